//! One stream's past and what may be known of it.

use crate::{
    Calling, Ended, Epochs, Life, Retirement,
    attachments::Attachments,
    events::{OwnedEvent, SpareEvents},
    identity::{Identity, id_of},
    uses::node::Nodes,
    waited::Waited,
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

/// What [`Timeline::fence`] came to.
///
/// Its example is that of [`Timeline`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fence {
    /// The epoch is done or has an event already: no call was made.
    Standing,
    /// An event has been recorded.
    Recorded,
    /// The stream captures a graph, and an event would become part of that: the epoch stays without
    /// one, and the next fence after the capture covers it.
    Capturing,
    /// The handle does not mean this stream here or now, and no call was made: it is the default
    /// stream of another thread, or one that may be gone by now and could not be fenced when it had
    /// to be. The next fence by whoever may call for the stream covers the epoch.
    OutOfReach,
}

impl Fence {
    /// Whether a new event has been recorded.
    #[must_use]
    pub fn is_new(self) -> bool {
        self == Self::Recorded
    }
}

/// The longest pause between two looks when a wait has a deadline.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// How long a driver is asked again that refuses every way to wait for a stream. What it refuses
/// for a moment it does not refuse for so long; what it refuses for good must not stop a program
/// for good.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a driver is asked again before the process ends, where the work that it refuses to tell
/// of may touch memory that is about to be freed.
const LAST_RESORT: Duration = Duration::from_secs(10);
/// The longest pause before it is asked again.
const LONGEST_REFUSED: Duration = Duration::from_millis(10);

/// The driver's code for questions about an event that was recorded in a capture.
const CAPTURED_EVENT: u32 = 907;

/// The driver's code for a question about the legacy default stream while one that is ordered with
/// it captures.
const CAPTURE_IMPLICIT: u32 = 906;

/// Serials given out. 2^64 of them do not run out.
static SERIALS: AtomicU64 = AtomicU64::new(0);

/// A stream with the epochs of its past: what pools note beside a freed block instead of an event.
///
/// Stamping costs a load. [`Timeline::fence`] costs an event record, and is asked for by whoever
/// needs to know.
///
/// ```
/// use aquifer_driver::{DeviceId, sim::Sim};
/// use aquifer_stream::{Fence, StreamPool};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
/// let stream = streams.lease()?;
/// let timeline = stream.timeline();
/// let freed_in = timeline.open();          // what a pool notes beside a freed block: a load
/// let fence: Fence = timeline.fence(freed_in)?; // an event, when somebody asks
/// assert!(timeline.open() > freed_in, "{fence:?}");
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub struct Timeline {
    driver: Arc<dyn Driver>,
    raw: RawStream,
    /// Its number among the streams of its pool, for people.
    number: u32,
    identity: Identity,
    /// This account's own number. A stream that is let go of and taken in again has another, and
    /// its epochs start anew.
    serial: u64,
    life: Life,
    /// Leases of it that have not ended: of one stream several, where it was adopted more than
    /// once.
    leases: AtomicU32,
    /// Whether its waits are its users' alone. Once set it stays.
    isolated: AtomicBool,
    epochs: Epochs<OwnedEvent>,
    spare: SpareEvents,
    /// Accounts for the uses of this stream's blocks by others.
    nodes: Nodes,
    waited: Waited,
    /// Whether the handle is good, and who calls for it.
    retirement: Retirement,
    attachments: Attachments,
}

impl Timeline {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        raw: RawStream,
        number: u32,
        id: Option<u64>,
        life: Life,
        isolated: bool,
    ) -> Self {
        Self {
            driver,
            raw,
            number,
            identity: Identity::new(id),
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            life,
            leases: AtomicU32::new(0),
            isolated: AtomicBool::new(isolated),
            epochs: Epochs::new(),
            spare: SpareEvents::new(),
            nodes: Nodes::default(),
            waited: Waited::new(),
            retirement: Retirement::new(),
            attachments: Attachments::default(),
        }
    }

    /// The stream.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// The driver it belongs to.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// This timeline as what keeps its stream known:
    /// [`Operand::order`](aquifer_driver::Operand::order) takes it, so that memory of another pool
    /// is ordered by the same account of the stream.
    ///
    /// ```
    /// use aquifer_core::DeviceId;
    /// use aquifer_driver::sim::Sim;
    /// use aquifer_stream::StreamPool;
    /// use std::sync::Arc;
    /// let driver = Sim::h200(1).driver();
    /// let (first, second) =
    ///     (StreamPool::new(driver.clone(), DeviceId(0), 4), StreamPool::new(driver.clone(), DeviceId(0), 4));
    /// let stream = first.lease()?;
    /// assert!(second.timeline(stream.raw(), None).is_err()); // a handle alone is not known there
    /// let timeline = second.timeline(stream.raw(), Some(stream.timeline().keep_alive()))?;
    /// assert!(Arc::ptr_eq(&timeline, stream.timeline()));
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    #[must_use]
    pub fn keep_alive(self: &Arc<Self>) -> KeepAlive {
        self.clone()
    }

    /// Its number among the streams of its pool.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The driver's number for the stream, which never comes back, unlike the handle. `None` for
    /// one that was taken in while it captured, since the driver tells it of no stream that does;
    /// one that lives until it is retired is numbered when [`Timeline::is_current`] is next asked.
    #[must_use]
    pub fn id(&self) -> Option<u64> {
        self.identity.id()
    }

    /// Whether the handle still means this stream, and not one that was made after it had been
    /// destroyed. While the handle's stream captures, the driver does not tell, and it is taken for
    /// the same. Four driver calls at most; never blocks.
    ///
    /// # Errors
    /// The driver's.
    pub fn is_current(&self) -> Result<bool> {
        match self.life {
            Life::Owned | Life::KeptAlive(_) | Life::Legacy | Life::Thread(_) => Ok(true),
            Life::Retired | Life::Fenced => {
                let id = id_of(&*self.driver, self.raw).map_err(|e| self.lost(e))?;
                Ok(id.is_none_or(|id| self.has(id)))
            }
        }
    }

    /// Whether the stream has this number.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.identity.is(id, &self.life)
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(crate) fn lease(&self) {
        self.leases.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_lease(&self) {
        self.leases.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether somebody can queue work on it now: it is leased or adopted, and not retired. One
    /// that nobody leases may be leased again at any time.
    ///
    /// ```
    /// use aquifer_core::DeviceId;
    /// use aquifer_driver::sim::Sim;
    /// use aquifer_stream::StreamPool;
    /// let pool = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
    /// let stream = pool.lease()?;
    /// let timeline = stream.timeline().clone();
    /// assert!(timeline.is_leased());
    /// drop(stream);
    /// assert!(!timeline.is_leased());
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    #[must_use]
    pub fn is_leased(&self) -> bool {
        // Relaxed: whoever learns of a lease's end late leaves its memory where it is for a moment
        // longer.
        self.leases.load(Ordering::Relaxed) > 0 && !self.is_retired()
    }

    /// Whether frees and uses must be fenced as they happen, since the handle may be gone later, or
    /// out of reach.
    #[inline]
    #[must_use]
    pub fn fences_at_once(&self) -> bool {
        self.life.fences_at_once()
    }

    /// Whether the stream waits for others, and others for it, only where its user says so.
    ///
    /// Pools order streams behind their users' backs: memory that is still in use passes from one
    /// stream to another with a wait on the device. Where work waits for work of *another process*,
    /// as collectives do, two ranks that take different memory from different streams could so wait
    /// for each other for ever. Isolated streams neither give nor take memory that way; what the
    /// host has seen done passes to and from them like any other.
    #[must_use]
    pub fn is_isolated(&self) -> bool {
        self.isolated.load(Ordering::Relaxed)
    }

    /// Marks the stream, for good.
    pub(crate) fn isolate(&self) {
        self.isolated.store(true, Ordering::Relaxed);
    }

    /// Whether a pool may make this stream wait for another without its user's asking: not if it is
    /// isolated, nor while it captures a graph, nor where its handle means another stream, nor once
    /// it has been retired. At most one driver call.
    #[must_use]
    pub fn waits_unasked(&self) -> bool {
        !self.is_isolated() && !self.is_retired() && !self.is_capturing().unwrap_or(true)
    }

    /// Whether a pool may make other streams wait for `epoch` of this one without its user's
    /// asking: not if it is isolated, nor where the wait could only be refused, since the stream
    /// captures or could not be fenced when it had to be. At most one driver call.
    #[must_use]
    pub fn is_waited_for_unasked(&self, epoch: u64) -> bool {
        let provable = if self.fences_at_once() {
            self.is_fenced(epoch)
        } else {
            !self.is_capturing().unwrap_or(true)
        };
        provable && !self.is_isolated()
    }

    /// The epoch of all that has been queued by now.
    #[inline]
    #[must_use]
    pub fn open(&self) -> u64 {
        self.epochs.open()
    }

    /// Whether all of an epoch is known to be done. Makes no driver call.
    #[inline]
    #[must_use]
    pub fn is_done(&self, epoch: u64) -> bool {
        self.epochs.is_done(epoch)
    }

    /// Whether an event has been recorded that proves `epoch`, or it is done.
    #[must_use]
    pub fn is_fenced(&self, epoch: u64) -> bool {
        epoch <= self.epochs.proved()
    }

    /// Returns whether nothing proves `epoch` and this thread can record no event that would,
    /// although the work may be over: the stream is another thread's default stream, or could not
    /// be fenced when it had to be. [`Timeline::wait`] without a deadline proves such an epoch, by
    /// waiting for the whole device. Makes no driver call.
    ///
    /// ```
    /// use aquifer_driver::{DeviceId, sim::Sim};
    /// use aquifer_stream::StreamPool;
    /// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
    /// let theirs = std::thread::spawn({
    ///     let streams = streams.clone();
    ///     move || streams.thread_default().map(|stream| stream.timeline().clone())
    /// });
    /// let timeline = theirs.join().expect("it does not panic")?;
    /// assert!(timeline.is_out_of_reach(timeline.open()));
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    #[must_use]
    pub fn is_out_of_reach(&self, epoch: u64) -> bool {
        if self.is_fenced(epoch) || self.is_retired() {
            return false;
        }
        match self.life {
            Life::Thread(_) => !self.life.is_meant_here(),
            Life::Fenced => epoch < self.open(),
            Life::Owned | Life::KeptAlive(_) | Life::Retired | Life::Legacy => false,
        }
    }

    /// Records an event that will prove `epoch` (`cuEventRecord`), unless there is one, or the
    /// stream captures. Does not block.
    ///
    /// # Errors
    /// The driver's; the next fence covers the epoch.
    pub fn fence(&self, epoch: u64) -> Result<Fence> {
        if self.is_fenced(epoch) {
            return Ok(Fence::Standing);
        }
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::OtherThread { .. }) => return Ok(Fence::OutOfReach),
            // A stream that has ended has nothing left to prove.
            Err(_) => return Ok(Fence::Standing),
        };
        let fleeting = matches!(self.life, Life::Fenced);
        if fleeting && epoch < self.open() {
            // Its own moment has passed without an event.
            return Ok(Fence::OutOfReach);
        }
        // Closed whatever comes of it, so that nobody calls for a stream that is gone in order to
        // try again.
        let closed = fleeting.then(|| self.epochs.close());
        let _relaxed = Relaxed::enter(&*self.driver);
        if self.captures()? {
            return Ok(Fence::Capturing);
        }
        let event = self.take_event()?;
        let closed = closed.unwrap_or_else(|| self.epochs.close());
        // The order of these three is what the module of epochs is about.
        self.driver.event_record(event.raw, self.raw).map_err(|e| self.lost(e))?;
        if self.captures()? {
            return Ok(Fence::Capturing);
        }
        self.epochs.publish(closed, event);
        Ok(Fence::Recorded)
    }

    /// Whether what is queued on the stream becomes part of a graph now (`cuStreamIsCapturing`).
    /// Not in a stream that has been retired. Never blocks.
    ///
    /// # Errors
    /// The driver's.
    pub fn is_capturing(&self) -> Result<bool> {
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId) => return Ok(false),
            Err(error) => return Err(error),
        };
        self.captures()
    }

    /// The number of the capture that the stream takes part in, which no other capture of the
    /// process has (`cuStreamGetCaptureInfo`). `None` where it takes part in none, has been
    /// retired, or is another thread's default stream, whose captures only that thread can see.
    /// Never blocks.
    ///
    /// # Errors
    /// [`MemoryError::CaptureInvalidated`]; the driver's.
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
            // The legacy default stream takes part in none, while one that is ordered with it does.
            Err(refused) if refused.code == CAPTURE_IMPLICIT => Ok(None),
            Err(refused) => Err(self.lost(refused)),
        }
    }

    /// The handle must be good.
    fn captures(&self) -> Result<bool> {
        self.driver.stream_is_capturing(self.raw).map_err(|e| self.lost(e))
    }

    /// An error if the stream captures; waits for it, and by it, would break the capture. The
    /// handle must be good.
    pub(crate) fn refuse_capturing(&self) -> Result<()> {
        if self.captures()? { Err(self.capturing()) } else { Ok(()) }
    }

    fn capturing(&self) -> MemoryError {
        MemoryError::Capturing { stream: self.raw.handle() }
    }

    /// The error for an epoch that could not be fenced.
    fn unfenced(&self, fence: Fence) -> Result<()> {
        match fence {
            Fence::Standing | Fence::Recorded => Ok(()),
            Fence::Capturing => Err(self.capturing()),
            Fence::OutOfReach if self.life.is_meant_here() => Err(MemoryError::UnknownId),
            Fence::OutOfReach => Err(self.of_another_thread()),
        }
    }

    /// Fences `epoch` of a stream that cannot be fenced later; nothing is to be done for others.
    ///
    /// # Errors
    /// Those that kept the event from being recorded. What ends in `epoch` is held back until a
    /// later event covers it.
    pub fn fence_at_once(&self, epoch: u64) -> Result<()> {
        if self.fences_at_once() { self.unfenced(self.fence(epoch)?) } else { Ok(()) }
    }

    fn of_another_thread(&self) -> MemoryError {
        MemoryError::OtherThread { stream: self.raw.handle() }
    }

    /// Announces driver calls for the handle, which stays good while the answer lives. Not to be
    /// held while another stream's is asked for.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] for a stream that has been retired, [`MemoryError::OtherThread`]
    /// for another thread's default stream, [`MemoryError::DeviceLost`].
    pub fn calling(&self) -> Result<Calling<'_>> {
        if !self.life.is_meant_here() {
            return Err(self.of_another_thread());
        }
        self.retirement.enter().map_err(|ended| match ended {
            Ended::Lost => MemoryError::DeviceLost { device: self.raw.device() },
            Ended::Retired => MemoryError::UnknownId,
        })
    }

    fn take_event(&self) -> Result<Arc<OwnedEvent>> {
        self.spare.take(&self.driver, self.raw.device()).map_err(|e| self.lost(e))
    }

    fn lost(&self, error: DriverError) -> MemoryError {
        MemoryError::driver(self.raw.device(), error)
    }

    /// Looks which recorded events have passed, oldest first, and stops at the first that has not.
    /// Never blocks.
    ///
    /// # Errors
    /// The driver's, or those of work queued before.
    pub fn poll(&self) -> Result<()> {
        while let Some((epoch, event)) = self.epochs.oldest() {
            let _relaxed = Relaxed::enter(&*self.driver);
            match self.driver.event_query(event.raw) {
                Ok(true) => {
                    drop(event);
                    self.finish(epoch);
                }
                Ok(false) => break,
                Err(refused) if refused.code == CAPTURED_EVENT => {
                    drop(self.disproved(epoch, refused));
                }
                Err(refused) => return Err(self.lost(refused)),
            }
        }
        Ok(())
    }

    /// The error of a question about the event that was published for `epoch`. Where a capture
    /// began and ended around the record, unseen by both looks, the event is part of a graph and is
    /// taken back.
    fn disproved(&self, epoch: u64, error: DriverError) -> MemoryError {
        if error.code == CAPTURED_EVENT {
            drop(self.epochs.withdraw(epoch));
        }
        self.lost(error)
    }

    fn finish(&self, epoch: u64) {
        let over = self.epochs.finish(epoch);
        if over.is_empty() {
            return;
        }
        self.spare.keep(over);
    }

    /// Makes this stream wait for `epoch` of another, on the device; the host does not wait. Says
    /// whether a wait had to be queued. Where both take part in one capture the wait becomes part
    /// of it.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if this stream has been retired; [`MemoryError::Capturing`] if
    /// only one of the two captures a graph, or each another, whose captures stay whole;
    /// [`MemoryError::OtherThread`] if one is the default stream of another thread, which
    /// has not been fenced there; the driver's. What was queued before is as it was.
    pub fn wait_for(&self, other: &Timeline, epoch: u64) -> Result<bool> {
        let same = std::ptr::eq(self, other);
        if same || other.is_done(epoch) || self.waited.has(other.serial, epoch) {
            return Ok(false);
        }
        same_machine(&*self.driver, &*other.driver)?;
        let fence = other.fence(epoch)?;
        if fence == Fence::Capturing && self.shares_capture(other)? {
            return self.join_capture(other).map(|()| true);
        }
        other.unfenced(fence)?;
        let Some((proved, event)) = other.epochs.proof(epoch) else {
            // It was seen done between the two looks.
            return Ok(false);
        };
        {
            let _calling = self.calling()?;
            self.refuse_capturing()?;
            self.driver.stream_wait_event(self.raw, event.raw).map_err(|e| self.lost(e))?;
        }
        drop(event);
        self.waited.note(other.serial, proved);
        Ok(true)
    }

    /// Makes this stream wait for all that `other` has captured so far, and so join its capture or,
    /// if it is part of that already, rejoin it (`cuEventRecord`, `cuStreamWaitEvent`). The event
    /// advances no epoch: what it stands for runs when the graph is launched.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if one of the two has been retired; the driver's.
    pub(crate) fn join_capture(&self, other: &Timeline) -> Result<()> {
        let event = {
            let _calling = other.calling()?;
            let event = other.take_event()?;
            other.driver.event_record(event.raw, other.raw).map_err(|e| other.lost(e))?;
            event
        };
        let _calling = self.calling()?;
        self.driver.stream_wait_event(self.raw, event.raw).map_err(|e| self.lost(e))
    }

    /// Whether both streams take part in the same capture.
    fn shares_capture(&self, other: &Self) -> Result<bool> {
        Ok(self
            .capture()?
            .is_some_and(|mine| other.capture().is_ok_and(|theirs| theirs == Some(mine))))
    }

    /// Blocks until `epoch` is done or the deadline has passed; says whether it is done.
    ///
    /// # Errors
    /// Where the epoch has no event and none can be recorded: [`MemoryError::Capturing`] at once;
    /// without a deadline the whole device is waited for if the stream is out of reach, with one
    /// that is [`MemoryError::OtherThread`] or [`MemoryError::UnknownId`]. The driver's, or those
    /// of work queued before.
    pub fn wait(&self, epoch: u64, deadline: Option<Instant>) -> Result<bool> {
        if self.is_done(epoch) {
            return Ok(true);
        }
        match self.fence(epoch)? {
            Fence::OutOfReach if deadline.is_none() => {
                return self.synchronize_device().map(|()| true);
            }
            fence => self.unfenced(fence)?,
        }
        let Some((proved, event)) = self.epochs.proof(epoch) else {
            return Ok(self.is_done(epoch));
        };
        let Some(deadline) = deadline else {
            let _relaxed = Relaxed::enter(&*self.driver);
            self.driver.event_synchronize(event.raw).map_err(|e| self.disproved(proved, e))?;
            self.finish(proved);
            self.spare.keep([event]);
            return Ok(true);
        };
        // The driver has no wait with a deadline.
        let mut pause = Duration::from_micros(1);
        loop {
            let done = {
                let _relaxed = Relaxed::enter(&*self.driver);
                self.driver.event_query(event.raw).map_err(|e| self.disproved(proved, e))?
            };
            if done {
                self.finish(proved);
                self.spare.keep([event]);
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits for all that is queued, and notes that it is done. There is nothing to wait for in a
    /// stream that has been retired.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; the driver's, or those of work queued before.
    pub fn synchronize(&self) -> Result<()> {
        let _calling = match self.calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId) => return Ok(()),
            Err(MemoryError::OtherThread { .. }) => return self.synchronize_device(),
            Err(error) => return Err(error),
        };
        self.synchronize_now()
    }

    /// Waits until what was noted of the stream is done, for those who may call when its handle is
    /// gone: what was fenced at once is waited for by its events, everything else by
    /// [`Timeline::synchronize`]. Blocks.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if something could not be fenced when it had to be; as
    /// [`Timeline::synchronize`].
    pub fn quiesce(&self) -> Result<()> {
        if !matches!(self.life, Life::Fenced) {
            return self.synchronize();
        }
        // Nothing is noted in an epoch without closing it.
        let last = self.open() - 1;
        if !self.is_fenced(last) && !self.is_retired() {
            return Err(MemoryError::UnknownId);
        }
        self.wait(last, None).map(drop)
    }

    /// Waits for all that is queued on the device, and notes that this stream's part is done
    /// (`cuCtxSynchronize`).
    fn synchronize_device(&self) -> Result<()> {
        let _relaxed = Relaxed::enter(&*self.driver);
        let closed = self.epochs.close();
        self.driver.device_synchronize(self.raw.device()).map_err(|e| self.lost(e))?;
        self.finish(closed);
        Ok(())
    }

    /// As [`Timeline::synchronize`], by a word of pinned memory that the device writes, which is
    /// shorter on some machines: [`Streams::stream_watch`](aquifer_driver::Streams::stream_watch).
    ///
    /// # Safety
    /// 1. As there, of `word`.
    ///
    /// # Errors
    /// As [`Timeline::synchronize`]; [`MemoryError::Capturing`] also where a capture has ended
    /// meanwhile of which the write became a part, and with it maybe what was queued before.
    #[expect(unsafe_code, reason = "passes a caller's promise on")]
    pub unsafe fn synchronize_by(&self, word: &AtomicU32) -> Result<()> {
        let value = word.load(Ordering::Relaxed).wrapping_add(1);
        let watched = self.calling().ok().map(|_calling| {
            let closed = self.epochs.close();
            // SAFETY: 1. the caller's.
            (closed, unsafe { self.driver.stream_watch(self.raw, word, value) })
        });
        match watched {
            Some((closed, Ok(true))) => self.finish(closed),
            Some((_, Ok(false))) => {
                self.synchronize()?;
                if word.load(Ordering::Acquire) != value {
                    return Err(self.capturing());
                }
            }
            // What was refused is refused again, or can be waited for all the same.
            Some((_, Err(_))) | None => self.synchronize()?,
        }
        Ok(())
    }

    /// The handle must be good.
    fn synchronize_now(&self) -> Result<()> {
        let _relaxed = Relaxed::enter(&*self.driver);
        self.refuse_capturing()?;
        let closed = self.epochs.close();
        self.driver.stream_synchronize(self.raw).map_err(|e| self.lost(e))?;
        self.finish(closed);
        Ok(())
    }

    /// As [`Timeline::synchronize`], by every means that the driver has, again and again, for a
    /// second: for callers that can hold back what the work touches if the driver refuses them all.
    /// Blocks.
    ///
    /// # Errors
    /// [`MemoryError::DeviceLost`], [`MemoryError::Capturing`] and those of a driver [that is
    /// gone](DriverError::is_driver_gone) at once; the last refusal after a second, and work may
    /// still run then.
    pub fn settle(&self) -> Result<()> {
        let (mut given_up, mut pause) = (None, Duration::from_micros(10));
        loop {
            let refused = match self.synchronize() {
                Ok(()) => return Ok(()),
                Err(at_once @ (MemoryError::DeviceLost { .. } | MemoryError::Capturing { .. })) => {
                    return Err(at_once);
                }
                Err(MemoryError::Driver(gone)) if gone.is_driver_gone() => {
                    return Err(MemoryError::Driver(gone));
                }
                Err(refused) => refused,
            };
            if self.wait(self.open(), None).is_ok() || self.synchronize_device().is_ok() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= *given_up.get_or_insert(now + PATIENCE) {
                return Err(refused);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_REFUSED);
        }
    }

    /// As [`Timeline::settle`], for callers that cannot hold back what the work touches, such as
    /// memory that is borrowed: does not return while work may run. Blocks.
    ///
    /// # Aborts
    /// Ends the process with a message if the driver refuses every way to wait for ten seconds and
    /// is neither lost nor gone. To return would let a device write memory that has another owner
    /// by then, to wait for ever would hang without a word, and neither can be mended by the
    /// caller.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]: what was queued may be part of a graph. [`MemoryError::DeviceLost`] and those of a driver
    /// [that is gone](DriverError::is_driver_gone): nothing that was queued runs any more.
    pub fn settle_or_abort(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match self.settle() {
                Err(MemoryError::Driver(refused)) if !refused.is_driver_gone() => {
                    if begun.elapsed() >= LAST_RESORT {
                        self.abort(refused);
                    }
                }
                settled => return settled,
            }
        }
    }

    #[cold]
    fn abort(&self, refused: DriverError) -> ! {
        // A standard error that is closed changes nothing.
        let _ = writeln!(
            io::stderr(),
            "aquifer: {} has refused every wait for stream {} for {} s ({refused}). Copies that it may still run touch memory \
             that is about to be freed, so the process ends here.",
            self.raw.device(),
            self.number,
            LAST_RESORT.as_secs(),
        );
        process::abort()
    }

    /// Synchronises, and never calls the driver for this stream again: its handle is about to be
    /// destroyed. Whoever goes on using the stream gets errors. Blocks, also until other threads'
    /// calls for it are over.
    ///
    /// A stream of a pool's own is synchronised and lives on: its handle is the pool's to destroy.
    /// So does the legacy default stream. A thread's default stream is retired by its thread,
    /// before that ends.
    ///
    /// # Errors
    /// [`MemoryError::OtherThread`]; the driver's; the stream is not retired.
    pub fn retire(&self) -> Result<()> {
        if self.life.outlives_retirement() {
            return self.synchronize();
        }
        if !self.life.is_meant_here() {
            return Err(self.of_another_thread());
        }
        let ended = self.retirement.end(|| {
            self.synchronize_now()?;
            self.finish(u64::MAX);
            Ok(())
        });
        ended.unwrap_or(Ok(()))
    }

    /// Whether the stream's handle is gone or about to go.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.retirement.is_over()
    }

    /// Ends the account of a stream whose device is lost: what was queued never runs. A stream that
    /// can be waited for after all is waited for instead, and lives on. Blocks.
    pub fn abandon(&self) {
        if self.settle().is_ok() {
            return;
        }
        self.finish(u64::MAX);
        self.retirement.lose();
    }

    /// The number that the pool called `key` keeps for this stream.
    #[inline]
    #[must_use]
    pub fn attachment(&self, key: u64) -> Option<u32> {
        self.attachments.get(key)
    }

    /// Keeps `number` for the pool called `key`, unless it keeps one already; answers with the one
    /// that is kept. `key` must never have another meaning.
    pub fn attach(&self, key: u64, number: u32) -> u32 {
        self.attachments.attach(key, number)
    }

    /// Lets go of what was kept for `key`, where it can; the first pool's stays and is never asked
    /// for again.
    pub fn detach(&self, key: u64) {
        self.attachments.detach(key);
    }
}

impl Drop for Timeline {
    #[expect(unsafe_code, reason = "ends a handle")]
    fn drop(&mut self) {
        if matches!(self.life, Life::Owned) {
            let (driver, raw) = (self.driver.clone(), self.raw);
            // Work that is still queued runs on. SAFETY: 1. the stream was made for this timeline,
            // and who copies its handle out keeps the timeline; no release of it has succeeded yet.
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
