//! Memory that the driver refuses to release.

use aquifer_core::{DriverError, budget::StrandedCount};
use aquifer_driver::{Driver, leftovers};
use std::sync::Arc;

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
