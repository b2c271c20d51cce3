//! One event of a log of another program.

use super::{Fault, TraceDevice, error::Name};
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
