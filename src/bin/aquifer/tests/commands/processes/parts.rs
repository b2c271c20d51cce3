//! The processes that are watched: each runs an ignored test of this program.

use serde_json::Value;
use std::{
    env, fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{self, Child, ChildStdin, ChildStdout, Command, Output, Stdio},
};

/// Writes a line for the test that has started this process.
pub(crate) fn say(text: &str) {
    let mut out = io::stdout().lock();
    writeln!(out, "\n@ {text}").unwrap();
    out.flush().unwrap();
}

pub(crate) fn wait_for_line() {
    io::stdin().lock().read_line(&mut String::new()).unwrap();
}

pub(crate) fn wait_for_end() {
    io::stdin().lock().read_to_end(&mut Vec::new()).unwrap();
}

/// A process. It ends with this, by the end of its input.
pub(crate) struct Part {
    pub(crate) child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Part {
    pub(crate) fn start(role: &str, folder: &Scratch, scale: u32) -> Self {
        Self::start_as(role, folder, scale, None)
    }

    /// Starts a process that claims to use the GPU with this PCI address.
    pub(crate) fn start_at(role: &str, folder: &Scratch, address: &str) -> Self {
        Self::spawn(role, folder, |command| command.env("ADDRESS", address))
    }

    /// Starts a process with this name, if any.
    pub(crate) fn start_as(role: &str, folder: &Scratch, scale: u32, name: Option<&str>) -> Self {
        Self::spawn(role, folder, |command| {
            if let Some(name) = name {
                command.arg0(name);
            }
            command.env("SCALE", scale.to_string())
        })
    }

    fn spawn(
        role: &str,
        folder: &Scratch,
        prepare: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        prepare(&mut command);
        let mut child = command
            .args([
                "--exact",
                &format!("processes::{role}"),
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("AQUIFER_STATUS", &folder.0)
            .env("AQUIFER_LEDGER", &folder.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    /// Returns the next line that the process says.
    pub(crate) fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process has ended");
            if let Some(line) = line.strip_prefix("@ ") {
                return line.trim_end().to_owned();
            }
        }
    }

    /// Returns the 20 figures that the process says next.
    pub(crate) fn figures(&mut self) -> Vec<u64> {
        self.line().split(' ').map(|figure| figure.parse().unwrap()).collect()
    }

    pub(crate) fn go(&mut self) {
        self.input.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ended = self.child.wait();
    }
}

/// A folder that is removed at the end.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("aquifer-test-processes-{name}-{}", process::id()));
        let _absent = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }

    pub(crate) fn files(&self) -> usize {
        fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// The program, on this folder.
pub(crate) fn program(folder: &Path, arguments: &[&str]) -> Command {
    let path = env::var_os("AQUIFER_BIN")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_aquifer")), PathBuf::from);
    let mut command = Command::new(path);
    command.args(arguments).env("AQUIFER_STATUS", folder).env("AQUIFER_LEDGER", folder);
    command
}

pub(crate) fn run(folder: &Scratch, arguments: &[&str]) -> Output {
    program(&folder.0, arguments).stdin(Stdio::null()).output().unwrap()
}

/// What the program prints, which must succeed without a word on stderr.
pub(crate) fn printed(folder: &Scratch, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn json(folder: &Scratch, flags: &[&str]) -> Value {
    let arguments = [&["top", "--once", "--json"], flags].concat();
    serde_json::from_str(&printed(folder, &arguments)).unwrap()
}

/// Checks that a request is refused in one line with status 2.
pub(crate) fn refused(output: &Output, expected: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty() && said.lines().count() == 1, "{said:?}");
    assert!(said.starts_with("aquifer: ") && said.contains(expected), "{said}");
}
