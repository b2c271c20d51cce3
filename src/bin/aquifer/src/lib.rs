//! The command-line program of aquifer: replays recorded allocation traces, measures the cost of
//! calls, and reports what a machine offers.
//!
//! | module | contents |
//! |---|---|
//! | `cli` | commands and flags |
//! | `run` | any CUDA program, observed and limited |
//! | `replay` | replaying a trace |
//! | `plan` | placing the blocks of a trace |
//! | `report` | what held memory in a trace |
//! | `top` | the processes of the user, live |
//! | `metrics` | the same for Prometheus |
//! | `doctor` | the report on this machine |
//! | `ledgers` | the memories that processes share |
//! | `amount` | amounts of memory |
//! | `error` | why a command has no result |
//! | `output` | files that appear whole or not at all, and rows on the screen |
//!
//! The benchmarks are the crate [`aquifer_benches`]. What they and the other commands share is in its
//! module [`console`](aquifer_benches::console): the device to run on, the progress line, and how
//! results are written.
//!
//! Results go to stdout. Text of other processes and of files is shown by
//! [`foreign`](aquifer_benches::console::foreign), in results and errors alike. An invalid request is
//! reported in one line on stderr, with nothing on stdout and exit status 2.

mod amount;
mod cli;
mod doctor;
mod error;
mod ledgers;
mod metrics;
mod output;
mod plan;
mod replay;
mod report;
mod run;
mod top;

use aquifer_benches::console::{foreign::printable, layout::wrap};
use aquifer_formats::history::made::{WORKLOADS, asks_for_list};
use cli::{Command, Refused};
use error::CommandError;
use serde_json::json;
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

/// What a command prints.
enum Printed {
    /// Lines, and the exit status. What is within a line may be of other processes and of files.
    Lines(String, u8),
    /// Bytes that are printed unchanged.
    Raw(Vec<u8>),
    /// Nothing, and the exit status of another program.
    Nothing(u8),
}

/// Runs a command line, of which the first argument is the program's name. Writes the result to
/// stdout, and returns the exit status.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let printed = match cli::parse(arguments) {
        Ok(cli) => execute(cli.command),
        Err(Refused::Words(text)) => Ok(Printed::Lines(text.trim_end().to_owned(), WELL)),
        Err(Refused::Mistake(line)) => return refuse(&line),
    };
    let (bytes, status) = match printed {
        Ok(Printed::Lines(text, status)) => {
            let lines: Vec<_> = text.split('\n').map(printable).collect();
            ((lines.join("\n") + "\n").into_bytes(), status)
        }
        Ok(Printed::Raw(bytes)) => (bytes, WELL),
        Ok(Printed::Nothing(status)) => return ExitCode::from(status),
        Err(error) => return refuse(&error.to_string()),
    };
    match io::stdout().lock().write_all(&bytes) {
        // That the reader has closed the pipe is no error.
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            refuse(&CommandError::Result(e).to_string())
        }
        _ => ExitCode::from(status),
    }
}

fn execute(command: Command) -> Result<Printed, CommandError> {
    let judged = |text, is_well| Ok(Printed::Lines(text, if is_well { WELL } else { NO }));
    match command {
        Command::Replay(cli::Replay { trace, json, .. })
        | Command::Report(cli::Report { trace, json, .. })
        | Command::Plan(cli::PlanArgs { trace, json, .. })
            if asks_for_list(&trace) =>
        {
            judged(workloads(json), true)
        }
        Command::Run(args) => run::run(&args).map(Printed::Nothing),
        Command::Replay(args) => {
            let report = replay::run(&args)?;
            // If stderr cannot be written, the notes are still in the JSON.
            report.notes.iter().for_each(|note| report_error(note));
            let text = if args.json { report.to_json() } else { report.to_screen() };
            judged(text, report.is_clean())
        }
        Command::Report(args) => {
            let result = report::run(&args)?;
            judged(result.text, result.within_limit)
        }
        Command::Plan(args) => {
            let report = plan::run(&args)?;
            report.notes.iter().for_each(|note| report_error(note));
            let text = if args.json { report.to_json() } else { report.to_screen() };
            judged(text, !args.check || report.fits())
        }
        Command::Bench(args) => {
            let (benchmark, rows) = args.what.settings();
            let report = aquifer_benches::run(&benchmark, &rows.selection());
            let report = report.map_err(CommandError::Bench)?;
            let text = if rows.json { report.to_json() } else { report.to_screen() };
            judged(text, report.is_clean())
        }
        Command::Stage(args) => {
            let report = aquifer_benches::load_file(&args.file, args.device, args.stager.config());
            let report = report.map_err(CommandError::Load)?;
            let text = if args.json { report.to_json() } else { report.to_screen() };
            judged(text, report.is_whole())
        }
        Command::Top(args) => judged(top::run(&args)?, true),
        Command::Metrics(args) => Ok(Printed::Raw(metrics::run(&args)?.into_bytes())),
        Command::Doctor(args) => {
            let diagnosis = doctor::diagnose();
            let text = if args.json { diagnosis.to_json() } else { diagnosis.to_screen() };
            judged(text, !args.strict || !diagnosis.has_warnings())
        }
        Command::Completions(args) => Ok(Printed::Raw(cli::completions(args.shell))),
        Command::Man => cli::man().map(Printed::Raw).map_err(CommandError::Result),
    }
}

/// Returns the list of generated traces as text or as JSON.
fn workloads(as_json: bool) -> String {
    if as_json {
        let rows = WORKLOADS.iter().map(|w| json!({ "name": w.name, "about": w.about }));
        return serde_json::Value::from_iter(rows).to_string();
    }
    let mut lines = vec!["aquifer replay made:NAME[,seed=N][,scale=X][,length=X]".to_owned()];
    for workload in &WORKLOADS {
        lines.push(format!("  {}", workload.name));
        lines.extend(wrap(workload.about, 74).into_iter().map(|line| format!("      {line}")));
    }
    lines.push("next  aquifer replay made:steady".to_owned());
    lines.join("\n")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_names_every_workload_and_fits_on_a_screen() {
        let text = workloads(false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let rows: serde_json::Value = serde_json::from_str(&workloads(true)).unwrap();
        for (at, workload) in WORKLOADS.iter().enumerate() {
            assert!(text.contains(workload.name));
            assert_eq!(rows[at]["name"], workload.name);
            assert!(!workload.about.is_empty());
        }
    }
}
