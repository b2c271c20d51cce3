//! Giving memory back to the driver: its outcome, its cost, and what the driver refuses.

use aquifer_core::{DriverError, MemoryError, Result, budget::StrandedCount};
use aquifer_driver::{Driver, leftovers};
use std::{ops::AddAssign, sync::Arc, time::Duration};

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

/// Calls `release` now and, while the driver refuses, at later [sweeps](leftovers::sweep). The
/// counts that `strand` returns last from a refusal to the next call. `state` is dropped after the
/// last call. Call it without a lock, since it calls the driver.
pub(crate) fn release_or_strand<T: Send + 'static>(
    driver: &Arc<dyn Driver>,
    mut state: T,
    release: impl Fn(&mut T) -> Result<(), DriverError> + Send + 'static,
    strand: impl Fn(&T) -> Vec<StrandedCount> + Send + 'static,
) {
    let mut stranded = Vec::new();
    leftovers::release(driver, move || {
        stranded.clear();
        let released = release(&mut state);
        if released.is_err() {
            stranded = strand(&state);
        }
        released
    });
}

pub(crate) const MIB: u64 = 1 << 20;

/// Returns the cost of releasing so many bytes in so many pieces and allocating them again.
pub(crate) fn reclaim_cost(
    pieces: u64,
    each: Duration,
    bytes: u64,
    each_mib: Duration,
) -> Duration {
    let of =
        |cost: Duration, count: u64| cost.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
    of(each, pieces).saturating_add(of(each_mib, bytes / MIB))
}
