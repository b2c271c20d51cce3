//! The driver's id of a stream, used to check that a handle still means the same stream.
//!
//! The driver reuses the handle of a destroyed stream, but never its id. While a stream captures,
//! the driver returns no id, and querying it would invalidate the capture.

use crate::StreamLifetime;
use aquifer_core::DriverError;
use aquifer_driver::{Driver, RawStream, Relaxed};
use std::sync::OnceLock;

/// The driver's id of a stream, once it is known.
pub(crate) struct StreamIdentity(OnceLock<u64>);

impl StreamIdentity {
    pub(crate) fn new(id: Option<u64>) -> Self {
        Self(id.map_or_else(OnceLock::new, OnceLock::from))
    }

    pub(crate) fn id(&self) -> Option<u64> {
        self.0.get().copied()
    }

    /// Returns whether a stream of this lifetime has this id. A stream without a known id adopts
    /// this one, unless it may be destroyed without notice.
    pub(crate) fn matches(&self, id: u64, life: &StreamLifetime) -> bool {
        match life {
            StreamLifetime::Fenced => self.0.get() == Some(&id),
            _ => *self.0.get_or_init(|| id) == id,
        }
    }
}

/// Returns the driver's id of a stream, or `None` if it captures. Does not invalidate captures of
/// other streams.
pub(crate) fn id_of(driver: &dyn Driver, raw: RawStream) -> Result<Option<u64>, DriverError> {
    let _relaxed = Relaxed::enter(driver);
    if driver.stream_is_capturing(raw)? {
        return Ok(None);
    }
    driver.stream_id(raw).map(Some)
}
