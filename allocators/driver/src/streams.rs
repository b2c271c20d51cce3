//! Streams: queues of work.
#![expect(unsafe_code, reason = "declares calls with safety conditions; holds no unsafe block")]

use crate::{DeviceId, RawEvent, RawStream, Result};
use std::{fmt::Debug, ops::RangeInclusive};

/// Which calls of a thread are refused because they could disturb an open capture
/// (`CUstreamCaptureMode`).
///
/// See [`Streams`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureMode {
    /// Unsafe calls fail while any thread captures in this mode, and invalidate that capture.
    Global,
    /// Unsafe calls fail while this thread captures.
    ThreadLocal,
    /// No call is refused.
    Relaxed,
}

/// Driver calls for streams.
///
/// ```
/// use aquifer::{DeviceId, Driver, driver::CaptureMode, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let urgent = driver.stream_create(gpu, *driver.stream_priorities(gpu)?.start())?;
/// assert!(driver.stream_query(urgent)? && !driver.stream_is_capturing(urgent)?);
/// let before = driver.exchange_capture_mode(CaptureMode::Relaxed)?;
/// driver.exchange_capture_mode(before)?;
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`Streams::stream_create`] returns a new stream that is valid until it is destroyed.
/// 2. Work that is queued on a stream runs in order, and after the work that
///    [`Streams::stream_wait_event`] made the stream wait for.
/// 3. `Ok` of [`Streams::stream_synchronize`] and `Ok(true)` of [`Streams::stream_query`] mean that
///    all work queued on the stream before the call is done.
/// 4. [`Streams::stream_id`] never returns the same number for two streams, and
///    [`Streams::stream_is_capturing`] never returns `Ok(false)` for a stream whose work becomes
///    part of a graph.
/// 5. A call that is refused has changed nothing.
pub unsafe trait Streams: Debug + Send + Sync {
    /// Creates a stream that does not wait for the legacy default stream
    /// (`cuStreamCreateWithPriority`, non-blocking). A lower number is a higher priority. The
    /// driver clamps it to [`Streams::stream_priorities`].
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_create(&self, device: DeviceId, priority: i32) -> Result<RawStream>;

    /// Destroys a stream (`cuStreamDestroy`). Work queued on it still runs. Does not block.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()>;

    /// Returns the range from the highest to the lowest priority, so the start is the smaller
    /// number (`cuCtxGetStreamPriorityRange`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_priorities(&self, device: DeviceId) -> Result<RangeInclusive<i32>>;

    /// Returns a number that no other stream of the process ever has (`cuStreamGetId`). The handle,
    /// in contrast, can be reused.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_id(&self, stream: RawStream) -> Result<u64>;

    /// Returns whether all queued work is done (`cuStreamQuery`). Never blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn stream_query(&self, stream: RawStream) -> Result<bool>;

    /// Waits until all queued work is done (`cuStreamSynchronize`). Blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn stream_synchronize(&self, stream: RawStream) -> Result<()>;

    /// Makes work queued on `stream` from now on wait for the last record of the event
    /// (`cuStreamWaitEvent`). The host does not wait.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Returns whether work queued on `stream` now becomes part of a graph instead of running
    /// (`cuStreamIsCapturing`, 14 ns). Also returns `true` after the capture has been invalidated,
    /// until it is ended, and for the legacy default stream while a stream that is ordered with it
    /// captures: nothing can be queued there then. Breaks no capture, and never blocks.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_is_capturing(&self, stream: RawStream) -> Result<bool>;

    /// Sets this thread's capture mode and returns the previous one
    /// (`cuThreadExchangeStreamCaptureMode`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;
}
