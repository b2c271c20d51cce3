//! A history: columns of blocks, the order of what happened, and what is known besides.

use crate::{
    names::{NameTable, StackTable},
    trace::{TraceDevice, TraceFormat},
};
use aquifer_core::event::BlockKind;
use std::ops::Range;

/// What the times of a history are.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HistoryClock {
    /// Microseconds since the first event.
    Microseconds,
    /// The number of the event, or the step of a problem: the input has no times.
    Events,
}

/// Where the addresses of a history come from.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressSource {
    /// From the input.
    Recorded,
    /// The input has none. Each block is at the lowest offset that had room when it was allocated.
    Packed,
}

/// A range of addresses that was used, and its place on an axis without the gaps between ranges.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressSpan {
    /// The first address.
    pub start: u64,
    /// Its bytes.
    pub bytes: u64,
    /// The offset of the first address on the axis.
    pub at: u64,
}

/// The blocks, in order of allocation. Every column has one element for each block.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Default, Debug)]
pub struct BlockColumns {
    /// The time of the allocation.
    pub birth: Vec<f64>,
    /// The time of the free, or infinity.
    pub freed: Vec<f64>,
    /// The time from which its bytes could be reused, or infinity. Never before `freed`.
    pub end: Vec<f64>,
    /// The first address, or the offset if the addresses are [packed](AddressSource::Packed).
    pub address: Vec<u64>,
    /// The bytes that it occupies: at least the requested ones, and equal to them if more is not
    /// known.
    pub bytes: Vec<u64>,
    /// The requested bytes. Never zero.
    pub requested: Vec<u64>,
    /// The name of its stream.
    pub stream: Vec<u32>,
    /// The name of the thread that allocated it. 0 if unknown.
    pub thread: Vec<u32>,
    /// The name of its tag. 0 if it has none.
    pub tag: Vec<u32>,
    /// The call stack of its allocation. 0 if unknown.
    pub stack: Vec<u32>,
    /// Its kind, if the input tells.
    pub kind: Vec<Option<BlockKind>>,
    /// The row or event of its allocation. 0 if it existed before the first one.
    pub row: Vec<u32>,
    /// The text that the program attached to it. 0 if it has none.
    pub metadata: Vec<u32>,
    /// Whether `bytes` is known to be exact. Empty if it is known of no block.
    pub is_exact: Vec<bool>,
}

impl BlockColumns {
    /// Returns the number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.birth.len()
    }

    /// Returns whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.birth.is_empty()
    }

    /// Returns the addresses that a block occupies.
    #[must_use]
    pub fn range(&self, block: usize) -> Range<u64> {
        // A block whose end exceeds 64 bits is recorded without its address.
        self.address[block]..self.address[block] + self.bytes[block]
    }
}

/// The kind of a mark.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MarkKind {
    /// Physical memory was added.
    Grow,
    /// Physical memory was released.
    Release,
    /// Physical memory moved to other addresses.
    Move,
    /// A request failed.
    Fail,
    /// A debugging pool found an error.
    Finding,
    /// The program marked the moment.
    User,
}

impl MarkKind {
    /// Every kind.
    pub const ALL: [Self; 6] =
        [Self::Grow, Self::Release, Self::Move, Self::Fail, Self::Finding, Self::User];

    /// Returns the name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Grow => "grow",
            Self::Release => "release",
            Self::Move => "move",
            Self::Fail => "fail",
            Self::Finding => "finding",
            Self::User => "user",
        }
    }
}

/// An event that is about no single block.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HistoryMark {
    /// The time.
    pub time: f64,
    /// The row or event.
    pub row: u32,
    /// The kind.
    pub kind: MarkKind,
    /// Its bytes.
    pub bytes: u64,
    /// The first address, if the input tells.
    pub address: Option<u64>,
    /// The bytes that the device had free, for a failed request, if the input tells.
    pub device_free: Option<u64>,
    /// The name of its tag or its text. 0 if it has none.
    pub text: u32,
    /// The name of the budget that refused a failed request, and behind a slash that of the charged
    /// one, if they differ. 0 if the input does not tell.
    pub refused_by: u32,
}

/// A named phase of the program: an annotation of PyTorch's profiler, or an NVTX range.
///
/// ```
/// use aquifer_formats::history::HistoryPhase;
/// let step = HistoryPhase { name: 3, begin: 10.0, end: 90.0, depth: 0 };
/// let forward = HistoryPhase { name: 4, begin: 12.0, end: 40.0, depth: 1 };
/// assert!(step.begin <= forward.begin && forward.end <= step.end);
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HistoryPhase {
    /// The number of its name.
    pub name: u32,
    /// The time of its first moment.
    pub begin: f64,
    /// The time of its end: that of the history if the input does not tell. Never before `begin`.
    pub end: f64,
    /// The number of phases of the same thread that surround it.
    pub depth: u32,
}

/// What a step does.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HistoryAction {
    /// The block is allocated.
    Allocate,
    /// The block is freed, and other streams may still use it.
    Free,
    /// The last use of a freed block is over.
    Complete,
    /// The block is freed and its last use is over.
    Release,
    /// Something that is about no single block: the index is that of a mark.
    Mark,
}

/// One step: an action, and the index of a block or a mark.
///
/// See the example of [`MemoryHistory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HistoryStep(u32);

impl HistoryStep {
    /// The number of indices.
    pub(super) const MOST: u32 = 1 << 29;

    /// Creates a step. The index must be below [`MOST`](Self::MOST).
    pub(super) fn new(action: HistoryAction, index: u32) -> Self {
        debug_assert!(index < Self::MOST);
        Self((action as u32) << 29 | index)
    }

    /// Returns what is done.
    #[must_use]
    pub fn action(self) -> HistoryAction {
        match self.0 >> 29 {
            0 => HistoryAction::Allocate,
            1 => HistoryAction::Free,
            2 => HistoryAction::Complete,
            3 => HistoryAction::Release,
            _ => HistoryAction::Mark,
        }
    }

    /// Returns the index of the block or mark.
    #[must_use]
    pub fn index(self) -> usize {
        (self.0 & (Self::MOST - 1)) as usize
    }
}

/// A valid history of one device's memory.
///
/// ```
/// use aquifer_formats::history::{AddressSource, HistoryAction, MemoryHistory};
/// let rows = "t_us,op,id,bytes,stream,device\n3,a,1,4096,3,0\n9,f,1,4096,3,0\n9,c,1,4096,3,0\n";
/// let history = MemoryHistory::from_reader(rows.as_bytes(), None)?;
/// assert_eq!((history.blocks.birth[0], history.blocks.end[0]), (0.0, 6.0));
/// assert_eq!(history.names.get(history.blocks.stream[0]), "3");
/// let actions: Vec<_> = history.steps.iter().map(|step| step.action()).collect();
/// assert_eq!(actions, [HistoryAction::Allocate, HistoryAction::Release]);
/// assert_eq!((history.addresses, history.address_height), (AddressSource::Packed, 4096));
///
/// let error = MemoryHistory::from_reader(rows.as_bytes(), Some("host:1".parse()?)).unwrap_err();
/// assert_eq!(error.to_string(), "nothing is allocated on device host:1 in it, but on 0");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MemoryHistory {
    /// The form of the input.
    pub format: TraceFormat,
    /// The device whose memory this is, if the input distinguishes devices.
    pub device: Option<TraceDevice>,
    /// The devices of the input that have blocks. Empty if it does not distinguish devices.
    pub devices: Vec<TraceDevice>,
    /// Notes on the input for the reader of a report.
    pub notes: Vec<String>,
    /// Rows of a log that could not be read. What they allocate is missing here.
    pub unreadable: u64,
    /// What times are.
    pub clock: HistoryClock,
    /// The time of the last event. The first is at 0.
    pub end: f64,
    /// The rows or events of this device.
    pub events: u64,
    /// The blocks.
    pub blocks: BlockColumns,
    /// Marks, in order.
    pub marks: Vec<HistoryMark>,
    /// Phases of the program, if the input names them: by their begin, outer ones first.
    pub phases: Vec<HistoryPhase>,
    /// The limit of the memory over time, if the input tells: each change, and the limit after it,
    /// or none if there is no limit any more.
    pub limits: Vec<(f64, Option<u64>)>,
    /// Bytes in use on the device beyond the memory of the pool that recorded them, by the driver's
    /// count, if the input tells: each change, and the bytes after it.
    pub outside: Vec<(f64, u64)>,
    /// What happened, in order.
    pub steps: Vec<HistoryStep>,
    /// Names of streams, threads, tags, frames, marks and phases, and texts of blocks.
    pub names: NameTable,
    /// Call stacks.
    pub stacks: StackTable,
    /// Where addresses come from.
    pub addresses: AddressSource,
    /// The address ranges that were used, by address. They do not touch.
    pub spans: Vec<AddressSpan>,
    /// The bytes of all spans. Below 2⁵³.
    pub address_height: u64,
    /// The physical bytes before the first event, or none if the input does not tell of physical
    /// memory.
    pub physical_at_start: Option<u64>,
    /// The ranges that were mapped before the first event, or none if the input does not tell at
    /// which addresses memory is mapped.
    pub mapped_at_start: Option<Vec<Range<u64>>>,
    /// Bytes of pinned host memory over time, if the input tells: each change and the bytes after
    /// it.
    pub pinned: Option<Vec<(f64, u64)>>,
    /// Whether the input tells the kinds of blocks.
    pub tells_kinds: bool,
}

impl MemoryHistory {
    /// Returns what the numbers of its rows count.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        self.format.unit()
    }

    /// Returns the time of a step.
    #[must_use]
    pub fn time(&self, step: HistoryStep) -> f64 {
        let index = step.index();
        match step.action() {
            HistoryAction::Allocate => self.blocks.birth[index],
            HistoryAction::Free | HistoryAction::Release => self.blocks.freed[index],
            HistoryAction::Complete => self.blocks.end[index],
            HistoryAction::Mark => self.marks[index].time,
        }
    }

    /// Returns the limit at a time, if the input tells it and there was one.
    #[must_use]
    pub fn limit_at(&self, time: f64) -> Option<u64> {
        let behind = self.limits.partition_point(|(at, _)| *at <= time);
        self.limits[..behind].last().and_then(|(_, limit)| *limit)
    }

    /// Returns the bytes in use on the device outside of the pool at a time, if the input tells
    /// them.
    #[must_use]
    pub fn outside_at(&self, time: f64) -> Option<u64> {
        let behind = self.outside.partition_point(|(at, _)| *at <= time);
        self.outside[..behind].last().map(|(_, bytes)| *bytes)
    }

    /// Returns the offset of an address on the axis of all spans. Returns 0 if it is in none.
    #[must_use]
    pub fn offset(&self, address: u64) -> u64 {
        let behind = self.spans.partition_point(|span| span.start <= address);
        match behind.checked_sub(1).map(|place| self.spans[place]) {
            Some(span) if address - span.start < span.bytes => span.at + (address - span.start),
            _ => 0,
        }
    }
}
