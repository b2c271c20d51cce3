//! Announcements: which captures allocate from which memory.

use super::memory::{Capture, Memory};
use crate::{Block, DevicePool, Request, home::check_home, pool::Inner};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::RawStream;
use aquifer_stream::{Fence, Stream, Timeline};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// The next announcement number.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The streams whose captures an announcement covers.
pub(super) enum Whose {
    Stream(Arc<Timeline>),
    Those(Box<dyn Fn(RawStream) -> bool + Send + Sync>),
}

impl Whose {
    /// Returns whether `timeline`, which takes part in the capture `id`, is covered. A stream that
    /// has joined the capture may allocate before the announced stream does.
    fn includes(&self, timeline: &Arc<Timeline>, id: u64) -> bool {
        match self {
            Self::Stream(announced) => {
                Arc::ptr_eq(announced, timeline)
                    || announced.capture().is_ok_and(|theirs| theirs == Some(id))
            }
            Self::Those(filter) => filter(timeline.raw()),
        }
    }
}

/// Maps the captures of some streams to a graph memory.
pub(super) struct Announcement {
    number: u64,
    whose: Whose,
    memory: Arc<Memory>,
    /// The driver's number of the last capture that has allocated from it; 0 before the first.
    /// Streams that join that capture use it too.
    capture: AtomicU64,
}

/// The open announcements of a pool. Usually none.
#[derive(Default)]
pub(crate) struct Announcements(Mutex<Vec<Arc<Announcement>>>);

impl Announcements {
    fn open(&self) -> MutexGuard<'_, Vec<Arc<Announcement>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory for blocks of this stream, if it takes part in an announced capture. The
    /// oldest announcement applies. Queries the driver.
    fn memory_for(&self, stream: &Stream) -> Result<Option<(Arc<Memory>, Capture)>> {
        // The filters are foreign code and run without the lock.
        let open = self.open().clone();
        let Some(id) = stream.timeline().capture()? else { return Ok(None) };
        let draws = open.iter().find(|a| a.capture.load(Ordering::Relaxed) == id);
        let found = draws.or_else(|| open.iter().find(|a| a.whose.includes(stream.timeline(), id)));
        Ok(found.map(|announcement| {
            announcement.capture.store(id, Ordering::Relaxed);
            (announcement.memory.clone(), Capture { announced: announcement.number, id })
        }))
    }
}

impl Inner {
    /// Allocates a block for work that `stream` captures, if the capture was announced. The request
    /// has been checked.
    pub(crate) fn allocate_for_graph(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
    ) -> Result<Option<Block>> {
        if self.apart.announced.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        let Some((memory, capture)) = self.announcements.memory_for(stream)? else {
            return Ok(None);
        };
        memory.allocate(stream, request, capture).map(Some)
    }
}

/// An open announcement: see [`GraphPool::announce`](super::GraphPool::announce). It ends when it
/// is dropped, or with [`Announced::end`].
#[must_use = "it ends when it is dropped"]
pub struct Announced {
    pool: DevicePool,
    announcement: Arc<Announcement>,
    /// Whether launches of the captured graph will be recorded.
    noted: bool,
}

impl Announced {
    /// # Errors
    /// [`MemoryError::WrongDevice`]; [`MemoryError::AlreadyAnnounced`].
    pub(super) fn new(pool: &DevicePool, memory: &Arc<Memory>, whose: Whose) -> Result<Self> {
        if let Whose::Stream(timeline) = &whose {
            check_home(&**pool.driver(), pool.device(), timeline)?;
        }
        let announcement = Arc::new(Announcement {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            whose,
            memory: memory.clone(),
            capture: AtomicU64::new(0),
        });
        let inner = pool.inner();
        {
            let mut open = inner.announcements.open();
            if let Whose::Stream(timeline) = &announcement.whose
                && open.iter().any(
                    |a| matches!(&a.whose, Whose::Stream(other) if Arc::ptr_eq(other, timeline)),
                )
            {
                return Err(MemoryError::AlreadyAnnounced { stream: timeline.raw().handle() });
            }
            open.push(announcement.clone());
        }
        // Relaxed: the announcement precedes the capture, so allocations in it see this count.
        inner.apart.announced.fetch_add(1, Ordering::Relaxed);
        inner.add_detour();
        let announced = Self { pool: pool.clone(), announcement, noted: false };
        let number = announced.announcement.number;
        memory.passes(number);
        // Fence the work that runs already, while that is possible.
        if let Whose::Stream(timeline) = &announced.announcement.whose
            && timeline.fence(timeline.open()) == Ok(Fence::Recorded)
        {
            memory.was_fenced(number, timeline, timeline.open() - 1);
        }
        Ok(announced)
    }

    /// Ends the announcement and returns the memory. The caller records the launches of the
    /// captured graph.
    pub(super) fn end_noted(mut self) -> Arc<Memory> {
        self.noted = true;
        self.announcement.memory.clone()
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let inner = self.pool.inner();
        let gone = {
            let mut open = inner.announcements.open();
            let at = open.iter().position(|a| Arc::ptr_eq(a, &self.announcement));
            at.map(|at| open.remove(at))
        };
        drop(gone);
        inner.end_detour();
        inner.apart.announced.fetch_sub(1, Ordering::Relaxed);
        let Announcement { memory, number, capture, .. } = &*self.announcement;
        if !self.noted && capture.load(Ordering::Relaxed) != 0 {
            memory.lose_sight();
        }
        memory.passes(*number);
    }
}

impl fmt::Debug for Announced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Announced")
            .field("memory", &self.announcement.memory)
            .finish_non_exhaustive()
    }
}
