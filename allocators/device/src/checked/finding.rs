//! Findings, and the records of the blocks that they concern.

use aquifer_core::{Bytes, MemoryError, Tag};
use std::{backtrace::Backtrace, fmt, panic::Location, sync::Arc, time::Instant};

/// The debugging record of a block.
///
/// See [`LeakReport`](crate::LeakReport) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BlockRecord {
    /// The block's first address.
    pub address: u64,
    /// Number of bytes requested.
    pub bytes: u64,
    /// The tag of the request.
    pub tag: Tag,
    /// The number of blocks that the pool had allocated with this one, itself included.
    pub number: u64,
    /// The driver's number of the owner stream (`cuStreamGetId`), which the simulated GPU uses
    /// too.
    pub stream: u64,
    /// The number of that stream in its pool, which recorders and snapshots use.
    pub(crate) of_pool: u32,
    /// When it was allocated.
    pub born: Instant,
    /// The line that allocated it.
    pub allocated_at: &'static Location<'static>,
    /// The line that freed it, if it was freed by [`DevicePool::free`](crate::DevicePool::free) or
    /// inside a function of this library. A plain drop does not pass its line.
    pub freed_at: Option<&'static Location<'static>>,
    /// The call stack of the allocation, with
    /// [`Debugging::backtraces`](crate::Debugging::backtraces).
    pub allocated_by: Option<Arc<Backtrace>>,
    /// The call stack of the free, likewise.
    pub freed_by: Option<Arc<Backtrace>>,
}

/// A fault of a block, or a possible fault.
///
/// Its `Display` is a readable report of a few lines.
///
/// See [`Debugging`](crate::Debugging) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// The fault.
    pub fault: Fault,
    /// The block concerned.
    pub block: BlockRecord,
}

/// The kinds of faults. Offsets count bytes from the first of the block.
///
/// See [`Debugging`](crate::Debugging) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Memory before the block was written.
    Underrun {
        /// The lowest wrong byte; -1 is right before the block.
        offset: i64,
        /// The value found.
        found: u8,
    },
    /// Memory behind the block was written.
    Overrun {
        /// The first wrong byte; the block's length is right behind it.
        offset: u64,
        /// The value found.
        found: u8,
    },
    /// The block was written after it was freed and all of its recorded uses were done.
    LateWrite {
        /// The first wrong byte.
        offset: u64,
        /// The value found.
        found: u8,
    },
    /// The block would have overlapped a block in use, and has been refused.
    Overlap {
        /// The block in use.
        held: Box<BlockRecord>,
    },
    /// The block was live when its pool closed.
    Leak,
    /// The block returned to the pool without a check, since the driver refused to read it.
    Unchecked {
        /// The driver's error.
        error: MemoryError,
    },
}

impl fmt::Display for BlockRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bytes, tag, number, stream, .. } = self;
        write!(
            f,
            "block {number} at {address:#x}, {} for \"{tag}\" on stream {stream}",
            Bytes(*bytes)
        )
    }
}

impl BlockRecord {
    fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n  block       {self}\n  allocated   {}", self.allocated_at)?;
        if let Some(stack) = &self.allocated_by {
            write!(f, "\n{stack}")?;
        }
        if let Some(freed_at) = self.freed_at {
            write!(f, "\n  freed       {freed_at}")?;
        }
        if let Some(stack) = &self.freed_by {
            write!(f, "\n  freed by\n{stack}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fault {
            Fault::Underrun { offset, found } => {
                write!(f, "written before its start: {found:#04x} at byte {offset}")?;
            }
            Fault::Overrun { offset, found } => {
                let bytes = self.block.bytes;
                write!(f, "written past its end: {found:#04x} at byte {offset} of {bytes}")?;
            }
            Fault::LateWrite { offset, found } => {
                write!(f, "written after its free: {found:#04x} at byte {offset}")?;
            }
            Fault::Overlap { .. } => f.write_str("overlaps a block that is held")?,
            Fault::Leak => write!(f, "never freed, {:.1?} old", self.block.born.elapsed())?,
            Fault::Unchecked { error } => write!(f, "not looked at: {error}")?,
        }
        self.block.write_details(f)?;
        if let Fault::Overlap { held } = &self.fault {
            f.write_str("\nand")?;
            held.write_details(f)?;
        }
        Ok(())
    }
}
