//! Events: points in a stream that streams and the host can wait for.
#![expect(unsafe_code, reason = "declares a call that destroys a handle; holds no unsafe block")]

use crate::{DeviceId, RawEvent, RawStream, Result};
use std::fmt::Debug;

/// Driver calls for events.
///
/// ```
/// use aquifer::{DeviceId, Driver, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let (a, b) = (driver.stream_create(gpu, 0)?, driver.stream_create(gpu, 0)?);
/// let event = driver.event_create(gpu)?;
/// driver.event_record(event, a)?;          // after the work queued on `a`
/// driver.stream_wait_event(b, event)?;     // work queued on `b` from now on waits for it
/// driver.event_synchronize(event)?;        // and so does the host
/// assert!(driver.event_query(event)?);
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`Events::event_create`] returns a new event that is valid until it is destroyed.
/// 2. `Ok(true)` of [`Events::event_query`] and `Ok` of [`Events::event_synchronize`] mean that all
///    work queued on the stream before the last record is done.
/// 3. A call that is refused has changed nothing.
pub unsafe trait Events: Debug + Send + Sync {
    /// Creates an event without timing in the primary context of `device` (`cuEventCreate`, about
    /// 0.1 µs).
    ///
    /// # Errors
    /// Errors of the driver.
    fn event_create(&self, device: DeviceId) -> Result<RawEvent>;

    /// Destroys an event (`cuEventDestroy`). Streams that already wait for it still do.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()>;

    /// Records the event after all work queued on `stream` (`cuEventRecord`, about 0.17 µs).
    /// Replaces an earlier record.
    ///
    /// # Errors
    /// Errors of the driver.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Returns whether the last record has been reached (`cuEventQuery`). Returns `true` for an
    /// event that was never recorded. Never blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn event_query(&self, event: RawEvent) -> Result<bool>;

    /// Waits until the last record has been reached (`cuEventSynchronize`). Blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn event_synchronize(&self, event: RawEvent) -> Result<()>;
}
