//! Parks and resumes that are prepared, and complete or undone later.

use crate::{
    pool_core::PoolCore,
    slot_memory::{Park, ParkReport, RestoredContents, ResumeReport, SavedBlock, SlotMemory},
};
use aquifer_core::Result;
use std::{fmt, mem, sync::Arc, time::Instant};

/// A park whose contents are saved, and whose memory is still there. From
/// [`DevicePool::begin_park`](crate::DevicePool::begin_park).
///
/// Dropping it allows uses again, as if nothing had happened.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, Park, PoolConfig, Request, Tag, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (stream, tag) = (pool.stream()?, Tag::named("two steps"));
/// let parkable = pool.parkable(tag)?;
/// let block = parkable.alloc(&stream, Request::bytes(4096))?;
/// # #[expect(unsafe_code, reason = "parks what nothing uses")]
/// // SAFETY: 1. and 2. nothing uses the block.
/// let pending = unsafe { pool.begin_park(tag, Park::discard()) }?;
/// assert!(parkable.is_parked());
/// drop(pending);
/// assert!(!parkable.is_parked());
/// # drop(block);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[must_use = "dropping it makes everything resident again"]
pub struct PendingPark {
    parts: Vec<(Arc<SlotMemory>, Vec<SavedBlock>)>,
}

impl PendingPark {
    pub(super) fn begin(
        pool: &PoolCore,
        memories: Vec<Arc<SlotMemory>>,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<Self> {
        let mut pending = Self { parts: Vec::with_capacity(memories.len()) };
        for memory in memories {
            let saved = memory.begin_park(pool, how, until)?;
            pending.parts.push((memory, saved));
        }
        Ok(pending)
    }

    /// Returns the memory to the driver (`cuMemUnmap`, `cuMemRelease`). Never waits for work.
    pub fn commit(mut self) -> ParkReport {
        let mut report = ParkReport::default();
        for (memory, saved) in mem::take(&mut self.parts) {
            memory.finish_park(saved, &mut report);
        }
        report
    }
}

impl Drop for PendingPark {
    fn drop(&mut self) {
        self.parts.iter().for_each(|(memory, _)| memory.abort_park());
    }
}

impl fmt::Debug for PendingPark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingPark").finish_non_exhaustive()
    }
}

/// A resume whose memory is mapped and has its contents. From
/// [`DevicePool::begin_resume`](crate::DevicePool::begin_resume).
///
/// Dropping it parks the memory again, with the contents that were saved. That makes driver calls,
/// but copies nothing and waits for no work.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, Park, PoolConfig, Request, Tag, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (stream, tag) = (pool.stream()?, Tag::named("two steps"));
/// let parkable = pool.parkable(tag)?;
/// let block = parkable.alloc(&stream, Request::bytes(4096))?;
/// # #[expect(unsafe_code, reason = "parks what nothing uses")]
/// // SAFETY: 1. and 2. nothing uses the block.
/// unsafe { pool.park(tag, Park::discard()) }?;
/// drop(pool.begin_resume(tag, None)?);
/// assert!(parkable.is_parked());
/// assert_eq!(pool.begin_resume(tag, None)?.commit().blocks, 1);
/// # drop(block);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[must_use = "dropping it parks everything again"]
pub struct PendingResume {
    keeps: bool,
    parts: Vec<(Arc<SlotMemory>, RestoredContents)>,
}

impl PendingResume {
    pub(super) fn begin(
        pool: &PoolCore,
        memories: Vec<Arc<SlotMemory>>,
        until: Option<Instant>,
    ) -> Result<Self> {
        let mut pending = Self { keeps: false, parts: Vec::with_capacity(memories.len()) };
        for memory in memories {
            if let Some(restored) = memory.begin_resume(pool, until)? {
                pending.parts.push((memory, restored));
            }
        }
        Ok(pending)
    }

    /// Keeps the saved contents until the next park of the tag, or until their block is dropped,
    /// for [`DevicePool::read_saved`](crate::DevicePool::read_saved).
    pub fn keep_saved(mut self) -> Self {
        self.keeps = true;
        self
    }

    /// Allows uses again, and frees the saved contents, unless they are kept. Makes no driver call,
    /// apart from those of the host memory's allocator.
    pub fn commit(mut self) -> ResumeReport {
        let mut report = ResumeReport::default();
        for (memory, restored) in mem::take(&mut self.parts) {
            memory.finish_resume(&restored, self.keeps, &mut report);
        }
        report
    }
}

impl Drop for PendingResume {
    fn drop(&mut self) {
        for (memory, restored) in mem::take(&mut self.parts) {
            memory.abort_resume(&restored);
        }
    }
}

impl fmt::Debug for PendingResume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingResume").finish_non_exhaustive()
    }
}
