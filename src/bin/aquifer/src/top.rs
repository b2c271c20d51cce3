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
//! | `view` | keys, and what they change |
//! | `screen` | drawing |
//! | `session` | the terminal, and its restoration |

mod driver;
mod json;
mod monitor;
mod reading;
mod screen;
mod session;
mod shared;
mod sums;
mod table;
mod view;
mod words;

use crate::{cli, error::CommandError};
use aquifer_status::StatusFolder;
use monitor::Monitor;
use std::{
    io::{self, IsTerminal},
    thread,
    time::Duration,
};

/// The interval unless another one is requested.
const INTERVAL: Duration = Duration::from_secs(1);

/// Runs the command. Returns the text to print, or `None` after a live view.
///
/// # Errors
/// [`CommandError`].
pub(crate) fn run(args: &cli::Top) -> Result<Option<String>, CommandError> {
    let folder = StatusFolder::open()?;
    let mut monitor = Monitor::new(folder, args.dead, args.sweep);
    if !args.once && !args.json && io::stdout().is_terminal() {
        let interval = args.interval.unwrap_or(INTERVAL);
        return session::run(&mut monitor, interval).map(|()| None);
    }
    monitor.read()?;
    if let Some(interval) = args.interval {
        thread::sleep(interval);
        monitor.read()?;
    }
    monitor.sweep_now();
    if args.json {
        return Ok(Some(json::text(&monitor)));
    }
    let width = if io::stdout().is_terminal() { session::width() } else { None };
    Ok(Some(table::page(&monitor, width)))
}
