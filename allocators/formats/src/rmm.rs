//! The log of RAPIDS' memory manager.
//!
//! One line per event under the header `Thread,Time,Action,Pointer,Size,Stream`, as its
//! `logging_resource_adaptor` writes them (RMM 26):
//!
//! - the thread as a decimal number
//! - the time of day with microseconds
//! - `allocate`, `free` or `allocate failure`
//! - the address as `0x7f04c0000200`, or `(nil)` if there is none
//! - the requested bytes
//! - the stream as `0x1f`, or `0` for none
//!
//! So RMM's replay benchmark and scripts can read these logs.

use aquifer_core::event::{Action, Event, EventSink, LineLog, MemoryLocation};
use std::{
    io,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// A sink that writes RMM's log, line by line, so that the log is complete up to the last event
/// even if the program is killed. Each line costs a system call.
///
/// Differences from RMM: the time of day is UTC instead of local time, threads are numbered from 1
/// in the order of their first events instead of the kernel's number, and a stream has its number
/// in the pool instead of its handle. Events without an RMM row are omitted: completions, growth,
/// moves.
///
/// ```
/// use aquifer::{DeviceId, Tag, event::{Action, MemoryLocation, Recorder, RmmLog}};
/// use std::sync::Arc;
/// let path = std::env::temp_dir().join(format!("rmm-{}.csv", std::process::id()));
/// let recorder = Recorder::new(Arc::new(RmmLog::create(&path)?));
/// let place = MemoryLocation::Device(DeviceId(0));
/// recorder.record(recorder.ticket(), recorder.event(Action::Allocate, place, 2, 0x7f00, 512, Tag::NONE));
/// recorder.record(recorder.ticket(), recorder.event(Action::Fail, place, 2, 0, 1 << 40, Tag::NONE));
/// let text = std::fs::read_to_string(&path)?;
/// let rows: Vec<_> = text.lines().map(|row| row.splitn(3, ',').last().unwrap()).collect();
/// assert_eq!(rows, ["Action,Pointer,Size,Stream", "allocate,0x7f00,512,0x2", "allocate failure,(nil),1099511627776,0x2"]);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct RmmLog {
    lines: LineLog,
    /// The time of day of the recorder's start, in microseconds.
    start_us: u64,
}

/// The first line of a log.
pub(crate) const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";
const DAY_US: u64 = 24 * 60 * 60 * 1_000_000;

impl RmmLog {
    /// Creates or replaces the file at `path`, named as
    /// [`TraceFile::create`](aquifer_core::event::TraceFile::create) documents. Times assume that
    /// the recorder is created now.
    ///
    /// # Errors
    /// The operating system's error if the file cannot be created or its first line cannot be
    /// written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let lines = LineLog::create(path, HEADER)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let start_us = (since.as_micros() % u128::from(DAY_US)) as u64;
        Ok(Self { lines, start_us })
    }

    /// Returns the row of an event, if RMM has one for it.
    fn row(&self, event: &Event) -> Option<String> {
        let action = match (event.place, event.action) {
            (MemoryLocation::Device(_), Action::Allocate) => "allocate",
            (MemoryLocation::Device(_), Action::Free) => "free",
            (MemoryLocation::Device(_), Action::Fail) => "allocate failure",
            _ => return None,
        };
        let pointer = match (event.action, event.address) {
            (Action::Fail, _) | (_, 0) => "(nil)".to_owned(),
            (_, address) => format!("{address:#x}"),
        };
        let stream = match event.stream {
            0 => "0".to_owned(),
            stream => format!("{stream:#x}"),
        };
        let (thread, time, bytes) = (event.thread, self.time(event.at_ns), event.bytes);
        Some(format!("{thread},{time},{action},{pointer},{bytes},{stream}"))
    }

    /// Formats the time of day: `13:05:59.000001`.
    fn time(&self, at_ns: u64) -> String {
        let us = (self.start_us + at_ns / 1000) % DAY_US;
        let (s, micros) = (us / 1_000_000, us % 1_000_000);
        format!("{:02}:{:02}:{:02}.{micros:06}", s / 3600, s / 60 % 60, s % 60)
    }
}

impl EventSink for RmmLog {
    fn record(&self, event: &Event) {
        if let Some(row) = self.row(event) {
            self.lines.write(format_args!("{row}"));
        }
    }

    fn accepts(&self, action: Action) -> bool {
        action != Action::Outside
    }

    fn dropped(&self) -> u64 {
        self.lines.dropped()
    }
}
