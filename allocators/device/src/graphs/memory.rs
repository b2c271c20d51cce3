//! The memory of graphs that share a pool: its blocks, its free ranges and when they can be reused,
//! and the launches that touch it.

mod give_back;
mod parked;
mod placed;
mod release;

pub(super) use give_back::GraphMemories;

use crate::{
    Block,
    backing::{shared_free::SharedFreeList, window::Grid},
    base::{
        driver::check_stream_device,
        pending::{StreamDeps, latest, raise},
    },
    dedicated::{DedicatedPool, Span, slot_pool::Capture},
    park::tagged::{SlotBlock, SlotBlocks, TaggedMemory},
    pool_core::PoolCore,
};
use aquifer_core::{BLOCK_ALIGN, MemoryError, PoolStats, Request, Result, Tag, event::BlockKind};
use aquifer_driver::{DeviceRange, Driver};
use aquifer_heap::Range;
use aquifer_stream::{Stream, StreamPool, Timeline};
use smallvec::smallvec;
use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The granularity of allocations in bytes on devices without virtual memory mapping.
const SEGMENT: u64 = 2 << 20;

/// Numbers of memories, for drivers that validate accesses. Never reused.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Memory whose addresses graphs store. What captured work has used is never remapped or used for
/// anything else until the last reference is dropped and all launches are done.
///
/// The pool's handles, its graphs, its announcements and its blocks hold references.
pub(crate) struct GraphMemory {
    number: u64,
    /// The tag that it is parked with; [`Tag::NONE`] if it is never parked.
    tag: Tag,
    pool: Weak<PoolCore>,
    dedicated: Arc<DedicatedPool>,
    streams: StreamPool,
    /// Addresses for as much memory as the device has, in slots with a handle each. `None` if the
    /// device has no virtual memory mapping.
    span: Option<Arc<Span>>,
    state: Mutex<State>,
    /// Set while a thread queues a launch. The next launch is ordered after it and waits for that.
    launching: AtomicBool,
    /// Number of open announcements.
    announcements: AtomicU64,
    /// Whether free memory stays, also where no captured work has used it.
    retains_free: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Any capture may use the free ranges once the host has seen their dependencies done.
    slots: SlotBlocks,
    /// Claimed slots that captured work may use at any later launch. They keep their memory.
    captured: BTreeSet<u64>,
    /// Ranges freed within captures that are still open.
    capture_lists: Vec<CaptureFreeList>,
    /// Allocations of the driver, on devices without virtual memory mapping.
    segments: Vec<Arc<Span>>,
    /// For streams with announced captures: the announcement, the stream, and the epoch that was
    /// closed and fenced at the announcement.
    fenced: Vec<(u64, Arc<Timeline>, u64)>,
    /// The last launch on each stream.
    launches: Vec<(Arc<Timeline>, u64)>,
    /// Whether there are graphs whose launches are not recorded.
    has_untracked_launches: bool,
}

/// Records a launch as a use of a block, so that later uses wait for it. The block's own stream is
/// ordered anyway.
fn record_launch(live: &SlotBlock, on: &Arc<Timeline>, epoch: u64) {
    if let Some(watch) = live.watch.as_ref().filter(|_| !Arc::ptr_eq(&live.owner_stream, on)) {
        // Recording fails only for parked memory, which this is not.
        let _ = watch.record(on, epoch);
    }
}

/// The ranges that one stream has freed within one capture. The stream can reuse them at once,
/// since its work is in order.
struct CaptureFreeList {
    capture: Capture,
    timeline: Arc<Timeline>,
    free: SharedFreeList,
}

impl CaptureFreeList {
    fn is_of(&self, capture: Capture, timeline: &Arc<Timeline>) -> bool {
        self.capture == capture && Arc::ptr_eq(&self.timeline, timeline)
    }
}

/// The exclusive right to queue a launch.
struct LaunchGuard<'a>(&'a AtomicBool);

impl Drop for LaunchGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl State {
    /// Ends the earlier captures of this announcement: what they had freed becomes usable by any
    /// later capture. At the first block of a capture, the blocks that are live count as captured:
    /// its graph may use them.
    fn enter_capture(&mut self, capture: Capture, grid: Grid) {
        self.close_captures(|other| other.announced == capture.announced && other != capture);
        if !capture.is_eager() && self.capture_lists.iter().all(|list| list.capture != capture) {
            let Self { captured, slots, .. } = self;
            captured.extend(
                slots
                    .blocks
                    .iter()
                    .flat_map(|(&start, live)| grid.slots(Range { start, len: live.bytes })),
            );
        }
    }

    fn close_captures(&mut self, over: impl Fn(Capture) -> bool) {
        let closed: Vec<_> =
            self.capture_lists.extract_if(.., |capture_list| over(capture_list.capture)).collect();
        // Launches during the capture have not been recorded with these blocks, which only captured
        // work could use.
        let blocks = self
            .slots
            .blocks
            .values()
            .filter(|live| closed.iter().any(|s| s.capture == live.capture));
        for live in blocks {
            for (on, epoch) in &self.launches {
                record_launch(live, on, *epoch);
            }
        }
        for capture_list in closed {
            let ranges: Vec<_> =
                capture_list.free.iter().map(|(range, deps)| (range, deps.clone())).collect();
            ranges.into_iter().for_each(|(range, deps)| self.slots.ranges.free.add(range, deps));
        }
    }

    fn capture_list(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
    ) -> Option<&mut SharedFreeList> {
        let mut lists = self.capture_lists.iter_mut();
        lists.find(|list| list.is_of(capture, timeline)).map(|list| &mut list.free)
    }

    /// Takes a free range for the capture, among those that its stream has freed in it and those
    /// whose dependencies are done: one that the block fills wholly, or else the lowest.
    fn take_free(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
        bytes: u64,
        align: u64,
    ) -> Option<Range> {
        let own = self.capture_list(capture, timeline);
        let own = own.and_then(|own| own.find_filled(bytes, align, |_| true));
        let ready = |deps: &StreamDeps| capture.may_use(timeline, deps);
        let shared = self.slots.ranges.free.find_filled(bytes, align, ready);
        let rank = |(is_filled, range): (bool, Range)| (!is_filled, range.start);
        let is_own = match (own, shared) {
            (Some(own), Some(shared)) => rank(own) < rank(shared),
            (own, _) => own.is_some(),
        };
        let (_, range) = if is_own { own } else { shared }?;
        let list = if is_own {
            self.capture_list(capture, timeline)?
        } else {
            &mut self.slots.ranges.free
        };
        list.take(range).map(|_| range)
    }

    /// Takes the free range that ends at `end`, from an aligned address on, if the capture may use
    /// it.
    fn take_tail(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
        end: u64,
        align: u64,
        most: u64,
    ) -> Option<Range> {
        let tail = |free: &SharedFreeList, ready: &dyn Fn(&StreamDeps) -> bool| {
            let (range, deps) = free.iter().last()?;
            let start = range.start.next_multiple_of(align);
            // A range that is long enough for the whole block lies too low to be extended.
            let fits = range.end() == end && start < end && end - start < most && ready(deps);
            fits.then_some(Range { start, len: end - start })
        };
        if let Some(own) = self.capture_list(capture, timeline)
            && let Some(range) = tail(own, &|_| true)
        {
            return own.take(range).map(|_| range);
        }
        let range = tail(&self.slots.ranges.free, &|deps| capture.may_use(timeline, deps))?;
        self.slots.ranges.free.take(range).map(|_| range)
    }

    /// Frees a range of a stream, whose last work is `own`, and that was allocated in `capture`. If
    /// that is over and the stream takes part in a later one, that one's work follows all uses: a
    /// launch is ordered after the stream's work outside of captures.
    fn add_free(
        &mut self,
        range: Range,
        timeline: &Arc<Timeline>,
        own: StreamDeps,
        capture: Capture,
    ) {
        let lists = &self.capture_lists;
        let open = if lists.iter().any(|list| list.capture == capture) {
            Some(capture)
        } else {
            let later = lists.iter().rfind(|list| Arc::ptr_eq(&list.timeline, timeline));
            later.map(|list| list.capture)
        };
        match open {
            Some(capture) => self.open_list(capture, timeline).add(range, own),
            None => self.slots.ranges.free.add(range, own),
        }
    }

    /// Returns what the stream has freed within a capture, empty before the first.
    fn open_list(&mut self, capture: Capture, timeline: &Arc<Timeline>) -> &mut SharedFreeList {
        let lists = &mut self.capture_lists;
        let known = lists.iter().position(|list| list.is_of(capture, timeline));
        let at = known.unwrap_or_else(|| {
            let (timeline, free) = (timeline.clone(), SharedFreeList::default());
            lists.push(CaptureFreeList { capture, timeline, free });
            lists.len() - 1
        });
        &mut lists[at].free
    }

    /// Frees a range that was taken for a block, if any, for which there was no memory.
    fn return_tail(&mut self, tail: Option<Range>, timeline: &Arc<Timeline>, capture: Capture) {
        if let Some(tail) = tail {
            self.return_range(tail, timeline, capture);
        }
    }

    /// Frees a range that was taken for a block of the capture.
    fn return_range(&mut self, range: Range, timeline: &Arc<Timeline>, capture: Capture) {
        let own = smallvec![(timeline.clone(), timeline.open())];
        self.add_free(range, timeline, own, capture);
    }

    /// Returns the work that freed memory depends on, except for open uses.
    fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let captured = self.capture_lists.iter().flat_map(|capture_list| capture_list.free.iter());
        let captured = captured.flat_map(|(_, deps)| deps.iter().cloned());
        self.slots
            .ranges
            .free_work()
            .chain(captured)
            .chain(self.slots.ranges.pending_work())
            .collect()
    }

    /// Returns all work that a launch must follow: everything that touches any of the memory.
    fn all_work(&self) -> Result<Vec<(Arc<Timeline>, u64)>> {
        self.slots.ranges.check_closed()?;
        let mut work = self.freed_work();
        for (&address, live) in &self.slots.blocks {
            work.push((live.owner_stream.clone(), live.owner_stream.open()));
            if let Some(watch) = &live.watch {
                work.extend(watch.work(address)?);
            }
        }
        work.extend(self.launches.iter().cloned());
        Ok(work)
    }
}

impl GraphMemory {
    pub(super) fn new(pool: &Arc<PoolCore>, tag: Tag) -> Result<Arc<Self>> {
        let dedicated = pool.dedicated.clone();
        let span = match (dedicated.is_plain(), dedicated.step()) {
            (true, _) | (_, 0) => None,
            (false, slot) => Some(dedicated.reserve_span(
                BlockKind::Graph,
                pool.info.memory.next_multiple_of(slot),
                slot,
                0,
            )?),
        };
        let (pool, streams) = (Arc::downgrade(pool), pool.streams().clone());
        Ok(Arc::new(Self {
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            tag,
            pool,
            dedicated,
            streams,
            span,
            state: Mutex::default(),
            launching: AtomicBool::new(false),
            announcements: AtomicU64::new(0),
            retains_free: AtomicBool::new(false),
        }))
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.dedicated.driver
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grid(&self) -> Grid {
        self.span.as_ref().map_or(Grid { base: 0, slot: SEGMENT }, |span| span.grid())
    }

    /// Allocates a block for the work of `capture` on `stream`.
    pub(super) fn allocate(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        capture: Capture,
    ) -> Result<Block> {
        check_stream_device(&*self.dedicated.driver, self.dedicated.device, stream.timeline())?;
        let _operation = self.begin_operation()?;
        let bytes = request.size().next_multiple_of(BLOCK_ALIGN);
        let (timeline, align, grid) = (stream.timeline(), request.alignment(), self.grid());
        let found = {
            let mut state = self.state();
            state.enter_capture(capture, grid);
            state.take_free(capture, timeline, bytes, align)
        };
        let again = || {
            (self.poll_fences() > 0)
                .then(|| self.state().take_free(capture, timeline, bytes, align))
                .flatten()
        };
        let range = match found.or_else(again) {
            Some(range) => range,
            None => self.grow(stream, bytes, &request, capture)?,
        };
        if capture.is_eager() {
            return self
                .make_eager_block(stream, range, &request, capture)
                .inspect_err(|_| self.state().return_range(range, timeline, capture));
        }
        Ok(self.make_block(stream, range, &request, capture))
    }

    /// Takes a range with new memory, using the free range at the end of the memory first.
    fn grow(
        &self,
        stream: &Stream,
        bytes: u64,
        request: &Request,
        capture: Capture,
    ) -> Result<Range> {
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        if let Some(error) = pool.refuse_oversized(bytes, request.owner()) {
            return Err(error);
        }
        match &self.span {
            Some(span) => self.grow_mapped(&pool, span, stream, bytes, request, capture),
            None => self.grow_plain(&pool, bytes, request),
        }
    }

    fn grow_mapped(
        &self,
        pool: &Arc<PoolCore>,
        span: &Arc<Span>,
        stream: &Stream,
        bytes: u64,
        request: &Request,
        capture: Capture,
    ) -> Result<Range> {
        let (Grid { base, slot }, timeline) = (self.grid(), stream.timeline());
        let (first, count, slots, tail) = {
            let mut state = self.state();
            let next = state.slots.ranges.next_slot();
            let tail =
                state.take_tail(capture, timeline, base + next * slot, request.alignment(), bytes);
            let (first, count) = match tail {
                Some(tail) => (next, (bytes - tail.len).div_ceil(slot)),
                None => {
                    let count = bytes.div_ceil(slot);
                    (state.slots.ranges.find_gap(count), count)
                }
            };
            if (first + count) * slot > span.bytes {
                state.return_tail(tail, timeline, capture);
                return Err(MemoryError::TooLarge { requested: bytes, limit: span.bytes });
            }
            (first, count, state.slots.ranges.claim(first, count), tail)
        };
        match pool.back_slots(span, timeline, request.owner(), &slots, None) {
            Ok(new) => {
                let (start, end) = (base + first * slot, base + (first + count) * slot);
                self.record_growth(&[Range { start, len: end - start }], new);
                let from = tail.map_or(start, |tail| tail.start);
                let range = self.state().slots.ranges.cut(from, bytes, end);
                Ok(range)
            }
            Err(error) => {
                let mut state = self.state();
                state.slots.ranges.unclaim(&slots);
                state.return_tail(tail, timeline, capture);
                Err(error)
            }
        }
    }

    /// Takes an allocation of the driver. Its last bytes are never lent, so that it cannot merge
    /// with a neighbouring allocation.
    fn grow_plain(&self, pool: &Arc<PoolCore>, bytes: u64, request: &Request) -> Result<Range> {
        let align = request.alignment();
        let segment = (bytes + align + BLOCK_ALIGN).next_multiple_of(SEGMENT);
        let span = pool.with_room(BlockKind::Graph, segment, request.owner(), None, |funds| {
            self.dedicated.allocate_span(BlockKind::Graph, segment, BLOCK_ALIGN, funds)
        })?;
        let start = span.address.next_multiple_of(align);
        let end = (span.address + segment - 1) / BLOCK_ALIGN * BLOCK_ALIGN;
        self.record_growth(&[Range { start: span.address, len: segment }], segment);
        let mut state = self.state();
        state.segments.push(span);
        Ok(state.slots.ranges.cut(start, bytes, end))
    }

    /// Accounts memory that was added, of which `new` bytes are from the driver.
    fn record_growth(&self, ranges: &[Range], new: u64) {
        let bytes: u64 = ranges.iter().map(|range| range.len).sum();
        self.dedicated.slot_pool_backed(new, bytes - new);
        self.dedicated.update_usage(|usage| {
            usage.graphs += bytes;
            usage.free_of_graphs += bytes;
        });
        if let Some(observer) = self.dedicated.driver.observer() {
            for &range in ranges {
                observer.kept_for_graphs(self.device_range(range), self.number);
            }
        }
        self.state().slots.of_graphs += bytes;
    }

    fn device_range(&self, range: Range) -> DeviceRange {
        DeviceRange { device: self.dedicated.device, address: range.start, bytes: range.len }
    }

    /// Wraps a range, which the caller owns, in a block.
    fn make_block(
        self: &Arc<Self>,
        stream: &Stream,
        range: Range,
        request: &Request,
        capture: Capture,
    ) -> Block {
        debug_assert!(range.start.is_multiple_of(request.alignment()), "a block is not aligned");
        let dedicated = &self.dedicated;
        let (requested, tag) = (request.size(), request.owner());
        let (releaser, streams) = (self.clone(), &self.streams);
        let (block, watch) =
            dedicated.slot_pool_block(releaser, streams, stream, range, requested, tag);
        let event = {
            let mut state = self.state();
            if !capture.is_eager() {
                state.captured.extend(self.grid().slots(range));
            }
            let (kind, watched) = (BlockKind::Graph, (&block, watch));
            let event = state.slots.hand_out(dedicated, kind, stream, watched, capture);
            // From here on, what the stream frees in this capture can be reused by the stream.
            if capture != Capture::UNANNOUNCED {
                state.open_list(capture, stream.timeline());
            }
            event
        };
        dedicated.send(event);
        block
    }

    /// Polls the work that freed memory depends on. Returns the number of streams polled. Never
    /// blocks.
    fn poll_fences(&self) -> usize {
        let work = latest(self.state().freed_work());
        for (timeline, epoch) in &work {
            // What cannot be fenced or polled now counts as not done. Other memory can be used.
            let _ = timeline.fence(*epoch).and_then(|_| timeline.poll());
        }
        (self as &dyn TaggedMemory).collect();
        work.len()
    }

    /// Called when an announcement begins or ends. What was freed within it becomes usable by every
    /// later one, as soon as it is known to be done. Never blocks.
    pub(super) fn end_announcement(&self, announced: u64) {
        let over: Vec<_> = {
            let mut state = self.state();
            state.close_captures(|capture| capture.announced == announced);
            state.fenced.extract_if(.., |(other, ..)| *other == announced).collect()
        };
        drop(over);
        self.poll_fences();
    }

    /// Records that `epoch` of a stream has been fenced. All work that the stream is about to
    /// capture is in later epochs.
    pub(super) fn record_fence(&self, announced: u64, timeline: &Arc<Timeline>, epoch: u64) {
        self.state().fenced.push((announced, timeline.clone(), epoch));
    }

    /// Returns the fenced epoch that covers all uncaptured work of a stream, if its open epoch
    /// contains only captured work.
    fn fenced_epoch(&self, timeline: &Arc<Timeline>) -> Option<u64> {
        let state = self.state();
        let fenced = state.fenced.iter().filter(|(_, other, _)| Arc::ptr_eq(other, timeline));
        let last = fenced.map(|(_, _, epoch)| *epoch).max();
        last.filter(|epoch| epoch + 1 == timeline.open())
    }

    fn lock_launches(&self) -> LaunchGuard<'_> {
        while self.launching.swap(true, Ordering::Acquire) {
            // The wait is only as long as a few driver calls.
            std::thread::yield_now();
        }
        LaunchGuard(&self.launching)
    }

    /// Orders a launch on `on` after all work that touches the memory, queues it, and records it.
    /// The host waits only while another launch of the same memory is being queued.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; [`MemoryError::Busy`] if a prepared use of a block is not
    /// finished; [`MemoryError::Parked`]; the driver's.
    pub(super) fn launch(
        &self,
        on: &Arc<Timeline>,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _launch = self.lock_launches();
        self.check_resident()?;
        if on.is_capturing()? {
            return Err(MemoryError::Capturing { stream: on.raw().handle() });
        }
        // Copied first: no lock is held during a driver call.
        let work = self.state().all_work()?;
        for (other, epoch) in latest(work) {
            match (on.wait_for(&other, epoch), self.fenced_epoch(&other)) {
                (Err(MemoryError::Capturing { .. }), Some(ran)) => drop(on.wait_for(&other, ran)?),
                (waited, _) => drop(waited?),
            }
            // Polled so that events of finished launches do not accumulate.
            other.poll()?;
        }
        queue()?;
        self.launched(on)
    }

    /// Records a launch queued on `on`, which touches all of the memory.
    pub(super) fn launched(&self, on: &Arc<Timeline>) -> Result<()> {
        let epoch = on.open();
        // Dropped after the lock is released: it may be the last reference to a stream.
        let _over: Vec<_> = {
            let mut state = self.state();
            if !raise(&mut state.launches, on, epoch) {
                state.launches.push((on.clone(), epoch));
            }
            let state = &mut *state;
            let captured = |live: &SlotBlock| {
                !live.capture.is_eager()
                    && state.capture_lists.iter().any(|list| list.capture == live.capture)
            };
            // Captured work does not wait for a launch. The launch of its own graph will.
            state
                .slots
                .blocks
                .values()
                .filter(|live| !captured(live))
                .for_each(|live| record_launch(live, on, epoch));
            state.launches.extract_if(.., |(other, epoch)| other.is_done(*epoch)).collect()
        };
        on.fence_at_once(epoch)
    }

    /// Records that a graph exists whose launches are not reported.
    pub(super) fn mark_untracked(&self) {
        self.state().has_untracked_launches = true;
    }
}

impl GraphMemory {
    pub(in crate::graphs) fn stats(&self) -> PoolStats {
        let state = self.state();
        let mut stats = PoolStats::default();
        stats.blocks = state.slots.blocks.len() as u64;
        if !state.slots.phase.has_memory() {
            return stats;
        }
        (stats.physical, stats.graphs) = (state.slots.of_graphs, state.slots.of_graphs);
        (stats.live, stats.requested) = state.slots.live();
        stats.pending = state.slots.ranges.pending_bytes();
        stats.cached = stats.physical - stats.live - stats.pending;
        stats
    }
}

impl fmt::Debug for GraphMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("Memory")
            .field("number", &self.number)
            .field("physical", &stats.physical)
            .field("live", &stats.live)
            .finish_non_exhaustive()
    }
}
