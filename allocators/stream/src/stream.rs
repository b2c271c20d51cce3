//! A leased stream, as its user holds it.

use crate::{Timeline, pool::Leased};
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
/// Clones share the lease, which ends with the last of them. What was queued runs on, and the next
/// who leases the stream queues behind it.
#[derive(Clone)]
pub struct Stream {
    pub(crate) lease: Arc<Leased>,
}

impl Stream {
    /// Its name in its pool.
    #[must_use]
    pub fn id(&self) -> Id<Stream> {
        self.lease.id
    }

    /// Its number in its pool, for people: leased streams from 0, adopted ones from the pool's cap
    /// on.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.lease.timeline.number()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.lease.timeline.raw().device()
    }

    /// The driver's handle, valid while this lease lasts; of an adopted stream, as long as its
    /// [`Life`](crate::Life) says.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        self.lease.timeline.raw()
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.lease.timeline.driver()
    }

    /// Its past.
    #[inline]
    #[must_use]
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.lease.timeline
    }

    /// Waits until all that was queued is done. Blocks.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; the driver's, and those of the work itself.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let site = site::enter();
        self.timeline().synchronize()?;
        site.checkpoint(&**self.driver());
        Ok(())
    }

    /// Whether all that was queued is done; it is in a stream that has been retired. Never blocks.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; the driver's, and those of the work itself.
    #[track_caller]
    pub fn is_idle(&self) -> Result<bool> {
        let _site = site::enter();
        let _calling = match self.timeline().calling() {
            Ok(calling) => calling,
            Err(MemoryError::UnknownId) => return Ok(true),
            Err(error) => return Err(error),
        };
        self.timeline().refuse_capturing()?;
        self.driver().stream_query(self.raw()).map_err(|e| MemoryError::driver(self.device(), e))
    }

    /// Makes work queued here from now on wait for all that is queued on `other` now. The host does
    /// not wait.
    ///
    /// If `other` captures a graph this stream joins the capture, and is part of it until that
    /// ends: the driver's way to fork a capture, and, with the two changed over, to join it again.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] if this stream has been retired; [`MemoryError::Capturing`] if
    /// this stream captures and `other` does not; the driver's.
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

    /// A gate that opens when all that is queued now is done.
    #[must_use]
    pub fn point(&self) -> Point {
        let point = Point::ahead(self.timeline());
        point.reached();
        point
    }

    /// Ends the account of an adopted stream, which its owner is about to destroy. Blocks until its
    /// work is done. What other clones queue from then on is refused with
    /// [`MemoryError::UnknownId`].
    ///
    /// A leased stream is its pool's: it is synchronised, and comes back to the pool.
    ///
    /// # Errors
    /// The driver's; the stream is not retired.
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

/// A point in a stream's queue, as a [`Gate`]: open when everything before it is done.
///
/// It may be made ahead of the work it stands for, and given to whoever must wait for it; it stays
/// shut until [`Point::reached`] says that the work is queued.
///
/// ```
/// use aquifer_core::Gate;
/// use aquifer_driver::{DeviceId, sim::Sim};
/// use aquifer_stream::{Point, StreamPool};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
/// let stream = streams.lease()?;
/// let point = Point::ahead(stream.timeline());
/// assert!(!point.is_open());               // its work is still to be queued
/// // … work is queued on the stream …
/// point.reached();
/// assert!(point.wait(None)?);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Point {
    timeline: Arc<Timeline>,
    /// 0 until the work is queued.
    epoch: Arc<AtomicU64>,
}

impl Point {
    /// A point that has not been reached: the work that it stands for is still to be queued.
    #[must_use]
    pub fn ahead(timeline: &Arc<Timeline>) -> Self {
        Self { timeline: timeline.clone(), epoch: Arc::new(AtomicU64::new(0)) }
    }

    /// All that the point stands for is queued. Further calls change nothing.
    pub fn reached(&self) {
        let epoch = self.timeline.open();
        // A later epoch would be right too, only later.
        let _ = self.epoch.compare_exchange(0, epoch, Ordering::Release, Ordering::Relaxed);
    }

    /// The epoch, once the point is reached.
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
        let looked = self.timeline.fence(epoch).and_then(|_| self.timeline.poll());
        looked.is_ok() && self.timeline.is_done(epoch)
    }

    fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        loop {
            if let Some(epoch) = self.epoch() {
                return self.timeline.wait(epoch, deadline);
            }
            // Between a gate's making and its work there is a driver call of another thread.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }
}

/// A point may be awaited: the future is ready when all that the point stands for is done, and
/// fails when the driver can no longer tell. It needs no runtime, see [`aquifer_core::wake`].
///
/// ```
/// use aquifer_core::Result;
/// use aquifer_stream::Stream;
/// /// Returns when all that is queued on the stream by now is done. Blocks no thread.
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
