//! The range of a plan, its blocks, and when their places can be taken again.

use crate::{
    Adoption, Block, Request,
    backing::handle::Handle,
    base::{
        driver::{check_stream_device, owner_of_freed},
        extent::{LazyBox, PackedRequest, UntilFree},
        pending::{DeferredFree, PartsWork, PendingUses, StreamDeps, latest, raise},
        released::Released,
        usage::{LiveUsage, PEAK_SLACK, TagHoldings},
    },
    block::{DriverBlock, ReleaseBlock},
    dedicated::{DedicatedPool, Span},
    pool_core::{PoolCore, count},
};
use aquifer_core::{
    Action, BLOCK_ALIGN, PoolStats, Result, Tag,
    budget::Holding,
    event::{BlockKind, Event, EventTicket},
};
use aquifer_driver::Ownership;
use aquifer_formats::plan::{PlanAnswer, PlanCursor};
use aquifer_stream::{Stream, StreamPool, Timeline};
use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The memory of a plan. The pool's hook and the live blocks hold references.
pub(super) struct PlannedMemory {
    pub(super) dedicated: Arc<DedicatedPool>,
    pub(super) span: Arc<Span>,
    streams: StreamPool,
    /// Whether a stream may wait on the device for another one.
    waits: bool,
    /// The lock of `dedicated` comes before it, so that is not called under it.
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) cursor: PlanCursor,
    pub(super) places: Box<[Place]>,
    pub(super) streams: StreamBindings,
    /// Freed blocks that streams still use of which the plan does not know.
    pub(super) held: Vec<DeferredFree>,
    pub(super) usage: LiveUsage,
    pub(super) by_tag: TagHoldings,
    /// Bytes of the blocks in `held`.
    pub(super) pending: u64,
    /// Whether the pool is closed.
    is_closed: bool,
    /// Whether the range was given back.
    pub(super) is_released: bool,
}

/// A block of the plan: what its owner holds, and the work of its last life.
#[derive(Default)]
pub(super) struct Place {
    /// Made at its first life, and used again while its stream is the same.
    block: Option<Arc<DriverBlock>>,
    /// The epoch of its stream that covers its own work.
    pub(super) epoch: u64,
    /// Other work that a later block at its addresses has to follow.
    pub(super) more: Option<Box<PartsWork>>,
}

/// An allocation that has a place in the plan.
#[derive(Clone, Copy)]
struct Hit {
    /// The block of the plan.
    number: u32,
    offset: u64,
    /// Whether its address is aligned as requested.
    is_aligned: bool,
    /// Whether it comes in the recorded order.
    recorded: bool,
}

/// Work that is not known to be done, on streams other than the one that asks.
type Unfinished = StreamDeps;

impl Place {
    /// Adds the work that `timeline` has to wait for.
    fn add_unfinished(&mut self, timeline: &Arc<Timeline>, unfinished: &mut Unfinished) {
        let mut add = |on: &Arc<Timeline>, epoch| {
            if Arc::ptr_eq(on, timeline) || on.is_done(epoch) {
                return;
            }
            if !raise(unfinished, on, epoch) {
                unfinished.push((on.clone(), epoch));
            }
        };
        if let Some(block) = &self.block {
            add(&block.timeline, self.epoch);
        }
        if let Some(more) = &mut self.more {
            if more.is_over() {
                self.more = None;
            } else {
                more.queued().for_each(|(on, epoch)| add(&on, epoch));
            }
        }
    }

    /// An iterator over the work of its last life.
    fn work(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> {
        let own = self.block.iter().map(|block| (block.timeline.clone(), self.epoch));
        own.chain(self.more.iter().flat_map(|more| more.queued()))
    }
}

impl PlannedMemory {
    pub(super) fn new(core: &PoolCore, span: Arc<Span>, cursor: PlanCursor) -> Arc<Self> {
        let blocks = cursor.plan().blocks().len();
        let state = Mutex::new(State {
            cursor,
            places: std::iter::repeat_with(Place::default).take(blocks).collect(),
            streams: StreamBindings::default(),
            held: Vec::new(),
            usage: LiveUsage::of_pool(core.peaks.clone(), PEAK_SLACK),
            by_tag: TagHoldings::default(),
            pending: 0,
            is_closed: false,
            is_released: false,
        });
        Arc::new(Self {
            dedicated: core.dedicated.clone(),
            span,
            streams: core.streams().clone(),
            waits: core.config.adoption == Adoption::Wait,
            state,
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of the range.
    pub(super) fn bytes(&self) -> u64 {
        self.span.bytes
    }

    /// Allocates a block at its place in the plan. Returns `None` for a stray. Makes no driver call
    /// unless the block follows work of another stream, or a place is still held.
    pub(super) fn allocate(
        self: &Arc<Self>,
        core: &PoolCore,
        stream: &Stream,
        request: &Request,
    ) -> Option<Block> {
        let mut left = Leftovers::new();
        let mut guard = self.state();
        let state = &mut *guard;
        let block = match self.find(core, state, stream.timeline(), request, &mut left) {
            Some(hit) if hit.is_aligned && state.cursor.followed().is_empty() => {
                let block = self.make_block(state, stream, hit, request, &mut left);
                drop(guard);
                Some(block)
            }
            Some(hit) => self.allocate_behind(core, guard, stream, request, hit, &mut left),
            None => {
                let has_held = !state.held.is_empty();
                drop(guard);
                if has_held {
                    // So that the next block finds the place. Held blocks stay held after an error.
                    let _ = self.poll();
                }
                None
            }
        };
        self.finish(left);
        block
    }

    /// Places a request: the block of the plan is live then. A stream that the pool refuses has no
    /// part in the plan.
    #[inline]
    fn find(
        &self,
        core: &PoolCore,
        state: &mut State,
        timeline: &Arc<Timeline>,
        request: &Request,
        left: &mut Leftovers,
    ) -> Option<Hit> {
        let number = match state.streams.find(timeline) {
            Some(number) => Some(number),
            None => {
                check_stream_device(&*core.driver, core.info.device, timeline).ok()?;
                let bound = state.streams.bind(timeline, request.size(), &mut state.cursor);
                bound.map(|(number, replaced)| {
                    left.add_timeline(replaced);
                    number
                })
            }
        };
        // No block of a plan has no bytes: a stream that is in no plan counts as a stray.
        let (bytes, number) = number.map_or((0, 0), |number| (request.size(), number));
        let answer = state.cursor.allocate_expected(bytes, number).unwrap_or_else(|| {
            // One of the freed blocks may hold the place.
            if !state.held.is_empty() {
                self.collect_held(state, left);
            }
            state.cursor.allocate(bytes, number)
        });
        match answer {
            PlanAnswer::Hit { block, offset, recorded } => {
                // An alignment is a power of two.
                let is_aligned = (self.span.address + offset) & (request.alignment() - 1) == 0;
                Some(Hit { number: block, offset, is_aligned, recorded })
            }
            PlanAnswer::Stray => None,
        }
    }

    /// Makes the block of a hit behind the uses that it follows. Returns `None`, and takes the hit
    /// back, if its place is not aligned as requested or if its stream cannot wait for them.
    #[inline(never)]
    fn allocate_behind<'a>(
        self: &'a Arc<Self>,
        core: &PoolCore,
        mut guard: MutexGuard<'a, State>,
        stream: &Stream,
        request: &Request,
        hit: Hit,
        left: &mut Leftovers,
    ) -> Option<Block> {
        let (state, timeline) = (&mut *guard, stream.timeline());
        let mut unfinished = Unfinished::new();
        for &followed in state.cursor.followed() {
            state.places[followed as usize].add_unfinished(timeline, &mut unfinished);
        }
        if hit.is_aligned && unfinished.is_empty() {
            return Some(self.make_block(state, stream, hit, request, left));
        }
        let may_wait = hit.is_aligned && hit.recorded && self.waits;
        if may_wait {
            drop(guard);
            let is_ordered = order(core, timeline, &unfinished);
            guard = self.state();
            if is_ordered {
                return Some(self.make_block(&mut guard, stream, hit, request, left));
            }
        }
        self.cancel(&mut guard, hit.number, timeline, unfinished, left);
        None
    }

    /// Takes a placed block back. A later block at its addresses has to follow what it follows.
    fn cancel(
        self: &Arc<Self>,
        state: &mut State,
        number: u32,
        timeline: &Arc<Timeline>,
        unfinished: Unfinished,
        left: &mut Leftovers,
    ) {
        let place = &mut state.places[number as usize];
        drop(self.template(&state.cursor, place, number, timeline, left));
        place.epoch = timeline.open();
        let more = PartsWork { own: unfinished, ..PartsWork::default() };
        place.more = (!more.own.is_empty()).then(|| Box::new(more));
        state.cursor.cancel(number);
    }

    /// Returns what the owners of a block of the plan hold.
    #[inline(always)]
    fn template(
        self: &Arc<Self>,
        cursor: &PlanCursor,
        place: &mut Place,
        number: u32,
        timeline: &Arc<Timeline>,
        left: &mut Leftovers,
    ) -> Arc<DriverBlock> {
        match &place.block {
            Some(block) if Arc::ptr_eq(&block.timeline, timeline) => block.clone(),
            _ => {
                let block = Arc::new(DriverBlock {
                    releaser: self.clone(),
                    timeline: timeline.clone(),
                    streams: self.streams.clone(),
                    bytes: cursor.plan().blocks()[number as usize].bytes,
                    key: u64::from(number),
                });
                left.add_block(place.block.replace(block.clone()));
                block
            }
        }
    }

    /// Makes the block of a place.
    #[inline(always)]
    fn make_block(
        self: &Arc<Self>,
        state: &mut State,
        stream: &Stream,
        hit: Hit,
        request: &Request,
        left: &mut Leftovers,
    ) -> Block {
        let place = &mut state.places[hit.number as usize];
        place.more = None;
        let timeline = stream.timeline();
        let driver_block = self.template(&state.cursor, place, hit.number, timeline, left);
        let (address, bytes) = (self.span.address + hit.offset, driver_block.bytes);
        let (requested, tag) = (request.size(), request.owner());
        debug_assert!(
            hit.offset + bytes <= self.span.bytes,
            "a place beyond the range of the plan"
        );
        debug_assert!(address.is_multiple_of(request.alignment()), "a block is not aligned");
        state.usage.record_alloc(bytes, requested);
        let holding = state.by_tag.of_mut(tag);
        holding.bytes += requested;
        holding.blocks += 1;
        let generation = self.dedicated.generation();
        let live = Ownership::Live { stream: stream.timeline().noted(), generation };
        self.dedicated.notify_observer(generation, address, bytes, live);
        self.note(left, Action::Allocate, stream.number(), address, requested, tag);
        Block::from_driver_block(
            address,
            PackedRequest::new(requested, tag),
            driver_block,
            generation,
        )
    }

    /// Leaves an event to be sent, if there is a recorder.
    #[inline]
    pub(super) fn note(
        &self,
        left: &mut Leftovers,
        action: Action,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) {
        if self.dedicated.is_recorded() {
            let kind = BlockKind::Cached;
            left.add_event(self.dedicated.event(kind, action, stream, address, bytes, tag));
        }
    }

    /// Returns whether the plan no longer matches.
    pub(super) fn is_dropped(&self) -> bool {
        self.state().cursor.is_dropped()
    }

    pub(super) fn add_to(&self, stats: &mut PoolStats) {
        let state = self.state();
        state.usage.add_to(stats);
        if !state.is_released {
            stats.pending += state.pending;
            stats.cached += self.span.bytes - state.usage.live() - state.pending;
        }
        let counters = state.cursor.counters();
        stats.plan_hits += counters.hits;
        stats.plan_strays += counters.strays;
        stats.plan_overlaps += counters.overlaps;
        stats.plan_resynchronisations += counters.resynchronisations;
    }

    pub(super) fn holdings(&self) -> Vec<Holding> {
        self.state().by_tag.iter().filter(|holding| holding.bytes > 0).copied().collect()
    }

    /// Makes no more blocks. The range is given back when no block lives in it.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.retire();
    }

    /// Gives the range to those that retire, if the plan is dropped or the pool is closed, and no
    /// block lives in it. Returns whether it did so now.
    pub(super) fn retire(&self) -> bool {
        let mut left = Leftovers::new();
        let is_retired = self.retire_if_unused(&mut self.state(), &mut left);
        self.finish(left);
        is_retired
    }

    /// Returns whether the range can be given back: the plan is dropped, and no block lives, or the
    /// pool is closed, and those that live are freed.
    pub(super) fn is_unused(&self) -> bool {
        self.state().is_unused()
    }

    /// As [`PlannedMemory::retire`], under the lock.
    #[inline]
    pub(super) fn retire_if_unused(&self, state: &mut State, left: &mut Leftovers) -> bool {
        let is_unused = state.is_unused();
        if is_unused {
            self.retire_unused(state, left);
        }
        is_unused
    }

    #[cold]
    fn retire_unused(&self, state: &mut State, left: &mut Leftovers) {
        state.is_released = true;
        let (mut work, mut until_free) = (PartsWork::default(), UntilFree::default());
        for mut block in mem::take(&mut state.held) {
            state.pending -= block.bytes;
            state.cursor.free(block.key as u32);
            let parts = mem::take(&mut block.work).into_parts();
            work.own.extend(parts.own);
            work.uses.extend(parts.uses);
            if let Some(values) = block.until_free.take() {
                until_free.get_or_insert_default().extend(*values);
            }
            left.add_free(block);
        }
        for place in &mut state.places {
            work.own.extend(place.work().filter(|(on, epoch)| !on.is_done(*epoch)));
            left.add_block(place.block.take());
            work.uses.extend(place.more.take().map(|more| more.uses).unwrap_or_default());
        }
        debug_assert_eq!((state.pending, state.usage.live()), (0, 0), "a retired plan has blocks");
        work.own = latest(work.own.into_vec()).into();
        state.streams.take().into_iter().for_each(|on| left.add_timeline(Some(on)));
        left.retire(work, until_free);
    }

    /// Does what is left after an operation, with no lock held.
    #[inline]
    pub(super) fn finish(&self, left: Leftovers) {
        if let Some(left) = left.into_lists() {
            self.finish_lists(left);
        }
    }

    #[inline(never)]
    fn finish_lists(&self, mut left: Lists) {
        if let Some((work, until_free)) = left.retired.take() {
            self.dedicated.update_usage(|usage| usage.pending += self.span.bytes);
            self.span.retire_whole(work, until_free);
            self.dedicated.enqueue_retiring(&self.span);
        }
        self.dedicated.send(mem::take(&mut left.events));
    }
}

impl State {
    #[inline]
    fn is_unused(&self) -> bool {
        let live = self.cursor.live() as usize;
        // A closed pool looks at held blocks no more.
        let is_over = self.is_closed && live == self.held.len();
        !self.is_released && (is_over || self.cursor.is_dropped() && live == 0)
    }
}

/// Makes a stream wait on the device for work of others. Returns whether all of it is ordered.
fn order(core: &PoolCore, timeline: &Timeline, work: &Unfinished) -> bool {
    // A stream that captures is refused by the wait itself, which calls the driver only if nothing
    // has ordered the two before.
    !timeline.is_isolated()
        && work.iter().all(|(other, epoch)| {
            !other.is_isolated()
                && timeline.wait_for(other, *epoch).is_ok_and(|queued| {
                    count(&core.counters.stream_waits, u64::from(queued));
                    true
                })
        })
}

impl ReleaseBlock for PlannedMemory {
    fn release_idle(&self, block: &DriverBlock, request: PackedRequest) -> bool {
        // Only pools without a recorder and an observer have blocks without extras.
        if block.timeline.fences_at_once() || self.dedicated.is_recorded() {
            return false;
        }
        let mut left = Leftovers::new();
        {
            let mut guard = self.state();
            let state = &mut *guard;
            let place = &mut state.places[block.key as usize];
            debug_assert!(place.more.is_none(), "a live block has the work of an earlier one");
            place.epoch = block.timeline.open();
            state.count_free(block.bytes, request.bytes(), request.tag());
            state.cursor.free(block.key as u32);
            self.retire_if_unused(state, &mut left);
        }
        self.finish(left);
        true
    }

    fn release(&self, block: DeferredFree) {
        let users = block.users();
        let stream = block.timeline.number();
        block.work.fence_at_once();
        let mut left = Leftovers::new();
        {
            let mut guard = self.state();
            let state = &mut *guard;
            let owner = owner_of_freed(&users);
            self.dedicated.notify_observer(block.generation, block.address, block.bytes, owner);
            let requested = block.requested;
            state.count_free(block.bytes, requested, block.tag);
            self.note(&mut left, Action::Free, stream, block.address, requested, block.tag);
            let mut block = block;
            if is_complete(&state.cursor, &mut block) {
                self.complete(state, block, &mut left);
            } else {
                state.pending += block.bytes;
                state.held.push(block);
            }
            self.retire_if_unused(state, &mut left);
        }
        self.finish(left);
    }

    fn handles(&self, address: u64, bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        self.span.handles(address, bytes)
    }
}

impl PlannedMemory {
    /// Frees the place of a block. A later block there follows the work that is not done.
    fn complete(&self, state: &mut State, mut block: DeferredFree, left: &mut Leftovers) {
        let place = &mut state.places[block.key as usize];
        debug_assert!(place.more.is_none(), "a live block has the work of an earlier one");
        let own = block.work.own.iter().find(|(on, _)| Arc::ptr_eq(on, &block.timeline));
        place.epoch = own.map_or(0, |(_, epoch)| *epoch);
        let mut more = mem::take(&mut block.work).into_parts();
        more.own.clear();
        place.more = (!more.uses.is_empty()).then(|| Box::new(more));
        state.cursor.free(block.key as u32);
        let (stream, address) = (block.timeline.number(), block.address);
        self.note(left, Action::Complete, stream, address, block.requested, block.tag);
        left.add_free(block);
    }

    /// Frees the places of held blocks whose uses are over. Makes no driver call.
    pub(super) fn collect_held(&self, state: &mut State, left: &mut Leftovers) {
        let mut over = Vec::new();
        over.extend(state.held.extract_if(.., |block| is_complete(&state.cursor, block)));
        for block in over {
            state.pending -= block.bytes;
            self.complete(state, block, left);
        }
    }

    /// Polls the uses of held blocks, and frees the places of those that are over.
    ///
    /// # Errors
    /// The driver's first. All have been polled.
    pub(super) fn poll(&self) -> Result<()> {
        let mut outcome = Ok(());
        for (timeline, epoch) in self.held_work() {
            outcome = outcome.and(timeline.fence(epoch).and_then(|_| timeline.poll()));
        }
        let mut left = Leftovers::new();
        {
            let mut guard = self.state();
            let state = &mut *guard;
            self.collect_held(state, &mut left);
            self.retire_if_unused(state, &mut left);
        }
        self.finish(left);
        outcome
    }

    /// Returns the work that held blocks wait for, except for open uses.
    pub(super) fn held_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let state = self.state();
        let work = state.held.iter().flat_map(|block| block.work.uses.queued());
        work.filter(|(timeline, epoch)| !timeline.is_done(*epoch)).collect()
    }

    /// Polls held blocks, and gives the range back to the driver if the plan is dropped and no
    /// block lives in it.
    pub(super) fn release_unused(&self) -> Released {
        // Held blocks stay held after an error, and the next attempt meets it again.
        let _ = self.poll();
        if self.retire() { self.dedicated.reap_span(&self.span) } else { Released::default() }
    }
}

/// Returns whether the place of a freed block can be taken again: its uses are over, or the plan
/// knows of them, and a later block can wait for them.
fn is_complete(cursor: &PlanCursor, block: &mut DeferredFree) -> bool {
    let is_shared = cursor.plan().blocks()[block.key as usize].shared;
    let uses = &mut block.work.uses;
    uses.are_over() || is_shared && !uses.has_open() && block.until_free.is_none()
}

impl State {
    fn count_free(&mut self, bytes: u64, requested: u64, tag: Tag) {
        self.usage.record_free(bytes, requested);
        let holding = self.by_tag.of_mut(tag);
        holding.bytes -= requested;
        holding.blocks -= 1;
    }
}

/// The streams of a program that are streams of a plan. No two are the same one.
#[derive(Default)]
pub(super) struct StreamBindings {
    bound: Vec<(Arc<Timeline>, u32)>,
    /// The index of the last one: the next block usually has the same stream.
    last: usize,
}

impl StreamBindings {
    /// Returns the plan's number of a stream, if it has one.
    #[inline]
    pub(super) fn find(&mut self, timeline: &Arc<Timeline>) -> Option<u32> {
        let is = |(other, _): &(Arc<Timeline>, u32)| Arc::ptr_eq(other, timeline);
        if !self.bound.get(self.last).is_some_and(is) {
            self.last = self.bound.iter().position(is)?;
        }
        Some(self.bound[self.last].1)
    }

    /// Makes a stream the one of the plan whose block of `bytes` is expected next, if no other
    /// stream that can still be used is that one. Returns its number, and the stream that was it
    /// before, to be dropped without a lock.
    pub(super) fn bind(
        &mut self,
        timeline: &Arc<Timeline>,
        bytes: u64,
        cursor: &mut PlanCursor,
    ) -> Option<(u32, Option<Arc<Timeline>>)> {
        let bytes = bytes.checked_next_multiple_of(BLOCK_ALIGN)?;
        let is_over = |other: &Timeline| other.is_retired() || !other.is_leased();
        let can_bind = |stream: u32| {
            self.bound.iter().all(|(other, number)| *number != stream || is_over(other))
        };
        let mut expected = cursor.expected();
        let stream = expected.find(|block| block.bytes == bytes && can_bind(block.stream))?.stream;
        drop(expected);
        match self.bound.iter_mut().find(|(_, number)| *number == stream) {
            Some((other, _)) => {
                cursor.replace_stream(stream);
                Some((stream, Some(mem::replace(other, timeline.clone()))))
            }
            None => {
                self.bound.push((timeline.clone(), stream));
                Some((stream, None))
            }
        }
    }

    /// Takes all streams, to be dropped without a lock.
    pub(super) fn take(&mut self) -> Vec<Arc<Timeline>> {
        mem::take(&mut self.bound).into_iter().map(|(timeline, _)| timeline).collect()
    }
}

/// Calls that take other locks, values whose drop may call the driver or foreign code, and events.
/// Most operations have none.
pub(super) struct Leftovers(LazyBox<Lists>);

#[derive(Default)]
pub(super) struct Lists {
    /// The work that the range waits for before it is given back, and what is dropped then.
    pub(super) retired: Option<(PartsWork, UntilFree)>,
    frees: Vec<DeferredFree>,
    blocks: Vec<Arc<DriverBlock>>,
    timelines: Vec<Arc<Timeline>>,
    pub(super) events: Vec<(EventTicket, Event)>,
}

impl Leftovers {
    pub(super) fn new() -> Self {
        Self(LazyBox::NONE)
    }

    /// Gives the range back and drops `until_free` when `work` is over.
    pub(super) fn retire(&mut self, work: PartsWork, until_free: UntilFree) {
        self.0.get_or_default().retired = Some((work, until_free));
    }

    pub(super) fn add_free(&mut self, free: DeferredFree) {
        self.0.get_or_default().frees.push(free);
    }

    #[inline]
    pub(super) fn add_block(&mut self, block: Option<Arc<DriverBlock>>) {
        if let Some(block) = block {
            self.0.get_or_default().blocks.push(block);
        }
    }

    pub(super) fn add_timeline(&mut self, timeline: Option<Arc<Timeline>>) {
        if let Some(timeline) = timeline {
            self.0.get_or_default().timelines.push(timeline);
        }
    }

    pub(super) fn add_event(&mut self, event: Option<(EventTicket, Event)>) {
        if let Some(event) = event {
            self.0.get_or_default().events.push(event);
        }
    }

    /// Returns what there is, to be dropped with no lock held.
    #[inline]
    pub(super) fn into_lists(self) -> Option<Lists> {
        (!self.0.is_none()).then(|| self.0.or_default())
    }
}
