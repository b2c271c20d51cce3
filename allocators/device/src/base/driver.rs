//! Checks of streams against a device, reports to a driver's observer, and kinds of errors.

use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::{BlockNote, DeviceRange, Driver, Ownership, RawStream, same_machine};
use aquifer_stream::Timeline;
use std::sync::Arc;

/// Refuses a stream of another device or machine.
///
/// # Errors
/// [`MemoryError::WrongDevice`] for another device; that of [`same_machine`] for another machine.
pub(crate) fn check_stream_device(
    driver: &dyn Driver,
    expected: DeviceId,
    stream: &Timeline,
) -> Result<()> {
    let actual = stream.raw().device();
    if expected != actual {
        return Err(MemoryError::WrongDevice { expected, actual });
    }
    same_machine(driver, &**stream.driver())
}

/// Returns the owner of freed memory that the streams `users` may still use.
pub(crate) fn owner_of_freed(users: &[RawStream]) -> Ownership<'_> {
    if users.is_empty() { Ownership::Free } else { Ownership::Pending { users } }
}

/// Reports the owner of a range to the driver's observer, if the block has a generation.
#[inline]
pub(crate) fn notify_observer(
    driver: &Arc<dyn Driver>,
    generation: u64,
    range: DeviceRange,
    owner: Ownership<'_>,
) {
    if generation != 0
        && let Some(observer) = driver.observer()
    {
        observer.block(BlockNote { range, owner });
    }
}

/// Returns whether released memory could resolve the error.
pub(crate) fn is_shortage(error: &MemoryError) -> bool {
    match error {
        MemoryError::OutOfBudget(_) | MemoryError::OutOfMemory(_) => true,
        MemoryError::Driver(error) => error.is_out_of_memory(),
        _ => false,
    }
}
