//! This program as another process.
#![allow(clippy::unwrap_used, dead_code, reason = "each test binary uses some of it")]

use std::{
    env,
    process::{Command, Output},
};

/// Returns a command that runs one of the ignored tests of this program.
pub(crate) fn itself(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// Returns what a process has printed, and its errors.
pub(crate) fn texts(output: &Output) -> [String; 2] {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}
