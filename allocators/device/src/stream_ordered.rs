//! The driver's stream-ordered pools: `cuMemAllocFromPoolAsync` and `cuMemFreeAsync`.
#![expect(unsafe_code, reason = "frees device memory")]

use crate::{
    Block, Dependencies, RangeSource,
    base::{pending::PendingUses, released::reclaim_cost},
    source::allocator::{SourceAllocator, forward_to_allocator},
};
use aquifer_core::{
    Budget, Charge, DeviceId, MemoryError, Opaque, PoolStats, Result,
    budget::{Offer, Reclaim},
    event::MemoryLocation,
};
use aquifer_driver::{DeviceRange, Driver, PoolHandle};
use aquifer_stream::{Stream, StreamPool};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Memory from a pool of the driver, some 0.3 µs a call on one thread.
///
/// The pool keeps freed memory. The memory that it reserves is charged after each allocation, since
/// only the driver can determine the amount. If there is no room, the allocation is returned to the
/// driver before it has been used, and the pool reclaims from others under the same budget what
/// they can release without waiting. It releases its unused memory for them too.
///
/// ```
/// use aquifer::{Budget, DeviceId, Opaque, Request, StreamOrdered, StreamPool, sim::Sim};
/// let driver = Sim::h200(1).driver();
/// let streams = StreamPool::new(driver.clone(), DeviceId(0), 4);
/// let pool = StreamOrdered::new(driver, streams.clone(), Budget::new("theirs", 1 << 30))?;
/// let block = pool.allocate(&streams.lease()?, Request::bytes(1 << 20))?;
/// assert_eq!(pool.stats().requested, 1 << 20);
/// # drop(block);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StreamOrdered {
    allocator: Arc<SourceAllocator<StreamOrderedSource>>,
}

#[derive(Debug)]
struct StreamOrderedSource {
    driver: Arc<dyn Driver>,
    pool: PoolHandle,
    budget: Budget,
    /// The charge for what the pool has reserved.
    charged: Mutex<Option<Charge>>,
    /// Whether a refused allocation has left memory reserved that is not charged.
    uncharged: AtomicBool,
}

impl StreamOrdered {
    /// Creates a driver pool for `streams`, under `budget`.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] if the driver has no such pools; the driver's.
    pub fn new(driver: Arc<dyn Driver>, streams: StreamPool, budget: Budget) -> Result<Self> {
        let device = streams.device();
        let driver_error = |e| MemoryError::driver(device, e);
        if !driver.device_info(device).map_err(driver_error)?.async_pools {
            return Err(MemoryError::Unsupported {
                feature: "stream-ordered pools (cuMemPoolCreate)",
            });
        }
        // A maximum could not follow the budget's limit: the driver fixes it here.
        let pool = driver.pool_create(device).map_err(driver_error)?;
        let charged = Mutex::new(None);
        let source = StreamOrderedSource {
            driver: driver.clone(),
            pool,
            budget: budget.clone(),
            charged,
            uncharged: AtomicBool::new(false),
        };
        let (budgets, name) = (Some(budget.clone()), "cuMemAllocAsync");
        let allocator = SourceAllocator::new(source, driver, streams, budgets, name);
        let _only_once = allocator.registration.set(budget.on_need(&allocator));
        Ok(Self { allocator })
    }
}

impl StreamOrderedSource {
    fn driver_error(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.pool.device(), error)
    }

    fn charged(&self) -> MutexGuard<'_, Option<Charge>> {
        self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges what the pool has reserved by now. If that is refused, the charge is unchanged.
    fn charge_reserved(&self) -> Result<()> {
        let reserved =
            self.driver.pool_usage(self.pool).map_err(|e| self.driver_error(e))?.reserved;
        let mut charged = self.charged();
        let now = charged.as_ref().map_or(0, Charge::bytes);
        if reserved > now {
            let more = self.budget.charge(reserved - now)?;
            match charged.as_mut() {
                Some(charge) => {
                    // Both charges belong to one budget, so they merge.
                    let _ = charge.merge(more);
                }
                None => *charged = Some(more),
            }
        } else if let Some(charge) = charged.as_mut() {
            drop(charge.split(now - reserved));
        }
        let now = charged.as_ref().map_or(0, Charge::bytes);
        debug_assert_eq!(now, reserved, "the charge is not what the driver's pool has reserved");
        self.uncharged.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Releases unused memory and charges the rest.
    fn trim_and_charge(&self, keep: u64) -> Result<()> {
        self.driver.pool_trim(self.pool, keep).map_err(|e| self.driver_error(e))?;
        self.charge_reserved()
    }
}

impl StreamOrdered {
    /// Returns the block of this pool that was [converted](Block::into_raw) to this address.
    ///
    /// # Errors
    /// [`MemoryError::ForeignBlock`] if there is none.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        self.allocator.take_raw(address)
    }
}

// SAFETY: 1. `cuMemAllocFromPoolAsync` returns memory of its own, aligned to at least
// `BLOCK_ALIGN`. 2. Only `deallocate` frees it, and the pool is destroyed with the source, which
// blocks keep alive. 3. The driver orders the allocation on the stream after earlier uses. 4. The
// free is queued on a stream that has been made to wait for the dependencies.
unsafe impl RangeSource for StreamOrderedSource {
    fn device(&self) -> DeviceId {
        self.pool.device()
    }

    fn allocate(&self, stream: &Stream, bytes: u64) -> Result<u64> {
        // A refused allocation is released when its stream reaches the free. Until then the pool
        // takes no more, so that it exceeds its budget by one allocation of each thread at most.
        if self.uncharged.load(Ordering::Relaxed) {
            self.trim_and_charge(0).map_err(|error| match error {
                // Reclaim for this request only: the excess is about to be freed.
                MemoryError::OutOfBudget(mut refused) => {
                    refused.requested = refused.requested.min(bytes);
                    MemoryError::OutOfBudget(refused)
                }
                error => error,
            })?;
        }
        let address = self
            .driver
            .pool_alloc(self.pool, stream.raw(), bytes)
            .map_err(|e| self.driver_error(e))?;
        if let Err(error) = self.charge_reserved() {
            // SAFETY: 1. `pool_alloc` has just returned it. 2. it has not been used.
            let _ = unsafe { self.driver.pool_free(stream.raw(), address) };
            self.uncharged.store(true, Ordering::Relaxed);
            let _ = self.trim_and_charge(0);
            return Err(error);
        }
        Ok(address)
    }

    fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<()> {
        let (owner_stream, address) = (&after.freed.timeline, range.address);
        after.freed.work.uses.order_before(owner_stream, address)?;
        // SAFETY: 1. it came from `pool_alloc`; each block is freed once, and kept whole if this
        // fails. 2. its owner stream, which the free is queued on, has been made to wait for all
        // other uses.
        unsafe { self.driver.pool_free(owner_stream.raw(), address) }
            .map_err(|e| self.driver_error(e))
    }

    fn reserved(&self) -> Option<u64> {
        Some(self.driver.pool_usage(self.pool).map_or(0, |usage| usage.reserved))
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        let before = self.reserved().unwrap_or(0);
        self.trim_and_charge(keep)?;
        Ok(before.saturating_sub(self.reserved().unwrap_or(0)))
    }
}

impl Drop for StreamOrderedSource {
    fn drop(&mut self) {
        // SAFETY: 1. only this value has the handle, and it is being dropped. Blocks keep this
        // value alive, so none is left.
        let _ = unsafe { self.driver.pool_destroy(self.pool) };
    }
}

impl Reclaim for SourceAllocator<StreamOrderedSource> {
    fn name(&self) -> &'static str {
        "a pool of the driver's"
    }

    /// Computed from the last charge of the reserved memory. The driver is not queried.
    fn offer(&self) -> Offer {
        let bytes = self
            .source
            .charged()
            .as_ref()
            .map_or(0, Charge::bytes)
            .saturating_sub(self.bytes_in_blocks());
        Offer {
            bytes,
            cost: reclaim_cost(1, Duration::from_micros(50), bytes, Duration::from_nanos(400)),
        }
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        let keep = self.source.reserved().unwrap_or(0).saturating_sub(bytes);
        // If it is refused, the memory stays reserved and charged until the next trim.
        let _ = self.trim(keep);
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.device()))
    }
}

impl Opaque for StreamOrdered {
    forward_to_allocator!();
    fn stats(&self) -> PoolStats {
        let mut stats = self.allocator.stats();
        let source = &self.allocator.source;
        if let Ok(usage) = source.driver.pool_usage(source.pool) {
            stats.peak_physical = usage.reserved_high;
        }
        stats
    }
}
