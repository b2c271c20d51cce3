//! What has been found, and about which block.

use aquifer_core::{Bytes, MemoryError, Tag};
use std::{backtrace::Backtrace, fmt, panic::Location, sync::Arc, time::Instant};

/// A block as debugging knows it.
///
/// Its example is that of [`LeakReport`](crate::LeakReport).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BlockRecord {
    /// The block's first address.
    pub address: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// Who it is for.
    pub tag: Tag,
    /// How many blocks the pool had given out when it gave out this one, itself included.
    pub number: u64,
    /// The driver's number of the stream that it belongs to (`cuStreamGetId`), by which the
    /// simulated GPU names it too.
    pub stream: u64,
    /// That stream's number in its pool, as recorders and snapshots name it.
    pub(crate) of_pool: u32,
    /// When it was given out.
    pub born: Instant,
    /// The line that asked for it.
    pub allocated_at: &'static Location<'static>,
    /// The line that freed it: where it was freed by
    /// [`DevicePool::free`](crate::DevicePool::free), or inside a function of this library's that
    /// was called there. A plain drop tells nobody its line.
    pub freed_at: Option<&'static Location<'static>>,
    /// The call stack that asked for it, with
    /// [`Debugging::backtraces`](crate::Debugging::backtraces).
    pub allocated_by: Option<Arc<Backtrace>>,
    /// The call stack that freed it, likewise.
    pub freed_by: Option<Arc<Backtrace>>,
}

/// Something that is wrong with a block, or might be.
///
/// Its `Display` is a report of a few lines for a person.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// What.
    pub fault: Fault,
    /// With which block.
    pub block: BlockRecord,
}

/// What is wrong with a block. Offsets count bytes from the block's first.
///
/// Its example is that of [`Debugging`](crate::Debugging).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Somebody has written before the block.
    Underrun {
        /// The wrong byte that lies lowest; -1 is right before the block.
        offset: i64,
        /// What is there.
        found: u8,
    },
    /// Somebody has written behind the block.
    Overrun {
        /// The first wrong byte; the block's length is right behind it.
        offset: u64,
        /// What is there.
        found: u8,
    },
    /// Somebody has written to the block after it was freed and all of its noted uses were done.
    LateWrite {
        /// The first wrong byte.
        offset: u64,
        /// What is there.
        found: u8,
    },
    /// The block would have overlapped one that is held; it has been refused.
    Overlap {
        /// The one that is held.
        held: Box<BlockRecord>,
    },
    /// The block is live and its pool is closing.
    Leak,
    /// The block has gone home without being looked at, since the driver refused.
    Unchecked {
        /// How.
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
    fn told(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        self.block.told(f)?;
        if let Fault::Overlap { held } = &self.fault {
            f.write_str("\nand")?;
            held.told(f)?;
        }
        Ok(())
    }
}
