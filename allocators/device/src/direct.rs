//! A resource whose every block is an allocation of its own: `cuMemAlloc` and `cuMemFree`.
#![expect(unsafe_code, reason = "frees device memory")]

use crate::{
    Block, Dependencies, RangeSource,
    source::allocator::{SourceAllocator, forward_to_allocator},
};
use aquifer_core::{Budget, DeviceId, DriverError, MemoryError, Opaque, PoolStats, Result};
use aquifer_driver::{DeviceRange, Driver, Relaxed};
use aquifer_stream::{Stream, StreamPool};
use std::sync::Arc;

/// A resource that allocates each block by `cuMemAlloc`. An allocation takes 50 µs or more, and a
/// free waits for the whole device.
///
/// Memory checkers see each of its blocks, while a pool looks like one large allocation to them.
/// The drop of a block blocks until all of its streams have finished with it.
#[derive(Clone, Debug)]
pub struct Direct {
    allocator: Arc<SourceAllocator<DirectSource>>,
}

#[derive(Debug)]
struct DirectSource {
    driver: Arc<dyn Driver>,
    device: DeviceId,
}

impl Direct {
    /// Creates a resource for `streams`, charged to `budget` if there is one.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, streams: StreamPool, budget: Option<Budget>) -> Self {
        let source = DirectSource { driver: driver.clone(), device: streams.device() };
        Self { allocator: SourceAllocator::new(source, driver, streams, budget, "cuMemAlloc") }
    }

    /// Returns the block that was [converted](Block::into_raw) into this address.
    ///
    /// # Errors
    /// [`MemoryError::DoubleFree`] if the block has been freed and the address is still remembered;
    /// [`MemoryError::ForeignBlock`] if there is no such block.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        self.allocator.take_raw(address)
    }
}

impl DirectSource {
    fn driver_error(&self, error: DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }
}

// SAFETY: 1. `cuMemAlloc` returns memory of its own, aligned to at least `BLOCK_ALIGN`. 2. Only
// `deallocate` frees it. 3. It had no earlier use: the driver had it. 4. The host waits for the
// dependencies before the driver gets it.
unsafe impl RangeSource for DirectSource {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn allocate(&self, _stream: &Stream, bytes: u64) -> Result<u64> {
        let _relaxed = Relaxed::enter(&*self.driver);
        self.driver.mem_alloc(self.device, bytes).map_err(|e| self.driver_error(e))
    }

    fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<()> {
        // `cuMemFree` waits for the device in practice, but does not guarantee it. This wait does.
        after.wait()?;
        let _relaxed = Relaxed::enter(&*self.driver);
        // SAFETY: 1. The address came from `mem_alloc`. Each block is freed once: the call is
        // repeated only after the driver has refused it. 2. The owner stream and every other user
        // have been waited for.
        match unsafe { self.driver.mem_free(self.device, range.address) } {
            // After the loss of the device its memory ends with its context.
            Err(e) if !e.is_device_lost() => Err(self.driver_error(e)),
            _ => Ok(()),
        }
    }
}

impl Opaque for Direct {
    forward_to_allocator!();
    fn stats(&self) -> PoolStats {
        self.allocator.stats()
    }
}
