//! A terminal that the program draws on, and its screen.

use super::parts::{Scratch, program};
use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs::File,
    io::Read,
    num::NonZero,
    os::fd::OwnedFd,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// How long a test waits for what it expects.
const PATIENCE: Duration = Duration::from_secs(30);

fn side_of(cells: u16) -> NonZero<u16> {
    NonZero::new(cells).unwrap()
}

/// The program in a terminal.
pub(crate) struct Window {
    child: Child,
    /// Keeps the terminal open.
    slave: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Window {
    pub(crate) fn open(folder: &Scratch, flags: &[&str], columns: u16, rows: u16) -> Self {
        let arguments = [&["top"], flags].concat();
        Self::of(program(&folder.0, &arguments), columns, rows)
    }

    /// Runs a command in a new terminal, which becomes its controlling one.
    pub(crate) fn of(command: Command, columns: u16, rows: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let mut leader = Command::new("setsid");
        leader.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => leader.env(name, value),
                None => leader.env_remove(name),
            };
        }
        let side = || Stdio::from(pty.slave.try_clone().unwrap());
        let child = leader
            .env("TERM", "xterm-256color")
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(side_of(rows), side_of(columns), 0)));
        thread::spawn({
            let (screen, mut master) = (screen.clone(), File::from(pty.master));
            move || {
                let mut piece = [0; 4096];
                while let Ok(read @ 1..) = master.read(&mut piece) {
                    screen.lock().unwrap().process(&piece[..read]);
                }
            }
        });
        Self { child, slave: pty.slave, screen }
    }

    pub(crate) fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Waits for a screen that `is_expected` and stays for a moment, and returns it. One that is
    /// half drawn does not stay.
    pub(crate) fn wait(&self, what: &str, is_expected: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.text();
            thread::sleep(Duration::from_millis(30));
            if is_expected(&text) && self.text() == text {
                return text;
            }
            assert!(Instant::now() < deadline, "no {what}:\n{text}");
        }
    }

    /// Changes the size, of which the kernel tells the program by a signal.
    pub(crate) fn resize(&mut self, columns: u16, rows: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(side_of(rows), side_of(columns));
        let status = Command::new("stty")
            .args(["cols", &columns.to_string(), "rows", &rows.to_string()])
            .stdin(Stdio::from(self.slave.try_clone().unwrap()))
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// Ends the program by a signal.
    pub(crate) fn ended_by(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}
