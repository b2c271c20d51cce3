//! A recorded life of device memory, ready to be lived again.
//!
//! A trace comes as CSV in one of two forms or as a memory snapshot of PyTorch's, plain or xz-compressed;
//! [`Trace::read`] tells them apart by their first bytes. All become the same [`Trace`]: blocks numbered from zero, streams numbered from zero without gaps, and a
//! list of steps. Whatever cannot have happened is refused with the row at fault, so that a replay never has to ask
//! whether a step makes sense.
//!
//! | module | holds |
//! |---|---|
//! | `source` | bytes to rows: files, xz, cut ends |
//! | `events` | the form with `a`, `f` and `c`, which this library and the recorder for PyTorch write |
//! | `rmm` | the log of RAPIDS' memory manager |
//! | `pickle`, `snapshot` | memory snapshots of PyTorch's |
//! | `made` | workloads that are made from a seed, with no file behind them |
//! | `builder` | rows to steps, and what cannot have happened |
//! | `split` | the same over another number of streams |
//! | `error` | how that is said |

mod builder;
mod error;
mod events;
pub(crate) mod made;
mod pickle;
mod rmm;
mod snapshot;
mod source;
mod split;

pub(crate) use error::{Fault, TraceError};
pub(crate) use snapshot::Facts;

use builder::Builder;
use source::Source;
use std::path::Path;

/// The largest block that is believed: all addresses that a process has.
pub(crate) const MAX_BLOCK: u64 = 1 << 47;
/// The most streams that are believed. A driver has a few hundred before it begins to share them.
pub(crate) const MAX_STREAMS: usize = 1024;

/// Which form the file had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// `t_us,op,id,bytes,stream`
    Events,
    /// `Thread,Time,Action,Pointer,Size,Stream`
    Rmm,
    /// No file: made from a seed.
    Made,
    /// A memory snapshot of PyTorch's.
    Snapshot,
}

/// One block from its allocation to its last use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    /// As asked for; never zero, at most [`MAX_BLOCK`].
    pub(crate) bytes: u64,
    /// The stream that it was allocated on.
    pub(crate) stream: u32,
    /// The stream that it was freed on, if it was; nearly always the same.
    pub(crate) freed_on: Option<u32>,
    /// Whether another stream still used it when it was freed: its completion is not the row behind its free.
    pub(crate) lingers: bool,
}

impl Block {
    /// Whether a stream other than its own uses it.
    pub(crate) fn crosses(&self) -> bool {
        self.lingers || self.freed_on.is_some_and(|stream| stream != self.stream)
    }
}

/// What happens to a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// It is allocated.
    Allocate,
    /// Its owner frees it.
    Free,
    /// Its last use is done. Only blocks that linger have this step, and not all of them.
    Complete,
}

/// One thing that happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    /// What.
    pub(crate) action: Action,
    /// To which of [`Trace::blocks`].
    pub(crate) block: u32,
}

/// A trace that makes sense.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Trace {
    /// Where it came from.
    pub(crate) format: Format,
    /// Every block, in order of allocation.
    pub(crate) blocks: Vec<Block>,
    /// What happens, in order. Each block is allocated before it is freed, once, and completed after that or never.
    pub(crate) steps: Vec<Step>,
    /// How many streams there are; every stream of a block is below it.
    pub(crate) streams: u32,
    /// The most bytes asked for that were allocated and not freed at once.
    pub(crate) peak_live: u64,
    /// How many blocks are freed.
    pub(crate) frees: u64,
    /// Bytes of the blocks that are not.
    pub(crate) live_at_end: u64,
    /// Rows that tell of something a replay cannot repeat: requests that failed, requests for nothing.
    pub(crate) skipped: u64,
    /// More about a snapshot, if it was one.
    pub(crate) snapshot: Option<Facts>,
}

impl Trace {
    /// Reads and checks the file at `path`, or makes the trace that it [asks for](made). `device`: which of a snapshot's
    /// devices; the one with most events by default.
    ///
    /// # Errors
    /// [`TraceError`] with the first row that is at fault; also where a device is asked for and there are none.
    pub(crate) fn read(path: &Path, device: Option<u32>) -> Result<Self, TraceError> {
        match made::trace(path) {
            Some(_) if device.is_some() => Err(TraceError::whole(Fault::NoDevices)),
            Some(made) => made,
            None => Self::parse(Source::open(path)?, device),
        }
    }

    /// A trace that a test has written down.
    #[cfg(test)]
    pub(crate) fn from_rows(rows: &str) -> Self {
        let text = format!("{}\n{rows}", events::HEADER).into_bytes();
        let source = Source::new(std::io::Cursor::new(text)).and_then(|source| Self::parse(source, None));
        source.unwrap_or_else(|e| panic!("{e}"))
    }

    fn parse(mut source: Source<'_>, device: Option<u32>) -> Result<Self, TraceError> {
        if source.begins_with(pickle::MAGIC)? {
            return snapshot::read(source.bytes(), device);
        }
        if device.is_some() {
            return Err(TraceError::whole(Fault::NoDevices));
        }
        type Take = fn(&str, u64, &mut Builder) -> Result<(), Fault>;
        let (format, take): (Format, Take) = match source.next_row()? {
            None => return Err(TraceError::whole(Fault::Empty)),
            Some((_, events::HEADER)) => (Format::Events, events::take),
            Some((_, rmm::HEADER)) => (Format::Rmm, rmm::take),
            Some((row, other)) => {
                return Err(TraceError { row: Some(row), fault: Fault::Header { found: other.to_owned() } });
            }
        };
        let mut builder = Builder::new();
        while let Some((row, text)) = source.next_row()? {
            take(text, row, &mut builder).map_err(|fault| TraceError { row: Some(row), fault })?;
        }
        builder.finish(format).map_err(TraceError::whole)
    }

    /// How many blocks are allocated.
    pub(crate) fn allocations(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Allocations and frees.
    pub(crate) fn operations(&self) -> u64 {
        self.allocations() + self.frees
    }

    /// Blocks that a stream other than their own uses.
    #[cfg(test)]
    pub(crate) fn crossings(&self) -> u64 {
        self.blocks.iter().filter(|block| block.crosses()).count() as u64
    }
}

#[cfg(test)]
mod tests;
