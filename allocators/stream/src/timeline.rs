//! The epochs of one stream: which of its work is complete, and the events that prove it.
//!
//! | method | driver calls |
//! |---|---|
//! | `open`, `is_done`, `is_fenced` | none |
//! | `fence` | `cuEventRecord`, and `cuStreamIsCapturing` |
//! | `poll` | `cuEventQuery` |
//! | `wait_for` | a fence of the other stream, `cuStreamIsCapturing`, `cuStreamWaitEvent` |
//! | `wait` | a fence, then `cuEventSynchronize`, or with a deadline `cuEventQuery` |
//! | `is_capturing` | `cuStreamIsCapturing` |
//! | `capture` | `cuStreamGetCaptureInfo` |
//! | `synchronize` | `cuStreamIsCapturing`, `cuStreamSynchronize` |

use crate::{
    Calling, Ended, Epochs, Retirement, Spin, StreamLifetime,
    attachments::Attachments,
    events::{EventPool, OwnedEvent},
    life::{StreamIdentity, id_of},
};
use aquifer_core::{DriverError, MemoryError, Result};
use aquifer_driver::{
    CaptureStatus, Driver, KeepAlive, RawStream, Relaxed, leftovers, same_machine,
};
use std::{
    fmt,
    io::{self, Write},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The result of [`Timeline::fence`].
///
/// See [`Timeline`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fence {
    /// The epoch is complete or already has an event, or the stream has ended. No driver call was
    /// made.
    Standing,
    /// A new event was recorded.
    Recorded,
    /// The stream captures a graph, and an event in it proves nothing. The epoch stays without an
    /// event. The next fence after the capture covers it.
    Capturing,
    /// The handle cannot be used for this stream on this thread or at this time. No driver call was
    /// made. Either the stream is the default stream of another thread, or it may be destroyed by
    /// now and could not be fenced in time. The next fence by a thread that may use the handle
    /// covers the epoch.
    OutOfReach,
}

impl Fence {
    /// Returns whether a new event was recorded.
    #[must_use]
    pub fn is_new(self) -> bool {
        self == Self::Recorded
    }
}

/// How many events of a stream are recorded, but not known to be complete, before a new fence
/// queries one of them. If it is pending, as many more are recorded before the next query.
const RECYCLED_FROM: usize = 32;

/// The longest pause between two polls of an event in a wait with a deadline.
const MAX_POLL_PAUSE: Duration = Duration::from_micros(200);

/// How long [`Timeline::settle`] retries when the driver refuses every way to wait for a stream. A
/// transient refusal ends sooner. A permanent refusal must not block the program for ever.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long [`Timeline::settle_or_abort`] retries before it aborts the process. By then, work of
/// unknown state may still touch memory that is about to be freed.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest pause between two retries.
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The driver's codes for a query of an event that was recorded in a capture, or a wait for it: the
/// first while the capture is open, the second after it has ended.
const CAPTURED_EVENT: [u32; 2] = [907, 1];

/// The driver's code for a query of the legacy default stream while a stream that is ordered with
/// it captures.
const CAPTURE_IMPLICIT: u32 = 906;

/// The number of serials given out. 64 bits never overflow in practice.
static SERIALS: AtomicU64 = AtomicU64::new(0);

/// A stream and its epochs. A pool stores an epoch with a freed block instead of recording an
/// event.
///
/// Reading the open epoch costs one load. [`Timeline::fence`] costs an event record, and is called
/// only when completion must be proved.
///
/// ```
/// use aquifer_driver::{DeviceId, sim::Sim};
/// use aquifer_stream::{Fence, StreamPool};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
/// let stream = streams.lease()?;
/// let timeline = stream.timeline();
/// let freed_in = timeline.open();          // stored with a freed block: one load
/// let fence: Fence = timeline.fence(freed_in)?; // records an event on demand
/// assert!(timeline.open() > freed_in, "{fence:?}");
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub struct Timeline {
    driver: Arc<dyn Driver>,
    raw: RawStream,
    /// The handle in notes to an observer.
    noted: RawStream,
    /// The stream's number in its pool, for messages.
    number: u32,
    identity: StreamIdentity,
    /// The number of this timeline. A stream that is released and adopted again gets a new
    /// timeline with a new serial, and its epochs start again.
    serial: u64,
    life: StreamLifetime,
    /// Leases that have not ended. A stream that was adopted more than once has several.
    leases: AtomicU32,
    /// Whether only the user may order this stream with others. Never reset once set.
    isolated: AtomicBool,
    /// Whether the stream has captured, or is about to. Never reset once set.
    captures: AtomicBool,
    epochs: Epochs<OwnedEvent>,
    events: EventPool,
    wait_cache: WaitCache,
    /// Whether the handle is valid, and how many threads are in a driver call for it.
    retirement: Retirement,
    attachments: Attachments,
}

impl Timeline {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        raw: RawStream,
        number: u32,
        id: Option<u64>,
        life: StreamLifetime,
        isolated: bool,
    ) -> Self {
        let noted = match (&life, driver.observer()) {
            (StreamLifetime::Thread(_), Some(observer)) => observer.on_every_thread(raw),
            _ => raw,
        };
        Self {
            driver,
            raw,
            noted,
            number,
            identity: StreamIdentity::new(id),
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            leases: AtomicU32::new(0),
            isolated: AtomicBool::new(isolated),
            captures: AtomicBool::new(matches!(life, StreamLifetime::Legacy)),
            life,
            epochs: Epochs::new(),
            events: EventPool::new(),
            wait_cache: WaitCache::new(),
            retirement: Retirement::new(),
            attachments: Attachments::default(),
        }
    }

    /// Returns the stream's handle.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Returns the stream's handle for notes to the driver's observer, which may be made on any
    /// thread.
    #[must_use]
    #[doc(hidden)]
    pub fn noted(&self) -> RawStream {
        self.noted
    }

    /// Returns the stream's driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Returns this timeline as a [`KeepAlive`]. Pass it to
    /// [`Operand::order`](aquifer_driver::Operand::order), so that memory of another pool is
    /// ordered by the same timeline.
    ///
    /// ```
    /// use aquifer::{DeviceId, StreamPool, sim::Sim};
    /// use std::sync::Arc;
    /// let driver = Sim::h200(1).driver();
    /// let streams = || StreamPool::new(driver.clone(), DeviceId(0), 4);
    /// let (first, second) = (streams(), streams());
    /// let stream = first.lease()?;
    /// assert!(second.timeline(stream.raw(), None).is_err()); // a handle is not enough
    /// let timeline = second.timeline(stream.raw(), Some(stream.timeline().keep_alive()))?;
    /// assert!(Arc::ptr_eq(&timeline, stream.timeline()));
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn keep_alive(self: &Arc<Self>) -> KeepAlive {
        self.clone()
    }

    /// Returns whether `alive` is this timeline, from [`Timeline::keep_alive`], and the calling
    /// thread may use its handle. Handles must not be compared instead: handle 2 is a different
    /// stream on every thread, and the driver reuses the handle of a destroyed stream.
    #[must_use]
    #[doc(hidden)]
    pub fn is(&self, alive: Option<&KeepAlive>) -> bool {
        let other = alive.and_then(|alive| alive.downcast_ref::<Self>());
        other.is_some_and(|other| std::ptr::eq(self, other)) && self.check_thread().is_ok()
    }

    /// Returns the stream's number in its pool.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the driver's id of the stream, which is never reused, unlike the handle. Returns
    /// `None` if the stream was adopted while it captured, because the driver returns no id during
    /// a capture. For a stream that lives until it is retired, the next [`Timeline::is_current`]
    /// then sets the id.
    #[must_use]
    pub fn id(&self) -> Option<u64> {
        self.identity.id()
    }

    /// Returns whether the handle still means this stream, and not one that was created after this
    /// stream was destroyed. Returns `true` while the handle's stream captures, because the driver
    /// returns no id then. At most four driver calls. Never blocks.
    ///
    /// # Errors
    /// Driver errors.
    pub fn is_current(&self) -> Result<bool> {
        match self.life {
            StreamLifetime::Owned
            | StreamLifetime::KeptAlive(_)
            | StreamLifetime::Legacy
            | StreamLifetime::Thread(_) => Ok(true),
            StreamLifetime::Retired | StreamLifetime::Fenced => {
                let id = id_of(&*self.driver, self.raw).map_err(|e| self.driver_error(e))?;
                Ok(id.is_none_or(|id| self.has_id(id)))
            }
        }
    }

    /// Returns whether the stream has this driver id.
    pub(crate) fn has_id(&self, id: u64) -> bool {
        self.identity.matches(id, &self.life)
    }

    pub(crate) fn begin_lease(&self) {
        self.leases.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_lease(&self) {
        self.leases.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns whether work can be queued on the stream now: it is leased or adopted, and not
    /// retired. An idle stream of a pool may be leased again at any time.
    ///
    /// ```
    /// use aquifer::{DeviceId, StreamPool, sim::Sim};
    /// let pool = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
    /// let stream = pool.lease()?;
    /// let timeline = stream.timeline().clone();
    /// assert!(timeline.is_leased());
    /// drop(stream);
    /// assert!(!timeline.is_leased());
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn is_leased(&self) -> bool {
        // Relaxed: if the end of a lease is seen late, memory only stays in place a little longer.
        self.leases.load(Ordering::Relaxed) > 0 && !self.is_retired()
    }

    /// Returns whether frees and uses must be fenced immediately, because the handle may be
    /// destroyed or unusable later.
    #[inline]
    #[must_use]
    pub fn fences_at_once(&self) -> bool {
        self.life.fences_at_once()
    }

    /// Returns whether only the user may order this stream with other streams.
    ///
    /// Pools queue device-side waits implicitly when memory that is still in use passes from one
    /// stream to another. Collectives wait for work of *another process*, so two ranks that take
    /// memory from different streams could deadlock. Isolated streams neither give nor take memory
    /// through such waits. Memory whose work is complete passes to and from them as usual.
    #[must_use]
    pub fn is_isolated(&self) -> bool {
        self.isolated.load(Ordering::Relaxed)
    }

    /// Isolates the stream permanently.
    pub(crate) fn isolate(&self) {
        self.isolated.store(true, Ordering::Relaxed);
    }

    /// Returns whether a pool may make this stream wait for another stream implicitly. Returns
    /// `false` if the stream is isolated, captures a graph, cannot be called from this thread, or
    /// is retired. At most one driver call.
    #[must_use]
    pub fn waits_unasked(&self) -> bool {
        !self.is_isolated() && !self.is_retired() && !self.is_capturing().unwrap_or(true)
    }

    /// Returns whether a pool may make other streams wait for `epoch` of this stream implicitly.
    /// Returns `false` if the stream is isolated, or if the wait would fail because the stream
    /// captures or could not be fenced in time. At most one driver call.
    #[must_use]
    pub fn is_waited_for_unasked(&self, epoch: u64) -> bool {
        let provable = if self.fences_at_once() {
            self.is_fenced(epoch)
        } else {
            !self.is_capturing().unwrap_or(true)
        };
        provable && !self.is_isolated()
    }

    /// Returns the open epoch. It covers all work that is queued so far.
    #[inline]
    #[must_use]
    pub fn open(&self) -> u64 {
        self.epochs.open()
    }

    /// Returns whether an epoch is known to be complete. Makes no driver call.
    #[inline]
    #[must_use]
    pub fn is_done(&self, epoch: u64) -> bool {
        self.epochs.is_done(epoch)
    }

    /// Returns whether `epoch` is complete or an event that proves it has been recorded.
    #[must_use]
    pub fn is_fenced(&self, epoch: u64) -> bool {
        epoch <= self.epochs.proved()
    }

    /// Returns whether nothing proves `epoch` and this thread cannot record an event that would,
    /// although the work may be complete. Either the stream is another thread's default stream, or
    /// it could not be fenced in time. [`Timeline::wait`] without a deadline proves such an epoch
    /// by synchronising the device. Makes no driver call.
    ///
    /// ```
    /// use aquifer::{DeviceId, StreamPool, sim::Sim};
    /// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
    /// let theirs = std::thread::spawn({
    ///     let streams = streams.clone();
    ///     move || streams.thread_default().map(|stream| stream.timeline().clone())
    /// });
    /// let timeline = theirs.join().expect("it does not panic")?;
    /// assert!(timeline.is_out_of_reach(timeline.open()));
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn is_out_of_reach(&self, epoch: u64) -> bool {
        if self.is_fenced(epoch) || self.is_retired() {
            return false;
        }
        match self.life {
            StreamLifetime::Thread(_) => !self.life.is_valid_on_this_thread(),
            StreamLifetime::Fenced => epoch < self.open(),
            StreamLifetime::Owned
            | StreamLifetime::KeptAlive(_)
            | StreamLifetime::Retired
            | StreamLifetime::Legacy => false,
        }
    }

    /// Records an event that proves `epoch` (`cuEventRecord`), unless there is one already or the
    /// stream captures. Never blocks.
    ///
    /// # Errors
    /// Driver errors. The next fence covers the epoch.
    pub fn fence(&self, epoch: u64) -> Result<Fence> {
        if self.is_fenced(epoch) {
            return Ok(Fence::Standing);
        }
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::OtherThread { .. }) => return Ok(Fence::OutOfReach),
            // A retired or lost stream has nothing left to prove.
            Err(_) => return Ok(Fence::Standing),
        };
        let may_be_destroyed = matches!(self.life, StreamLifetime::Fenced);
        if may_be_destroyed && epoch < self.open() {
            // The time to fence this epoch has passed without an event.
            return Ok(Fence::OutOfReach);
        }
        // Closed even if the fence fails, so that no retry uses the handle of a destroyed stream.
        let closed = may_be_destroyed.then(|| self.epochs.close());
        if self.captures.load(Ordering::Relaxed) && self.query_capturing()? {
            return Ok(Fence::Capturing);
        }
        let event = self.acquire_event()?;
        let closed = closed.unwrap_or_else(|| self.epochs.close());
        // The order of the next three steps matters: see the module `epochs`.
        if let Err(refused) = self.driver.event_record(event.raw, self.raw) {
            let is_capturing = self.query_capturing().unwrap_or(false);
            return if is_capturing {
                Ok(Fence::Capturing)
            } else {
                Err(self.driver_error(refused))
            };
        }
        if self.query_capturing()? {
            self.events.release([event]);
            return Ok(Fence::Capturing);
        }
        self.epochs.publish(closed, event);
        Ok(Fence::Recorded)
    }

    /// Returns whether work queued on the stream becomes part of a graph now
    /// (`cuStreamIsCapturing`). Returns `false` for a retired stream. Never blocks.
    ///
    /// # Errors
    /// Driver errors.
    pub fn is_capturing(&self) -> Result<bool> {
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId) => return Ok(false),
            Err(error) => return Err(error),
        };
        self.query_capturing()
    }

    /// Returns the id of the capture that the stream takes part in (`cuStreamGetCaptureInfo`). The
    /// id is unique in the process. Returns `None` if the stream takes part in no capture, is
    /// retired, or is another thread's default stream, whose captures only that thread can query.
    /// Never blocks.
    ///
    /// # Errors
    /// [`MemoryError::CaptureInvalidated`], and driver errors.
    pub fn capture(&self) -> Result<Option<u64>> {
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId | MemoryError::OtherThread { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        match self.driver.capture_status(self.raw) {
            Ok(CaptureStatus::None) => Ok(None),
            Ok(CaptureStatus::Active { id }) => Ok(Some(id)),
            Ok(CaptureStatus::Invalidated) => {
                Err(MemoryError::CaptureInvalidated { stream: self.raw.handle() })
            }
            // The legacy default stream itself does not capture, but a stream that is ordered with
            // it does.
            Err(refused) if refused.code == CAPTURE_IMPLICIT => Ok(None),
            Err(refused) => Err(self.driver_error(refused)),
        }
    }

    /// Tells that the stream is about to capture: while it does, no fence closes an epoch.
    /// Otherwise the first fence in the first capture of a stream closes one without an event.
    /// Fences of such a stream make one driver call more, and so do those of the legacy default
    /// stream, on which a record would invalidate the captures that are ordered with it.
    pub fn expect_capture(&self) {
        self.captures.store(true, Ordering::Relaxed);
    }

    /// The handle must be valid.
    fn query_capturing(&self) -> Result<bool> {
        let is_capturing =
            self.driver.stream_is_capturing(self.raw).map_err(|e| self.driver_error(e))?;
        if is_capturing {
            self.expect_capture();
        }
        Ok(is_capturing)
    }

    /// Returns an error if the stream captures. A wait for the stream, or by it, would invalidate
    /// the capture. The handle must be valid.
    pub(crate) fn check_not_capturing(&self) -> Result<()> {
        if self.query_capturing()? { Err(self.capturing_error()) } else { Ok(()) }
    }

    fn capturing_error(&self) -> MemoryError {
        MemoryError::Capturing { stream: self.raw.handle() }
    }

    /// Returns the error for an epoch that could not be fenced.
    fn check_fenced(&self, fence: Fence) -> Result<()> {
        match fence {
            Fence::Standing | Fence::Recorded => Ok(()),
            Fence::Capturing => Err(self.capturing_error()),
            Fence::OutOfReach if self.life.is_valid_on_this_thread() => Err(MemoryError::UnknownId),
            Fence::OutOfReach => Err(self.other_thread_error()),
        }
    }

    /// Fences `epoch` if the stream cannot be fenced later. Does nothing for other streams.
    ///
    /// # Errors
    /// The reason why no event was recorded. Memory whose last use ends in `epoch` is held back
    /// until a later event covers it.
    pub fn fence_at_once(&self, epoch: u64) -> Result<()> {
        if self.fences_at_once() { self.check_fenced(self.fence(epoch)?) } else { Ok(()) }
    }

    fn other_thread_error(&self) -> MemoryError {
        MemoryError::OtherThread { stream: self.raw.handle() }
    }

    /// Announces driver calls for the handle. The handle stays valid until the returned guard is
    /// dropped. Do not hold the guard while acquiring that of another stream.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] for a retired stream, [`MemoryError::OtherThread`] for another
    /// thread's default stream, [`MemoryError::DeviceLost`].
    pub fn calling(&self) -> Result<Calling<'_>> {
        self.check_thread()?;
        self.retirement.enter().map_err(|ended| match ended {
            Ended::Lost => MemoryError::DeviceLost { device: self.raw.device() },
            Ended::Retired => MemoryError::UnknownId,
        })
    }

    /// Returns an error if the handle means another stream on the calling thread.
    pub(crate) fn check_thread(&self) -> Result<()> {
        if self.life.is_valid_on_this_thread() { Ok(()) } else { Err(self.other_thread_error()) }
    }

    fn acquire_event(&self) -> Result<Arc<OwnedEvent>> {
        if let Some(event) = self.events.spare() {
            return Ok(event);
        }
        let _relaxed = Relaxed::enter(&*self.driver);
        self.recycle_events();
        self.events.acquire(&self.driver, self.raw.device()).map_err(|e| self.driver_error(e))
    }

    /// Queries the middle one of the recorded events (`cuEventQuery`), if [`RECYCLED_FROM`] more
    /// have been recorded since the last query. If it is complete, it and the earlier ones can be
    /// recorded again. A stream that is fenced at each free would otherwise create an event for
    /// each, until its pool polls in a slow path.
    ///
    /// Errors are left to the next poll. The caller has relaxed the thread's capture mode.
    fn recycle_events(&self) {
        let Some((epoch, event)) = self.epochs.middle(RECYCLED_FROM) else { return };
        if self.driver.event_query(event.raw) == Ok(true) {
            drop(event);
            self.finish(epoch);
        }
    }

    fn driver_error(&self, error: DriverError) -> MemoryError {
        MemoryError::driver(self.raw.device(), error)
    }

    /// Polls recorded events, oldest first, and stops at the first that is pending. Never blocks.
    ///
    /// # Errors
    /// Driver errors, including those of earlier work.
    pub fn poll(&self) -> Result<()> {
        let mut relaxed = None;
        while let Some((epoch, event)) = self.epochs.oldest() {
            relaxed.get_or_insert_with(|| Relaxed::enter(&*self.driver));
            match self.driver.event_query(event.raw) {
                Ok(true) => {
                    drop(event);
                    self.finish(epoch);
                }
                Ok(false) => break,
                Err(refused) => self.withdraw_captured(epoch, refused, true)?,
            }
        }
        Ok(())
    }

    /// Withdraws the event that was published for `epoch` if the driver refused it because it is
    /// part of a graph: the capture ended between the record and the query of the capture state.
    ///
    /// # Errors
    /// Any other refusal, and this one if the caller may not try again.
    fn withdraw_captured(&self, epoch: u64, refused: DriverError, may_retry: bool) -> Result<()> {
        let is_captured = CAPTURED_EVENT.contains(&refused.code);
        if is_captured {
            drop(self.epochs.withdraw(epoch));
        }
        if is_captured && may_retry { Ok(()) } else { Err(self.driver_error(refused)) }
    }

    fn finish(&self, epoch: u64) {
        let unused = self.epochs.finish(epoch);
        if unused.is_empty() {
            return;
        }
        self.events.release(unused);
    }

    /// Makes this stream wait on the device for `epoch` of another stream. The host does not wait.
    /// Returns whether a wait had to be queued. If both streams take part in the same capture, the
    /// wait becomes part of it.
    ///
    /// # Errors
    /// - [`MemoryError::UnknownId`] if this stream is retired.
    /// - [`MemoryError::Capturing`] if only one of the two captures a graph, or if each captures a
    ///   different one. The captures stay valid.
    /// - [`MemoryError::OtherThread`] if one is the default stream of another thread and was not
    ///   fenced there.
    /// - Driver errors.
    ///
    /// On error, the work queued before is unchanged.
    pub fn wait_for(&self, other: &Timeline, epoch: u64) -> Result<bool> {
        let same = std::ptr::eq(self, other);
        if same || other.is_done(epoch) || self.wait_cache.covers(other.serial, epoch) {
            return Ok(false);
        }
        same_machine(&*self.driver, &*other.driver)?;
        let mut is_first = true;
        loop {
            let fence = other.fence(epoch)?;
            if fence == Fence::Capturing && self.shares_capture(other)? {
                return self.join_capture(other).map(|()| true);
            }
            other.check_fenced(fence)?;
            let Some((proved, event)) = other.epochs.proof(epoch) else {
                // The epoch completed between the fence and this lookup.
                return Ok(false);
            };
            let queued = {
                let _calling = self.calling()?;
                self.check_not_capturing()?;
                self.driver.stream_wait_event(self.raw, event.raw)
            };
            let Err(refused) = queued else {
                drop(event);
                self.wait_cache.record(other.serial, proved);
                return Ok(true);
            };
            if !is_first || !other.is_captured(&event) {
                return Err(self.driver_error(refused));
            }
            // Fenced again, once, after the capture.
            drop(other.epochs.withdraw(proved));
            is_first = false;
        }
    }

    /// Returns whether the driver refuses a query of an event because it is part of a graph.
    #[cold]
    fn is_captured(&self, event: &OwnedEvent) -> bool {
        let _relaxed = Relaxed::enter(&*self.driver);
        let queried = self.driver.event_query(event.raw);
        queried.is_err_and(|refused| CAPTURED_EVENT.contains(&refused.code))
    }

    /// Makes this stream wait for all that `other` has captured so far (`cuEventRecord`,
    /// `cuStreamWaitEvent`). This stream joins the capture of `other`, or rejoins it if it already
    /// takes part in it. The event closes no epoch: the captured work runs only when the graph is
    /// launched.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if one of the two is retired, and driver errors.
    pub(crate) fn join_capture(&self, other: &Timeline) -> Result<()> {
        let event = {
            let _calling = other.calling()?;
            let event = other.acquire_event()?;
            other.driver.event_record(event.raw, other.raw).map_err(|e| other.driver_error(e))?;
            event
        };
        let _calling = self.calling()?;
        self.driver.stream_wait_event(self.raw, event.raw).map_err(|e| self.driver_error(e))
    }

    /// Returns whether both streams take part in the same capture.
    fn shares_capture(&self, other: &Self) -> Result<bool> {
        Ok(self
            .capture()?
            .is_some_and(|mine| other.capture().is_ok_and(|theirs| theirs == Some(mine))))
    }

    /// Waits until `epoch` is complete or the deadline has passed. Returns whether the epoch is
    /// complete. Blocks.
    ///
    /// # Errors
    /// - [`MemoryError::Capturing`] immediately, if the epoch has no event and the stream captures.
    /// - If the stream is out of reach, a wait without a deadline synchronises the whole device. A
    ///   wait with a deadline returns [`MemoryError::OtherThread`] or [`MemoryError::UnknownId`].
    /// - Driver errors, including those of earlier work.
    pub fn wait(&self, epoch: u64, deadline: Option<Instant>) -> Result<bool> {
        let mut is_first = true;
        while !self.is_done(epoch) {
            match self.fence(epoch)? {
                Fence::OutOfReach if deadline.is_none() => {
                    return self.synchronize_device().map(|()| true);
                }
                fence => self.check_fenced(fence)?,
            }
            let Some((proved, event)) = self.epochs.proof(epoch) else {
                return Ok(self.is_done(epoch));
            };
            match self.wait_for_event(&event, deadline) {
                Ok(true) => {
                    self.finish(proved);
                    self.events.release([event]);
                }
                Ok(false) => return Ok(false),
                // Fenced again, once, after the capture.
                Err(refused) => self.withdraw_captured(proved, refused, is_first)?,
            }
            is_first = false;
        }
        Ok(true)
    }

    /// Waits until an event is complete or the deadline has passed. Returns whether it is complete.
    fn wait_for_event(
        &self,
        event: &OwnedEvent,
        deadline: Option<Instant>,
    ) -> Result<bool, DriverError> {
        let Some(deadline) = deadline else {
            let _relaxed = Relaxed::enter(&*self.driver);
            return self.driver.event_synchronize(event.raw).map(|()| true);
        };
        // The driver has no wait with a deadline, so the event is polled.
        let mut pause = Duration::from_micros(1);
        loop {
            let done = {
                let _relaxed = Relaxed::enter(&*self.driver);
                self.driver.event_query(event.raw)?
            };
            let now = Instant::now();
            if done || now >= deadline {
                return Ok(done);
            }
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(MAX_POLL_PAUSE);
        }
    }

    /// Waits for all queued work and marks it as complete. Returns immediately for a retired
    /// stream. Blocks.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`], and driver errors, including those of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId) => return Ok(()),
            Err(MemoryError::OtherThread { .. }) => return self.synchronize_device(),
            Err(error) => return Err(error),
        };
        self.synchronize_now()
    }

    /// Waits until the recorded work of the stream is complete, even if its handle may be
    /// destroyed. A [`StreamLifetime::Fenced`] stream is waited for through its events, any other
    /// stream through [`Timeline::synchronize`]. Blocks.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if some work could not be fenced in time. Otherwise as
    /// [`Timeline::synchronize`].
    pub fn quiesce(&self) -> Result<()> {
        if !matches!(self.life, StreamLifetime::Fenced) {
            return self.synchronize();
        }
        // Recording work in an epoch of such a stream also closes that epoch.
        let last = self.open() - 1;
        if !self.is_fenced(last) && !self.is_retired() {
            return Err(MemoryError::UnknownId);
        }
        self.wait(last, None).map(drop)
    }

    /// Synchronises the whole device, and marks the epochs of this stream as complete
    /// (`cuCtxSynchronize`).
    fn synchronize_device(&self) -> Result<()> {
        let _relaxed = Relaxed::enter(&*self.driver);
        let closed = self.epochs.close();
        self.driver.device_synchronize(self.raw.device()).map_err(|e| self.driver_error(e))?;
        self.finish(closed);
        Ok(())
    }

    /// The handle must be valid.
    fn synchronize_now(&self) -> Result<()> {
        let _relaxed = Relaxed::enter(&*self.driver);
        self.check_not_capturing()?;
        let closed = self.epochs.close();
        self.driver.stream_synchronize(self.raw).map_err(|e| self.driver_error(e))?;
        self.finish(closed);
        Ok(())
    }

    /// Like [`Timeline::synchronize`], but tries every way of waiting that the driver has, and
    /// retries for one second. For callers that can hold back the affected memory if the driver
    /// refuses them all. Blocks.
    ///
    /// # Errors
    /// [`MemoryError::DeviceLost`], [`MemoryError::Capturing`] and the errors of a driver [that is
    /// gone](DriverError::is_driver_gone) immediately. Any other refusal after one second, and work
    /// may still be running then.
    pub fn settle(&self) -> Result<()> {
        let (mut deadline, mut pause) = (None, Duration::from_micros(10));
        loop {
            let refused = match self.synchronize() {
                Ok(()) => return Ok(()),
                Err(at_once @ (MemoryError::DeviceLost { .. } | MemoryError::Capturing { .. })) => {
                    return Err(at_once);
                }
                Err(MemoryError::Driver(error)) if error.is_driver_gone() => {
                    return Err(MemoryError::Driver(error));
                }
                Err(refused) => refused,
            };
            if self.wait(self.open(), None).is_ok() || self.synchronize_device().is_ok() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= *deadline.get_or_insert(now + SETTLE_TIMEOUT) {
                return Err(refused);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
        }
    }

    /// Like [`Timeline::settle`], for callers that cannot hold back the affected memory, such as
    /// borrowed memory. Does not return while work may be running. Blocks.
    ///
    /// # Aborts
    /// Aborts the process with a message if the driver refuses every way to wait for five seconds
    /// and is neither lost nor gone. Returning would let the device write memory that has a new
    /// owner. Waiting for ever would hang without a message. The caller could repair neither.
    ///
    /// # Errors
    /// - [`MemoryError::Capturing`]: the queued work may be part of a graph.
    /// - [`MemoryError::DeviceLost`], and the errors of a driver [that is
    ///   gone](DriverError::is_driver_gone): no queued work runs any more.
    pub fn settle_or_abort(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            match self.settle() {
                Err(MemoryError::Driver(refused)) if !refused.is_driver_gone() => {
                    if started.elapsed() >= ABORT_TIMEOUT {
                        self.abort(refused);
                    }
                }
                waited => return waited,
            }
        }
    }

    #[cold]
    fn abort(&self, refused: DriverError) -> ! {
        // A closed standard error does not matter here.
        let _ = writeln!(
            io::stderr(),
            "aquifer: {} has refused every wait for stream {} for {} s ({refused}). Copies that it may still run touch memory \
             that is about to be freed, so the process ends here.",
            self.raw.device(),
            self.number,
            ABORT_TIMEOUT.as_secs(),
        );
        process::abort()
    }

    /// Synchronises the stream and makes no further driver call for it, because its handle is about
    /// to be destroyed. Later calls for the stream return errors. Blocks, also until driver calls
    /// of other threads for this stream have ended.
    ///
    /// A stream that its pool owns is only synchronised, and stays usable: the pool destroys its
    /// handle. The same holds for the legacy default stream. A thread's default stream must be
    /// retired by its own thread before that thread ends.
    ///
    /// # Errors
    /// [`MemoryError::OtherThread`], and driver errors. The stream is not retired then.
    pub fn retire(&self) -> Result<()> {
        if self.life.outlives_retirement() {
            return self.synchronize();
        }
        if !self.life.is_valid_on_this_thread() {
            return Err(self.other_thread_error());
        }
        let ended = self.retirement.end(|| {
            self.synchronize_now()?;
            self.finish(u64::MAX);
            Ok(())
        });
        ended.unwrap_or(Ok(()))
    }

    /// Returns whether the stream's handle is destroyed or about to be.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.retirement.is_over()
    }

    /// Ends the timeline of a stream whose device is lost: queued work never runs. If the stream
    /// can still be waited for, it is waited for instead and stays usable. Blocks.
    pub fn abandon(&self) {
        if self.settle().is_ok() {
            return;
        }
        self.finish(u64::MAX);
        self.retirement.lose();
    }

    /// Returns the number that the pool with the id `key` stores for this stream.
    #[inline]
    #[must_use]
    pub fn attachment(&self, key: u64) -> Option<u32> {
        self.attachments.get(key)
    }

    /// Stores `number` for the pool with the id `key`, unless a number is stored already. Returns
    /// the stored number. `key` must never be reused for another pool.
    pub fn attach(&self, key: u64, number: u32) -> u32 {
        self.attachments.attach(key, number)
    }

    /// Removes the number stored for `key`. The entry of the first pool stays, and is never looked
    /// up again.
    pub fn detach(&self, key: u64) {
        self.attachments.detach(key);
    }
}

impl Drop for Timeline {
    #[expect(unsafe_code, reason = "ends a handle")]
    fn drop(&mut self) {
        if matches!(self.life, StreamLifetime::Owned) {
            let (driver, raw) = (self.driver.clone(), self.raw);
            // Queued work runs on. SAFETY: 1. the stream was created for this timeline, every copy
            // of its handle is held together with the timeline, and no release of the stream has
            // succeeded yet.
            leftovers::release(&self.driver, move || unsafe { driver.stream_destroy(raw) });
        }
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("number", &self.number)
            .field("raw", &self.raw)
            .field("life", &self.life)
            .field("epochs", &self.epochs)
            .finish_non_exhaustive()
    }
}

/// The number of other streams that are remembered.
const MAX_ENTRIES: usize = 64;

/// The newest epoch of each other stream that was waited for, by that stream's serial.
pub(crate) struct WaitCache(Spin<Vec<(u64, u64)>>);

impl WaitCache {
    pub(crate) fn new() -> Self {
        Self(Spin::new(Vec::new()))
    }

    pub(crate) fn covers(&self, serial: u64, epoch: u64) -> bool {
        self.0.with(|entries| {
            entries.iter().any(|&(other, newest)| other == serial && epoch <= newest)
        })
    }

    pub(crate) fn record(&self, serial: u64, epoch: u64) {
        self.0.with(|entries| match entries.iter_mut().find(|(other, _)| *other == serial) {
            Some((_, newest)) => *newest = (*newest).max(epoch),
            None => {
                if entries.len() == MAX_ENTRIES {
                    // Evicting an entry may cost a redundant wait.
                    entries.remove(0);
                }
                entries.push((serial, epoch));
            }
        });
    }
}
