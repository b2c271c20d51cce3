//! Device memory from a custom source, such as a slab of another library's allocation or a driver
//! call that this library does not make.
//!
//! ```text
//!   Limit, Tagged, CountingAllocator, …      wrappers: any Resource, safe to implement
//!   SourcePool<S>                  blocks, statistics, budget, open uses, frees that have to be tried again
//!   S: RangeSource                 ranges: what a user writes, unsafe to implement
//! ```
//!
//! A source handles ranges, not blocks. [`SourcePool`] makes blocks of them, records the streams
//! that use each, and returns a range to the source with its [`Dependencies`]: the work that must
//! be over before the memory may be reused.

pub(crate) mod allocator;
mod range;

pub use range::{Dependencies, RangeSource};

use allocator::SourceAllocator;
use aquifer_core::{BLOCK_ALIGN, Budget, MemoryError, Opaque, PoolStats, Result};
use aquifer_stream::StreamPool;
use std::sync::Arc;

/// Blocks from a [`RangeSource`]: a [`Resource`](crate::Resource) like any pool. A clone is another
/// handle.
///
/// It caches nothing: each allocation and each free calls the source. The source lives until the
/// last block has been returned.
///
/// [`RangeSource`] has an example.
#[derive(Debug)]
pub struct SourcePool<S: RangeSource> {
    allocator: Arc<SourceAllocator<S>>,
}

impl<S: RangeSource> Clone for SourcePool<S> {
    fn clone(&self) -> Self {
        Self { allocator: self.allocator.clone() }
    }
}

impl<S: RangeSource> SourcePool<S> {
    /// Creates a pool of blocks from `source` for work on `streams`. Requested bytes are charged to
    /// `budget` if there is one.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`] for streams of another device; [`MemoryError::BadAlignment`]
    /// for a source whose alignment is no power of two or below [`BLOCK_ALIGN`].
    pub fn new(source: S, streams: StreamPool, budget: Option<Budget>) -> Result<Self> {
        let (expected, actual, align) = (source.device(), streams.device(), source.alignment());
        if expected != actual {
            return Err(MemoryError::WrongDevice { expected, actual });
        }
        if !align.is_power_of_two() || align < BLOCK_ALIGN {
            return Err(MemoryError::BadAlignment { align });
        }
        let (driver, name) = (streams.driver().clone(), std::any::type_name::<S>());
        Ok(Self { allocator: SourceAllocator::new(source, driver, streams, budget, name) })
    }

    /// Returns the source.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.allocator.source
    }
}

impl<S: RangeSource> Opaque for SourcePool<S> {
    allocator::forward_to_allocator!();
    fn stats(&self) -> PoolStats {
        self.allocator.stats()
    }
}
