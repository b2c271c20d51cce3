//! One event of a log of another program, and what a reader passes over in such files.
//!
//! The files of other programs are read as they really end: cut off by a kill, begun late, written
//! by two programs. A reader refuses what is not its format at all. Everything else that it cannot
//! use is passed over and counted by kind.

use super::{
    Fault, TraceDevice,
    error::{Name, TraceError},
};
use aquifer_core::event::BlockKind;

/// What happens to a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LogAction {
    /// It is allocated.
    Allocate,
    /// It is freed, and its last use is over.
    Release,
    /// A request failed.
    Fail,
    /// A request of zero bytes, which changes nothing.
    Nothing,
}

/// One event of a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogEvent<'a> {
    pub(crate) action: LogAction,
    pub(crate) row: u64,
    /// Since the first event. Never goes back.
    pub(crate) time: f64,
    pub(crate) device: TraceDevice,
    /// The name of the block while it lives.
    pub(crate) id: u64,
    pub(crate) address: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
    pub(crate) thread: &'a str,
    pub(crate) tag: &'a str,
    pub(crate) metadata: &'a str,
}

impl LogEvent<'_> {
    /// An event of device 0 about which nothing else is known.
    pub(crate) fn new(action: LogAction, row: u64, time: f64, id: u64, bytes: u64) -> Self {
        let (device, address, stream) = (TraceDevice::Gpu(0), None, 0);
        let (thread, tag, metadata) = ("", "", "");
        Self { action, row, time, device, id, address, bytes, stream, thread, tag, metadata }
    }

    /// Returns the name of its block for errors.
    pub(crate) fn name(&self) -> Name {
        if self.address == Some(self.id) { Name::Pointer(self.id) } else { Name::Id(self.id) }
    }

    /// The kind of the block, if the log tells.
    pub(crate) fn kind(&self) -> Option<BlockKind> {
        matches!(self.device, TraceDevice::Host(_)).then_some(BlockKind::Pinned)
    }
}

/// A phase of a log: its name, begin, end and depth.
pub(crate) type LogPhase = (String, f64, f64, u32);

/// What takes the events of a log.
pub(crate) type LogSink<'a> = dyn FnMut(&LogEvent<'_>) -> Result<(), Fault> + 'a;

/// The kind of rows that do not have the form of their log.
pub(crate) const UNREADABLE: &str = "rows that cannot be read";

/// Counts of what was passed over, by kind.
#[derive(Default, Debug)]
pub(crate) struct Skips {
    counts: Vec<(&'static str, u64)>,
    /// The first error, for an input of which nothing is left.
    first: Option<TraceError>,
}

impl Skips {
    /// Counts one. The kinds are few.
    pub(crate) fn add(&mut self, kind: &'static str) {
        match self.counts.iter_mut().find(|(there, _)| *there == kind) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((kind, 1)),
        }
    }

    /// Counts one with its error.
    pub(crate) fn add_error(&mut self, kind: &'static str, row: Option<u64>, fault: Fault) {
        self.add(kind);
        self.first.get_or_insert(TraceError { row, fault });
    }

    /// Returns the count of one kind.
    pub(crate) fn count(&self, kind: &str) -> u64 {
        self.counts.iter().find(|(there, _)| *there == kind).map_or(0, |(_, count)| *count)
    }

    /// Returns the counts in one line, if anything was passed over.
    pub(crate) fn note(&self) -> Option<String> {
        let counts: Vec<_> =
            self.counts.iter().map(|(kind, count)| format!("{kind} ({count})")).collect();
        (!counts.is_empty()).then(|| format!("passed over: {}", counts.join(", ")))
    }

    /// Returns the error of an input in which nothing is allocated: the first one that was passed
    /// over, since that is the reason.
    pub(crate) fn explain(self, error: TraceError) -> TraceError {
        match (error.fault, self.first) {
            (Fault::NoAllocation, Some(first)) => first,
            (fault, _) => TraceError { row: error.row, fault },
        }
    }
}
