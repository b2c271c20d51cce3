//! A terminal that the program draws on, and its screen.

use super::parts::{Scratch, program};
use nix::{
    pty::{Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{LocalFlags, Termios, tcgetattr},
    },
    unistd::Pid,
};
use std::{
    fs::File,
    io::{Read, Write},
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
    keys: File,
    /// Keeps the terminal open, and its settings readable, after the program has ended.
    slave: OwnedFd,
    before: Termios,
    screen: Arc<Mutex<vt100::Parser>>,
    written: Arc<Mutex<Vec<u8>>>,
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
        let before = tcgetattr(&pty.slave).unwrap();
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
        let written = Arc::new(Mutex::new(Vec::new()));
        let keys = File::from(pty.master);
        thread::spawn({
            let (screen, written) = (screen.clone(), written.clone());
            let mut master = keys.try_clone().unwrap();
            move || {
                let mut piece = [0; 4096];
                while let Ok(read @ 1..) = master.read(&mut piece) {
                    written.lock().unwrap().extend_from_slice(&piece[..read]);
                    screen.lock().unwrap().process(&piece[..read]);
                }
            }
        });
        Self { child, keys, slave: pty.slave, before, screen, written }
    }

    pub(crate) fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    pub(crate) fn written(&self) -> Vec<u8> {
        self.written.lock().unwrap().clone()
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

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn is_raw(&self) -> bool {
        !tcgetattr(&self.slave).unwrap().local_flags.contains(LocalFlags::ICANON)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
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

    /// Waits for the end, and checks that the terminal is as it was.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.text());
            thread::sleep(Duration::from_millis(10));
        };
        let after = tcgetattr(&self.slave).unwrap();
        assert_eq!(after.local_flags, self.before.local_flags);
        assert_eq!(after.input_flags, self.before.input_flags);
        assert_eq!(after.output_flags, self.before.output_flags);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen.lock().unwrap();
            // The other screen is left, and the cursor is shown.
            if !screen.screen().alternate_screen() && !screen.screen().hide_cursor() {
                return status;
            }
            drop(screen);
            assert!(Instant::now() < deadline, "the screen is not restored");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}
