//! Which stream a handle means.
//!
//! A handle comes back after its stream has been destroyed; the driver's number of a stream never
//! does. Of a stream that captures the driver tells none, and breaks the capture if it is asked.

use crate::Life;
use aquifer_core::DriverError;
use aquifer_driver::{Driver, RawStream, Relaxed};
use std::sync::OnceLock;

/// The driver's number of a stream, once it is known.
pub(crate) struct Identity(OnceLock<u64>);

impl Identity {
    pub(crate) fn new(id: Option<u64>) -> Self {
        Self(id.map_or_else(OnceLock::new, OnceLock::from))
    }

    pub(crate) fn id(&self) -> Option<u64> {
        self.0.get().copied()
    }

    /// Whether a stream of such a life has this number. One that has not been numbered yet has it
    /// if it lives until it is retired, and so cannot have been destroyed without a word meanwhile.
    pub(crate) fn is(&self, id: u64, life: &Life) -> bool {
        match life {
            Life::Fenced => self.0.get() == Some(&id),
            _ => *self.0.get_or_init(|| id) == id,
        }
    }
}

/// The driver's number of a stream. `None` for one that captures. Breaks nobody else's capture
/// either.
pub(crate) fn id_of(driver: &dyn Driver, raw: RawStream) -> Result<Option<u64>, DriverError> {
    let _relaxed = Relaxed::enter(driver);
    if driver.stream_is_capturing(raw)? {
        return Ok(None);
    }
    driver.stream_id(raw).map(Some)
}
