//! A trace: its blocks and steps, and what is recorded about it.

use aquifer_core::event::BlockKind;
use std::fmt;

/// The largest valid block size: the address space of a process.
pub(crate) const MAX_BLOCK: u64 = 1 << 47;
/// The maximum number of streams. A driver has a few hundred before it begins to share them.
pub(crate) const MAX_STREAMS: usize = 1024;
/// The header of files of [`Format::Events`] without kinds, devices and tags.
pub(super) const EVENTS_HEADER: &str = "t_us,op,id,bytes,stream";
/// The header of files of [`Format::Rmm`].
pub(super) const RMM_HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// The form of the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// `t_us,op,id,bytes,stream`, with or without `kind`, `device` and `tag`
    Events,
    /// `Thread,Time,Action,Pointer,Size,Stream`
    Rmm,
    /// No file: generated from a seed.
    Made,
    /// A memory snapshot of PyTorch.
    Snapshot,
}

/// One block from its allocation to its last use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    /// The requested size. Never zero, at most [`MAX_BLOCK`].
    pub(crate) bytes: u64,
    /// The stream that it was allocated on.
    pub(crate) stream: u32,
    /// The stream that it was freed on, if it was freed. Nearly always the same.
    pub(crate) freed_on: Option<u32>,
    /// Whether another stream still used it when it was freed: its completion is not in the row
    /// directly after its free.
    pub(crate) lingers: bool,
}

impl Block {
    /// Returns whether a stream other than its own uses it.
    pub(crate) fn crosses(&self) -> bool {
        self.lingers || self.freed_on.is_some_and(|stream| stream != self.stream)
    }
}

/// The kind of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// It is allocated.
    Allocate,
    /// Its owner frees it.
    Free,
    /// Its last use is complete. Only blocks that linger have this step, and not all of them do.
    Complete,
}

/// One step. Two steps are equal regardless of their rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// The kind.
    pub(crate) action: Action,
    /// The index of the block in [`Trace::blocks`].
    pub(crate) block: u32,
    /// The row, or the event of a snapshot, counted from 1.
    pub(crate) row: u32,
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        (self.action, self.block) == (other.action, other.block)
    }
}

impl Eq for Step {}

/// The location of memory in a trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Device {
    /// On a device, by its ordinal.
    Gpu(u32),
    /// Pinned on a NUMA node of the host, or on an unknown node.
    Host(Option<u32>),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(device) => write!(f, "{device}"),
            Self::Host(Some(node)) => write!(f, "host:{node}"),
            Self::Host(None) => f.write_str("host"),
        }
    }
}

/// A valid trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Trace {
    /// The form of the input.
    pub(crate) format: Format,
    /// Every block, in order of allocation.
    pub(crate) blocks: Vec<Block>,
    /// The steps, in order. Each block is allocated before it is freed, freed at most once, and
    /// completed after that or never.
    pub(crate) steps: Vec<Step>,
    /// The number of streams. Every stream of a block is below it.
    pub(crate) streams: u32,
    /// The peak of live bytes, in requested sizes.
    pub(crate) peak_live: u64,
    /// The number of freed blocks.
    pub(crate) frees: u64,
    /// Bytes of the blocks that are never freed.
    pub(crate) live_at_end: u64,
    /// Rows that a replay cannot repeat: failed requests, and requests of zero bytes.
    pub(crate) skipped: u64,
    /// The file's contents by device, kind and tag, including what is not replayed. Empty if the
    /// file does not record them.
    pub(crate) memory: Vec<(Device, Account)>,
    /// The device of this memory, if the file distinguishes devices.
    pub(crate) device: Option<u32>,
    /// Notes on the file for the reader of the result.
    pub(crate) notes: Vec<String>,
    /// Facts about the snapshot, if the input is one.
    pub(crate) snapshot: Option<SnapshotFacts>,
}

impl Trace {
    /// Returns what the numbers of its steps count.
    pub(crate) fn unit(&self) -> &'static str {
        match self.format {
            Format::Events | Format::Rmm => "row",
            Format::Made => "step",
            Format::Snapshot => "event",
        }
    }

    /// Returns the number of allocations.
    pub(crate) fn allocations(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the number of allocations and frees.
    pub(crate) fn operations(&self) -> u64 {
        self.allocations() + self.frees
    }

    /// Returns the number of blocks that a stream other than their own uses.
    #[cfg(test)]
    pub(crate) fn crossings(&self) -> u64 {
        self.blocks.iter().filter(|block| block.crosses()).count() as u64
    }
}

/// Totals of the blocks of one kind and one tag.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Account {
    /// Their kind.
    pub(crate) kind: BlockKind,
    /// Their tag. Empty if the input has none.
    pub(crate) tag: String,
    /// The number of allocations.
    pub(crate) allocations: u64,
    /// The number of blocks that are still allocated.
    pub(crate) blocks: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// The peak of allocated bytes.
    pub(crate) peak: u64,
}

/// Facts about a snapshot besides its trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SnapshotFacts {
    /// The index of the device whose events are played.
    pub(crate) device: usize,
    /// The number of devices.
    pub(crate) devices: usize,
    /// Blocks that existed before the first event, including those freed with an open use.
    pub(crate) blocks_at_start: u64,
    /// Their bytes.
    pub(crate) bytes_at_start: u64,
}
