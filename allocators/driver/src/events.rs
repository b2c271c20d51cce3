//! Points in a queue that others can wait for.
#![expect(unsafe_code, reason = "declares a call that ends a handle's life; holds no unsafe block")]

use crate::{DeviceId, RawEvent, RawStream, Result};
use std::fmt::Debug;

/// Events.
///
/// ```
/// use aquifer_driver::{DeviceId, Driver, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let (a, b) = (driver.stream_create(gpu, 0)?, driver.stream_create(gpu, 0)?);
/// let event = driver.event_create(gpu)?;
/// driver.event_record(event, a)?;          // behind what is queued on `a`
/// driver.stream_wait_event(b, event)?;     // what is queued on `b` from now on comes after it
/// driver.event_synchronize(event)?;        // and so does the host
/// assert!(driver.event_query(event)?);
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. An event that [`Events::event_create`] answers with is a new one, valid until it is
///    destroyed.
/// 2. `Ok(true)` of [`Events::event_query`] and `Ok` of [`Events::event_synchronize`] mean that all
///    that was queued on the stream before the last record is done.
/// 3. A call that is refused has changed nothing.
pub unsafe trait Events: Debug + Send + Sync {
    /// An event without timing, in the primary context of `device` (`cuEventCreate`, about 0.1 µs).
    ///
    /// # Errors
    /// The driver's.
    fn event_create(&self, device: DeviceId) -> Result<RawEvent>;

    /// Ends an event (`cuEventDestroy`). Streams that wait for it go on waiting.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()>;

    /// Puts the event behind all that is queued on `stream` (`cuEventRecord`, about 0.17 µs). A
    /// record made before is forgotten.
    ///
    /// # Errors
    /// The driver's.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Whether the last record has been reached; true for an event never recorded (`cuEventQuery`).
    /// Never blocks.
    ///
    /// # Errors
    /// Those of work queued before.
    fn event_query(&self, event: RawEvent) -> Result<bool>;

    /// Waits until the last record has been reached (`cuEventSynchronize`). Blocks.
    ///
    /// # Errors
    /// Those of work queued before.
    fn event_synchronize(&self, event: RawEvent) -> Result<()>;
}
