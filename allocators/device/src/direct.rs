//! A resource whose every block is an allocation of its own: `cuMemAlloc` and `cuMemFree`.
#![expect(unsafe_code, reason = "frees device memory")]

use crate::{
    Block,
    base::pending::DeferredFree,
    driver_alloc::{DriverAllocator, DriverSource, ReleaseCall},
};
use aquifer_core::{
    Budget, Charge, DeviceId, DriverError, MemoryError, Opaque, PoolStats, Result,
    budget::HookRegistration,
};
use aquifer_driver::{Driver, Relaxed};
use aquifer_stream::{Stream, StreamPool};
use std::sync::Arc;

/// A resource that allocates each block by `cuMemAlloc`. An allocation takes 50 µs or more, and a
/// free waits for the whole device.
///
/// Memory checkers see each of its blocks, while a pool looks like one large allocation to them.
/// The drop of a block blocks until all of its streams have finished with it.
#[derive(Clone, Debug)]
pub struct Direct {
    allocator: Arc<DriverAllocator<DirectSource>>,
}

#[derive(Debug)]
struct DirectSource {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    budget: Option<Budget>,
}

impl Direct {
    /// Creates a resource for `streams`, charged to `budget` if there is one.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, streams: StreamPool, budget: Option<Budget>) -> Self {
        let source = DirectSource { driver: driver.clone(), device: streams.device(), budget };
        Self { allocator: DriverAllocator::new(source, driver, streams) }
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

impl DriverSource for DirectSource {
    fn allocate(&self, _stream: &Stream, bytes: u64) -> Result<(u64, Option<Charge>)> {
        let charge = self.budget.as_ref().map(|b| b.charge(bytes)).transpose()?;
        let _relaxed = Relaxed::enter(&*self.driver);
        let address = self
            .driver
            .mem_alloc(self.device, bytes)
            .map_err(|e| MemoryError::driver(self.device, e))?;
        Ok((address, charge))
    }

    fn name(&self) -> &'static str {
        "cuMemAlloc"
    }

    fn budget(&self) -> Option<(&Budget, Option<&HookRegistration>)> {
        self.budget.as_ref().map(|budget| (budget, None))
    }

    fn deallocate(&self, block: &DeferredFree) -> Result<()> {
        if self.wait_for_work(block)? {
            self.free_call(block.address)().map_err(|e| MemoryError::driver(self.device, e))?;
        }
        Ok(())
    }

    fn release_later(&self, block: &DeferredFree) -> Option<ReleaseCall> {
        self.wait_for_work(block).ok().map(|_| Box::new(self.free_call(block.address)) as _)
    }
}

impl DirectSource {
    /// Waits until all uses of a freed block are over. Returns whether its device still exists:
    /// after its loss no work runs, and its memory ends with its context. Blocks.
    fn wait_for_work(&self, block: &DeferredFree) -> Result<bool> {
        // `cuMemFree` waits for the device in practice, but does not guarantee it. This wait does.
        match block.work.wait(None) {
            Err(MemoryError::DeviceLost { .. }) => Ok(false),
            waited => waited.map(|_| true),
        }
    }

    /// Returns the call that frees a block whose work has been waited for.
    fn free_call(&self, address: u64) -> impl FnMut() -> Result<(), DriverError> + Send + use<> {
        let (driver, device) = (self.driver.clone(), self.device);
        move || {
            let _relaxed = Relaxed::enter(&*driver);
            // SAFETY: 1. The address came from `mem_alloc`. Each block is freed once: the call is
            // repeated only after the driver has refused it. 2. The owner stream and every other
            // user have been waited for.
            unsafe { driver.mem_free(device, address) }
        }
    }
}

impl Opaque for Direct {
    crate::driver_alloc::forward_to_allocator!();
    fn stats(&self) -> PoolStats {
        self.allocator.stats()
    }
}
