//! `aquifer top`: the memory of all processes of this user that use the library, live.
//!
//! | module | contents |
//! |---|---|
//! | `error` | why nothing is shown |
//! | `words` | text, amounts and rates in few columns |
//! | `driver` | what the driver says is in use on each GPU |
//! | `reading` | one reading of all processes |
//! | `shared` | the memories that processes share |
//! | `rates` | what happened in a second, by two readings |
//! | `sums` | sums over pools: of a process, a place in it, and a device |
//! | `history` | physical memory over the last minutes |
//! | `monitor` | the readings one after the other, and dead processes |
//! | `table` | columns and lines |
//! | `json` | one reading as JSON |
//! | `view` | keys, and what they change |
//! | `screen` | drawing |
//! | `session` | the terminal, and its restoration |

mod driver;
mod error;
mod history;
mod json;
mod monitor;
mod rates;
mod reading;
mod screen;
mod session;
mod shared;
mod sums;
mod table;
mod view;
mod words;

use crate::cli;
use aquifer_status::StatusFolder;
use error::TopError;
use monitor::Monitor;
use std::{
    io::{self, IsTerminal},
    thread,
    time::Duration,
};

/// The interval unless another one is requested.
const INTERVAL: Duration = Duration::from_secs(1);

/// Runs the command. Returns the text to print, which is empty after a live view.
///
/// # Errors
/// [`TopError`].
pub(crate) fn run(args: &cli::Top) -> Result<String, TopError> {
    let folder = StatusFolder::open()?;
    let mut monitor = Monitor::new(folder, args.dead, args.sweep);
    if !args.once && !args.json && io::stdout().is_terminal() {
        let interval = args.interval.unwrap_or(INTERVAL);
        return session::run(&mut monitor, interval).map(|()| String::new());
    }
    monitor.read()?;
    if let Some(interval) = args.interval {
        thread::sleep(interval);
        monitor.read()?;
    }
    monitor.sweep_now();
    if args.json {
        return Ok(json::text(&monitor));
    }
    let width = if io::stdout().is_terminal() { session::width() } else { None };
    Ok(table::page(&monitor, width))
}
