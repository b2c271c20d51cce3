//! A leased stream, as the user holds it.

use crate::Timeline;
use aquifer_core::{DeviceId, Gate, Id, MemoryError, Result, wake::Opened};
use aquifer_driver::{Driver, RawStream, same_machine, site};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// A stream leased from a [`StreamPool`](crate::StreamPool), or adopted by one.
///
/// Clones share the lease, which ends with the last of them. Queued work runs on. The next user of
/// the stream queues behind it.
#[derive(Clone)]
pub struct Stream {
    pub(crate) lease: Arc<StreamLease>,
}

impl Stream {
    /// Returns the id of the stream in its pool.
    #[must_use]
    pub fn id(&self) -> Id<Stream> {
        self.lease.id
    }

    /// Returns the number of the stream in its pool, for messages. Leased streams are numbered from
    /// 0, adopted ones from the pool's cap.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.lease.timeline.number()
    }

    /// Returns the device of the stream.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.lease.timeline.raw().device()
    }

    /// Returns the driver's handle. It is valid while this lease lasts. The handle of an adopted
    /// stream is valid as its [`StreamLifetime`](crate::StreamLifetime) says.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        self.lease.timeline.raw()
    }

    /// Returns the driver of the stream.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.lease.timeline.driver()
    }

    /// Returns the timeline of the stream.
    #[inline]
    #[must_use]
    #[doc(hidden)]
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.lease.timeline
    }

    /// Waits until all queued work is complete. Blocks. The device pool of the stream then applies
    /// its release threshold, as CUDA's does.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`], and driver errors, including those of the work itself.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let _site = site::enter();
        self.timeline().synchronize()?;
        self.lease.pool.synchronized();
        Ok(())
    }

    /// Returns whether all queued work is complete. Returns `true` for a retired stream. Never
    /// blocks.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`], and driver errors, including those of the work itself.
    #[track_caller]
    pub fn is_idle(&self) -> Result<bool> {
        let _site = site::enter();
        let _calling = match self.timeline().calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId) => return Ok(true),
            Err(error) => return Err(error),
        };
        self.timeline().check_not_capturing()?;
        self.driver().stream_query(self.raw()).map_err(|e| MemoryError::driver(self.device(), e))
    }

    /// Makes later work on this stream wait for all work queued on `other` so far. The host does
    /// not wait.
    ///
    /// If `other` captures a graph, this stream joins the capture until it ends. This is the
    /// driver's way to fork a capture and, with the streams exchanged, to join it again.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if this stream is retired, [`MemoryError::Capturing`] if this
    /// stream captures and `other` does not, and driver errors.
    #[track_caller]
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        let _site = site::enter();
        let (mine, theirs) = (self.timeline(), other.timeline());
        same_machine(&**self.driver(), &**other.driver())?;
        if !Arc::ptr_eq(mine, theirs) && theirs.is_capturing()? {
            return mine.join_capture(theirs);
        }
        mine.wait_for(theirs, theirs.open()).map(drop)
    }

    /// Returns a gate that opens when all work queued so far is complete.
    #[must_use]
    pub fn point(&self) -> Point {
        let point = Point::ahead(self.timeline());
        point.reached();
        point
    }

    /// Retires an adopted stream that its owner is about to destroy. Blocks until its work is
    /// complete. Later work that other clones queue is refused with [`MemoryError::UnknownId`].
    ///
    /// A leased stream belongs to its pool: it is synchronised and returns to the pool.
    ///
    /// # Errors
    /// Driver errors. The stream is not retired then.
    #[track_caller]
    pub fn retire(self) -> Result<()> {
        let _site = site::enter();
        self.timeline().retire()
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.timeline(), other.timeline())
    }
}
impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("number", &self.number())
            .field("raw", &self.raw())
            .finish_non_exhaustive()
    }
}

/// A pool that leased a stream.
pub(crate) trait ReturnSlot: Send + Sync {
    /// Makes the stream of this slot available to the next lease.
    fn return_slot(&self, slot: u32);

    /// Called when a thread has waited for a stream of the pool.
    fn synchronized(&self);
}

/// One lease. The stream returns to the pool when the last clone is dropped.
pub(crate) struct StreamLease {
    /// Lives as long as its leases.
    pool: Arc<dyn ReturnSlot>,
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) id: Id<Stream>,
    /// The slot it returns to, or `None` for an adopted stream.
    slot: Option<u32>,
}

impl StreamLease {
    pub(crate) fn new(
        pool: Arc<dyn ReturnSlot>,
        timeline: &Arc<Timeline>,
        id: Id<Stream>,
        slot: Option<u32>,
    ) -> Arc<Self> {
        timeline.begin_lease();
        Arc::new(Self { pool, timeline: timeline.clone(), id, slot })
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        self.timeline.end_lease();
        if let Some(slot) = self.slot {
            self.pool.return_slot(slot);
        }
    }
}

/// A point in a stream's queue, as a [`Gate`] that opens when all work before it is complete.
///
/// It may be created before its work is queued, and passed to its waiters. It stays shut until
/// [`Point::reached`] is called after the work is queued.
///
/// ```
/// use aquifer::{DeviceId, Gate, StreamPool, sim::Sim, stream::Point};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
/// let stream = streams.lease()?;
/// let point = Point::ahead(stream.timeline());
/// assert!(!point.is_open());               // its work is not queued yet
/// // … work is queued on the stream …
/// point.reached();
/// assert!(point.wait(None)?);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Point {
    timeline: Arc<Timeline>,
    /// 0 until the work is queued.
    epoch: Arc<AtomicU64>,
}

impl Point {
    /// Creates a point whose work is still to be queued.
    #[must_use]
    #[doc(hidden)]
    pub fn ahead(timeline: &Arc<Timeline>) -> Self {
        Self { timeline: timeline.clone(), epoch: Arc::new(AtomicU64::new(0)) }
    }

    /// Declares that all work of the point is queued. Further calls have no effect.
    pub fn reached(&self) {
        let epoch = self.timeline.open();
        // A later epoch would also be correct, but opens later.
        let _ = self.epoch.compare_exchange(0, epoch, Ordering::Release, Ordering::Relaxed);
    }

    /// Returns the epoch if the point is reached.
    fn epoch(&self) -> Option<u64> {
        Some(self.epoch.load(Ordering::Acquire)).filter(|&epoch| epoch != 0)
    }
}

impl Gate for Point {
    fn is_open(&self) -> bool {
        let Some(epoch) = self.epoch() else { return false };
        if self.timeline.is_done(epoch) {
            return true;
        }
        let polled = self.timeline.fence(epoch).and_then(|_| self.timeline.poll());
        polled.is_ok() && self.timeline.is_done(epoch)
    }

    fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        loop {
            if let Some(epoch) = self.epoch() {
                return self.timeline.wait(epoch, deadline);
            }
            // The point was passed on before its work was queued. Another thread is about to queue
            // it.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }
}

/// The future is ready when all work before the point is complete. It fails when the driver can no
/// longer report completion. It needs no runtime, see [`aquifer_core::wake`].
///
/// ```
/// use aquifer::{Stream, error::Result};
/// /// Returns when all work queued so far is complete. Blocks no thread.
/// async fn finished(stream: &Stream) -> Result<()> {
///     stream.point().await
/// }
/// ```
impl IntoFuture for Point {
    type Output = Result<()>;
    type IntoFuture = Opened;

    fn into_future(self) -> Opened {
        Opened::of(Arc::new(self))
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Point")
            .field("stream", &self.timeline.number())
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}
