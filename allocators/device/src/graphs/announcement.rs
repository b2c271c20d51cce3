//! Announcements: which captures allocate from which memory.

use crate::{
    Block, DevicePool, Request,
    base::driver::check_stream_device,
    pool_core::{PoolCore, PoolHook},
    slot_memory::{Capture, SlotMemory},
};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::RawStream;
use aquifer_stream::{Stream, Timeline};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// The next announcement number.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// The streams that an announcement covers.
pub(super) enum AnnouncedStreams {
    /// Its captures.
    Stream(Arc<Timeline>),
    /// All work of those that the filter accepts.
    Matching(Box<dyn Fn(RawStream) -> bool + Send + Sync>),
}

impl AnnouncedStreams {
    /// Returns whether `timeline`, which takes part in the capture `id`, is covered. A stream that
    /// has joined the capture may allocate before the announced stream does.
    fn includes(&self, timeline: &Arc<Timeline>, id: u64) -> bool {
        match self {
            Self::Stream(announced) => {
                Arc::ptr_eq(announced, timeline)
                    || announced.capture().is_ok_and(|other| other == Some(id))
            }
            Self::Matching(filter) => filter(timeline.raw()),
        }
    }
}

/// Maps the captures of some streams to a graph memory.
pub(super) struct Announcement {
    number: u64,
    streams: AnnouncedStreams,
    memory: Arc<SlotMemory>,
    /// The driver's number of the last capture that has allocated from it; 0 before the first.
    /// Streams that join that capture use it too.
    capture: AtomicU64,
}

impl Announcement {
    /// Returns its memory, for the work of a capture or for eager work.
    fn serve(&self, id: u64) -> (Arc<SlotMemory>, Capture) {
        (self.memory.clone(), Capture { announced: self.number, id })
    }
}

/// The open announcements of a pool. Usually none.
#[derive(Default)]
pub(crate) struct Announcements(Mutex<Vec<Arc<Announcement>>>);

impl Announcements {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Announcement>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory for blocks of this stream, if an announcement covers its work. The newest
    /// announcement applies, so that they can be nested. Queries the driver.
    fn memory_for(&self, stream: &Stream) -> Result<Option<(Arc<SlotMemory>, Capture)>> {
        // The filters are foreign code and run without the lock.
        let open = self.lock().clone();
        let Some(id) = stream.timeline().capture()? else {
            let covers = |a: &&Arc<Announcement>| match &a.streams {
                AnnouncedStreams::Stream(_) => false,
                AnnouncedStreams::Matching(filter) => filter(stream.raw()),
            };
            return Ok(open.iter().rev().find(covers).map(|a| a.serve(Capture::EAGER)));
        };
        let covers = |a: &&Arc<Announcement>| {
            a.capture.load(Ordering::Relaxed) == id || a.streams.includes(stream.timeline(), id)
        };
        let found = open.iter().rev().find(covers);
        Ok(found.map(|announcement| {
            announcement.capture.store(id, Ordering::Relaxed);
            announcement.serve(id)
        }))
    }
}

impl PoolHook for Announcements {
    fn allocate(
        &self,
        core: &PoolCore,
        stream: &Stream,
        request: Request,
    ) -> Result<Option<Block>> {
        if core.dedicated.announced.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        let Some((memory, capture)) = self.memory_for(stream)? else {
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
    tracked: bool,
}

impl Announced {
    /// # Errors
    /// [`MemoryError::WrongDevice`]; [`MemoryError::AlreadyAnnounced`].
    pub(super) fn new(
        pool: &DevicePool,
        memory: &Arc<SlotMemory>,
        streams: AnnouncedStreams,
    ) -> Result<Self> {
        if let AnnouncedStreams::Stream(timeline) = &streams {
            check_stream_device(&**pool.driver(), pool.device(), timeline)?;
        }
        let announcement = Arc::new(Announcement {
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            streams,
            memory: memory.clone(),
            capture: AtomicU64::new(0),
        });
        let core = pool.core();
        {
            let mut open = core.feature::<Announcements>().lock();
            if let AnnouncedStreams::Stream(timeline) = &announcement.streams
                && open.iter().any(
                    |a| matches!(&a.streams, AnnouncedStreams::Stream(t) if Arc::ptr_eq(t, timeline)),
                )
            {
                return Err(MemoryError::AlreadyAnnounced { stream: timeline.raw().handle() });
            }
            open.push(announcement.clone());
        }
        // Relaxed: the announcement precedes the capture, so allocations in it see this count.
        core.dedicated.announced.fetch_add(1, Ordering::Relaxed);
        core.add_full_path_reason();
        let announced = Self { pool: pool.clone(), announcement, tracked: false };
        let number = announced.announcement.number;
        memory.count_announcement(true);
        memory.end_announcement(number);
        // Fence the work that runs already, while that is possible.
        if let AnnouncedStreams::Stream(timeline) = &announced.announcement.streams {
            timeline.expect_capture();
            // What cannot be fenced now counts as not done.
            let _ = timeline.fence(timeline.open());
        }
        Ok(announced)
    }

    /// Ends the announcement and returns the memory. The caller records the launches of the
    /// captured graph.
    pub(super) fn end_tracked(mut self) -> Arc<SlotMemory> {
        self.tracked = true;
        self.announcement.memory.clone()
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let core = self.pool.core();
        let gone = {
            let mut open = core.feature::<Announcements>().lock();
            let at = open.iter().position(|a| Arc::ptr_eq(a, &self.announcement));
            at.map(|at| open.remove(at))
        };
        drop(gone);
        core.remove_full_path_reason();
        core.dedicated.announced.fetch_sub(1, Ordering::Relaxed);
        let Announcement { memory, number, capture, .. } = &*self.announcement;
        if !self.tracked && capture.load(Ordering::Relaxed) != 0 {
            memory.mark_untracked();
        }
        memory.end_announcement(*number);
        memory.count_announcement(false);
    }
}

impl fmt::Debug for Announced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Announced")
            .field("memory", &self.announcement.memory)
            .finish_non_exhaustive()
    }
}
