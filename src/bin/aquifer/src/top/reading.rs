//! One reading of all processes.

use super::shared::SharedMemories;
use aquifer_console::foreign::printable;
use aquifer_status::{ProcessStatus, StatusError, StatusFolder};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// All processes at one moment, or nearly so: each file is read when it is its turn.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) at: Instant,
    /// Nanoseconds since 1970.
    pub(super) taken_ns: u64,
    /// The processes, in the order in which they began to publish.
    pub(super) processes: Vec<ProcessStatus>,
    /// Files that cannot be read, each in one harmless line.
    pub(super) errors: Vec<String>,
    /// The memories that processes share.
    pub(super) shared: SharedMemories,
}

impl Reading {
    /// Reads all files of the folder.
    ///
    /// # Errors
    /// [`StatusError`] if the folder cannot be listed.
    pub(super) fn take(folder: &StatusFolder) -> Result<Self, StatusError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let taken_ns = since.map_or(0, |since| since.as_nanos() as u64);
        let (mut processes, mut errors) = (Vec::new(), Vec::new());
        for process in folder.processes()? {
            match process {
                Ok(process) => processes.push(process),
                Err(error) => errors.push(printable(&error.to_string())),
            }
        }
        processes.sort_by(|a, b| {
            (a.started_ns, a.process, &a.path).cmp(&(b.started_ns, b.process, &b.path))
        });
        errors.sort();
        let shared = SharedMemories::read();
        Ok(Self { at: Instant::now(), taken_ns, processes, errors, shared })
    }
}
