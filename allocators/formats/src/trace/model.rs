//! A trace: its blocks and steps, and what is recorded about it.

use std::{
    fmt,
    io::{self, Write},
};

/// The largest valid block size: the address space of a process.
pub const MAX_BLOCK: u64 = 1 << 47;
/// The maximum number of streams. A driver has a few hundred before it begins to share them.
pub const MAX_STREAMS: usize = 1024;
/// The header of files of [`TraceFormat::Events`] without kinds, devices and tags.
pub(super) const EVENTS_HEADER: &str = "t_us,op,id,bytes,stream";

/// The form of the input.
///
/// See the example of [`Trace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TraceFormat {
    /// `t_us,op,id,bytes,stream`, with or without `kind`, `device` and `tag`
    Events,
    /// `Thread,Time,Action,Pointer,Size,Stream`, or `Event Type,Device ID,Address,…` of RMM before
    /// 0.15
    Rmm,
    /// No file: generated from a seed.
    Made,
    /// A memory snapshot of PyTorch.
    Snapshot,
}

impl TraceFormat {
    /// Returns its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Rmm => "rmm",
            Self::Made => "made",
            Self::Snapshot => "snapshot",
        }
    }

    /// Returns what the numbers of its steps count.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Events | Self::Rmm => "row",
            Self::Made => "step",
            Self::Snapshot => "event",
        }
    }
}

/// One block from its allocation to its last use.
///
/// See the example of [`Trace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceBlock {
    /// The requested size. Never zero, at most [`MAX_BLOCK`].
    pub bytes: u64,
    /// The stream that it was allocated on.
    pub stream: u32,
    /// The stream that it was freed on, if it was freed. Nearly always the same.
    pub freed_on: Option<u32>,
    /// Whether another stream still used it when it was freed: its completion is not in the row
    /// directly after its free.
    pub lingers: bool,
}

impl TraceBlock {
    /// Returns whether a stream other than its own uses it.
    pub fn crosses(&self) -> bool {
        self.lingers || self.freed_on.is_some_and(|stream| stream != self.stream)
    }
}

/// The kind of a step.
///
/// See the example of [`Trace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TraceAction {
    /// It is allocated.
    Allocate,
    /// Its owner frees it.
    Free,
    /// Its last use is complete. Only blocks that linger have this step, and not all of them do.
    Complete,
}

/// One step. Two steps are equal regardless of their rows.
///
/// See the example of [`Trace`].
#[derive(Clone, Copy, Debug)]
pub struct TraceStep {
    /// The kind.
    pub action: TraceAction,
    /// The index of the block in [`Trace::blocks`].
    pub block: u32,
    /// The row, or the event of a snapshot, counted from 1.
    pub row: u32,
}

impl PartialEq for TraceStep {
    fn eq(&self, other: &Self) -> bool {
        (self.action, self.block) == (other.action, other.block)
    }
}

impl Eq for TraceStep {}

/// The location of memory in a trace.
///
/// See the example of [`Trace`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum TraceDevice {
    /// On a device, by its ordinal.
    Gpu(u32),
    /// Pinned on a NUMA node of the host, or on an unknown node.
    Host(Option<u32>),
}

impl TraceDevice {
    /// Returns the ordinal of a device.
    pub(crate) fn gpu(&self) -> Option<u32> {
        match self {
            Self::Gpu(device) => Some(*device),
            Self::Host(_) => None,
        }
    }
}

impl fmt::Display for TraceDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(device) => write!(f, "{device}"),
            Self::Host(Some(node)) => write!(f, "host:{node}"),
            Self::Host(None) => f.write_str("host"),
        }
    }
}

/// A valid trace.
///
/// ```
/// use aquifer_formats::trace::{Trace, TraceAction, TraceBlock};
/// let rows = "t_us,op,id,bytes,stream\n0,a,1,4096,3\n7,f,1,4096,3\n7,c,1,4096,3\n";
/// let trace = Trace::from_reader(rows.as_bytes(), None)?;
/// let block = TraceBlock { bytes: 4096, stream: 0, freed_on: Some(0), lingers: false };
/// assert_eq!(trace.blocks, [block]);
/// trace.check();
/// // The completion directly follows the free, so it is no step of its own.
/// assert!(trace.steps.iter().map(|step| step.action).eq([TraceAction::Allocate, TraceAction::Free]));
///
/// let error = Trace::from_reader(&rows.as_bytes()[..40], None).unwrap_err();
/// assert_eq!(error.to_string(), "row 3: cut off: the row has no line end");
/// # Ok::<(), aquifer_formats::trace::TraceError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    /// The form of the input.
    pub format: TraceFormat,
    /// Every block, in order of allocation.
    pub blocks: Vec<TraceBlock>,
    /// The steps, in order. Each block is allocated before it is freed, freed at most once, and
    /// completed after that or never.
    pub steps: Vec<TraceStep>,
    /// The number of streams. Every stream of a block is below it.
    pub streams: u32,
    /// The peak of live bytes, in requested sizes.
    pub peak_live: u64,
    /// The number of freed blocks.
    pub frees: u64,
    /// Bytes of the blocks that are never freed.
    pub live_at_end: u64,
    /// The device of this memory, if the file distinguishes devices.
    pub device: Option<u32>,
    /// The devices that have blocks in the file. Empty if it does not distinguish devices.
    pub devices: Vec<u32>,
    /// Notes on the file for the reader of the result.
    pub notes: Vec<String>,
    /// Rows of a log that could not be read. What they allocate is missing here.
    pub unreadable: u64,
}

impl Trace {
    /// Creates a trace of these blocks and steps.
    pub(crate) fn of_steps(
        format: TraceFormat,
        blocks: Vec<TraceBlock>,
        steps: Vec<TraceStep>,
        streams: u32,
    ) -> Self {
        let (device, devices, notes, unreadable) = (None, Vec::new(), Vec::new(), 0);
        let (peak_live, frees, live_at_end) = (0, 0, 0);
        let mut trace = Self {
            format,
            blocks,
            steps,
            streams,
            peak_live,
            frees,
            live_at_end,
            device,
            devices,
            notes,
            unreadable,
        };
        trace.count();
        trace
    }

    /// Counts what the fields say about the steps.
    pub(super) fn count(&mut self) {
        let (mut live, mut peak, mut frees) = (0_u64, 0, 0);
        for step in &self.steps {
            let bytes = self.blocks[step.block as usize].bytes;
            match step.action {
                TraceAction::Allocate => live += bytes,
                TraceAction::Free => {
                    live -= bytes;
                    frees += 1;
                }
                TraceAction::Complete => {}
            }
            peak = peak.max(live);
        }
        debug_assert!(frees <= self.blocks.len() as u64, "a block is freed once");
        debug_assert!(self.steps.len() as u64 >= self.blocks.len() as u64 + frees);
        (self.peak_live, self.live_at_end, self.frees) = (peak, live, frees);
    }

    /// Returns what the numbers of its steps count.
    pub fn unit(&self) -> &'static str {
        self.format.unit()
    }

    /// Returns the number of allocations.
    pub fn allocations(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the number of allocations and frees.
    pub fn operations(&self) -> u64 {
        self.allocations() + self.frees
    }

    /// Checks that each block is allocated in order, freed at most once and completed after that,
    /// on streams that there are, and that the sums are right. Looks at every step. See the example
    /// of [`Trace`].
    ///
    /// # Panics
    /// If something is wrong.
    pub fn check(&self) {
        // Of each block, how many of its steps have been seen.
        let mut seen = vec![0_u8; self.blocks.len()];
        let (mut next, mut live, mut peak, mut frees) = (0, 0_u64, 0, 0);
        for step in &self.steps {
            let (index, block) = (step.block as usize, self.blocks[step.block as usize]);
            match step.action {
                TraceAction::Allocate => {
                    assert_eq!(step.block, next, "blocks are numbered in order of allocation");
                    (next, live) = (next + 1, live + block.bytes);
                    peak = peak.max(live);
                }
                TraceAction::Free => {
                    assert_eq!(seen[index], 1, "block {index} is freed once, after its allocation");
                    (frees, live) = (frees + 1, live - block.bytes);
                }
                TraceAction::Complete => {
                    assert_eq!(seen[index], 2, "block {index} is completed after its free");
                    assert!(block.lingers, "block {index} has no use that lingers");
                }
            }
            seen[index] += 1;
        }
        assert_eq!(next as usize, self.blocks.len(), "all blocks are allocated");
        assert_eq!((peak, live, frees), (self.peak_live, self.live_at_end, self.frees));
        for (block, seen) in self.blocks.iter().zip(seen) {
            assert!(block.stream < self.streams, "stream {} of {}", block.stream, self.streams);
            assert!(block.freed_on.is_none_or(|stream| stream < self.streams));
            assert_eq!(block.freed_on.is_some(), seen > 1, "a freed block has the stream");
        }
    }

    /// Returns the peak of *active* bytes, in requested sizes: of blocks that are live, or freed
    /// and still in use by another stream. A use without a completion lasts to the end. At least
    /// [`peak_live`](Self::peak_live), and equal to it if no block lingers.
    pub fn peak_active(&self) -> u64 {
        let (mut active, mut peak) = (0_u64, 0);
        for step in &self.steps {
            let block = self.blocks[step.block as usize];
            match step.action {
                TraceAction::Allocate => active = active.saturating_add(block.bytes),
                TraceAction::Free if block.lingers => {}
                TraceAction::Free | TraceAction::Complete => {
                    active = active.saturating_sub(block.bytes);
                }
            }
            peak = peak.max(active);
        }
        peak
    }

    /// Writes the blocks and steps as rows of [`TraceFormat::Events`], for other programs. Times
    /// are the numbers of the steps, since a trace keeps no times.
    ///
    /// ```
    /// # use aquifer_formats::trace::Trace;
    /// let trace = Trace::read("made:edge".as_ref(), None)?;
    /// let mut rows = Vec::new();
    /// trace.write_to(&mut rows)?;
    /// let read = Trace::from_reader(std::io::Cursor::new(rows), None)?;
    /// assert_eq!((read.blocks, read.steps), (trace.blocks, trace.steps));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{EVENTS_HEADER}")?;
        for (time, step) in self.steps.iter().enumerate() {
            let block = self.blocks[step.block as usize];
            let freed_on = block.freed_on.unwrap_or(block.stream);
            let mut row = |op, stream| {
                writeln!(out, "{time},{op},{},{},{stream}", step.block + 1, block.bytes)
            };
            match step.action {
                TraceAction::Allocate => row('a', block.stream)?,
                TraceAction::Free => {
                    row('f', freed_on)?;
                    if !block.lingers {
                        row('c', freed_on)?;
                    }
                }
                TraceAction::Complete => row('c', freed_on)?,
            }
        }
        Ok(())
    }

    /// Returns the number of blocks that a stream other than their own uses.
    #[cfg(test)]
    pub(crate) fn crossings(&self) -> u64 {
        self.blocks.iter().filter(|block| block.crosses()).count() as u64
    }
}
