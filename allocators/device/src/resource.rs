//! The one interface of everything that gives out device memory.

use crate::{Block, Request};
use aquifer_core::{DeviceId, PoolStats, Result};
use aquifer_stream::Stream;
use std::fmt::Debug;

/// A source of device memory: the caching pool, the driver's own allocators, and whatever wraps one of them.
///
/// Object safe. Blocks know their way home, so there is no call to free one.
pub trait Resource: Debug + Send + Sync {
    /// The device.
    fn device(&self) -> DeviceId;

    /// A block that work queued on `stream` from now on may use. May call the driver, and may block when memory is
    /// short.
    ///
    /// # Errors
    /// A request that makes no sense; a stream of another device; out of memory, explained.
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block>;

    /// What it holds.
    fn stats(&self) -> PoolStats;

    /// Gives free memory back to the driver until it holds no more than `keep` bytes, as far as that needs no waiting;
    /// answers with the bytes given back.
    ///
    /// # Errors
    /// The driver's; what was given back before stays given back.
    fn trim(&self, keep: u64) -> Result<u64>;
}

/// Somebody who can give memory back when a pool is short of it: an application that evicts, another pool.
///
/// Called with no lock held, from the thread whose allocation found no room. It must not allocate from the pool that
/// asks.
pub trait Reclaim: Debug + Send + Sync {
    /// Frees what it can of `bytes`, or queues the work that will. Answers with how much it let go of; 0 says that there
    /// is nothing more to have. The pool believes only its own count.
    fn reclaim(&self, bytes: u64) -> u64;
}
