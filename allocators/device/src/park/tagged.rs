//! The memories of a tag, which are parked and resumed together: of all or of none.
//!
//! Both directions have two steps. The first does what can fail, and can be undone. The second
//! cannot fail. So several tags, also of several devices, can be parked or resumed as one.

use super::{
    saved::{RestoredContents, SavedContents, SavedPiece},
    settings::{Park, ParkReport, QUIESCE_POLL, ResumeReport},
};
use crate::{DevicePool, pool_core::PoolCore};
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_heap::Range;
use std::{fmt, sync::Arc, thread, time::Instant};

/// What a resume brings back.
pub(crate) struct ParkedContents {
    pub(crate) slots: Vec<u64>,
    /// The size of a slot in bytes.
    pub(crate) slot: u64,
    /// The live blocks.
    pub(crate) ranges: Vec<Range>,
    pub(crate) pieces: Vec<SavedPiece>,
}

/// Memory of a tag that can be parked.
pub(crate) trait TaggedMemory: Send + Sync {
    fn tag(&self) -> Tag;

    /// Returns whether uses are refused.
    fn is_parked(&self) -> bool;

    /// Returns the bytes of physical memory that are charged for it.
    fn charged_bytes(&self) -> u64;

    /// Refuses further uses, waits until `until` for those that are queued, and saves the contents.
    /// On failure nothing has changed.
    fn begin_park(
        &self,
        pool: &PoolCore,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<SavedContents>;

    /// Allows uses again, after `begin_park`.
    fn abort_park(&self);

    /// Returns the memory to the driver, after `begin_park`, and adds to the report.
    fn finish_park(&self, pool: &PoolCore, saved: SavedContents, report: &mut ParkReport);

    /// Maps memory with the saved contents, or does nothing for memory that is resident. Waits
    /// until `until` for another thread that parks or resumes it. On failure everything is still
    /// parked.
    fn begin_resume(
        &self,
        pool: &PoolCore,
        until: Option<Instant>,
    ) -> Result<Option<RestoredContents>> {
        let parked = loop {
            match self.start_resume() {
                Err(MemoryError::Parked { .. })
                    if until.is_some_and(|until| Instant::now() < until) =>
                {
                    thread::sleep(QUIESCE_POLL);
                }
                started => break started?,
            }
        };
        let Some(ParkedContents { slots, slot, ranges, pieces }) = parked else {
            return Ok(None);
        };
        let taken = slots.len() as u64 * slot;
        let mut restored = RestoredContents { pieces, taken, ..RestoredContents::default() };
        match self.restore_resident(pool, &slots, &ranges, until, &mut restored) {
            Ok(()) => Ok(Some(restored)),
            Err(error) => {
                self.park_again(restored.pieces);
                Err(error)
            }
        }
    }

    /// Returns the memory to the driver again, after `begin_resume`.
    fn abort_resume(&self, restored: RestoredContents) {
        self.unmap_again(restored.taken);
        self.park_again(restored.pieces);
    }

    /// Returns what was parked, and refuses other resumes. Returns `None` for memory that is
    /// resident.
    fn start_resume(&self) -> Result<Option<ParkedContents>>;

    /// Maps memory for the slots, and copies the contents of the ranges back. On failure nothing is
    /// mapped.
    fn restore_resident(
        &self,
        pool: &PoolCore,
        slots: &[u64],
        ranges: &[Range],
        until: Option<Instant>,
        restored: &mut RestoredContents,
    ) -> Result<()>;

    /// Returns the memory that a resume has mapped to the driver.
    fn unmap_again(&self, taken: u64);

    /// Ends a resume that has no memory, with the contents as they were saved.
    fn park_again(&self, pieces: Vec<SavedPiece>);

    /// Allows uses again, after `begin_resume`, and adds to the report.
    fn finish_resume(&self, restored: RestoredContents, report: &mut ResumeReport);
}

/// A park whose contents are saved, and whose memory is still there. From
/// [`DevicePool::begin_park`].
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
    pool: DevicePool,
    parts: Vec<(Arc<dyn TaggedMemory>, SavedContents)>,
    report: ParkReport,
    began: Instant,
}

impl PendingPark {
    pub(super) fn begin(
        pool: &DevicePool,
        memories: Vec<Arc<dyn TaggedMemory>>,
        tag: Tag,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<Self> {
        let (pool, parts) = (pool.clone(), Vec::with_capacity(memories.len()));
        let mut pending = Self { pool, parts, report: ParkReport::of(tag), began: Instant::now() };
        for memory in memories {
            let saved = memory.begin_park(pending.pool.core(), how, until)?;
            pending.parts.push((memory, saved));
        }
        Ok(pending)
    }

    /// Returns the memory to the driver (`cuMemUnmap`, `cuMemRelease`). Never waits for work.
    pub fn commit(mut self) -> ParkReport {
        let mut report = self.report.clone();
        for (memory, saved) in std::mem::take(&mut self.parts) {
            memory.finish_park(self.pool.core(), saved, &mut report);
        }
        report.kept.shared = self.pool.core().held_by(report.tag);
        report.took = self.began.elapsed();
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
        f.debug_struct("PendingPark").field("tag", &self.report.tag).finish_non_exhaustive()
    }
}

/// A resume whose memory is mapped and has its contents. From [`DevicePool::begin_resume`].
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
    parts: Vec<(Arc<dyn TaggedMemory>, RestoredContents)>,
    report: ResumeReport,
    began: Instant,
}

impl PendingResume {
    pub(super) fn begin(
        pool: &PoolCore,
        memories: Vec<Arc<dyn TaggedMemory>>,
        tag: Tag,
        until: Option<Instant>,
    ) -> Result<Self> {
        let parts = Vec::with_capacity(memories.len());
        let mut pending = Self { parts, report: ResumeReport::of(tag), began: Instant::now() };
        for memory in memories {
            if let Some(restored) = memory.begin_resume(pool, until)? {
                pending.parts.push((memory, restored));
            }
        }
        Ok(pending)
    }

    /// Allows uses again, and frees the saved contents. Makes no driver call, apart from those of
    /// the host memory's allocator.
    pub fn commit(mut self) -> ResumeReport {
        let mut report = self.report.clone();
        for (memory, restored) in std::mem::take(&mut self.parts) {
            memory.finish_resume(restored, &mut report);
        }
        report.took = self.began.elapsed();
        report
    }
}

impl Drop for PendingResume {
    fn drop(&mut self) {
        for (memory, restored) in std::mem::take(&mut self.parts) {
            memory.abort_resume(restored);
        }
    }
}

impl fmt::Debug for PendingResume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingResume").field("tag", &self.report.tag).finish_non_exhaustive()
    }
}
