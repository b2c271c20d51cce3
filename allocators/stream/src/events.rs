//! Events that a stream records again and again.

use crate::Spin;
use aquifer_core::{DeviceId, DriverError};
use aquifer_driver::{Driver, RawEvent, leftovers};
use std::sync::Arc;

/// An event that is destroyed with its last owner.
pub(crate) struct OwnedEvent {
    driver: Arc<dyn Driver>,
    pub(crate) raw: RawEvent,
}

impl Drop for OwnedEvent {
    #[expect(unsafe_code, reason = "ends a handle")]
    fn drop(&mut self) {
        let (driver, raw) = (self.driver.clone(), self.raw);
        // SAFETY: 1. the handle is private to this value, which made it and is going; no release of
        // it has succeeded yet.
        leftovers::release(&self.driver, move || unsafe { driver.event_destroy(raw) });
    }
}

/// Events kept for the next fences of one stream; more than that are destroyed.
const SPARE_EVENTS: usize = 64;

/// Events that were seen done and that nobody holds.
pub(crate) struct SpareEvents(Spin<Vec<Arc<OwnedEvent>>>);

impl SpareEvents {
    pub(crate) fn new() -> Self {
        Self(Spin::new(Vec::new()))
    }

    /// One of these, or a new one.
    pub(crate) fn take(
        &self,
        driver: &Arc<dyn Driver>,
        device: DeviceId,
    ) -> Result<Arc<OwnedEvent>, DriverError> {
        if let Some(event) = self.0.with(Vec::pop) {
            return Ok(event);
        }
        // What was refused may be released by now. What is refused again stays for the next sweep.
        let _ = leftovers::sweep(driver);
        let raw = driver.event_create(device)?;
        Ok(Arc::new(OwnedEvent { driver: driver.clone(), raw }))
    }

    /// Keeps those that this was the last to hold. One that somebody else holds may be waited for:
    /// it is not recorded again before he has done this too.
    pub(crate) fn keep(&self, events: impl IntoIterator<Item = Arc<OwnedEvent>>) {
        let free = events.into_iter().filter_map(|mut event| {
            if Arc::get_mut(&mut event).is_some() {
                Some(event)
            } else {
                Arc::into_inner(event).map(Arc::new)
            }
        });
        let free: Vec<_> = free.collect();
        let too_many = self.0.with(|spare| {
            let room = SPARE_EVENTS.saturating_sub(spare.len());
            let mut free = free.into_iter();
            spare.extend(free.by_ref().take(room));
            free
        });
        drop(too_many);
    }
}
