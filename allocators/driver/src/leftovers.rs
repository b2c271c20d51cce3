//! Driver objects that the driver refused to release, kept for a later sweep.
//!
//! A release can be refused temporarily, for example because it returns the error of earlier work.
//! The owner of the object is often being dropped at that time and cannot try again, so it stores
//! the call here. Pools sweep when they trim and when memory is short, and report repeated
//! refusals.
//!
//! An object of a lost device, or of a driver that has shut down, counts as released: it ends with
//! its context.

use crate::{Driver, DriverError};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// A call that releases one or several objects. After it returns `Ok` it is dropped and not called
/// again.
type Release = Box<dyn FnMut() -> Result<(), DriverError> + Send>;

struct Leftover {
    driver: Arc<dyn Driver>,
    release: Release,
}

/// One list for all drivers of the process, since an object may outlive every pool.
static LEFTOVERS: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());
/// The length of the list, so that a sweep of an empty list takes no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn leftovers() -> MutexGuard<'static, Vec<Leftover>> {
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_final(released: &Result<(), DriverError>) -> bool {
    released
        .as_ref()
        .map_or_else(|refused| refused.is_device_lost() || refused.is_driver_gone(), |()| true)
}

/// Calls `release` now, and keeps it for [`sweep`] if the driver refuses. It may call the driver,
/// so never call it while holding a lock.
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
    if !is_final(&release()) {
        keep(driver, release);
    }
}

/// Keeps a release call that was just refused for [`sweep`]. Makes no driver call.
///
/// See [`release`] for an example.
pub fn keep(
    driver: &Arc<dyn Driver>,
    release: impl FnMut() -> Result<(), DriverError> + Send + 'static,
) {
    let leftover = Leftover { driver: driver.clone(), release: Box::new(release) };
    leftovers().push(leftover);
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Retries the kept releases of this driver. Takes as long as those calls.
///
/// See [`release`] for an example.
///
/// # Errors
/// The driver's first refusal. All other releases have been tried.
pub fn sweep(driver: &Arc<dyn Driver>) -> Result<(), DriverError> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    // Removed first, so that no lock is held during a driver call.
    let of_driver: Vec<_> =
        leftovers().extract_if(.., |leftover| Arc::ptr_eq(&leftover.driver, driver)).collect();
    let mut outcome = Ok(());
    for mut leftover in of_driver {
        let released = (leftover.release)();
        if is_final(&released) {
            COUNT.fetch_sub(1, Ordering::Relaxed);
            drop(leftover);
        } else {
            leftovers().push(leftover);
            outcome = outcome.and(released);
        }
    }
    outcome
}

/// Returns the number of releases of this driver that are kept for [`sweep`].
///
/// See [`release`] for an example.
#[must_use]
pub fn count(driver: &Arc<dyn Driver>) -> usize {
    leftovers().iter().filter(|leftover| Arc::ptr_eq(&leftover.driver, driver)).count()
}
