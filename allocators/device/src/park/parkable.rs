//! The parkable memory of one tag, with its own addresses and handles.
//!
//! - It has one range of addresses, twice as long as the device's memory, in slots with a handle
//!   each.
//! - Blocks are cut out of slots that have memory, lowest address first.
//! - Each free range stores its dependencies: the work that must be over before it is reused. Free
//!   ranges are kept in a [`SharedFreeList`](crate::backing::shared_free::SharedFreeList), as in
//!   the caches, here for one tag.
//! - A stream reuses its own freed ranges at once, and those of other streams when their work is
//!   known to be done. If no more memory is available, it waits for that work on the device.

use super::{
    settings::Phase,
    tagged::{SlotBlocks, TaggedMemory},
};
use crate::{
    Adoption, Block,
    backing::window::Grid,
    base::{
        driver::check_stream_device,
        pending::{self, DeferredFree, StreamDeps, latest},
        released::Released,
        waits::{begin_request, deadline, try_wait, wait_for_epoch},
    },
    block::ReleaseBlock,
    dedicated::{DedicatedPool, Span, slot_pool::Capture},
    pool_core::PoolCore,
    request::ValidateRequest,
};
use aquifer_core::{
    Action, BLOCK_ALIGN, MemoryError, PoolStats, Request, Result, Tag, event::BlockKind,
};
use aquifer_driver::{DeviceRange, RawStream};
use aquifer_heap::Range;
use aquifer_stream::{Stream, StreamPool, Timeline};
use std::{
    fmt,
    ops::DerefMut,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

/// The parkable memory of one tag.
pub(crate) struct ParkablePool {
    pub(super) pool: Weak<PoolCore>,
    pub(super) dedicated: Arc<DedicatedPool>,
    streams: StreamPool,
    pub(super) tag: Tag,
    pub(super) span: Arc<Span>,
    state: Mutex<SlotBlocks>,
}

/// Marks a thread that takes memory for blocks. Parking waits until it has finished.
struct OperationGuard<'a>(&'a ParkablePool);

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        self.0.state().operations -= 1;
    }
}

/// Takes back parkable blocks that were dropped.
struct ParkableRelease(Arc<ParkablePool>);

impl SlotBlocks {
    /// Returns where `bytes` fit with the fewest slots without memory: the first such slot, their
    /// number, and the free range before it that also becomes part of the block.
    fn growth_slots(
        &self,
        grid: Grid,
        bytes: u64,
        align: u64,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> (u64, u64, Option<Range>) {
        let count = bytes.div_ceil(grid.slot);
        let next = self.ranges.next_slot();
        let end = grid.base + next * grid.slot;
        let tail = self
            .ranges
            .free
            .iter()
            .last()
            .filter(|(range, deps)| range.end() == end && ready(deps));
        let start = tail.map_or(end, |(range, _)| range.start.next_multiple_of(align));
        if start < end {
            let fewer = bytes.saturating_sub(end - start).div_ceil(grid.slot).max(1);
            if fewer <= count {
                return (next, fewer, Some(Range { start, len: end - start }));
            }
        }
        (self.ranges.find_gap(count), count, None)
    }
}

impl ParkablePool {
    pub(super) fn new(pool: &Arc<PoolCore>, tag: Tag, slot: u64) -> Result<Arc<Self>> {
        let dedicated = pool.dedicated.clone();
        let bytes = pool.info.memory.saturating_mul(2).next_multiple_of(slot);
        let span = dedicated.reserve_span(BlockKind::Parkable, bytes, slot, 0)?;
        let (pool, streams) = (Arc::downgrade(pool), pool.streams().clone());
        Ok(Arc::new(Self { pool, dedicated, streams, tag, span, state: Mutex::default() }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SlotBlocks> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn grid(&self) -> Grid {
        self.span.grid()
    }

    /// Allocates a block for work that is queued on `stream` from now on.
    pub(super) fn allocate(self: &Arc<Self>, stream: &Stream, request: Request) -> Result<Block> {
        let request = request.checked()?;
        check_stream_device(&*self.dedicated.driver, self.dedicated.device, stream.timeline())?;
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        if let Some(error) = pool.refuse_oversized(request.size(), self.tag) {
            return Err(error);
        }
        // One deadline for growth and for the wait after it.
        let _request = begin_request();
        let bytes = request.size().next_multiple_of(BLOCK_ALIGN);
        let own = Some(stream.timeline());
        let done = |deps: &StreamDeps| pending::is_done_except(deps, own);
        if let Some((range, deps)) = self.take_free(bytes, &request, done)? {
            return self.register_block(stream, range, deps, &request);
        }
        self.poll_fences()?;
        if let Some((range, deps)) = self.take_free(bytes, &request, done)? {
            return self.register_block(stream, range, deps, &request);
        }
        let slots = bytes.div_ceil(self.span.slot);
        let short = pool.budget().remaining() < slots * self.span.slot;
        if short
            && pool.config.adoption == Adoption::Wait
            && stream.timeline().waits_unasked()
            && let Some((range, deps)) = self.take_free_and_wait(stream, bytes, &request)?
        {
            return self.register_block(stream, range, deps, &request);
        }
        let (range, deps) = match self.grow(&pool, stream, bytes, request.alignment(), done) {
            Ok(grown) => grown,
            Err(MemoryError::OutOfMemory(error)) => {
                self.wait_for_freed(deadline(pool.config.wait))?;
                match self.take_free(bytes, &request, done)? {
                    Some(taken) => taken,
                    None => return Err(MemoryError::OutOfMemory(error)),
                }
            }
            Err(error) => return Err(error),
        };
        self.register_block(stream, range, deps, &request)
    }

    /// Waits for the work on freed blocks until the deadline, and frees their ranges.
    fn wait_for_freed(&self, until: Option<Instant>) -> Result<()> {
        for (timeline, epoch) in latest(self.freed_work()) {
            try_wait(|| wait_for_epoch(&timeline, epoch, until))?;
        }
        self.poll_fences()
    }

    /// Takes a free range whose dependencies are `ready`, with these dependencies.
    fn take_free(
        &self,
        bytes: u64,
        request: &Request,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> Result<Option<(Range, StreamDeps)>> {
        let mut state = self.state();
        state.check_resident(self.tag)?;
        let range = state.ranges.free.find(bytes, request.alignment(), ready);
        Ok(range.and_then(|range| Some((range, state.ranges.free.take(range)?))))
    }

    /// Like `take`, for any free range: the stream waits for its dependencies on the device.
    fn take_free_and_wait(
        &self,
        stream: &Stream,
        bytes: u64,
        request: &Request,
    ) -> Result<Option<(Range, StreamDeps)>> {
        let Some((range, deps)) = self.take_free(bytes, request, |_| true)? else {
            return Ok(None);
        };
        let waited = deps
            .iter()
            .try_for_each(|(other, epoch)| stream.timeline().wait_for(other, *epoch).map(drop));
        match waited {
            Ok(()) => Ok(Some((range, deps))),
            Err(error) => {
                self.state().ranges.free.add(range, deps);
                // The stream cannot wait for these now. Other memory may be available.
                match error {
                    MemoryError::Capturing { .. }
                    | MemoryError::OtherThread { .. }
                    | MemoryError::UnknownId => Ok(None),
                    error => Err(error),
                }
            }
        }
    }

    /// Takes a range with new memory, using the free range at the end of the claimed slots first if
    /// it is `ready`.
    fn grow(
        &self,
        pool: &Arc<PoolCore>,
        stream: &Stream,
        bytes: u64,
        align: u64,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> Result<(Range, StreamDeps)> {
        let Grid { base, slot } = self.grid();
        let (first, count, slots, tail) = {
            let mut state = self.state();
            state.check_resident(self.tag)?;
            let (first, count, tail) = state.growth_slots(self.grid(), bytes, align, ready);
            let limit = self.span.bytes;
            if (first + count) * slot > limit {
                return Err(MemoryError::TooLarge { requested: bytes, limit });
            }
            let tail = tail.and_then(|tail| Some((tail, state.ranges.free.take(tail)?)));
            state.operations += 1;
            (first, count, state.ranges.claim(first, count), tail)
        };
        let _operation = OperationGuard(self);
        let backed = pool.back_slots(&self.span, stream.timeline(), self.tag, &slots, None);
        let mut state = self.state();
        match backed {
            Ok(new) => {
                self.dedicated.slot_pool_backed(new, count * slot - new);
                let end = base + (first + count) * slot;
                let (tail, deps) = tail
                    .unwrap_or((Range { start: end - count * slot, len: 0 }, StreamDeps::new()));
                let range = state.ranges.cut(tail.start, bytes, end);
                Ok((range, deps))
            }
            Err(error) => {
                state.ranges.unclaim(&slots);
                if let Some((tail, deps)) = tail {
                    state.ranges.free.add(tail, deps);
                }
                Err(error)
            }
        }
    }

    /// Wraps a range in a block. The caller owns the range and has already waited for its
    /// dependencies.
    fn register_block(
        self: &Arc<Self>,
        stream: &Stream,
        range: Range,
        deps: StreamDeps,
        request: &Request,
    ) -> Result<Block> {
        debug_assert!(range.start.is_multiple_of(request.alignment()), "a block is not aligned");
        let (dedicated, streams) = (&self.dedicated, &self.streams);
        let releaser = Arc::new(ParkableRelease(self.clone()));
        let (block, watch) =
            dedicated.slot_pool_block(releaser, streams, stream, range, request.size(), self.tag);
        let entered = {
            let mut state = self.state();
            state.check_resident(self.tag).map(|()| {
                let (kind, capture) = (BlockKind::Parkable, Capture::UNANNOUNCED);
                state.hand_out(dedicated, kind, stream, (&block, watch), capture)
            })
        };
        match entered {
            Ok(event) => {
                dedicated.send(event);
                Ok(block)
            }
            Err(error) => {
                // The block was never handed out.
                drop(block);
                self.state().ranges.free.add(range, deps);
                Err(error)
            }
        }
    }

    /// Polls the work that freed blocks depend on. Never blocks.
    pub(crate) fn poll_fences(&self) -> Result<()> {
        let work = latest(self.freed_work());
        for (timeline, epoch) in work {
            timeline.fence(epoch)?;
            timeline.poll()?;
        }
        (self as &dyn TaggedMemory).collect();
        Ok(())
    }

    /// Returns the work that freed blocks depend on, except for open uses.
    pub(crate) fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let state = self.state();
        state.ranges.free_work().chain(state.ranges.pending_work()).collect()
    }

    /// Returns whether uses are refused.
    pub(super) fn is_parked(&self) -> bool {
        self.state().phase != Phase::Resident
    }

    /// Returns the bytes of slots that contain no live block and no pending free. Work may still
    /// run in them.
    pub(crate) fn empty_bytes(&self) -> u64 {
        let state = self.state();
        match state.phase {
            Phase::Resident => {
                state.ranges.empty_slots(self.grid()).count() as u64 * self.span.slot
            }
            Phase::Parking | Phase::Parked | Phase::Resuming => 0,
        }
    }

    /// Returns slots to the driver that contain no live block and no running work.
    pub(crate) fn trim(&self) -> Released {
        // Work that cannot be polled counts as running.
        let mut released = Released::default();
        released.add_refusal(self.poll_fences());
        let removed = {
            let mut state = self.state();
            if state.phase != Phase::Resident {
                return released;
            }
            let slots: Vec<u64> = state.ranges.claimed.iter().copied().collect();
            self.dedicated.retire_free_slots(&mut state.ranges, &self.span, &slots)
        };
        if !removed.is_empty() {
            released += self.dedicated.reap_span(&self.span);
        }
        released
    }

    /// Returns the live blocks by address, with their requested sizes and their streams.
    pub(super) fn live_blocks(&self) -> Vec<(DeviceRange, RawStream)> {
        self.state().list(&self.dedicated)
    }

    /// Returns its statistics.
    pub(super) fn stats(&self) -> PoolStats {
        let mut stats = PoolStats::default();
        stats.physical = self.span.charged_bytes();
        let state = self.state();
        stats.blocks = state.blocks.len() as u64;
        if state.phase.has_memory() {
            (stats.live, stats.requested) = state.live();
            stats.cached = state.ranges.free.bytes();
            stats.pending = state.ranges.pending_bytes();
        }
        stats
    }
}

impl ParkablePool {
    /// Takes back a block that its owner has dropped.
    fn deallocate(&self, block: DeferredFree) {
        let range = Range { start: block.address, len: block.bytes };
        let stream = block.timeline.number();
        block.work.fence_at_once();
        let (over, pieces, events) = {
            let mut state = self.state();
            let Some((live, pieces)) = state.take_back(&self.dedicated, &block) else { return };
            let there = state.phase.has_memory();
            let over = if !there {
                state.ranges.free.add(range, StreamDeps::new());
                Some(block)
            } else if block.work.uses.is_empty() && state.phase == Phase::Resident {
                self.dedicated.slot_pool_collected(BlockKind::Parkable, range.len);
                state.ranges.free.add(range, block.work.own.clone());
                Some(block)
            } else {
                state.ranges.defer(block);
                None
            };
            let event = |action| {
                self.dedicated.event(
                    BlockKind::Parkable,
                    action,
                    stream,
                    range.start,
                    live.requested,
                    self.tag,
                )
            };
            // A parked block was already accounted as freed when it was parked.
            let freed = there.then(|| event(Action::Free)).flatten();
            let completed =
                (freed.is_some() && over.is_some()).then(|| event(Action::Complete)).flatten();
            (over, pieces, freed.into_iter().chain(completed))
        };
        self.dedicated.send(events);
        drop(pieces);
        drop(over.and_then(|block| block.until_free));
    }
}

impl ReleaseBlock for ParkableRelease {
    fn before_release(&self, address: u64) {
        self.0.state().begin_release(address);
    }

    fn release(&self, block: DeferredFree) {
        self.0.deallocate(block);
    }
}

impl TaggedMemory for ParkablePool {
    fn tag(&self) -> Tag {
        self.tag
    }

    fn kind(&self) -> BlockKind {
        BlockKind::Parkable
    }

    fn dedicated(&self) -> &DedicatedPool {
        &self.dedicated
    }

    fn span(&self) -> Result<&Arc<Span>> {
        Ok(&self.span)
    }

    fn slots(&self) -> Box<dyn DerefMut<Target = SlotBlocks> + '_> {
        Box::new(self.state())
    }

    fn queued_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.freed_work()
    }
}

impl Drop for ParkablePool {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // No block is live, but work on freed ones may still use the free ranges.
        let mut work: Vec<_> = state.ranges.free_work().collect();
        let mut left = state
            .ranges
            .end(|bytes| self.dedicated.slot_pool_collected(BlockKind::Parkable, bytes));
        work.extend(left.work.own.drain(..));
        left.work.own = latest(work).into();
        self.dedicated.slot_pool_retired(self.span.charged_bytes());
        let until_free = left.take_until_free();
        self.span.retire_whole(left.work, until_free);
        self.dedicated.enqueue_retiring(&self.span);
    }
}

impl fmt::Debug for ParkablePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParkablePool")
            .field("tag", &self.tag)
            .field("span", &self.span)
            .finish_non_exhaustive()
    }
}
