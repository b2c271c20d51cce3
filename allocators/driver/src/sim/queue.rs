//! Streams as queues of work.

use super::{
    access_history::{Action, ActionKind},
    address_space::DeviceUse,
    capture::CapturedPoint,
    clock::Clock,
    family::copies::CopyWork,
    kernel::KernelBody,
};
use crate::{DeviceId, RawStream, site::Site};
use std::{collections::VecDeque, fmt, sync::Arc};

/// The implicit order of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamKind {
    /// No implicit order.
    NonBlocking,
    /// Ordered before and after the work of the device's legacy stream.
    Blocking,
    /// The device's legacy stream, ordered before and after the work of every blocking stream.
    Legacy,
    /// A branch of an executable graph, by its number. It has no handle, and only a launch queues
    /// work on it.
    Branch { exec: u64 },
}

impl StreamKind {
    pub(crate) fn is_branch(self) -> bool {
        matches!(self, Self::Branch { .. })
    }
}

/// A stream. Its index is reused when it is destroyed and all its work is done, as a driver reuses
/// handles. The counts continue, so that a position in a queue is unique.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: DeviceId,
    /// A number that no other stream ever has.
    pub(crate) id: u64,
    pub(crate) kind: StreamKind,
    /// Whether the handle is valid.
    pub(crate) alive: bool,
    /// Its component of the clocks.
    pub(crate) component: u32,
    /// The clock that precedes the next item.
    pub(crate) clock: Clock,
    /// The version of the host's clock that was joined last.
    pub(crate) joined_host: u64,
    /// The numbers of items that were queued here and that have run.
    pub(crate) enqueued: u64,
    pub(crate) executed: u64,
    pub(crate) queue: VecDeque<QueueItem>,
    /// The capture that it takes part in.
    pub(crate) capture: Option<u64>,
}

/// Handles 0 and 1 are the legacy stream, 2 the thread's own default stream.
pub(crate) const FIRST_HANDLE: u64 = 0x100;
const HANDLE_STEP: u64 = 0x40;

/// Distance between the handles of two machines, so that they are distinct.
const MACHINE_STEP: u64 = 1 << 32;

/// Returns the handle of the stream at an index of a machine's table.
pub(crate) fn stream_handle(machine_id: u64, index: usize) -> u64 {
    machine_id * MACHINE_STEP + FIRST_HANDLE + index as u64 * HANDLE_STEP
}

/// Returns the index in a machine's table of the stream of a handle, if it can be one.
pub(crate) fn stream_index(machine_id: u64, stream: RawStream) -> Option<usize> {
    let offset =
        stream.handle().checked_sub(machine_id * MACHINE_STEP)?.checked_sub(FIRST_HANDLE)?;
    offset.is_multiple_of(HANDLE_STEP).then_some((offset / HANDLE_STEP) as usize)
}

/// A point in a stream.
#[derive(Clone, Debug)]
pub(crate) struct StreamPoint {
    /// The stream's index in the table.
    pub(crate) stream: usize,
    /// Reached when this many items have run.
    pub(crate) count: u64,
    /// The clock at this point.
    pub(crate) clock: Clock,
}

/// An event, with its last record.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: DeviceId,
    pub(crate) point: Option<StreamPoint>,
    /// The position in a capture, if its last record was captured.
    pub(crate) captured: Option<CapturedPoint>,
}

/// One item of a queue.
#[derive(Debug)]
pub(crate) struct QueueItem {
    pub(crate) work: Work,
    /// Its stamp.
    pub(crate) action: Action,
}

/// Work that is not in a queue yet. Captured work stays in this form, and is queued at each launch.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) name: &'static str,
    pub(crate) site: Site,
    /// Its accesses to host memory, in stream order.
    pub(crate) host: Vec<HostUse>,
    /// What it does, with its device memory.
    pub(crate) work: Work,
}

/// An access of work to host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostUse {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: ActionKind,
}

impl Task {
    /// Creates work that accesses device memory only.
    pub(crate) fn new(name: &'static str, site: Site, work: Work) -> Self {
        Self { name, site, host: Vec::new(), work }
    }
}

/// What an item does when it runs.
#[derive(Clone)]
pub(crate) enum Work {
    /// Nothing: its memory cannot be accessed, which has been reported.
    Inaccessible,
    /// A kernel with one declared access and no effect.
    Access(DeviceUse),
    /// A user's kernel.
    Kernel { uses: Arc<[DeviceUse]>, body: Option<KernelBody> },
    /// A copy or fill.
    Copy(Arc<CopyWork>),
    /// Waits until another stream (an index) has run `count` items.
    Wait { stream: usize, count: u64 },
}

impl Work {
    /// Returns whether it calls code of the program, which must not happen under the simulator's
    /// lock.
    pub(crate) fn runs_program_code(&self) -> bool {
        matches!(self, Self::Kernel { body: Some(_), .. })
    }

    /// Returns the device memory that the driver checks when a graph with this work is
    /// instantiated: that of fills, but not of copies or kernel arguments.
    pub(crate) fn uses_checked_at_instantiation(&self) -> &[DeviceUse] {
        match self {
            Self::Copy(work) if work.is_fill() => &work.uses,
            _ => &[],
        }
    }

    /// Returns the device memory that it accesses, in the order of the checks.
    pub(crate) fn uses(&self) -> &[DeviceUse] {
        match self {
            Self::Access(u) => std::slice::from_ref(u),
            Self::Kernel { uses, .. } => uses,
            Self::Copy(work) => &work.uses,
            Self::Inaccessible | Self::Wait { .. } => &[],
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("uses", &self.uses()).finish_non_exhaustive()
    }
}
