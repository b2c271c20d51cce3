//! Bytes that are held on a device until they are used.

use aquifer_core::{DeviceId, Reservation, Result};
use aquifer_device::{Block, DeviceBuffer, DevicePool, Request};
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::sync::{Mutex, PoisonError};

/// Bytes reserved on one device, drawn from by allocations; the rest goes back when this is dropped.
///
/// Blocks drawn from a lease are blocks like any other, and outlive it. A lease counts bytes as its device's budget
/// does, so a request beside it can never take what it holds; how the bytes lie is not reserved.
#[derive(Debug)]
pub struct Lease {
    pool: DevicePool,
    held: Mutex<Reservation>,
}

impl Lease {
    /// Reserves `bytes` in the pool's budget, asking the pool's caches for what it lacks.
    pub(crate) fn reserve(pool: &DevicePool, bytes: u64) -> Result<Self> {
        let budget = pool.budget();
        let held = match budget.reserve(bytes) {
            Ok(held) => held,
            Err(refused) => {
                // What is cached and done is charged, and can be given up.
                let keep = pool.stats().physical.saturating_sub(bytes.saturating_sub(refused.remaining));
                pool.trim(keep)?;
                budget.reserve(bytes)?
            }
        };
        Ok(Self { pool: pool.clone(), held: Mutex::new(held) })
    }

    /// The device that was picked.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.pool.device()
    }

    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    /// Bytes that are still held.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remaining()
    }

    /// Leases a stream of the device.
    ///
    /// # Errors
    /// As [`DevicePool::stream`].
    pub fn stream(&self) -> Result<Stream> {
        self.pool.stream()
    }

    /// A block drawn from what is held. A request for more than that draws the rest and asks the budget.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`].
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.pool.alloc_reserved(stream, request, &self.held)
    }

    /// A buffer drawn from what is held.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::from_alloc(len, |request| self.alloc(stream, request))
    }
}
