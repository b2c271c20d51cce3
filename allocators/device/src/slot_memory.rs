//! Memory in slots of a range of addresses that stay, out of which blocks are cut: that of graphs,
//! and that of parkable blocks.
//!
//! - A slot has one handle, which no other memory shares. Slots get memory when blocks need it.
//! - Each free range stores its dependencies: the work that must be over before it is reused. A
//!   stream reuses its own freed ranges at once, except in captured work, and those of other
//!   streams when their work is known to be done.
//! - Captured work may use its memory at any later launch, so that stays while anything refers to
//!   it. All other slots that are wholly free are given back to the driver.
//! - Memory with a tag is parked with the tag: its handles are released, and its addresses stay.

mod blocks;
mod captures;
mod give_back;
mod launches;
mod parking;
mod placed;
mod ranges;
mod saved;
mod settings;

pub(crate) use give_back::SlotMemories;
pub(crate) use ranges::Capture;
pub(crate) use saved::{RestoredContents, SavedBlock};
pub use settings::{Park, ParkReport, ResumeReport};

use crate::{
    Adoption, Block,
    backing::{handle::Handle, window::Grid},
    base::{
        driver::check_stream_device,
        extent::PackedRequest,
        pending::{DeferredFree, PartsWork, StreamDeps, latest},
        waits::{deadline, try_wait, wait_for_epoch},
    },
    block::{DriverBlock, ReleaseBlock},
    dedicated::{DedicatedPool, Span},
    pool_core::PoolCore,
};
use aquifer_core::{
    Action, BLOCK_ALIGN, Event, MemoryError, PoolStats, Request, Result, Tag,
    event::{BlockKind, EventTicket},
    panics::Contained,
};
use aquifer_driver::{DeviceRange, Driver, RawStream};
use aquifer_heap::Range;
use aquifer_stream::{Stream, StreamPool, Timeline};
use captures::SlotState;
use settings::Phase;
use std::{
    fmt, mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Numbers of memories, for drivers that validate accesses. Never reused.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Memory in slots: of the graphs that share a pool, or of the parkable blocks of a tag.
///
/// The handles of users, graphs, announcements and blocks hold references. When the last one is
/// dropped, the memory retires.
pub(crate) struct SlotMemory {
    number: u64,
    kind: BlockKind,
    /// The tag that it is parked with; `None` if it is never parked.
    tag: Option<Tag>,
    pool: Weak<PoolCore>,
    dedicated: Arc<DedicatedPool>,
    streams: StreamPool,
    span: Arc<Span>,
    state: Mutex<SlotState>,
    /// Set while a thread queues a launch. The next launch is ordered after it and waits for that.
    launching: AtomicBool,
    /// Number of open announcements.
    announcements: AtomicU64,
    /// Whether free memory stays, also where no captured work has used it.
    retains_free: AtomicBool,
}

/// Marks a thread that takes memory for a block. Parking waits until it has finished.
struct OperationGuard<'a>(Option<&'a SlotMemory>);

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.0 {
            memory.state().slots.operations -= 1;
        }
    }
}

impl SlotMemory {
    /// Reserves `bytes` of addresses, or a little more. Maps nothing.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] on devices without virtual memory mapping; the driver's.
    pub(crate) fn new(
        pool: &Arc<PoolCore>,
        kind: BlockKind,
        tag: Option<Tag>,
        bytes: u64,
        slot: u64,
    ) -> Result<Arc<Self>> {
        let dedicated = pool.dedicated.clone();
        if slot == 0 {
            return Err(MemoryError::Unsupported {
                feature: "virtual memory management (cuMemAddressReserve)",
            });
        }
        let span = dedicated.reserve_span(kind, bytes.next_multiple_of(slot), slot, 0)?;
        Ok(Arc::new(Self {
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            kind,
            tag,
            pool: Arc::downgrade(pool),
            dedicated,
            streams: pool.streams().clone(),
            span,
            state: Mutex::default(),
            launching: AtomicBool::new(false),
            announcements: AtomicU64::new(0),
            retains_free: AtomicBool::new(false),
        }))
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.dedicated.driver
    }

    fn is_of_graphs(&self) -> bool {
        self.kind == BlockKind::Graph
    }

    /// Returns the tag that it is parked with; [`Tag::NONE`] if it is never parked.
    pub(crate) fn tag(&self) -> Tag {
        self.tag.unwrap_or(Tag::NONE)
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grid(&self) -> Grid {
        self.span.grid()
    }

    /// Begins to take memory for a block. Parking waits until the returned value is dropped.
    fn begin_operation(&self) -> Result<OperationGuard<'_>> {
        let Some(tag) = self.tag else { return Ok(OperationGuard(None)) };
        let slots = &mut self.state().slots;
        slots.check_resident(tag)?;
        slots.operations += 1;
        Ok(OperationGuard(Some(self)))
    }

    /// Allocates a block for the work of `capture` on `stream`.
    pub(crate) fn allocate(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        capture: Capture,
    ) -> Result<Block> {
        let timeline = stream.timeline();
        check_stream_device(&**self.driver(), self.dedicated.device, timeline)?;
        let _operation = self.begin_operation()?;
        let (bytes, align) = (request.size().next_multiple_of(BLOCK_ALIGN), request.alignment());
        let take = || self.state().take_free(capture, timeline, bytes, align);
        self.state().enter_capture(capture, self.grid());
        let again = || {
            // What cannot be fenced or polled now counts as not done. Other memory can be used.
            let _ = self.poll_fences();
            take()
        };
        let range = match take().or_else(again) {
            Some(range) => range,
            None if self.is_of_graphs() => {
                self.grow(&*self.open_pool()?, stream, bytes, &request, capture)?
            }
            None => self.wait_or_grow(stream, bytes, &request, capture)?,
        };
        if capture.is_eager() {
            return self
                .make_eager_block(stream, range, &request, capture)
                .inspect_err(|_| self.state().return_range(range, timeline, capture));
        }
        Ok(self.make_block(stream, range, &request, capture))
    }

    fn open_pool(&self) -> Result<Arc<PoolCore>> {
        self.pool.upgrade().ok_or(MemoryError::Closed)
    }

    /// Takes a range with new memory. Where the budget is short, takes one that the stream waits
    /// for on the device, if it may. Where there is no memory, waits for the work on free ranges.
    fn wait_or_grow(
        &self,
        stream: &Stream,
        bytes: u64,
        request: &Request,
        capture: Capture,
    ) -> Result<Range> {
        let (pool, timeline) = (self.open_pool()?, stream.timeline());
        let new = bytes.next_multiple_of(self.span.slot);
        if pool.budget().remaining() < new
            && pool.config.adoption == Adoption::Wait
            && timeline.waits_unasked()
        {
            let found = {
                let free = &mut self.state().slots.ranges.free;
                let found = free.find_filled(bytes, request.alignment(), |_| true);
                found.and_then(|(_, range)| Some((range, free.take(range)?)))
            };
            if let Some((range, deps)) = found {
                match self.order_behind(timeline, range, deps) {
                    Ok(_) => return Ok(range),
                    // The stream cannot wait for these now. Other memory may be available.
                    Err(
                        MemoryError::Capturing { .. }
                        | MemoryError::OtherThread { .. }
                        | MemoryError::UnknownId,
                    ) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        match self.grow(&pool, stream, bytes, request, capture) {
            Err(MemoryError::OutOfMemory(error)) => {
                let until = deadline(pool.config.wait);
                for (on, epoch) in latest(self.freed_work()) {
                    try_wait(|| wait_for_epoch(&on, epoch, until))?;
                }
                self.poll_fences()?;
                let taken = self.state().take_free(capture, timeline, bytes, request.alignment());
                taken.ok_or(MemoryError::OutOfMemory(error))
            }
            grown => grown,
        }
    }

    /// Orders a stream on the device after the work that a taken range depends on, and returns it.
    /// On failure the range is free again.
    fn order_behind(
        &self,
        timeline: &Timeline,
        range: Range,
        deps: StreamDeps,
    ) -> Result<StreamDeps> {
        let ordered =
            deps.iter().try_for_each(|(other, epoch)| timeline.wait_for(other, *epoch).map(drop));
        match ordered {
            Ok(()) => Ok(deps),
            Err(error) => {
                self.state().slots.ranges.free.add(range, deps);
                Err(error)
            }
        }
    }

    /// Takes a range with new memory, using the free range at the end of the memory first.
    fn grow(
        &self,
        pool: &PoolCore,
        stream: &Stream,
        bytes: u64,
        request: &Request,
        capture: Capture,
    ) -> Result<Range> {
        if let Some(error) = pool.refuse_oversized(bytes, request.owner()) {
            return Err(error);
        }
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
            if (first + count) * slot > self.span.bytes {
                state.return_tail(tail, timeline, capture);
                return Err(MemoryError::TooLarge { requested: bytes, limit: self.span.bytes });
            }
            (first, count, state.slots.ranges.claim(first, count), tail)
        };
        match pool.back_slots(&self.span, timeline, request.owner(), &slots, None) {
            Ok(new) => {
                let (start, end) = (base + first * slot, base + (first + count) * slot);
                self.record_growth(&[Range { start, len: end - start }], new);
                let from = tail.map_or(start, |tail| tail.start);
                Ok(self.state().slots.ranges.cut(from, bytes, end))
            }
            Err(error) => {
                let mut state = self.state();
                state.slots.ranges.unclaim(&slots);
                state.return_tail(tail, timeline, capture);
                Err(error)
            }
        }
    }

    /// Accounts memory that was added, of which `new` bytes are from the driver.
    fn record_growth(&self, ranges: &[Range], new: u64) {
        let bytes: u64 = ranges.iter().map(|range| range.len).sum();
        self.dedicated.slots_backed(self.kind, new, bytes - new);
        self.observe(ranges.iter().copied(), true);
    }

    /// Reports to a validating driver that ranges are kept for graphs, or no longer.
    fn observe(&self, ranges: impl Iterator<Item = Range>, kept: bool) {
        if let Some(observer) = self.driver().observer().filter(|_| self.is_of_graphs()) {
            for range in ranges {
                let range = self.device_range(range);
                match kept {
                    true => observer.kept_for_graphs(range, self.number),
                    false => observer.let_go_by_graphs(range),
                }
            }
        }
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
        debug_assert!(request.size() <= range.len, "a block is smaller than requested");
        let timeline = stream.timeline();
        let driver_block = DriverBlock {
            releaser: self.clone(),
            timeline: timeline.clone(),
            streams: self.streams.clone(),
            bytes: range.len,
            key: 0,
        };
        let packed = PackedRequest::new(request.size(), request.owner());
        let generation = self.dedicated.generation();
        let block = Block::from_driver_block(range.start, packed, driver_block, generation);
        let watch = block.uses.watch();
        let event = {
            let mut state = self.state();
            if !capture.is_eager() {
                state.captured.extend(self.grid().slots(range));
            }
            let watched = (&block, watch);
            let event = state.slots.hand_out(&self.dedicated, self.kind, stream, watched, capture);
            // From here on, what the stream frees in this capture can be reused by the stream.
            if capture != Capture::UNANNOUNCED {
                state.open_list(capture, timeline);
            }
            event
        };
        self.dedicated.send(event);
        block
    }

    /// Wraps a range, which the caller owns, in a block for work that is not captured. Orders the
    /// stream on the device after all launches, which write free memory too. Waits while another
    /// thread queues a launch of the same memory.
    fn make_eager_block(
        self: &Arc<Self>,
        stream: &Stream,
        range: Range,
        request: &Request,
        capture: Capture,
    ) -> Result<Block> {
        let _launch = self.lock_launches();
        // Copied first: no lock is held during a driver call.
        let launches = self.state().launches.clone();
        for (on, epoch) in &launches {
            stream.timeline().wait_for(on, *epoch)?;
        }
        Ok(self.make_block(stream, range, request, capture))
    }

    /// Returns the work that freed memory depends on, except for open uses.
    fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.state().freed_work()
    }

    /// Polls the work that freed memory depends on. Never blocks.
    ///
    /// # Errors
    /// The driver's first. All have been polled.
    fn poll_fences(&self) -> Result<()> {
        let mut outcome = Ok(());
        for (timeline, epoch) in latest(self.freed_work()) {
            outcome = outcome.and(timeline.fence(epoch).and_then(|_| timeline.poll()));
        }
        self.collect();
        outcome
    }

    /// Moves freed blocks whose uses are done to the free ranges. Makes no driver call.
    fn collect(&self) {
        let (over, events) = {
            let mut state = self.state();
            let over = state.slots.ranges.collect(false, |bytes| self.count_collected(bytes));
            let events = self.completions(&over);
            (over, events)
        };
        self.dedicated.send(events);
        self.drop_freed(over);
    }

    fn count_collected(&self, bytes: u64) {
        self.dedicated.slot_block_collected(self.kind, bytes);
    }

    /// Makes the events of blocks that have become free. Called under the lock under which their
    /// memory becomes free, so that they precede the events of the next blocks there.
    fn completions(&self, over: &[DeferredFree]) -> Vec<(EventTicket, Event)> {
        let event = |block: &DeferredFree| {
            let (stream, address) = (block.timeline.number(), block.address);
            let (bytes, tag) = (block.requested, block.tag);
            self.dedicated.event(self.kind, Action::Complete, stream, address, bytes, tag)
        };
        over.iter().filter_map(event).collect()
    }

    /// Drops what was kept until blocks are free. Called with no lock held.
    fn drop_freed(&self, over: Vec<DeferredFree>) {
        for DeferredFree { until_free, .. } in over {
            if until_free.is_some() {
                drop(until_free);
                self.dedicated.count_completion();
            }
        }
    }

    /// Returns the live blocks by address, with their requested sizes and their streams.
    pub(crate) fn live_blocks(&self) -> Vec<(DeviceRange, RawStream)> {
        self.state().slots.list(&self.dedicated)
    }

    /// Returns its statistics. Parked blocks are counted, but have no bytes.
    pub(crate) fn stats(&self) -> PoolStats {
        let (mut stats, state) = (PoolStats::default(), self.state());
        stats.blocks = state.slots.blocks.len() as u64;
        stats.physical = self.span.charged_bytes();
        if self.is_of_graphs() {
            stats.graphs = stats.physical;
        }
        if state.slots.phase.has_memory() {
            (stats.live, stats.requested) = state.slots.live();
            stats.pending = state.slots.ranges.pending_bytes();
            stats.cached = stats.physical - stats.live - stats.pending;
        }
        stats
    }
}

impl ReleaseBlock for SlotMemory {
    fn before_release(&self, address: u64) {
        self.state().slots.begin_release(address);
    }

    /// None of memory that is parked with a tag: its handles change.
    fn handles(&self, address: u64, bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        if self.tag.is_some() {
            return None;
        }
        self.span.handles(address, bytes)
    }

    fn release(&self, block: DeferredFree) {
        let range = Range { start: block.address, len: block.bytes };
        let stream = block.timeline.number();
        block.work.fence_at_once();
        let (over, live, events) = {
            let mut state = self.state();
            let taken = state.slots.take_back(&self.dedicated, &block);
            let Some(live) = taken else { return };
            let phase = state.slots.phase;
            // Made under the lock: as soon as it is released, the range may become another block. A
            // parked block was already accounted as freed when it was parked.
            let mut events = Vec::new();
            if phase.has_memory() {
                let (bytes, tag) = (live.requested, live.tag);
                let (kind, action, address) = (self.kind, Action::Free, range.start);
                events.extend(self.dedicated.event(kind, action, stream, address, bytes, tag));
            }
            let over = if !phase.has_memory() {
                state.slots.ranges.free.add(range, StreamDeps::new());
                Some(block)
            } else if block.work.uses.is_empty() && phase == Phase::Resident {
                self.count_collected(range.len);
                let own = block.work.own.clone();
                state.add_free(range, &block.timeline, own, live.capture);
                events.extend(self.completions(std::slice::from_ref(&block)));
                Some(block)
            } else {
                state.slots.ranges.defer(block);
                None
            };
            (over, live, events)
        };
        self.dedicated.send(events);
        drop((over, live));
    }
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        let mut state = mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        // No block is live, but launches and work on freed blocks may still run.
        let mut work = state.freed_work();
        work.extend(state.launches);
        let (parts, mut until_free) =
            state.slots.ranges.end(|bytes| self.dedicated.slot_block_collected(self.kind, bytes));
        self.dedicated.slots_retired(self.kind, self.span.charged_bytes());
        if self.is_of_graphs() && self.driver().observer().is_some() {
            let dedicated = Arc::downgrade(&self.dedicated);
            let range = self.device_range(Range { start: self.span.address, len: self.span.bytes });
            until_free.push(Contained::new(Box::new(GraphRangeRelease { dedicated, range })));
        }
        if state.has_untracked_launches {
            self.span.require_synchronize();
        }
        let work = PartsWork { own: latest(work).into(), uses: parts.uses };
        let until_free = (!until_free.is_empty()).then(|| Box::new(until_free));
        self.span.retire_whole(work, until_free);
        self.dedicated.enqueue_retiring(&self.span);
    }
}

/// Reports to a validating driver, when dropped, that a range is no longer kept for graphs.
struct GraphRangeRelease {
    dedicated: Weak<DedicatedPool>,
    range: DeviceRange,
}

impl Drop for GraphRangeRelease {
    fn drop(&mut self) {
        if let Some(observer) =
            self.dedicated.upgrade().as_ref().and_then(|dedicated| dedicated.driver.observer())
        {
            observer.let_go_by_graphs(self.range);
        }
    }
}

impl fmt::Debug for SlotMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("SlotMemory")
            .field("number", &self.number)
            .field("physical", &stats.physical)
            .field("live", &stats.live)
            .finish_non_exhaustive()
    }
}
