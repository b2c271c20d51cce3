//! The allocators: a pinned pool, and the driver itself.
#![expect(unsafe_code, reason = "frees memory by hand, as collections do")]

use crate::bench::device::source::Source;
use allocator_api2::alloc::Allocator;
use aquifer_core::{DriverError, MemoryError};
use aquifer_driver::{DeviceId, Driver, HostFlags};
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
pub(super) struct Held(NonNull<u8>, Layout);

// SAFETY: 1. only the owner accesses the memory.
unsafe impl Send for Held {}

fn layout(bytes: u64) -> Option<Layout> {
    Layout::from_size_align(bytes as usize, 16).ok()
}

impl Source for Pinned {
    type Held = Held;
    // Boxed, so that the result is no larger than a pointer. A larger result is passed through
    // memory, which takes longer than the pair.
    type Refused = Box<MemoryError>;

    #[inline(always)]
    fn take(&self, bytes: u64) -> Result<Held, Self::Refused> {
        let too_large =
            || Box::new(MemoryError::TooLarge { requested: bytes, limit: isize::MAX as u64 });
        let layout = layout(bytes).ok_or_else(too_large)?;
        match self.allocator.allocate(layout) {
            Ok(block) => Ok(Held(block.cast(), layout)),
            Err(_) => Err(self.reason(layout)),
        }
    }

    #[inline(always)]
    fn give(&self, Held(block, layout): Held) -> Result<(), Self::Refused> {
        // SAFETY: 1. a `Held` comes from `take` only, with its layout, and is consumed here.
        unsafe { self.allocator.deallocate(block, layout) };
        Ok(())
    }

    fn rest(&self) -> Result<(), Self::Refused> {
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
pub(super) struct Address(NonNull<u8>);

// SAFETY: 1. only the owner accesses the memory.
unsafe impl Send for Address {}

impl Source for Direct {
    type Held = Address;
    type Refused = DriverError;

    fn take(&self, bytes: u64) -> Result<Address, DriverError> {
        self.driver.host_alloc(self.device, bytes as usize, HostFlags::default()).map(Address)
    }

    fn give(&self, Address(block): Address) -> Result<(), DriverError> {
        // SAFETY: 1. an `Address` comes from `take` only, and is consumed here. 2. no work uses it.
        unsafe { self.driver.host_free(self.device, block) }
    }

    fn rest(&self) -> Result<(), DriverError> {
        Ok(())
    }
}
