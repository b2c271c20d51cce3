//! The allocators: a pinned pool, and the driver itself.
#![expect(unsafe_code, reason = "frees memory by hand, as collections do")]

use crate::device::source::Source;
use allocator_api2::alloc::Allocator;
use aquifer_core::{DriverError, MemoryError};
use aquifer_driver::{DeviceId, Driver};
use aquifer_host::{PinnedAllocator, PinnedPool};
use std::{alloc::Layout, ptr::NonNull, sync::Arc};

/// A pinned pool, called as a collection calls it.
#[derive(Clone, Debug)]
pub(super) struct Pinned {
    pool: PinnedPool,
    allocator: PinnedAllocator,
}

impl Pinned {
    pub(super) fn on(pool: &PinnedPool) -> Self {
        Self { pool: pool.clone(), allocator: pool.allocator() }
    }

    /// Returns why there is no block, by a second attempt.
    #[cold]
    #[inline(never)]
    fn reason(&self, layout: Layout) -> Box<MemoryError> {
        Box::new(match self.pool.allocate(layout) {
            Ok(block) => {
                // SAFETY: 1. allocated just now, with that layout.
                unsafe { self.allocator.deallocate(block.cast(), layout) };
                MemoryError::Busy { address: 0 }
            }
            Err(error) => error,
        })
    }
}

/// Memory of [`Pinned`], accepted only by [`Pinned::give`].
#[derive(Debug)]
pub(super) struct PinnedBlock(NonNull<u8>, Layout);

// SAFETY: 1. only the owner accesses the memory.
unsafe impl Send for PinnedBlock {}

fn layout(bytes: u64) -> Option<Layout> {
    Layout::from_size_align(bytes as usize, 16).ok()
}

impl Source for Pinned {
    type Held = PinnedBlock;
    // Boxed, so that the result is no larger than a pointer. A larger result is passed through
    // memory, which takes longer than the pair.
    type Refused = Box<MemoryError>;

    #[inline(always)]
    fn take(&self, bytes: u64) -> Result<PinnedBlock, Self::Refused> {
        let too_large =
            || Box::new(MemoryError::TooLarge { requested: bytes, limit: isize::MAX as u64 });
        let layout = layout(bytes).ok_or_else(too_large)?;
        match self.allocator.allocate(layout) {
            Ok(block) => Ok(PinnedBlock(block.cast(), layout)),
            Err(_) => Err(self.reason(layout)),
        }
    }

    #[inline(always)]
    fn give(&self, PinnedBlock(block, layout): PinnedBlock) -> Result<(), Self::Refused> {
        // SAFETY: 1. a `Held` comes from `take` only, with its layout, and is consumed here.
        unsafe { self.allocator.deallocate(block, layout) };
        Ok(())
    }
}

/// The driver's own allocations.
#[derive(Clone, Debug)]
pub(super) struct Direct {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) device: DeviceId,
}

/// Memory of [`Direct`], accepted only by [`Direct::give`].
#[derive(Debug)]
pub(super) struct DriverAddress(NonNull<u8>);

// SAFETY: 1. only the owner accesses the memory.
unsafe impl Send for DriverAddress {}

impl Source for Direct {
    type Held = DriverAddress;
    type Refused = DriverError;

    fn take(&self, bytes: u64) -> Result<DriverAddress, DriverError> {
        self.driver.host_alloc(self.device, bytes as usize, false).map(DriverAddress)
    }

    fn give(&self, DriverAddress(block): DriverAddress) -> Result<(), DriverError> {
        // SAFETY: 1. an `Address` comes from `take` only, and is consumed here. 2. no work uses it.
        unsafe { self.driver.host_free(self.device, block) }
    }
}
