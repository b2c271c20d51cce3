//! Where the parkable blocks of one tag lie: addresses and handles of their own.
//!
//! One range of addresses, twice as long as the device has memory, in slots with a handle each.
//! Blocks are cut out of slots that have memory, lowest place first, and what is free remembers
//! whose work has to be over before others may have it: the [`Commons`] of the caches, here for one
//! tag. A stream has what it freed itself at once, what others freed when that is known to be done,
//! and where there is no more memory to be had it waits for them on the device.

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

/// Between two looks whether other threads have taken the memory that they were about to.
const PAUSE: Duration = Duration::from_micros(50);

/// The memory of one tag.
pub(crate) struct Lodging {
    pub(super) pool: Weak<Inner>,
    pub(super) apart: Arc<Apart>,
    streams: StreamPool,
    pub(super) tag: Tag,
    pub(super) span: Arc<Span>,
    state: Mutex<State>,
}

/// What a tag's blocks may be used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Anything.
    Awake,
    /// Nothing: they are about to be parked. Their memory is still there.
    Parking,
    /// Nothing, and there is no memory behind them.
    Parked,
    /// Nothing: they are about to have memory again.
    Resuming,
}

/// A thread that is taking memory for blocks. Nothing is parked before it is through.
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
    /// What is free in claimed slots.
    pub(super) free: Commons,
    /// Freed blocks that others use or used, and what ends when they are free.
    held_back: Vec<HeldBack>,
    /// Slots that are somebody's: they have memory, are about to, or had it when they were parked.
    pub(super) claimed: BTreeSet<u64>,
    /// What was in the live blocks when they were parked.
    pub(super) saved: Vec<Piece>,
    /// Freed on the way to or from being parked: whoever checks is told at its end.
    untold: Vec<(u64, Range)>,
    /// Threads that take memory for blocks, or blocks back: what they have in hand is in none of
    /// the above.
    underway: u64,
}

/// A live block, as its memory's keeper sees it.
pub(super) struct Lodger {
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) home: Arc<Timeline>,
    pub(super) generation: u64,
    /// `None` as soon as its owner lets go of it.
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

/// The way home of a parkable block.
struct Lodged(Arc<Lodging>);

impl State {
    /// For each live block an event of each of these, to be sent without the lock.
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

    /// The live blocks as ranges, those that touch as one, by address.
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

    /// Whether a live block lies in any part of a range.
    pub(super) fn lives_in(&self, range: Range) -> bool {
        let below = self.blocks.range(..range.end()).next_back();
        below.is_some_and(|(start, lodger)| start + lodger.bytes > range.start)
    }

    /// What was freed and is done with becomes free; `all` where the host has seen that all of it
    /// is. What ends with it, to be dropped outside the lock.
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

    /// Where `bytes` find room with the fewest slots that have no memory yet: the first of them,
    /// how many, and the free range before it that is the block's too.
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

    /// Lets go of those of `slots` that are wholly free and whose past is `ready`. Answers with
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
            // Looked at by taking it, and given back if it is not to go: whoever could see that
            // waits for this lock.
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

    /// Refuses uses of all blocks, unless one is open. The work that may be queued for them.
    fn shut_blocks(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>> {
        if let Some(open) = self.held_back.iter().find(|held| held.block.uses.is_open()) {
            return Err(MemoryError::Busy { address: open.block.address });
        }
        let mut work = Vec::new();
        for (&address, lodger) in &self.blocks {
            // Nobody is about to let go of one, or that would be under way.
            let Some(watch) = &lodger.watch else { continue };
            work.extend(watch.park(address, tag)?);
            work.push((lodger.home.clone(), lodger.home.open()));
        }
        Ok(work)
    }

    /// Uses begin again.
    pub(super) fn wake(&mut self, apart: &Apart) {
        self.tell(apart);
        self.phase = Phase::Awake;
        self.blocks.values().filter_map(|lodger| lodger.watch.as_ref()).for_each(Watch::resume);
    }

    /// Tells whoever checks of the blocks that were freed on the way.
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

    /// That the tag is parked, unless it is awake.
    fn admit(&self, state: &State) -> Result<()> {
        match state.phase {
            Phase::Awake => Ok(()),
            Phase::Parking | Phase::Parked | Phase::Resuming => {
                Err(MemoryError::Parked { tag: self.tag })
            }
        }
    }

    /// A block for work that is queued on `stream` from now on.
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

    /// Waits for the work of what has been freed, until the deadline, and makes it free.
    fn wait_for_freed(&self, until: Option<Instant>) -> Result<()> {
        for (timeline, epoch) in latest(self.freed_work()) {
            waited(|| timeline.wait(epoch, until))?;
        }
        self.look()
    }

    /// A free range of the tag's that is `ready`, and what has to be over before it is used.
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

    /// The same, whatever uses it: the stream waits for that on the device.
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
                // Nobody can wait for these just now; there may be other memory.
                match error {
                    MemoryError::Capturing { .. }
                    | MemoryError::OtherThread { .. }
                    | MemoryError::UnknownId => Ok(None),
                    error => Err(error),
                }
            }
        }
    }

    /// A range with new memory behind it, as far as what is free and `ready` at the end of the
    /// claimed slots does not do.
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

    /// The token of a block over a range that is the caller's, whom nothing of its `past` stops.
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
                // Its token goes unknown to anybody.
                drop(block);
                self.state().free.add(range, past);
                Err(error)
            }
        }
    }

    /// Looks which work is done that freed blocks wait for. Never blocks.
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

    /// What freed blocks wait for, but for uses that are open.
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

    /// Says that freed blocks are free, and ends what ends with them.
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

    /// Refuses blocks from now on, and every use of those there are. Answers with the work that has
    /// to be over before nothing uses the tag's memory any more. Blocks while other threads take
    /// memory for blocks, until the deadline.
    ///
    /// # Errors
    /// [`MemoryError::Parked`]; [`MemoryError::Busy`] if a use is open; [`MemoryError::TimedOut`].
    /// Nothing has changed then.
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

    /// Uses begin again.
    pub(super) fn open(&self) {
        self.state().wake(&self.apart);
    }

    /// Whether no use may begin.
    pub(super) fn is_parked(&self) -> bool {
        self.state().phase != Phase::Awake
    }

    /// Gives slots back to the driver in which nothing lives and nothing runs. Answers with the
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
            // Before anybody can take them down.
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

    /// What it holds.
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
    /// A block comes home.
    fn take_back(&self, block: Deferred) {
        let range = Range { start: block.address, len: block.bytes };
        let users: Vec<RawStream> = block.uses.iter().map(|u| u.on().raw()).collect();
        let stream = block.timeline.number();
        let own = Owned::ends(&block.timeline);
        let (over, pieces, events) = {
            let mut state = self.state();
            // One that was never given out is not known, and lies in what its maker has in hand.
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
            // A block without memory was freed by every account when it was parked.
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
    /// Takes out what was saved of a freed range, as far as nothing else was saved with it.
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
        // Before the block's uses are taken: what watches them is good no longer then.
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

/// The last epoch of each stream.
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

/// The first of `count` numbers in a row that are not taken.
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
        // No block lives, and what is free may be in use by work of those that did.
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
