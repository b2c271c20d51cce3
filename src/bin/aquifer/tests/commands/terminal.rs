//! A program on a pseudo-terminal, for the tests of its progress line.

use nix::{pty::openpty, unistd::Pid};
use std::{
    fs,
    io::Read,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Longer than any run takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs a program whose standard error is a terminal. Returns what it wrote there, and its exit
/// status. `act` is called again and again while the program runs, with what it has written so far.
pub(crate) fn on_terminal(mut command: Command, act: impl Fn(Pid, &str)) -> (String, ExitStatus) {
    let terminal = openpty(None, None).expect("a terminal");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(terminal.slave);
    let mut running = command.spawn().expect("the program starts");
    // The last handle here of the side that the program writes to.
    drop(command);
    let told = Arc::new(Mutex::new(Vec::new()));
    let reader = thread::spawn({
        let (told, mut terminal) = (told.clone(), fs::File::from(terminal.master));
        move || {
            let mut piece = [0; 4096];
            // The end is an error once no process has the other side open.
            while let Ok(read @ 1..) = terminal.read(&mut piece) {
                told.lock().expect("not poisoned").extend_from_slice(&piece[..read]);
            }
        }
    });
    let id = Pid::from_raw(running.id().cast_signed());
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = running.try_wait().expect("a status") {
            break status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        act(id, &String::from_utf8_lossy(&told.lock().expect("not poisoned")));
        thread::sleep(Duration::from_millis(2));
    };
    reader.join().expect("no panic");
    let told = String::from_utf8_lossy(&told.lock().expect("not poisoned")).into_owned();
    (told, status)
}
