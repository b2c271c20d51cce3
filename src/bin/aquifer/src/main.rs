//! The command-line program of aquifer: replays recorded allocation traces, measures the cost of
//! calls, and reports what a machine offers.
//!
//! | module | contents |
//! |---|---|
//! | `cli` | commands and flags |
//! | `trace` | recorded and generated traces, parsed and checked |
//! | `replay` | replaying a trace |
//! | `bench` | benchmarks |
//! | `stage` | loading a file to the device |
//! | `doctor` | the report on this machine |
//! | `gpu`, `place` | the driver, if there is one, and the selected device |
//! | `amount`, `figures`, `layout`, `json`, `progress` | parsing and formatting |
//!
//! Results go to stdout. An invalid request is reported in one line on stderr, with nothing on
//! stdout and exit status 2.

mod amount;
mod bench;
mod cli;
mod doctor;
mod figures;
mod gpu;
mod json;
mod layout;
mod place;
mod progress;
mod replay;
mod stage;
mod trace;

use cli::{Benched, Command, Refused};
use std::{
    env,
    io::{self, Write},
    process::ExitCode,
};
use trace::made;

/// Exit status: success.
const WELL: u8 = 0;
/// Exit status: the request is valid and the result is negative.
const NO: u8 = 1;
/// Exit status: the request is invalid.
const MISTAKE: u8 = 2;

fn main() -> ExitCode {
    let (text, status) = match cli::parse(env::args_os()) {
        Ok(cli) => match cli.command {
            Command::Replay(args) if made::asks_for_list(&args.trace) => {
                (made::list(args.json), WELL)
            }
            Command::Completions(args) => return raw(&cli::completions(args.shell)),
            Command::Man => match cli::man() {
                Ok(page) => return raw(&page),
                Err(e) => return refuse(&e.to_string()),
            },
            Command::Replay(args) => match replay::run(&args) {
                Ok(report) => {
                    for note in &report.notes {
                        // If stderr cannot be written, the note is still in the JSON.
                        let _ = writeln!(io::stderr().lock(), "aquifer: {note}");
                    }
                    let text = if args.json { report.to_json() } else { report.to_screen() };
                    (text, if report.is_clean() { WELL } else { NO })
                }
                Err(mistake) => return refuse(&mistake.to_string()),
            },
            Command::Bench(args) => {
                let (report, json) = match args.what {
                    Benched::Arena(args) => {
                        (bench::arena::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                    Benched::Device(args) => {
                        (bench::device::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                    Benched::Pinned(args) => {
                        (bench::pinned::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                    Benched::Global(args) => {
                        (bench::global::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                    Benched::Placement(args) => {
                        (bench::placement::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                    Benched::Budget(args) => {
                        (bench::budget::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                    Benched::Stage(args) => {
                        (bench::stage::run(&args).map_err(|e| e.to_string()), args.rows.json)
                    }
                };
                match report {
                    Ok(report) => {
                        let text = if json { report.to_json() } else { report.to_screen() };
                        (text, if report.is_clean() { WELL } else { NO })
                    }
                    Err(mistake) => return refuse(&mistake),
                }
            }
            Command::Stage(args) => match stage::run(&args) {
                Ok(report) => {
                    let text = if args.json { report.to_json() } else { report.to_screen() };
                    (text, if report.is_whole() { WELL } else { NO })
                }
                Err(mistake) => return refuse(&mistake.to_string()),
            },
            Command::Doctor(args) => {
                let diagnosis = doctor::Diagnosis::make();
                let refused = args.strict && diagnosis.has_warnings();
                (diagnosis.text(&args), if refused { NO } else { WELL })
            }
        },
        Err(Refused::Words(text)) => (text.trim_end().to_owned(), WELL),
        Err(Refused::Mistake(line)) => return refuse(&line),
    };
    match writeln!(io::stdout().lock(), "{text}") {
        Ok(()) => ExitCode::from(status),
        // The reader closed the pipe. This is no error.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(status),
        Err(e) => refuse(&format!("the result cannot be written: {e}")),
    }
}

/// Writes bytes to stdout unchanged.
fn raw(bytes: &[u8]) -> ExitCode {
    match io::stdout().lock().write_all(bytes) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            refuse(&format!("the result cannot be written: {e}"))
        }
        _ => ExitCode::from(WELL),
    }
}

/// Prints an error in one line on stderr and returns the exit status for it.
fn refuse(line: &str) -> ExitCode {
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    // A failure to write to stderr cannot be reported.
    let _ = writeln!(io::stderr().lock(), "aquifer: {line}");
    ExitCode::from(MISTAKE)
}
