//! Memory that the host cannot reach: what wrappers know of it.
//!
//! A device's block is a token, not a pointer: it knows its way home, and it is used through a
//! stream. So its sources are no `Allocator`s, and no collection takes one. Wrappers do not mind: a
//! limit counts bytes, whoever may touch them.
//!
//! The trait lies here and not with its pools, because pools and wrappers do not know each other:
//! what both speak lies below both. It says nothing of streams but that there are some, so that
//! nothing of a device is needed here either.
//!
//! Any type may implement it, and no soundness rests on an implementation: a device's block is a
//! token that only its pool can make, so a wrapper can hand on what it was given and nothing else.
//! A source of memory of one's own, where soundness does rest on what it says, implements
//! `RangeSource` of aquifer-device.

use crate::{DeviceId, PoolStats, Request, Result};
use std::{any::Any, sync::Arc};

/// A source of blocks that the host cannot reach: a pool of device memory, and whatever wraps one.
///
/// Object safe, once its types are named. Blocks know their way home, so there is no call to free
/// one.
///
/// Wrappers of one's own implement it over another source; what has to end with a block is given to
/// [`OpaqueBlock::keep_until_free`]. This one counts:
///
/// ```
/// use aquifer_core::{DeviceId, Opaque, OpaqueBlock, PoolStats, Request, Result};
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
    /// What work is queued on.
    type Stream;
    /// What is handed out. It goes home when it is dropped.
    type Block: OpaqueBlock;

    /// The device.
    fn device(&self) -> DeviceId;

    /// A block that work queued on `stream` from now on may use. May call the driver, and may block
    /// when memory is short.
    ///
    /// # Errors
    /// A request that makes no sense; a stream of another device; out of memory, explained.
    fn allocate(&self, stream: &Self::Stream, request: Request) -> Result<Self::Block>;

    /// What it holds. Of a wrapper around several: the sum.
    fn stats(&self) -> PoolStats;

    /// Gives free memory back to the driver until it holds no more than `keep` bytes, as far as
    /// that needs no waiting; answers with the bytes given back. Of a wrapper around several: from
    /// each in turn, as if it stood alone.
    ///
    /// # Errors
    /// The driver's; what was given back before stays given back.
    fn trim(&self, keep: u64) -> Result<u64>;
}

/// A block that the host cannot reach.
///
/// Its example is that of [`Opaque`].
pub trait OpaqueBlock {
    /// Keeps `thing` until the block's memory is really free: for a block that queued work still
    /// uses that is later than its drop. A block that is forgotten keeps it for good.
    fn keep_until_free(&mut self, thing: Box<dyn Any + Send + Sync>);
}

macro_rules! behind {
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

// What lies behind a pointer is a source too, so that wrappers compose over borrowed pools and over
// `dyn` ones.
behind!(&M, Arc<M>);
