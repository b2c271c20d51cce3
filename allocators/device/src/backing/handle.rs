//! Physical handles, charged to the budget as long as they occupy device memory.
#![expect(unsafe_code, reason = "ends a handle's life")]

use aquifer_core::{
    Action, Budget, Charge, DeviceId, MemoryError, OutOfBudget, Recorder, Reservation, Tag,
    budget::StrandedCount,
    event::{BlockKind, MemoryLocation},
};
use aquifer_driver::{Driver, DriverError, ExportTypes, PhysicalHandle, leftovers};
use std::{
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// The source of charges for new memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Funds<'a> {
    pub(crate) budget: &'a Budget,
    /// Used before the budget.
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

    /// Returns the bytes that could be charged now.
    pub(crate) fn remaining(&self) -> u64 {
        self.budget.remaining().saturating_add(self.reserved_bytes())
    }

    /// Returns how many bytes have to be released before `bytes` could be charged; 0 if they could
    /// be charged now.
    pub(crate) fn shortfall(&self, bytes: u64) -> u64 {
        self.budget.shortfall(bytes.saturating_sub(self.reserved_bytes()))
    }

    /// Returns the refusal that charging `bytes` would meet now, if any, from this budget or one
    /// above it.
    pub(crate) fn refusal(&self, bytes: u64) -> Option<HandleError> {
        let reserved = self.reserved_bytes();
        let refused = self.budget.refusal(bytes.saturating_sub(reserved))?;
        let remaining = refused.remaining.saturating_add(reserved);
        Some(HandleError::Budget(OutOfBudget { requested: bytes, remaining, ..refused }))
    }

    fn reserved_bytes(&self) -> u64 {
        self.reserved
            .map_or(0, |held| held.lock().unwrap_or_else(PoisonError::into_inner).remaining())
    }
}

/// The bytes that a part of a pool holds from the driver.
#[derive(Default, Debug)]
pub(crate) struct HeldBytes {
    now: AtomicU64,
    /// The part of the held bytes whose release the driver has refused.
    stuck: AtomicU64,
    whole: Arc<WholeHeld>,
}

/// The bytes that all parts of a pool hold together. The parts have their peaks at different times.
#[derive(Default, Debug)]
struct WholeHeld {
    now: AtomicU64,
    peak: AtomicU64,
    /// What the recorder was told last.
    recorded: Mutex<u64>,
}

impl HeldBytes {
    /// Creates the count of another part of the same pool.
    pub(crate) fn of_other_part(&self) -> Self {
        Self { whole: self.whole.clone(), ..Self::default() }
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Returns the bytes that all parts of the pool hold together.
    pub(crate) fn now_of_pool(&self) -> u64 {
        self.whole.now.load(Ordering::Relaxed)
    }

    /// Returns the most that all parts of the pool held together.
    pub(crate) fn peak_of_pool(&self) -> u64 {
        self.whole.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.now.fetch_add(bytes, Ordering::Relaxed);
        let now = self.whole.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.whole.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Resets the peak of the pool to the current value.
    pub(crate) fn reset_peak_of_pool(&self) {
        let WholeHeld { now, peak, .. } = &*self.whole;
        peak.store(now.load(Ordering::Relaxed), Ordering::Relaxed);
        // Includes what was added concurrently.
        peak.fetch_max(now.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns whether the pool holds more than was recorded last.
    pub(crate) fn has_grown(&self) -> bool {
        self.now_of_pool() > *self.whole.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records by how much the bytes that the pool holds have changed since this was last called.
    /// Bytes are held only while they are charged. So what the records add up to is never above
    /// the limit, even if another thread grows by what this one has just released. Called with no
    /// lock held.
    pub(crate) fn record_change(&self, recorder: &Recorder, device: DeviceId, kind: BlockKind) {
        let (ticket, action, bytes) = {
            let recorded = self.whole.recorded.lock();
            let mut recorded = recorded.unwrap_or_else(PoisonError::into_inner);
            let now = self.now_of_pool();
            let before = std::mem::replace(&mut *recorded, now);
            let action = match now.cmp(&before) {
                std::cmp::Ordering::Greater => Action::Grow,
                std::cmp::Ordering::Less => Action::Reap,
                std::cmp::Ordering::Equal => return,
            };
            (recorder.ticket(), action, now.abs_diff(before))
        };
        let place = MemoryLocation::Device(device);
        let event = recorder.event(action, place, 0, 0, bytes, Tag::NONE);
        recorder.record(ticket, event.of_kind(kind));
    }

    /// Returns the bytes whose release the driver has refused so far.
    pub(crate) fn stuck(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Records that the driver has refused a release. The bytes stay held.
    pub(crate) fn strand(&self, bytes: u64) {
        self.stuck.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that a refused release has succeeded later.
    pub(crate) fn unstrand(&self, bytes: u64) {
        let before = self.stuck.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "{bytes} of {before} stranded bytes are released");
        self.sub(bytes);
    }

    pub(crate) fn sub(&self, bytes: u64) {
        let before = self.now.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "{bytes} of {before} held bytes are released");
        let before = self.whole.now.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "{bytes} of the pool's {before} bytes are released");
    }
}

/// A physical handle and its charge.
///
/// Each mapping keeps an `Arc` of its handle. The device gets the memory back after the release
/// *and* the last unmap, so the charge ends with the last `Arc`. Dropping the last one calls the
/// driver, so never drop one while holding a lock.
pub(crate) struct Handle {
    driver: Arc<dyn Driver>,
    raw: PhysicalHandle,
    bytes: u64,
    held: Arc<HeldBytes>,
    /// What the memory can be exported as.
    export: ExportTypes,
    /// `None` for imported memory, which is charged elsewhere, and after the release.
    charge: Option<Charge>,
    /// Whether it has not been released yet.
    live: bool,
}

/// Why no handle could be created.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HandleError {
    Budget(OutOfBudget),
    Driver(DriverError),
}

impl HandleError {
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Budget(_) => true,
            Self::Driver(e) => e.is_out_of_memory(),
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
    /// Creates a handle of as many bytes as `charge` covers. It can be exported as `wanted`, or if
    /// the system forbids that, as `required`. Returns the charge if the driver refuses.
    pub(crate) fn create(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        (required, wanted): (ExportTypes, ExportTypes),
        charge: Charge,
        held: &Arc<HeldBytes>,
    ) -> Result<Arc<Handle>, (DriverError, Charge)> {
        match Self::create_exportable(driver, device, wanted, charge, held) {
            Err((refused, charge))
                if required != wanted
                    && !refused.is_out_of_memory()
                    && !refused.is_device_lost() =>
            {
                Self::create_exportable(driver, device, required, charge, held)
            }
            created => created,
        }
    }

    fn create_exportable(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        types: ExportTypes,
        charge: Charge,
        held: &Arc<HeldBytes>,
    ) -> Result<Arc<Handle>, (DriverError, Charge)> {
        let bytes = charge.bytes();
        debug_assert!(bytes > 0, "a handle of no bytes");
        match driver.handle_create(device, bytes, types) {
            Ok(raw) => {
                held.add(bytes);
                let (driver, held) = (driver.clone(), held.clone());
                let (export, charge) = (types, Some(charge));
                Ok(Arc::new(Handle { driver, raw, bytes, held, export, charge, live: true }))
            }
            Err(error) => Err((error, charge)),
        }
    }

    /// Releases the memory and returns its charge. Returns `None` if there are other references,
    /// which then keep the memory, or if the driver refuses the release. The memory is then
    /// stranded: it stays charged, and the release is tried again later.
    pub(crate) fn release_keeping_charge(handle: Arc<Handle>) -> Option<Charge> {
        Arc::into_inner(handle)?.release()
    }

    /// Wraps a handle of imported memory, which is charged elsewhere.
    pub(crate) fn imported(driver: &Arc<dyn Driver>, raw: PhysicalHandle) -> Arc<Handle> {
        Arc::new(Handle {
            driver: driver.clone(),
            raw,
            bytes: 0,
            held: Arc::default(),
            export: ExportTypes::NONE,
            charge: None,
            live: true,
        })
    }

    pub(crate) fn raw(&self) -> PhysicalHandle {
        self.raw
    }

    /// Returns what the memory can be exported as. What was imported cannot.
    pub(crate) fn export(&self) -> ExportTypes {
        self.export
    }

    /// Returns the bytes that the pool is charged for: none for imported memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Releases the handle, once.
    fn release(&mut self) -> Option<Charge> {
        if !std::mem::take(&mut self.live) {
            return None;
        }
        let charge = self.charge.take();
        // SAFETY: 1. only this value has the handle, and it has not released it before.
        match unsafe { self.driver.handle_release(self.raw) } {
            Err(e) if !e.is_device_lost() => {
                self.retry_release_later(charge);
                None
            }
            _ => {
                self.held.sub(self.bytes);
                charge
            }
        }
    }

    /// Counts the handle as stranded until the returned value is dropped. Returns `None` for memory
    /// that is not charged here.
    pub(crate) fn count_stranded(&self) -> Option<StrandedCount> {
        self.charge.as_ref().map(|charge| charge.budget().count_stranded(charge.bytes()))
    }

    /// Keeps a handle whose release the driver has refused. It stays charged, as stranded, until a
    /// later sweep releases it.
    fn retry_release_later(&self, charge: Option<Charge>) {
        let (driver, raw) = (self.driver.clone(), self.raw);
        let (held, bytes) = (self.held.clone(), self.bytes);
        held.strand(bytes);
        // Kept where the handle is never released: the memory stays allocated.
        let mut stranded = charge.map(|charge| {
            ManuallyDrop::new((charge.budget().count_stranded(charge.bytes()), charge))
        });
        leftovers::keep(&self.driver, move || {
            // SAFETY: 1. only the value that left the handle here had it, and no release of it has
            // succeeded yet.
            let released = unsafe { driver.handle_release(raw) };
            if released.is_ok() || released.is_err_and(|e| e.is_device_lost()) {
                held.unstrand(bytes);
                drop(stranded.take().map(ManuallyDrop::into_inner));
            }
            released
        });
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        drop(self.release());
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.raw).finish()
    }
}
