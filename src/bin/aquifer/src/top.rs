//! `aquifer top`: the memory of all processes of this user that use the library, live.
//!
//! | module | contents |
//! |---|---|
//! | `words` | text, amounts and rates in few columns |
//! | `driver` | what the driver says is in use on each GPU |
//! | `reading` | one reading of all processes, and what happened in a second, by two |
//! | `shared` | the memories that processes share |
//! | `sums` | sums over pools: of a process, a place in it, and a device |
//! | `monitor` | the readings one after the other, and dead processes |
//! | `table` | columns and lines |
//! | `json` | one reading as JSON |

mod driver;
mod json;
mod monitor;
mod reading;
mod shared;
mod sums;
mod table;
mod words;

use crate::{cli, error::CommandError};
use aquifer_status::StatusFolder;
use console::Term;
use monitor::Monitor;
use std::{thread, time::Duration};

/// The interval unless another one is requested.
const INTERVAL: Duration = Duration::from_secs(1);

/// Runs the command. Returns the text to print. On a terminal it shows the table until a signal ends
/// the program.
///
/// # Errors
/// [`CommandError`].
pub(crate) fn run(args: &cli::Top) -> Result<String, CommandError> {
    let mut monitor = Monitor::new(StatusFolder::open()?, args.dead, args.sweep);
    let terminal = Term::stdout();
    monitor.read()?;
    if !args.once && !args.json && terminal.is_term() {
        let interval = args.interval.unwrap_or(INTERVAL);
        loop {
            let (rows, columns) = terminal.size();
            let page = table::page(&monitor, Some(columns.into()));
            let lines: Vec<_> = page.lines().take(usize::from(rows).saturating_sub(1)).collect();
            // From the top, each line to its end, and nothing below.
            let text = format!("\x1b[H{}\x1b[K\n\x1b[J", lines.join("\x1b[K\n"));
            terminal.write_str(&text).map_err(CommandError::Terminal)?;
            thread::sleep(interval);
            monitor.read()?;
        }
    }
    if let Some(interval) = args.interval {
        thread::sleep(interval);
        monitor.read()?;
    }
    monitor.sweep_now();
    if args.json {
        return Ok(json::text(&monitor));
    }
    let width = terminal.size_checked().map(|(_, columns)| columns.into());
    Ok(table::page(&monitor, width))
}
