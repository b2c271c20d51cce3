//! The driver's own stream-ordered pools: `cuMemAllocFromPoolAsync` and `cuMemFreeAsync`.
#![expect(unsafe_code, reason = "frees device memory")]

use crate::{
    Block, Request,
    backend::{Ledger, Source},
};
use aquifer_core::{__opaque::Sealed, Budget, Charge, DeviceId, MemoryError, Opaque, PoolStats, Result};
use aquifer_driver::{Driver, PoolHandle};
use aquifer_stream::{Stream, StreamPool, Timeline, Uses};
use std::sync::{Arc, Mutex, PoisonError};

/// Memory from a pool of the driver's, some 0.3 µs a call on one thread.
///
/// The pool keeps what is freed and holds at most what its budget had left when it was made. What it reserves is charged
/// after each allocation, since only the driver knows how much that is.
#[derive(Clone, Debug)]
pub struct StreamOrdered {
    ledger: Arc<Ledger<Calls>>,
}

#[derive(Debug)]
struct Calls {
    driver: Arc<dyn Driver>,
    pool: PoolHandle,
    budget: Budget,
    /// For what the pool has reserved.
    charged: Mutex<Option<Charge>>,
}

impl StreamOrdered {
    /// A pool of its own for `streams`, under `budget`.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] where the driver has no such pools; the driver's.
    pub fn new(driver: Arc<dyn Driver>, streams: StreamPool, budget: Budget) -> Result<Self> {
        let device = streams.device();
        let lost = |e| MemoryError::driver(device, e);
        if !driver.device_info(device).map_err(lost)?.async_pools {
            return Err(MemoryError::Unsupported { feature: "stream-ordered pools (cuMemPoolCreate)" });
        }
        let most = budget.remaining();
        let total = driver.memory_info(device).map_err(lost)?.total;
        let pool = driver.pool_create(device, if most < total { most } else { 0 }).map_err(lost)?;
        let charged = Mutex::new(None);
        Ok(Self {
            ledger: Ledger::new(Calls { driver: driver.clone(), pool, budget, charged }, driver, streams),
        })
    }
}

impl Calls {
    fn lost(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.pool.device(), error)
    }

    /// Charges what the pool has reserved by now. A refusal leaves the charge as it was.
    fn charge_reserved(&self) -> Result<()> {
        let reserved = self.driver.pool_usage(self.pool).map_err(|e| self.lost(e))?.reserved;
        let mut charged = self.charged.lock().unwrap_or_else(PoisonError::into_inner);
        let now = charged.as_ref().map_or(0, Charge::bytes);
        if reserved > now {
            let more = self.budget.charge(reserved - now)?;
            match charged.as_mut() {
                Some(charge) => {
                    // Both are of one budget, so they merge.
                    let _ = charge.merge(more);
                }
                None => *charged = Some(more),
            }
        } else if let Some(charge) = charged.as_mut() {
            drop(charge.split(now - reserved));
        }
        Ok(())
    }
}

impl StreamOrdered {
    /// The block of these that was [turned into](Block::into_raw) this address.
    ///
    /// # Errors
    /// [`MemoryError::ForeignBlock`] if there is none.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        self.ledger.take_raw(address)
    }
}

impl Source for Calls {
    fn take(&self, stream: &Stream, bytes: u64) -> Result<(u64, Option<Charge>)> {
        let address = self.driver.pool_alloc(self.pool, stream.raw(), bytes).map_err(|e| self.lost(e))?;
        if let Err(error) = self.charge_reserved() {
            // SAFETY: 1. it has just come from `pool_alloc`. 2. nobody has used it.
            let _ = unsafe { self.driver.pool_free(stream.raw(), address) };
            let _ = self.driver.pool_trim(self.pool, 0);
            let _ = self.charge_reserved();
            return Err(error);
        }
        Ok((address, None))
    }

    fn give(&self, home: &Timeline, address: u64, uses: &Uses) -> Result<()> {
        for noted in uses.iter() {
            home.wait_for(noted.on(), noted.epoch().unwrap_or(0))?;
        }
        // SAFETY: 1. from `pool_alloc`; each block is given back once, and kept whole if this fails.
        // 2. its home stream, which the free is queued on, has been made to wait for every other user.
        unsafe { self.driver.pool_free(home.raw(), address) }.map_err(|e| self.lost(e))
    }

    fn reserved(&self) -> Option<u64> {
        Some(self.driver.pool_usage(self.pool).map_or(0, |usage| usage.reserved))
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        let before = self.reserved().unwrap_or(0);
        self.driver.pool_trim(self.pool, keep).map_err(|e| self.lost(e))?;
        self.charge_reserved()?;
        Ok(before.saturating_sub(self.reserved().unwrap_or(0)))
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // SAFETY: 1. the handle is private to this value, which is going. Blocks hold it, so none is left.
        let _ = unsafe { self.driver.pool_destroy(self.pool) };
    }
}

impl crate::Reclaim for StreamOrdered {
    /// Gives back what the driver's pool has reserved and not used, for another pool under the same budget.
    fn reclaim(&self, bytes: u64) -> u64 {
        let keep = self.ledger.source.reserved().unwrap_or(0).saturating_sub(bytes);
        self.ledger.trim(keep).unwrap_or(0)
    }
}

impl Sealed for StreamOrdered {}
impl Opaque for StreamOrdered {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.ledger.device()
    }
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.ledger.allocate(stream, request)
    }
    fn stats(&self) -> PoolStats {
        let mut stats = self.ledger.stats();
        let calls = &self.ledger.source;
        if let Ok(usage) = calls.driver.pool_usage(calls.pool) {
            stats.peak_physical = usage.reserved_high;
        }
        stats
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.ledger.trim(keep)
    }
}
