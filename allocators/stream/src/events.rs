//! Recycled events of a stream.

use crate::Spin;
use aquifer_core::{DeviceId, DriverError};
use aquifer_driver::{Driver, RawEvent, leftovers};
use std::sync::Arc;

/// An event that is destroyed with its last reference.
pub(crate) struct OwnedEvent {
    driver: Arc<dyn Driver>,
    pub(crate) raw: RawEvent,
}

impl Drop for OwnedEvent {
    #[expect(unsafe_code, reason = "ends a handle")]
    fn drop(&mut self) {
        let (driver, raw) = (self.driver.clone(), self.raw);
        // SAFETY: 1. the handle is private to this value, which created it and is being dropped,
        // and no release of it has succeeded yet.
        leftovers::release(&self.driver, move || unsafe { driver.event_destroy(raw) });
    }
}

/// The maximum number of spare events of a stream. More are destroyed.
const MAX_SPARE_EVENTS: usize = 512;

/// Completed events without other references.
pub(crate) struct EventPool(Spin<Vec<Arc<OwnedEvent>>>);

impl EventPool {
    pub(crate) fn new() -> Self {
        Self(Spin::new(Vec::new()))
    }

    /// Returns a spare event.
    pub(crate) fn spare(&self) -> Option<Arc<OwnedEvent>> {
        self.0.with(Vec::pop)
    }

    /// Returns a spare event or creates one.
    pub(crate) fn acquire(
        &self,
        driver: &Arc<dyn Driver>,
        device: DeviceId,
    ) -> Result<Arc<OwnedEvent>, DriverError> {
        if let Some(event) = self.spare() {
            return Ok(event);
        }
        // Retry releases that the driver refused before. What is refused again stays for the next
        // sweep.
        let _ = leftovers::sweep(driver);
        let raw = driver.event_create(device)?;
        Ok(Arc::new(OwnedEvent { driver: driver.clone(), raw }))
    }

    /// Recycles the events that have no other reference. Another thread may be waiting for an event
    /// that it still references. Such an event is not recorded again until that thread passes it
    /// here too.
    pub(crate) fn release(&self, events: impl IntoIterator<Item = Arc<OwnedEvent>>) {
        let free = events.into_iter().filter_map(|mut event| {
            if Arc::get_mut(&mut event).is_some() {
                Some(event)
            } else {
                Arc::into_inner(event).map(Arc::new)
            }
        });
        let free: Vec<_> = free.collect();
        let excess = self.0.with(|spare| {
            let room = MAX_SPARE_EVENTS.saturating_sub(spare.len());
            let mut free = free.into_iter();
            spare.extend(free.by_ref().take(room));
            free
        });
        drop(excess);
    }
}
