//! The one interface of everything that gives out device memory.

use crate::Block;
use aquifer_core::Opaque;
use aquifer_stream::Stream;
use std::fmt::Debug;

/// A source of device memory: the caching pool, the driver's own allocators, and whatever wraps one of them, by
/// aquifer-adapters' wrappers too. Its methods are those of [`Opaque`]. Object safe.
pub trait Resource: Opaque<Stream = Stream, Block = Block> + Debug + Send + Sync {}

impl<R: Opaque<Stream = Stream, Block = Block> + Debug + Send + Sync> Resource for R {}

/// Somebody who can give memory back when a pool is short of it: an application that evicts, another pool.
///
/// Called with no lock held, from the thread whose allocation found no room. It must not allocate from the pool that
/// asks.
pub trait Reclaim: Debug + Send + Sync {
    /// Frees what it can of `bytes`, or queues the work that will. Answers with how much it let go of; 0 says that there
    /// is nothing more to have. The pool believes only its own count.
    fn reclaim(&self, bytes: u64) -> u64;
}
