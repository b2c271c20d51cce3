//! The command-line program of aquifer: replays recorded allocation traces, measures the cost of
//! calls, and reports what a machine offers.
//!
//! | module | contents |
//! |---|---|
//! | `cli` | commands and flags |
//! | `made` | the list of generated traces |
//! | `replay` | replaying a trace |
//! | `plan` | placing the blocks of a trace |
//! | `report` | what held memory in a trace |
//! | `top` | the processes of the user, live |
//! | `metrics` | the same for Prometheus |
//! | `doctor` | the report on this machine |
//! | `ledgers` | the memories that processes share |
//! | `listen_address` | where to listen, and what is refused |
//! | `amount` | amounts of memory |
//! | `rows` | rows of a result on the screen |
//! | `output` | files that appear whole or not at all |
//! | `trace_file` | what commands say of the traces that they read |
//!
//! The benchmarks are the crate [`aquifer_benches`]. What they and the other commands share is the
//! crate [`aquifer_console`]: the device to run on, the progress line, and how results are written.
//!
//! Results go to stdout. Text of other processes and of files is shown by
//! [`aquifer_console::foreign`], in results and errors alike. An invalid request is reported in one
//! line on stderr, with nothing on stdout and exit status 2.

mod amount;
mod cli;
mod doctor;
mod ledgers;
mod listen_address;
mod made;
mod metrics;
mod output;
mod plan;
mod replay;
mod report;
mod rows;
mod top;
mod trace_file;

use aquifer_console::foreign::printable;
use aquifer_formats::trace::made::asks_for_list;
use cli::{Command, Refused};
use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
};

/// Exit status: success.
const WELL: u8 = 0;
/// Exit status: the request is valid and the result is negative.
const NO: u8 = 1;
/// Exit status: the request is invalid.
const MISTAKE: u8 = 2;

/// Runs a command line, of which the first argument is the program's name. Writes the result to
/// stdout, and returns the exit status.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let (text, status) = match cli::parse(arguments) {
        Ok(cli) => match cli.command {
            Command::Replay(args) if asks_for_list(&args.trace) => (made::list(args.json), WELL),
            Command::Completions(args) => return raw(&cli::completions(args.shell)),
            Command::Man => match cli::man() {
                Ok(page) => return raw(&page),
                Err(e) => return refuse(&e.to_string()),
            },
            Command::Replay(args) => match replay::run(&args) {
                Ok(report) => {
                    // If stderr cannot be written, the notes are still in the JSON.
                    report.notes.iter().for_each(|note| report_error(note));
                    let text = if args.json { report.to_json() } else { report.to_screen() };
                    (text, if report.is_clean() { WELL } else { NO })
                }
                Err(mistake) => return refuse(&mistake.to_string()),
            },
            Command::Report(args) if asks_for_list(&args.trace) => (made::list(args.json), WELL),
            Command::Report(args) => match report::run(&args) {
                Ok(result) => (result.text, if result.within_limit { WELL } else { NO }),
                Err(mistake) => return refuse(&mistake.to_string()),
            },
            Command::Plan(args) if asks_for_list(&args.trace) => (made::list(args.json), WELL),
            Command::Plan(args) => match plan::run(&args) {
                Ok(report) => {
                    let text = if args.json { report.to_json() } else { report.to_screen() };
                    report.notes.iter().for_each(|note| report_error(note));
                    let refused = args.check && !report.fits();
                    (text, if refused { NO } else { WELL })
                }
                Err(mistake) => return refuse(&mistake.to_string()),
            },
            Command::Bench(args) => {
                let (benchmark, rows) = args.what.settings();
                match aquifer_benches::run(&benchmark, &rows.selection()) {
                    Ok(report) => {
                        let report = report.with_note(rows.note);
                        let text = if rows.json { report.to_json() } else { report.to_screen() };
                        (text, if report.is_clean() { WELL } else { NO })
                    }
                    Err(mistake) => return refuse(&mistake.to_string()),
                }
            }
            Command::Stage(args) => {
                match aquifer_benches::load_file(&args.file, args.device, args.stager.config()) {
                    Ok(report) => {
                        let text = if args.json { report.to_json() } else { report.to_screen() };
                        (text, if report.is_whole() { WELL } else { NO })
                    }
                    Err(mistake) => return refuse(&mistake.to_string()),
                }
            }
            Command::Top(args) => match top::run(&args) {
                Ok(text) if text.is_empty() => return ExitCode::from(WELL),
                Ok(text) => (text, WELL),
                Err(mistake) => return refuse(&mistake.to_string()),
            },
            Command::Metrics(args) => match metrics::run(&args) {
                Ok(text) => return raw(text.as_bytes()),
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
    // The lines of a text are ours. What is within them may be of other processes and of files.
    let text: Vec<_> = text.split('\n').map(printable).collect();
    match writeln!(io::stdout().lock(), "{}", text.join("\n")) {
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
    report_error(line);
    ExitCode::from(MISTAKE)
}

/// Prints an error or a note in one line on stderr.
fn report_error(line: &str) {
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    // A failure to write to stderr cannot be reported.
    let _ = writeln!(io::stderr().lock(), "aquifer: {}", printable(&line));
}
