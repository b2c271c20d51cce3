//! Each block an allocation of its own: `cuMemAlloc` and `cuMemFree`.
#![expect(unsafe_code, reason = "frees device memory")]

use crate::{
    Block, Request,
    backend::{Deferred, Ledger, Source},
};
use aquifer_core::{
    Budget, Charge, DeviceId, MemoryError, Opaque, PoolStats, Result, budget::Registration,
};
use aquifer_driver::{Driver, Relaxed};
use aquifer_stream::{Stream, StreamPool};
use std::sync::Arc;

/// Memory by `cuMemAlloc`, 50 µs and more a block, and a free that waits for the whole device.
///
/// What it is good for is that memory checkers see each block: inside a pool they see one large
/// one. Dropping a block blocks until its streams have finished with it.
#[derive(Clone, Debug)]
pub struct Direct {
    ledger: Arc<Ledger<Calls>>,
}

#[derive(Debug)]
struct Calls {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    budget: Option<Budget>,
}

impl Direct {
    /// Blocks for `streams`, charged to `budget` if there is one.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, streams: StreamPool, budget: Option<Budget>) -> Self {
        let calls = Calls { driver: driver.clone(), device: streams.device(), budget };
        Self { ledger: Ledger::new(calls, driver, streams) }
    }
}

impl Direct {
    /// The block of these that was [turned into](Block::into_raw) this address.
    ///
    /// # Errors
    /// [`MemoryError::DoubleFree`] if it has been freed, as long as that is remembered;
    /// [`MemoryError::ForeignBlock`] if there is none.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        self.ledger.take_raw(address)
    }

    /// As [`DevicePool::share_raw`](crate::DevicePool::share_raw).
    pub(crate) fn share_raw(&self, address: u64) -> Result<Arc<Block>> {
        self.ledger.share_raw(address)
    }

    /// As [`DevicePool::free_raw`](crate::DevicePool::free_raw).
    pub(crate) fn free_raw(&self, address: u64) -> Result<()> {
        self.ledger.free_raw(address)
    }

    /// As [`DevicePool::reset_peaks`](crate::DevicePool::reset_peaks).
    pub(crate) fn reset_peaks(&self) {
        self.ledger.reset_peaks();
    }
}

impl Source for Calls {
    fn take(&self, _stream: &Stream, bytes: u64) -> Result<(u64, Option<Charge>)> {
        let charge = self.budget.as_ref().map(|b| b.charge(bytes)).transpose()?;
        let _relaxed = Relaxed::enter(&*self.driver);
        let address = self
            .driver
            .mem_alloc(self.device, bytes)
            .map_err(|e| MemoryError::driver(self.device, e))?;
        Ok((address, charge))
    }

    fn budget(&self) -> Option<(&Budget, Option<&Registration>)> {
        self.budget.as_ref().map(|budget| (budget, None))
    }

    fn give(&self, block: &Deferred) -> Result<()> {
        let (home, address, uses) = (&block.timeline, block.address, &block.uses);
        // `cuMemFree` stalls the device, but that it does is no promise; these waits are one.
        let waited = (|| {
            for noted in uses.iter() {
                noted.on().wait(noted.epoch().unwrap_or(0), None)?;
            }
            home.wait(home.open(), None)
        })();
        match waited {
            Ok(_) => {}
            // Nothing runs on a lost device, and its memory goes with its context.
            Err(MemoryError::DeviceLost { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        let _relaxed = Relaxed::enter(&*self.driver);
        // SAFETY: 1. from `mem_alloc`; each block is given back once, and kept whole if this fails.
        // 2. its home stream and every other user have been waited for.
        unsafe { self.driver.mem_free(self.device, address) }
            .map_err(|e| MemoryError::driver(self.device, e))
    }
}

impl Opaque for Direct {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.ledger.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.ledger.allocate(stream, request)
    }
    fn stats(&self) -> PoolStats {
        self.ledger.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.ledger.trim(keep)
    }
}
