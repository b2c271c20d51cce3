//! An allocation request for opaque memory.

use crate::{DeviceId, PoolStats, Result, Tag};
use std::{any::Any, sync::Arc};

/// The minimum alignment of a block of device memory, in bytes.
pub const BLOCK_ALIGN: u64 = 512;

/// The size, alignment and tag of an allocation.
///
/// ```
/// use aquifer::{Request, Tag};
/// let request = Request::bytes(1 << 30).align(4096).tag(Tag::named("kv"));
/// assert_eq!(request.size(), 1 << 30);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    bytes: u64,
    align: u64,
    tag: Tag,
}

impl Request {
    /// Creates a request for `bytes`, aligned to [`BLOCK_ALIGN`], with this thread's current tag.
    #[inline]
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, align: BLOCK_ALIGN, tag: Tag::current() }
    }

    /// Sets the alignment in bytes: a power of two, up to what the source of the memory supports.
    #[inline]
    #[must_use]
    pub fn align(self, align: u64) -> Self {
        Self { align, ..self }
    }

    /// Sets the tag under which the block is counted.
    #[inline]
    #[must_use]
    pub fn tag(self, tag: Tag) -> Self {
        Self { tag, ..self }
    }

    /// Returns the requested bytes.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Returns the requested alignment, in bytes.
    #[inline]
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.align
    }

    /// Returns the tag.
    #[inline]
    #[must_use]
    pub fn owner(&self) -> Tag {
        self.tag
    }
}

/// A source of blocks that the host cannot access: a pool of device memory, or a wrapper of one.
///
/// Object safe once its associated types are specified. Blocks return to their pool when they are
/// dropped, so there is no call to free one.
///
/// Custom wrappers implement it over another source. A value whose lifetime ends with that of a
/// block is given to [`OpaqueBlock::keep_until_free`]. This wrapper counts blocks:
///
/// ```
/// use aquifer::{DeviceId, Opaque, PoolStats, Request, device::OpaqueBlock, error::Result};
/// use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
/// struct Counting<M>(M, Arc<AtomicU64>);
/// struct Ends(Arc<AtomicU64>);
/// impl Drop for Ends {
///     fn drop(&mut self) { self.0.fetch_sub(1, Ordering::Relaxed); }
/// }
/// impl<M: Opaque> Opaque for Counting<M> {
///     type Stream = M::Stream;
///     type Block = M::Block;
///     fn device(&self) -> DeviceId { self.0.device() }
///     fn allocate(&self, stream: &M::Stream, request: Request) -> Result<M::Block> {
///         let mut block = self.0.allocate(stream, request)?;
///         self.1.fetch_add(1, Ordering::Relaxed);
///         block.keep_until_free(Box::new(Ends(self.1.clone())));
///         Ok(block)
///     }
///     fn stats(&self) -> PoolStats { self.0.stats() }
///     fn trim(&self, keep: u64) -> Result<u64> { self.0.trim(keep) }
/// }
/// ```
pub trait Opaque {
    /// The stream type, on which work is queued.
    type Stream;
    /// The block type. A block returns to its pool when it is dropped.
    type Block: OpaqueBlock;

    /// Returns the device.
    fn device(&self) -> DeviceId;

    /// Allocates a block for work that is queued on `stream` from now on. May call the driver, and
    /// may block when memory is short.
    ///
    /// # Errors
    /// An invalid request, a stream of another device, or an explained out-of-memory error.
    fn allocate(&self, stream: &Self::Stream, request: Request) -> Result<Self::Block>;

    /// Returns the statistics. A wrapper of several sources returns the sum.
    fn stats(&self) -> PoolStats;

    /// Releases free memory to the driver until at most `keep` bytes are held, as far as this needs
    /// no waiting. Returns the number of bytes released. A wrapper of several sources trims each of
    /// them separately.
    ///
    /// # Errors
    /// The driver's error. Memory released before it stays released.
    fn trim(&self, keep: u64) -> Result<u64>;
}

/// A block that the host cannot access.
///
/// See the example of [`Opaque`].
pub trait OpaqueBlock {
    /// Keeps `value` alive until the block's memory is really free. If queued work still uses the
    /// block, this is after the drop of the block. If the block is forgotten, `value` is never
    /// dropped.
    fn keep_until_free(&mut self, value: Box<dyn Any + Send + Sync>);
}

macro_rules! forward_opaque {
    ($($pointer:ty),*) => {$(
        impl<M: Opaque + ?Sized> Opaque for $pointer {
            type Stream = M::Stream;
            type Block = M::Block;
            fn device(&self) -> DeviceId {
                (**self).device()
            }
            #[track_caller]
            fn allocate(&self, stream: &M::Stream, request: Request) -> Result<M::Block> {
                (**self).allocate(stream, request)
            }
            fn stats(&self) -> PoolStats {
                (**self).stats()
            }
            fn trim(&self, keep: u64) -> Result<u64> {
                (**self).trim(keep)
            }
        }
    )*};
}

// Pointers to a source are sources too, so that wrappers also work over borrowed and `dyn` pools.
forward_opaque!(&M, Arc<M>);
