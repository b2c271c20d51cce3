//! The parkable memory of one tag, with its own addresses and handles.
//!
//! - It has one range of addresses, twice as long as the device's memory, in slots with a handle
//!   each.
//! - Blocks are cut out of slots that have memory, lowest address first.
//! - Each free range stores its dependencies: the work that must be over before it is reused. Free
//!   ranges are kept in a [`Commons`], as in the caches, here for one tag.
//! - A stream reuses its own freed ranges at once, and those of other streams when their work is
//!   known to be done. If no more memory is available, it waits for that work on the device.

use super::saved::Piece;
use crate::{
    Adoption, Block,
    apart::{Apart, Owned, Span},
    backend::{Backed, Deferred, Release},
    block::Asked,
    chain::waited,
    home::check_home,
    leasing::Fit,
    physical::{
        commons::{self, Commons, Past},
        window::Grid,
    },
    pool::{Inner, deadline},
    request::Sensible,
};
use aquifer_core::{
    Action, BLOCK_ALIGN, Event, MemoryError, PoolStats, Request, Result, Tag,
    event::{BlockKind, Ticket},
};
use aquifer_driver::{Ownership, RawStream};
use aquifer_heap::Range;
use aquifer_stream::{Stream, StreamPool, Timeline, Watch};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

/// The interval at which a thread checks whether other threads have finished taking memory.
const PAUSE: Duration = Duration::from_micros(50);

/// The parkable memory of one tag.
pub(crate) struct Lodging {
    pub(super) pool: Weak<Inner>,
    pub(super) apart: Arc<Apart>,
    streams: StreamPool,
    pub(super) tag: Tag,
    pub(super) span: Arc<Span>,
    state: Mutex<State>,
}

/// The state of a tag's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Resident: uses are allowed.
    Awake,
    /// Being parked: no uses. The memory is still there.
    Parking,
    /// Parked: no uses, and no memory.
    Parked,
    /// Being resumed: no uses yet.
    Resuming,
}

/// Marks a thread that takes memory for blocks. Parking waits until it has finished.
struct Underway<'a>(&'a Lodging);

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.0.state().underway -= 1;
    }
}

pub(super) struct State {
    pub(super) phase: Phase,
    /// Live blocks, by address.
    pub(super) blocks: BTreeMap<u64, Lodger>,
    /// Free ranges in claimed slots.
    pub(super) free: Commons,
    /// Freed blocks that other streams still use, with what is dropped once they are free.
    held_back: Vec<HeldBack>,
    /// Claimed slots: they have memory, are getting it, or had it when they were parked.
    pub(super) claimed: BTreeSet<u64>,
    /// The contents of the live blocks when they were parked.
    pub(super) saved: Vec<Piece>,
    /// Blocks freed while being parked or resumed. They are reported to a validating driver at its
    /// end.
    untold: Vec<(u64, Range)>,
    /// The number of threads that take memory for blocks or return blocks. Their memory is in none
    /// of the lists above.
    underway: u64,
}

/// A live block, as its allocator sees it.
pub(super) struct Lodger {
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) home: Arc<Timeline>,
    pub(super) generation: u64,
    /// `None` as soon as its owner drops the block.
    pub(super) watch: Option<Watch>,
}

struct HeldBack {
    block: Deferred,
    /// The epoch of the home stream that covers the block's own work.
    own: (Arc<Timeline>, u64),
}

impl HeldBack {
    fn range(&self) -> Range {
        Range { start: self.block.address, len: self.block.bytes }
    }
}

/// Takes back parkable blocks that were dropped.
struct Lodged(Arc<Lodging>);

impl State {
    /// Returns an event of each action for each live block, to be sent without the lock.
    pub(super) fn events(
        &self,
        apart: &Apart,
        tag: Tag,
        actions: &[Action],
    ) -> Vec<(Ticket, Event)> {
        let of = |(&address, lodger): (&u64, &Lodger)| {
            let (stream, requested) = (lodger.home.number(), lodger.requested);
            let event = move |&action: &Action| {
                apart.event(BlockKind::Parkable, action, stream, address, requested, tag)
            };
            actions.iter().filter_map(event)
        };
        self.blocks.iter().flat_map(of).collect()
    }

    /// Returns the ranges of the live blocks by address, adjacent ones merged.
    pub(super) fn live_ranges(&self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (&start, lodger) in &self.blocks {
            match ranges.last_mut() {
                Some(last) if last.end() == start => last.len += lodger.bytes,
                _ => ranges.push(Range { start, len: lodger.bytes }),
            }
        }
        ranges
    }

    /// Returns whether a live block overlaps a range.
    pub(super) fn lives_in(&self, range: Range) -> bool {
        let below = self.blocks.range(..range.end()).next_back();
        below.is_some_and(|(start, lodger)| start + lodger.bytes > range.start)
    }

    /// Moves freed blocks whose uses are done to the free ranges. With `all`, the host has seen all
    /// uses done. Returns what is to be dropped outside the lock.
    pub(super) fn settle(&mut self, apart: &Apart, all: bool) -> Vec<Deferred> {
        let mut over = Vec::new();
        for mut held in std::mem::take(&mut self.held_back) {
            held.block.uses.forget_done();
            if !all && !held.block.uses.is_empty() {
                self.held_back.push(held);
                continue;
            }
            apart.lodged_settled(held.block.bytes);
            self.free.add(held.range(), std::iter::once(held.own).collect());
            over.push(held.block);
        }
        over
    }

    /// Returns where `bytes` fit with the fewest slots without memory: the first such slot, their
    /// number, and the free range before it that also becomes part of the block.
    fn room(
        &self,
        grid: Grid,
        bytes: u64,
        align: u64,
        ready: impl Fn(&Past) -> bool,
    ) -> (u64, u64, Option<Range>) {
        let count = bytes.div_ceil(grid.slot);
        let next = self.claimed.last().map_or(0, |last| last + 1);
        let end = grid.base + next * grid.slot;
        let tail =
            self.free.iter().last().filter(|(range, past)| range.end() == end && ready(past));
        let start = tail.map_or(end, |(range, _)| range.start.next_multiple_of(align));
        if start < end {
            let fewer = bytes.saturating_sub(end - start).div_ceil(grid.slot).max(1);
            if fewer <= count {
                return (next, fewer, Some(Range { start, len: end - start }));
            }
        }
        (gap(&self.claimed, count), count, None)
    }

    /// Releases those of `slots` that are wholly free and whose dependencies are `ready`. Returns
    /// them.
    pub(super) fn vacate(
        &mut self,
        slots: &[u64],
        grid: Grid,
        ready: impl Fn(&Past) -> bool,
    ) -> Vec<u64> {
        let mut vacated = Vec::new();
        for &slot in slots {
            let range = Range { start: grid.base + slot * grid.slot, len: grid.slot };
            // Taken to inspect it, and added back if it is to stay. The lock keeps other threads
            // from seeing this.
            let Some(past) = self.free.take(range) else { continue };
            if ready(&past) {
                self.claimed.remove(&slot);
                vacated.push(slot);
            } else {
                self.free.add(range, past);
            }
        }
        vacated
    }

    /// Refuses uses of all blocks, unless one is open. Returns the work that may be queued for
    /// them.
    fn shut_blocks(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>> {
        if let Some(open) = self.held_back.iter().find(|held| held.block.uses.is_open()) {
            return Err(MemoryError::Busy { address: open.block.address });
        }
        let mut work = Vec::new();
        for (&address, lodger) in &self.blocks {
            // A block being dropped would be counted in `underway`, which is 0.
            let Some(watch) = &lodger.watch else { continue };
            work.extend(watch.park(address, tag)?);
            work.push((lodger.home.clone(), lodger.home.open()));
        }
        Ok(work)
    }

    /// Allows uses again.
    pub(super) fn wake(&mut self, apart: &Apart) {
        self.tell(apart);
        self.phase = Phase::Awake;
        self.blocks.values().filter_map(|lodger| lodger.watch.as_ref()).for_each(Watch::resume);
    }

    /// Reports to a validating driver the blocks that were freed while being parked or resumed.
    pub(super) fn tell(&mut self, apart: &Apart) {
        for (generation, range) in std::mem::take(&mut self.untold) {
            apart.note(generation, range.start, range.len, Ownership::Free);
        }
    }
}

impl Lodging {
    pub(super) fn new(pool: &Arc<Inner>, tag: Tag, slot: u64) -> Result<Arc<Self>> {
        let apart = pool.apart.clone();
        let bytes = pool.info.memory.saturating_mul(2).next_multiple_of(slot);
        let span = apart.reserve(BlockKind::Parkable, bytes, slot, 0)?;
        let state = State {
            phase: Phase::Awake,
            blocks: BTreeMap::new(),
            free: Commons::default(),
            held_back: Vec::new(),
            claimed: BTreeSet::new(),
            saved: Vec::new(),
            untold: Vec::new(),
            underway: 0,
        };
        let (pool, streams) = (Arc::downgrade(pool), pool.streams().clone());
        Ok(Arc::new(Self { pool, apart, streams, tag, span, state: Mutex::new(state) }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn grid(&self) -> Grid {
        Grid { base: self.span.address, slot: self.span.slot }
    }

    /// Returns an error unless the tag is resident.
    fn admit(&self, state: &State) -> Result<()> {
        match state.phase {
            Phase::Awake => Ok(()),
            Phase::Parking | Phase::Parked | Phase::Resuming => {
                Err(MemoryError::Parked { tag: self.tag })
            }
        }
    }

    /// Allocates a block for work that is queued on `stream` from now on.
    pub(super) fn allocate(self: &Arc<Self>, stream: &Stream, request: Request) -> Result<Block> {
        let request = request.checked()?;
        check_home(&*self.apart.driver, self.apart.device, stream.timeline())?;
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        if let Some(error) = pool.refuse_beyond(request.size(), self.tag) {
            return Err(error);
        }
        let bytes = request.size().next_multiple_of(BLOCK_ALIGN);
        let own = Some(stream.timeline());
        let done = |past: &Past| commons::is_done_but_for(past, own);
        if let Some((range, past)) = self.take(bytes, &request, done)? {
            return self.lodge(stream, range, past, &request);
        }
        self.look()?;
        if let Some((range, past)) = self.take(bytes, &request, done)? {
            return self.lodge(stream, range, past, &request);
        }
        let slots = bytes.div_ceil(self.span.slot);
        let short = pool.budget().remaining() < slots * self.span.slot;
        if short
            && pool.config.adoption == Adoption::Wait
            && stream.timeline().waits_unasked()
            && let Some((range, past)) = self.take_and_wait(stream, bytes, &request)?
        {
            return self.lodge(stream, range, past, &request);
        }
        let (range, past) = match self.grow(&pool, stream, bytes, request.alignment(), done) {
            Ok(grown) => grown,
            Err(MemoryError::OutOfMemory(told)) => {
                self.wait_for_freed(deadline(pool.config.wait))?;
                match self.take(bytes, &request, done)? {
                    Some(taken) => taken,
                    None => return Err(MemoryError::OutOfMemory(told)),
                }
            }
            Err(error) => return Err(error),
        };
        self.lodge(stream, range, past, &request)
    }

    /// Waits for the work on freed blocks until the deadline, and frees their ranges.
    fn wait_for_freed(&self, until: Option<Instant>) -> Result<()> {
        for (timeline, epoch) in latest(self.freed_work()) {
            waited(|| timeline.wait(epoch, until))?;
        }
        self.look()
    }

    /// Takes a free range whose dependencies are `ready`, with these dependencies.
    fn take(
        &self,
        bytes: u64,
        request: &Request,
        ready: impl Fn(&Past) -> bool,
    ) -> Result<Option<(Range, Past)>> {
        let mut state = self.state();
        self.admit(&state)?;
        let range = state.free.place(bytes, request.alignment(), Fit::Lowest, self.grid(), ready);
        Ok(range.and_then(|range| Some((range, state.free.take(range)?))))
    }

    /// Like `take`, for any free range: the stream waits for its dependencies on the device.
    fn take_and_wait(
        &self,
        stream: &Stream,
        bytes: u64,
        request: &Request,
    ) -> Result<Option<(Range, Past)>> {
        let Some((range, past)) = self.take(bytes, request, |_| true)? else { return Ok(None) };
        let waited = past
            .iter()
            .try_for_each(|(other, epoch)| stream.timeline().wait_for(other, *epoch).map(drop));
        match waited {
            Ok(()) => Ok(Some((range, past))),
            Err(error) => {
                self.state().free.add(range, past);
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
        pool: &Arc<Inner>,
        stream: &Stream,
        bytes: u64,
        align: u64,
        ready: impl Fn(&Past) -> bool,
    ) -> Result<(Range, Past)> {
        let Grid { base, slot } = self.grid();
        let (first, count, tail) = {
            let mut state = self.state();
            self.admit(&state)?;
            let (first, count, tail) = state.room(self.grid(), bytes, align, ready);
            let limit = self.span.bytes;
            if (first + count) * slot > limit {
                return Err(MemoryError::TooLarge { requested: bytes, limit });
            }
            let tail = tail.and_then(|tail| Some((tail, state.free.take(tail)?)));
            state.claimed.extend(first..first + count);
            state.underway += 1;
            (first, count, tail)
        };
        let _underway = Underway(self);
        let slots: Vec<u64> = (first..first + count).collect();
        let backed = pool.back(&self.span, stream.timeline(), self.tag, &slots, None);
        let mut state = self.state();
        match backed {
            Ok(new) => {
                self.apart.lodged_backed(BlockKind::Parkable, new, count * slot - new);
                let end = base + (first + count) * slot;
                let (tail, past) =
                    tail.unwrap_or((Range { start: end - count * slot, len: 0 }, Past::new()));
                let range = Range { start: tail.start, len: bytes };
                if range.end() < end {
                    state
                        .free
                        .add(Range { start: range.end(), len: end - range.end() }, Past::new());
                }
                Ok((range, past))
            }
            Err(error) => {
                slots.iter().for_each(|slot| {
                    state.claimed.remove(slot);
                });
                if let Some((tail, past)) = tail {
                    state.free.add(tail, past);
                }
                Err(error)
            }
        }
    }

    /// Wraps a range in a block. The caller owns the range and has already waited for its
    /// dependencies.
    fn lodge(
        self: &Arc<Self>,
        stream: &Stream,
        range: Range,
        past: Past,
        request: &Request,
    ) -> Result<Block> {
        let (apart, tag, timeline) = (&self.apart, self.tag, stream.timeline());
        let generation = apart.generation();
        let backed = Backed {
            ledger: Arc::new(Lodged(self.clone())),
            timeline: timeline.clone(),
            streams: self.streams.clone(),
            bytes: range.len,
        };
        let block = Block::backed(range.start, Asked::new(request.size(), tag), backed, generation);
        let watch = Some(block.uses.watch(timeline));
        let requested = request.size();
        let entered = {
            let mut state = self.state();
            let admitted = self.admit(&state);
            if admitted.is_ok() {
                apart.lodged_took(range.len, requested, tag);
                let live = Ownership::Live { stream: stream.raw(), generation };
                apart.note(generation, range.start, range.len, live);
                let home = timeline.clone();
                let lodger = Lodger { bytes: range.len, requested, home, generation, watch };
                state.blocks.insert(range.start, lodger);
            }
            admitted.map(|()| {
                let (kind, stream) = (BlockKind::Parkable, stream.number());
                apart.event(kind, Action::Allocate, stream, range.start, requested, tag)
            })
        };
        match entered {
            Ok(event) => {
                apart.send(event);
                Ok(block)
            }
            Err(error) => {
                // The block was never handed out.
                drop(block);
                self.state().free.add(range, past);
                Err(error)
            }
        }
    }

    /// Polls the work that freed blocks depend on. Never blocks.
    pub(crate) fn look(&self) -> Result<()> {
        let work = latest(self.freed_work());
        for (timeline, epoch) in work {
            timeline.fence(epoch)?;
            timeline.poll()?;
        }
        let over = self.state().settle(&self.apart, false);
        self.complete(over);
        Ok(())
    }

    /// Returns the work that freed blocks depend on, except for open uses.
    pub(crate) fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let state = self.state();
        let mut work: Vec<_> =
            state.free.iter().flat_map(|(_, past)| past.iter().cloned()).collect();
        for held in &state.held_back {
            work.push(held.own.clone());
            work.extend(held.block.uses.stamped());
        }
        work
    }

    /// Reports freed blocks as free, and drops what was kept until then.
    pub(super) fn complete(&self, over: Vec<Deferred>) {
        for block in over {
            let Deferred { address, bytes, timeline, until_free, .. } = block;
            self.apart.report(
                BlockKind::Parkable,
                Action::Complete,
                timeline.number(),
                address,
                bytes,
                self.tag,
            );
            if until_free.is_some() {
                drop(until_free);
                self.apart.note_end();
            }
        }
    }

    /// Refuses new blocks and every use of existing ones from now on. Returns the work that must be
    /// over before nothing uses the tag's memory any more. While other threads take memory for
    /// blocks, waits until the deadline.
    ///
    /// # Errors
    /// [`MemoryError::Parked`]; [`MemoryError::Busy`] if a use is open; [`MemoryError::TimedOut`].
    /// In each case nothing has changed.
    pub(super) fn shut(&self, until: Option<Instant>) -> Result<Vec<(Arc<Timeline>, u64)>> {
        {
            let mut state = self.state();
            self.admit(&state)?;
            state.phase = Phase::Parking;
        }
        let shut = loop {
            let state = self.state();
            if state.underway == 0 {
                break state.shut_blocks(self.tag);
            }
            drop(state);
            if until.is_some_and(|until| Instant::now() >= until) {
                break Err(MemoryError::TimedOut);
            }
            std::thread::sleep(PAUSE);
        };
        match shut {
            Ok(mut work) => {
                work.extend(self.freed_work());
                Ok(latest(work))
            }
            Err(error) => {
                self.open();
                Err(error)
            }
        }
    }

    /// Allows uses again.
    pub(super) fn open(&self) {
        self.state().wake(&self.apart);
    }

    /// Returns whether uses are refused.
    pub(super) fn is_parked(&self) -> bool {
        self.state().phase != Phase::Awake
    }

    /// Returns slots to the driver that contain no live block and no running work. Returns the
    /// bytes.
    pub(crate) fn trim(&self) -> Result<u64> {
        self.look()?;
        let vacated = {
            let mut state = self.state();
            if state.phase != Phase::Awake {
                return Ok(0);
            }
            let slots: Vec<u64> = state.claimed.iter().copied().collect();
            let vacated = state.vacate(&slots, self.grid(), commons::is_done);
            // Accounted before another thread can unmap them.
            self.apart.lodged_left(vacated.len() as u64 * self.span.slot);
            for slot in &vacated {
                self.span.leave(*slot..slot + 1, Past::new(), Vec::new());
            }
            vacated
        };
        if vacated.is_empty() {
            return Ok(0);
        }
        let (gone, outcome) = self.apart.take_down(&self.span);
        outcome.map(|()| gone)
    }

    /// Returns its statistics.
    pub(super) fn stats(&self) -> PoolStats {
        let mut stats = PoolStats::default();
        stats.physical = self.span.charged_bytes();
        let state = self.state();
        stats.blocks = state.blocks.len() as u64;
        if matches!(state.phase, Phase::Awake | Phase::Parking) {
            stats.live = state.blocks.values().map(|lodger| lodger.bytes).sum();
            stats.requested = state.blocks.values().map(|lodger| lodger.requested).sum();
            stats.cached = state.free.bytes();
            stats.pending = state.held_back.iter().map(|held| held.block.bytes).sum();
        }
        stats
    }
}

impl Lodging {
    /// Takes back a block that its owner has dropped.
    fn take_back(&self, block: Deferred) {
        let range = Range { start: block.address, len: block.bytes };
        let users: Vec<RawStream> = block.uses.iter().map(|u| u.on().raw()).collect();
        let stream = block.timeline.number();
        let own = Owned::ends(&block.timeline);
        let (over, pieces, events) = {
            let mut state = self.state();
            // A block that was never handed out is not in the list. Its maker still owns the range.
            let Some(lodger) = state.blocks.remove(&block.address) else { return };
            state.underway -= 1;
            let there = matches!(state.phase, Phase::Awake | Phase::Parking);
            let (live, requested) = if there { (range.len, lodger.requested) } else { (0, 0) };
            self.apart.lodged_freed(live, requested, self.tag);
            let mut pieces = Vec::new();
            match state.phase {
                Phase::Awake => {
                    let owner = if users.is_empty() {
                        Ownership::Free
                    } else {
                        Ownership::Pending { users: &users }
                    };
                    self.apart.note(block.generation, range.start, range.len, owner);
                }
                Phase::Parking | Phase::Resuming => state.untold.push((block.generation, range)),
                Phase::Parked => pieces = state.forget(range),
            }
            let over = if !there {
                state.free.add(range, Past::new());
                Some(block)
            } else if block.uses.is_empty() && state.phase == Phase::Awake {
                self.apart.lodged_settled(range.len);
                state.free.add(range, std::iter::once(own).collect());
                Some(block)
            } else {
                state.held_back.push(HeldBack { block, own });
                None
            };
            let event = |action| {
                self.apart.event(
                    BlockKind::Parkable,
                    action,
                    stream,
                    range.start,
                    lodger.requested,
                    self.tag,
                )
            };
            // A parked block was already accounted as freed when it was parked.
            let freed = there.then(|| event(Action::Free)).flatten();
            let completed =
                (freed.is_some() && over.is_some()).then(|| event(Action::Complete)).flatten();
            (over, pieces, freed.into_iter().chain(completed))
        };
        drop(pieces);
        self.apart.send(events);
        drop(over.and_then(|block| block.until_free));
    }
}

impl State {
    /// Removes the saved contents of a freed range, unless they share a piece with those of a live
    /// block.
    fn forget(&mut self, range: Range) -> Vec<Piece> {
        let saved = std::mem::take(&mut self.saved);
        let (kept, over) = saved
            .into_iter()
            .partition(|piece| !piece.touches(range) || piece.ranges().any(|r| self.lives_in(r)));
        self.saved = kept;
        over
    }
}

impl Release for Lodged {
    fn ending(&self, address: u64) {
        // Taken before the block's uses are taken, which invalidates the watch.
        let mut state = self.0.state();
        if let Some(lodger) = state.blocks.get_mut(&address)
            && let Some(watch) = lodger.watch.take()
        {
            watch.resume();
            state.underway += 1;
        }
    }

    fn release(&self, block: Deferred) {
        self.0.take_back(block);
    }
}

/// Returns the latest unfinished epoch of each stream.
pub(crate) fn latest(work: Vec<(Arc<Timeline>, u64)>) -> Vec<(Arc<Timeline>, u64)> {
    let mut latest: Vec<(Arc<Timeline>, u64)> = Vec::new();
    for (timeline, epoch) in work {
        match latest.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &timeline)) {
            Some((_, last)) => *last = epoch.max(*last),
            None if timeline.is_done(epoch) => {}
            None => latest.push((timeline, epoch)),
        }
    }
    latest
}

/// Returns the first of `count` consecutive numbers that are not taken.
pub(crate) fn gap(taken: &BTreeSet<u64>, count: u64) -> u64 {
    let mut first = 0;
    for &slot in taken {
        if slot - first >= count {
            break;
        }
        first = slot + 1;
    }
    first
}

impl Drop for Lodging {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // No block is live, but work on freed ones may still use the free ranges.
        let (mut until, mut uses, mut until_free) = (Past::new(), Vec::new(), Vec::new());
        until.extend(state.free.iter().flat_map(|(_, past)| past.iter().cloned()));
        for HeldBack { block, own } in state.held_back.drain(..) {
            until.push(own);
            uses.extend(block.uses.follow());
            until_free.extend(block.until_free.map(|all| *all).unwrap_or_default());
            self.apart.lodged_settled(block.bytes);
        }
        self.apart.lodged_left(self.span.charged_bytes());
        let until_free = (!until_free.is_empty()).then(|| Box::new(until_free));
        self.span.leave_whole(latest(until.into_vec()).into(), uses, until_free);
        self.apart.leave(&self.span);
    }
}

impl fmt::Debug for Lodging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lodging")
            .field("tag", &self.tag)
            .field("span", &self.span)
            .finish_non_exhaustive()
    }
}
