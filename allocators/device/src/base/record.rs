//! Records of blocks, for debugging.

use aquifer_core::{Bytes, Tag};
use aquifer_stream::Timeline;
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
    /// Writes where the block was allocated and freed.
    pub(crate) fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// Returns the number by which findings name a stream: the driver's own, which violations of the
/// simulated GPU use too. A stream without one, since it captures, is named by its number in its
/// pool.
pub(crate) fn stream_of(stream: &Timeline) -> u64 {
    stream.id().unwrap_or_else(|| u64::from(stream.number()))
}
