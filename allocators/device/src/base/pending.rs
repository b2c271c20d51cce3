//! The work that freed memory waits for, and what decides when it may be reused.
//!
//! Two facts decide it, and each has one method:
//!
//! - [`PendingUses::are_over`]: the uses by other streams are over. The *owner stream* can reuse
//!   the memory at once, since it is in order with itself.
//! - [`PendingWork::is_over`]: the work of the owner streams is over as well. *Any* stream can
//!   reuse the memory, and it can be unmapped.
//!
//! Neither calls the driver, so both may be asked under a lock. What they find is learned by
//! [`poll`](PendingWork::poll) or [`wait`](PendingWork::wait), and made unnecessary for one stream
//! by [`order_before`](PendingUses::order_before). These call the driver, so a list of pending
//! memory is emptied under its lock, polled without it, and filled again with what still waits.
//!
//! | what waits | kept by | under the lock of | polled by |
//! |---|---|---|---|
//! | a block of a cache | `StreamCache` | the cache | slow paths of its pool |
//! | a block of a source | `SourceAllocator` | the allocator | its calls, and the end of the last open use |
//! | a block of a slot pool | `SlotRanges` | the graph memory or parkable pool | its allocations and trims |
//! | slots of a span | `Span` | the span | `DedicatedPool::reap` |
//! | memory of another library | `Adopted` | the process | creations and drops of such memory |
//!
//! Ranges without uses by other streams store [`StreamDeps`] only: shared free ranges, and
//! zombies, the old mappings of moved handles. Values that wait for a driver that has refused
//! (`release_or_strand`) depend on no stream.
//!
//! # Where another stream takes a free range
//! A slow path asks `is_done` of a range's [`StreamDeps`], which [`Timeline::poll`] has brought up
//! to date. Of these searches only one that `may_wait` takes a range whose work is not done.
//!
//! | memory | taken in | with unfinished work |
//! |---|---|---|
//! | shared free list | `MappedMemory::allocate_shared` | never |
//! | ranges of other caches | `FreeRanges::read_cache`, `read_shared`; `MappedMemory::claim` | `back_window` makes the new stream wait |
//! | handles under free ranges | `MappedMemory::take_mappings` | the same; the old mapping becomes a zombie |
//! | the stream's own frees that others use | `Step::Wait`: `PoolCore::wait_on_device` | `order_before` makes the stream wait |
//! | parkable memory | `Capture::may_use`; `wait_or_grow` where the budget is short | `order_behind` makes the stream wait |
//! | graph memory | `Capture::may_use`; at a given address `allocate_at` | never; `order_behind` |
//! | blocks of a plan | `PlannedMemory::allocate_behind` | `order` makes the new stream wait |
//!
//! | what | driver call |
//! |---|---|
//! | [`Timeline::fence`], in `PoolCore::poll_fences` and before a wait | `cuEventRecord`, and `cuStreamIsCapturing` |
//! | [`Timeline::poll`], in `PoolCore::poll_fences` | `cuEventQuery` |
//! | [`Timeline::wait_for`] | `cuStreamWaitEvent`, and `cuStreamIsCapturing` |
//! | `Timeline::waits_unasked`, `is_waited_for_unasked`: may it wait, may it be waited for | `cuStreamIsCapturing` |

use super::extent::UntilFree;
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_driver::RawStream;
use aquifer_stream::{Noted, Timeline, Uses};
use smallvec::{SmallVec, smallvec};
use std::{sync::Arc, time::Instant};

/// Uses of freed memory by streams other than its owner: those of a block ([`Uses`]), or those of
/// memory that is released in parts. No new use of freed memory is opened, so once none is open,
/// the stamped ones are all there are.
pub(crate) trait PendingUses {
    /// Forgets what is over, and returns whether nothing is left. Makes no driver call.
    fn are_over(&mut self) -> bool;

    /// Returns whether a use is open: its work may not be queued yet.
    fn has_open(&self) -> bool;

    /// An iterator over the work of the uses that are not open.
    fn queued(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)>;

    /// Makes `stream` wait on the device for all uses. Returns the number of waits queued. The host
    /// does not wait. `address` is that of the memory.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] while a use is open; those of [`Timeline::wait_for`].
    fn order_before(&self, stream: &Timeline, address: u64) -> Result<u64> {
        if self.has_open() {
            return Err(MemoryError::Busy { address });
        }
        self.queued()
            .try_fold(0, |waits, (on, epoch)| Ok(waits + u64::from(stream.wait_for(&on, epoch)?)))
    }
}

impl PendingUses for Uses {
    fn are_over(&mut self) -> bool {
        self.forget_done();
        self.is_empty()
    }
    fn has_open(&self) -> bool {
        self.is_open()
    }
    fn queued(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> {
        self.stamped()
    }
}

impl PendingUses for Vec<Noted> {
    fn are_over(&mut self) -> bool {
        self.retain(|noted| !noted.is_done());
        self.is_empty()
    }
    fn has_open(&self) -> bool {
        self.iter().any(Noted::is_open)
    }
    fn queued(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> {
        self.iter().filter_map(|noted| Some((noted.on().clone(), noted.epoch()?)))
    }
}

/// The queued work and the open uses that must be over before freed memory is free.
#[derive(Clone, Default)]
pub(crate) struct PendingWork<U> {
    /// The epochs that cover the work of the owner streams. Empty if there was none.
    pub(crate) own: StreamDeps,
    /// Uses by other streams.
    pub(crate) uses: U,
}

/// The work of memory that is released in parts.
pub(crate) type PartsWork = PendingWork<Vec<Noted>>;

impl<U: PendingUses> PendingWork<U> {
    /// Returns the work so far of `owner`, and `uses`.
    pub(crate) fn new(owner: &Arc<Timeline>, uses: U) -> Self {
        Self { own: smallvec![(owner.clone(), owner.open())], uses }
    }

    /// Fences the owner streams that cannot be fenced later. After a refusal nothing proves their
    /// work: the memory stays until the stream is retired.
    pub(crate) fn fence_at_once(&self) {
        for (timeline, epoch) in &self.own {
            let _ = timeline.fence_at_once(*epoch);
        }
    }

    /// Forgets uses that are over, and returns whether the host has seen all work done. Makes no
    /// driver call.
    pub(crate) fn is_over(&mut self) -> bool {
        is_done(&self.own) && self.uses.are_over()
    }

    /// An iterator over all work, except for open uses.
    pub(crate) fn queued(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> {
        self.own.iter().cloned().chain(self.uses.queued())
    }

    /// Records events behind the queued work where there are none, and polls them. Never blocks.
    ///
    /// # Errors
    /// The first refusal; all streams have been polled.
    pub(crate) fn poll(&self) -> Result<()> {
        poll(self.queued())
    }

    /// Waits until all work is over except for open uses, or until the deadline. Returns whether it
    /// is over. Blocks.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        self.queued().try_fold(true, |done, (on, epoch)| Ok(done & on.wait(epoch, deadline)?))
    }

    /// As [`PendingUses::order_before`], for all work.
    pub(crate) fn order_before(&self, stream: &Timeline, address: u64) -> Result<u64> {
        let waits = self.uses.order_before(stream, address)?;
        self.own.iter().try_fold(waits, |waits, (on, epoch)| {
            Ok(waits + u64::from(stream.wait_for(on, *epoch)?))
        })
    }
}

impl PendingWork<Uses> {
    /// Returns the same work for memory that is released in parts. The uses continue to report
    /// their state.
    pub(crate) fn into_parts(self) -> PartsWork {
        PendingWork { own: self.own, uses: self.uses.follow() }
    }
}

/// Records events behind the work where there are none, and polls them. Never blocks.
pub(crate) fn poll(work: impl Iterator<Item = (Arc<Timeline>, u64)>) -> Result<()> {
    let mut outcome = Ok(());
    for (on, epoch) in work.filter(|(on, epoch)| !on.is_done(*epoch)) {
        outcome = outcome.and(on.fence(epoch).and_then(|_| on.poll()));
    }
    outcome
}

/// A block that its owner has freed.
pub(crate) struct DeferredFree {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Bytes that were requested.
    pub(crate) requested: u64,
    /// What its allocator knows it by; 0 if its address suffices.
    pub(crate) key: u64,
    /// The tag of the request.
    pub(crate) tag: Tag,
    pub(crate) generation: u64,
    /// The owner stream.
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) work: PendingWork<Uses>,
    /// Values dropped when the memory is really free, such as charges.
    pub(crate) until_free: UntilFree,
}

impl DeferredFree {
    /// Returns the streams that may still use the block, besides its owner, for the driver's
    /// observer. Returns none for a block without a generation, which is not reported to it.
    pub(crate) fn users(&self) -> SmallVec<[RawStream; 2]> {
        let uses = (self.generation != 0).then(|| self.work.uses.iter());
        uses.into_iter().flatten().map(|noted| noted.on().noted()).collect()
    }
}

/// The dependencies of a range: the streams that used it, and the epochs that must be done before
/// it is reused.
pub(crate) type StreamDeps = SmallVec<[(Arc<Timeline>, u64); 2]>;

/// Returns whether the host has seen all dependencies done.
pub(crate) fn is_done(deps: &StreamDeps) -> bool {
    is_done_except(deps, None)
}

/// Returns whether the host has seen all dependencies done, except for those on `own`, which is in
/// order with itself.
pub(crate) fn is_done_except(deps: &StreamDeps, own: Option<&Arc<Timeline>>) -> bool {
    let is_own = |timeline| own.is_some_and(|own| Arc::ptr_eq(own, timeline));
    deps.iter().all(|(timeline, epoch)| is_own(timeline) || timeline.is_done(*epoch))
}

/// Raises the epoch of a stream to `epoch` in a list of streams. Returns whether it is in the list.
/// The latest epoch of a stream covers all others.
pub(crate) fn raise(list: &mut [(Arc<Timeline>, u64)], on: &Arc<Timeline>, epoch: u64) -> bool {
    let known = list.iter_mut().find(|(other, _)| Arc::ptr_eq(other, on));
    known.is_some_and(|(_, last)| {
        *last = epoch.max(*last);
        true
    })
}

/// Merges the dependencies `more` into `deps`, without those that are done.
pub(crate) fn merge_deps(deps: &mut StreamDeps, more: StreamDeps) {
    deps.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
    for (timeline, epoch) in more {
        if !timeline.is_done(epoch) && !raise(deps, &timeline, epoch) {
            deps.push((timeline, epoch));
        }
    }
}

/// Returns the latest unfinished epoch of each stream.
pub(crate) fn latest(work: Vec<(Arc<Timeline>, u64)>) -> Vec<(Arc<Timeline>, u64)> {
    let mut latest: Vec<(Arc<Timeline>, u64)> = Vec::new();
    for (timeline, epoch) in work {
        if !raise(&mut latest, &timeline, epoch) && !timeline.is_done(epoch) {
            latest.push((timeline, epoch));
        }
    }
    latest
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{Access, Call, DeviceId, sim::Sim};
    use aquifer_stream::{Stream, StreamPool, UseList};
    use std::slice;

    const ADDRESS: u64 = 0x4000;

    fn machine() -> Result<(Sim, [Stream; 3])> {
        let sim = Sim::h200(1).stepped();
        let streams = StreamPool::new(sim.driver(), DeviceId(0), 4);
        let all = [streams.lease()?, streams.lease()?, streams.lease()?];
        Ok((sim, all))
    }

    /// Returns the work of a block of `owner` that was freed after `users` had used it.
    fn freed(owner: &Stream, users: &[Stream]) -> Result<PendingWork<Uses>> {
        let mut list = UseList::new();
        for user in users {
            list.record(owner.timeline(), user.timeline(), Access::Read)?;
        }
        Ok(PendingWork::new(owner.timeline(), list.take()))
    }

    #[test]
    fn memory_is_free_for_its_owner_when_others_are_done_and_for_all_when_its_owner_is_too()
    -> Result<()> {
        let (_sim, [owner, user, _]) = machine()?;
        let mut work = freed(&owner, slice::from_ref(&user))?;
        let mut parts = freed(&owner, slice::from_ref(&user))?.into_parts();
        assert!(!work.uses.are_over() && !parts.uses.are_over());
        user.synchronize()?;
        assert!(work.uses.are_over() && parts.uses.are_over());
        assert!(!work.is_over() && !parts.is_over());
        assert_eq!((work.queued().count(), parts.queued().count()), (1, 1));
        owner.synchronize()?;
        assert!(work.is_over() && parts.is_over());
        Ok(())
    }

    #[test]
    fn no_stream_can_be_ordered_before_memory_with_an_open_use() -> Result<()> {
        let (sim, [owner, user, other]) = machine()?;
        let mut list = UseList::new();
        let open = list.prepare(ADDRESS, owner.timeline(), user.timeline(), Access::Read)?;
        let work = PendingWork::new(owner.timeline(), list.take());
        let parts = work.into_parts();
        let waits = || sim.driver().calls().get(Call::StreamWaitEvent);
        let before = waits();
        assert!(parts.uses.has_open());
        assert_eq!(
            parts.order_before(other.timeline(), ADDRESS),
            Err(MemoryError::Busy { address: ADDRESS })
        );
        assert_eq!(waits(), before);
        open.finish()?;
        assert!(!parts.uses.has_open());
        assert_eq!(parts.order_before(other.timeline(), ADDRESS)?, 2, "the user and the owner");
        assert_eq!(waits(), before + 2);
        Ok(())
    }

    #[test]
    fn a_poll_reaches_all_streams_also_after_a_refusal() -> Result<()> {
        let (sim, [owner, first, second]) = machine()?;
        let work = freed(&owner, &[first, second])?;
        let fenced = || work.uses.queued().filter(|(on, epoch)| on.is_fenced(*epoch)).count();
        sim.fail(Call::EventRecord, 1, 999);
        assert!(poll(work.uses.queued()).is_err());
        assert_eq!(fenced(), 1);
        poll(work.uses.queued())?;
        assert_eq!(fenced(), 2);
        Ok(())
    }
}
