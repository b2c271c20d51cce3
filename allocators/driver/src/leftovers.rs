//! Driver objects that the driver refused to release: kept here and released by a later sweep.
//!
//! A release can be refused for a moment, for example by an error of earlier work that comes out of
//! it. The owner of the object is often being dropped then and cannot try again. It leaves the call
//! here. Pools sweep when they trim and when memory is short, and report what is refused again.
//!
//! An object of a lost device, or of a driver that is gone, counts as released: it ends with its
//! context.

use crate::{Driver, DriverError};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// A call that releases one object, or several. After `Ok` it is dropped and not called again.
type Release = Box<dyn FnMut() -> Result<(), DriverError> + Send>;

struct Leftover {
    driver: Arc<dyn Driver>,
    release: Release,
}

/// Of all drivers of the process: an object may outlive every pool.
static LEFT: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());
/// How many there are, so that a sweep over none takes no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn left() -> MutexGuard<'static, Vec<Leftover>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_over(released: &Result<(), DriverError>) -> bool {
    released
        .as_ref()
        .map_or_else(|refused| refused.is_device_lost() || refused.is_driver_gone(), |()| true)
}

/// Calls `release` now, and keeps it for [`sweep`] if the driver refuses. May call the driver, so
/// never under a lock.
///
/// ```
/// use aquifer_driver::{DeviceId, DriverError, leftovers, sim::Sim};
/// let driver = Sim::h200(1).driver();
/// let mut refusals = 1;
/// leftovers::release(&driver, move || match refusals {
///     0 => Ok(()),
///     _ => {
///         refusals -= 1;
///         Err(DriverError { call: "cuEventDestroy", code: 999, name: "CUDA_ERROR_UNKNOWN" })
///     }
/// });
/// assert_eq!(leftovers::count(&driver), 1);
/// assert!(leftovers::sweep(&driver).is_ok());
/// assert_eq!(leftovers::count(&driver), 0);
/// ```
pub fn release(
    driver: &Arc<dyn Driver>,
    mut release: impl FnMut() -> Result<(), DriverError> + Send + 'static,
) {
    if !is_over(&release()) {
        keep(driver, release);
    }
}

/// Keeps a call that was refused just now for [`sweep`]. Makes no driver call.
///
/// Its example is that of [`release`].
pub fn keep(
    driver: &Arc<dyn Driver>,
    release: impl FnMut() -> Result<(), DriverError> + Send + 'static,
) {
    let leftover = Leftover { driver: driver.clone(), release: Box::new(release) };
    left().push(leftover);
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Tries again to release what was left of this driver. Takes as long as those calls.
///
/// Its example is that of [`release`].
///
/// # Errors
/// The driver's first refusal; all others have been tried.
pub fn sweep(driver: &Arc<dyn Driver>) -> Result<(), DriverError> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    // Taken out first: no lock over a driver call.
    let own: Vec<_> =
        left().extract_if(.., |leftover| Arc::ptr_eq(&leftover.driver, driver)).collect();
    let mut outcome = Ok(());
    for mut leftover in own {
        let released = (leftover.release)();
        if is_over(&released) {
            COUNT.fetch_sub(1, Ordering::Relaxed);
            drop(leftover);
        } else {
            left().push(leftover);
            outcome = outcome.and(released);
        }
    }
    outcome
}

/// Returns how many objects of this driver wait for [`sweep`] to release them.
///
/// Its example is that of [`release`].
#[must_use]
pub fn count(driver: &Arc<dyn Driver>) -> usize {
    left().iter().filter(|leftover| Arc::ptr_eq(&leftover.driver, driver)).count()
}
