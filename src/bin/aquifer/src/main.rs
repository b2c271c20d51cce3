//! The program of [`aquifer_cli`].

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    aquifer_cli::run(env::args_os())
}
