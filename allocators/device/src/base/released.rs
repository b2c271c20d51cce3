//! The outcome of giving memory back to the driver.

use aquifer_core::{MemoryError, Result};
use std::ops::AddAssign;

/// What an attempt to give memory back has released.
///
/// A refusal ends no attempt: the driver may refuse one mapping for ever. What it refuses stays
/// held and charged, all other memory is tried, and the next attempt tries all of it again.
#[derive(Debug, Default)]
#[must_use = "the driver may have refused"]
pub(crate) struct Released {
    pub(crate) bytes: u64,
    /// The first refusal.
    pub(crate) refused: Option<MemoryError>,
}

impl Released {
    /// Adds a step that released no bytes, and its refusal.
    pub(crate) fn add_refusal(&mut self, outcome: Result<()>) {
        if let Err(refused) = outcome {
            self.refused.get_or_insert(refused);
        }
    }

    /// Returns the bytes if nothing was refused.
    ///
    /// # Errors
    /// The first refusal.
    pub(crate) fn complete(self) -> Result<u64> {
        self.refused.map_or(Ok(self.bytes), Err)
    }

    /// Returns the loss of the device, if that is why something was refused. Nothing can be
    /// allocated then, while any other refusal concerns the refused memory alone.
    pub(crate) fn device_lost(&self) -> Result<()> {
        match &self.refused {
            Some(lost @ MemoryError::DeviceLost { .. }) => Err(lost.clone()),
            _ => Ok(()),
        }
    }
}

impl From<u64> for Released {
    fn from(bytes: u64) -> Self {
        Self { bytes, refused: None }
    }
}

impl AddAssign for Released {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.add_refusal(other.refused.map_or(Ok(()), Err));
    }
}
