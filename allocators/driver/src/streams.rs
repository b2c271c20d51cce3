//! Queues of work.
#![expect(
    unsafe_code,
    reason = "declares calls with conditions of their own; holds no unsafe block"
)]

use crate::{DeviceId, Driver, RawEvent, RawStream, Result};
use std::{fmt::Debug, ops::RangeInclusive, sync::atomic::AtomicU32};

/// How strictly a thread treats calls that could disturb a capture which is open somewhere
/// (`CUstreamCaptureMode`).
///
/// Its example is that of [`Streams`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureMode {
    /// Unsafe calls fail while any thread captures in this mode, and break that capture.
    Global,
    /// Unsafe calls fail while this thread captures.
    ThreadLocal,
    /// Nothing is refused.
    Relaxed,
}

/// Streams.
///
/// ```
/// use aquifer_driver::{CaptureMode, DeviceId, Driver, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let urgent = driver.stream_create(gpu, *driver.stream_priorities(gpu)?.start())?;
/// assert!(driver.stream_query(urgent)? && !driver.stream_is_capturing(urgent)?);
/// let before = driver.exchange_capture_mode(CaptureMode::Relaxed)?;
/// driver.exchange_capture_mode(before)?;
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. A stream that [`Streams::stream_create`] answers with is a new one, valid until it is
///    destroyed.
/// 2. Work that is queued on a stream runs in order, and after what [`Streams::stream_wait_event`]
///    made the stream wait for.
/// 3. `Ok` of [`Streams::stream_synchronize`], and `Ok(true)` of [`Streams::stream_query`] and
///    [`Streams::stream_watch`], mean that all that was queued on the stream before the call is
///    done.
/// 4. [`Streams::stream_id`] never tells two streams by the same number, and
///    [`Streams::stream_is_capturing`] never answers `Ok(false)` for a stream whose work becomes
///    part of a graph.
/// 5. A call that is refused has changed nothing.
pub unsafe trait Streams: Debug + Send + Sync {
    /// A stream that does not wait for the legacy default stream (`cuStreamCreateWithPriority`,
    /// non-blocking). A lower number is a higher priority; the driver clamps it to
    /// [`Streams::stream_priorities`].
    ///
    /// # Errors
    /// The driver's.
    fn stream_create(&self, device: DeviceId, priority: i32) -> Result<RawStream>;

    /// Ends a stream; work queued on it still runs (`cuStreamDestroy`). Does not block.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()>;

    /// Highest to lowest priority, so the start is the smaller number
    /// (`cuCtxGetStreamPriorityRange`).
    ///
    /// # Errors
    /// The driver's.
    fn stream_priorities(&self, device: DeviceId) -> Result<RangeInclusive<i32>>;

    /// A number that no other stream of the process ever has (`cuStreamGetId`), unlike the handle,
    /// which comes back.
    ///
    /// # Errors
    /// The driver's.
    fn stream_id(&self, stream: RawStream) -> Result<u64>;

    /// Whether all that was queued is done (`cuStreamQuery`). Never blocks.
    ///
    /// # Errors
    /// Those of work queued before.
    fn stream_query(&self, stream: RawStream) -> Result<bool>;

    /// Waits until all that was queued is done (`cuStreamSynchronize`). Blocks.
    ///
    /// # Errors
    /// Those of work queued before.
    fn stream_synchronize(&self, stream: RawStream) -> Result<()>;

    /// Has the device write `value` into a word of pinned memory behind all that was queued
    /// (`cuStreamWriteValue32`), and looks at it for some tens of microseconds: whether it is
    /// there, and so all of that is done. A wait for a few KiB takes 0.8 µs less of 7.7 so than by
    /// [`Streams::stream_synchronize`] on the host of one H200, and 0.5 more of 6.6 on that of two;
    /// that is to follow where the answer is `false`. The write itself may not be done yet: a query
    /// of the stream may answer so. In a stream that captures it becomes a part of the graph, and
    /// the word stays as it is.
    ///
    /// # Safety
    /// 1. `word` lies in pinned memory of this driver that devices reach by the host's address.
    ///    Nobody else writes it, or waits by it, until this returns; after `false` it stays until
    ///    what was queued is known to be done, or for as long as there is the graph.
    ///
    /// # Errors
    /// The driver's; nothing has been queued.
    unsafe fn stream_watch(&self, stream: RawStream, word: &AtomicU32, value: u32) -> Result<bool>;

    /// Makes work queued on `stream` from now on wait for the event's last record
    /// (`cuStreamWaitEvent`). The host does not wait.
    ///
    /// # Errors
    /// The driver's.
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Whether what is queued on `stream` now becomes part of a graph instead of running
    /// (`cuStreamIsCapturing`, 14 ns). Also true after something has broken the capture, until it
    /// is ended, and for the legacy default stream while a stream that is ordered with it captures:
    /// nothing can be queued there then. Breaks no capture, and never blocks.
    ///
    /// # Errors
    /// The driver's.
    fn stream_is_capturing(&self, stream: RawStream) -> Result<bool>;

    /// Sets this thread's capture mode and answers with the one before
    /// (`cuThreadExchangeStreamCaptureMode`).
    ///
    /// # Errors
    /// The driver's.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;
}

/// While it lives, this thread's calls neither fail for nor break a capture that somebody has open.
///
/// An event query from *any* thread breaks a capture in global mode; the slow paths of pools make
/// such calls.
#[derive(Debug)]
pub struct Relaxed<'a> {
    driver: &'a dyn Driver,
    before: Option<CaptureMode>,
}

impl<'a> Relaxed<'a> {
    /// Relaxes this thread's capture mode. Where the driver refuses, nothing is changed and later
    /// calls will tell.
    #[must_use = "the mode is restored when this is dropped"]
    pub fn enter(driver: &'a dyn Driver) -> Self {
        Self { driver, before: driver.exchange_capture_mode(CaptureMode::Relaxed).ok() }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.before {
            // A refusal leaves the thread relaxed, which refuses less and breaks nothing.
            let _ = self.driver.exchange_capture_mode(mode);
        }
    }
}
