//! Physical memory that is charged for as long as the device is short of it.
#![expect(unsafe_code, reason = "ends a handle's life")]

use aquifer_core::{Budget, Charge, DeviceId, MemoryError, OutOfBudget, Reservation};
use aquifer_driver::{Driver, DriverError, PhysicalHandle};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// What new memory is charged to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Funds<'a> {
    pub(crate) budget: &'a Budget,
    /// Drawn from first.
    pub(crate) reserved: Option<&'a Mutex<Reservation>>,
}

impl Funds<'_> {
    pub(crate) fn charge(&self, bytes: u64) -> Result<Charge, OutOfBudget> {
        if let Some(reserved) = self.reserved {
            let drawn = reserved.lock().unwrap_or_else(PoisonError::into_inner).draw(bytes);
            if let Ok(charge) = drawn {
                return Ok(charge);
            }
        }
        self.budget.charge(bytes)
    }
}

/// Bytes held from the driver, now and at most.
#[derive(Default, Debug)]
pub(crate) struct Held {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Held {
    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: u64) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: u64) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A physical handle and what is charged for it.
///
/// Whoever maps it keeps an `Arc` of it: the device has the memory back after the release *and* the last unmap, so the
/// charge ends with the last `Arc`, and no earlier. Dropping the last one calls the driver: never under a lock.
pub(crate) struct Handle {
    driver: Arc<dyn Driver>,
    raw: PhysicalHandle,
    bytes: u64,
    held: Arc<Held>,
    charge: Option<Charge>,
}

/// Why there is no handle.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoHandle {
    Budget(OutOfBudget),
    Driver(DriverError),
}

impl NoHandle {
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Budget(_) => true,
            Self::Driver(e) => e.is_out_of_memory(),
        }
    }

    /// The refusal of `wanted` bytes, of which `taken` had been granted one by one and go back.
    pub(crate) fn of(self, wanted: u64, taken: u64) -> Self {
        match self {
            Self::Budget(refused) => Self::Budget(OutOfBudget {
                requested: wanted,
                current: refused.current.saturating_sub(taken),
                remaining: refused.remaining + taken,
                ..refused
            }),
            Self::Driver(_) => self,
        }
    }

    pub(crate) fn into_error(self, device: DeviceId) -> MemoryError {
        match self {
            Self::Budget(e) => MemoryError::OutOfBudget(e),
            Self::Driver(e) => MemoryError::driver(device, e),
        }
    }
}

impl Handle {
    /// Charges first, then takes the memory.
    pub(crate) fn create(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        bytes: u64,
        funds: Funds<'_>,
        held: &Arc<Held>,
    ) -> Result<Arc<Handle>, NoHandle> {
        let charge = funds.charge(bytes).map_err(NoHandle::Budget)?;
        let raw = driver.handle_create(device, bytes).map_err(NoHandle::Driver)?;
        held.add(bytes);
        Ok(Arc::new(Handle { driver: driver.clone(), raw, bytes, held: held.clone(), charge: Some(charge) }))
    }

    pub(crate) fn raw(&self) -> PhysicalHandle {
        self.raw
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: 1. the handle is private to this value, which is going.
        let released = unsafe { self.driver.handle_release(self.raw) };
        match released {
            Ok(()) => self.held.sub(self.bytes),
            Err(e) if e.is_device_lost() => self.held.sub(self.bytes),
            // The memory is still taken, so it stays charged: the charge is forgotten on purpose.
            Err(_) => {
                let _still_charged = self.charge.take().map(std::mem::ManuallyDrop::new);
            }
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.raw).finish()
    }
}
