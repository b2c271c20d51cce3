//! What is tried, and in which order, when a stream's own cache has no room.
//!
//! Each step is followed by another look, and the cheapest come first. Only waiting for the oldest work blocks,
//! and handlers may; no lock is held over any of them:
//!
//! 1. what other streams have finished with of this stream's own freed blocks;
//! 2. an event behind each stream that has freed since its last, and a look which have passed;
//! 3. new physical memory, what is free in other caches, what this stream has to wait for on the device, and handles from
//!    under free memory, in the order of one of the lists of [`Step`]s below: which one, [`crate::leasing`] decides;
//! 4. handlers that were asked to give something back, other pools among them;
//! 5. the oldest work that frees something, waited for on the host, up to a deadline;
//! 6. an error that says what stood in the way.

use crate::{
    Adoption, Block, Request,
    home::{Home, Settle},
    leasing::First,
    physical::{
        Physical,
        handle::NoHandle,
        mapped::{Attempt, Effort, Grain, Reach},
    },
    pool::{Inner, deadline},
};
use aquifer_core::{
    Action, MemoryError, OutOfMemory, PoolStats, Reservation, Result, Tag,
    budget::Holding,
    error::{Stranded, Tried},
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// What slow paths count.
#[derive(Default, Debug)]
pub(crate) struct Counters {
    pub(crate) reaped: AtomicU64,
    failures: AtomicU64,
    growths: AtomicU64,
    moves: AtomicU64,
    adoptions: AtomicU64,
    fences: AtomicU64,
    stream_waits: AtomicU64,
    host_waits: AtomicU64,
}

impl Counters {
    pub(crate) fn add_to(&self, stats: &mut PoolStats) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.reaped += read(&self.reaped);
        stats.failures += read(&self.failures);
        stats.growths += read(&self.growths);
        stats.moves += read(&self.moves);
        stats.adoptions += read(&self.adoptions);
        stats.fences += read(&self.fences);
        stats.stream_waits += read(&self.stream_waits);
        stats.host_waits += read(&self.host_waits);
    }
}

/// One step towards room.
#[derive(Clone, Copy)]
enum Step {
    /// Look in all caches that share.
    In(Attempt),
    /// Look in the stream's own cache only.
    InOwn(Attempt),
    /// Make each stream wait, on the device, for the other users of what it has freed.
    Wait,
}

const fn attempt(reach: Reach, grain: Grain, grow: bool, steal: bool) -> Attempt {
    Attempt { reach, grain, grow, steal }
}

/// Whole slots that are free and done, in whatever cache.
const TAKE: Attempt = attempt(Reach::Done, Grain::Slots, false, false);
/// The same by the unit.
const TAKE_UNITS: Attempt = attempt(Reach::Done, Grain::Units, false, false);
/// The same, and what is still in use: the stream waits for it on the device.
const TAKE_IN_USE: Attempt = attempt(Reach::Wait, Grain::Units, false, false);
/// New memory where it is missing.
const GROW: Attempt = attempt(Reach::Done, Grain::Slots, true, false);
/// Handles from under free memory where it is missing.
const MOVE: Attempt = attempt(Reach::Done, Grain::Units, false, true);
/// The same, under what is still in use.
const MOVE_IN_USE: Attempt = attempt(Reach::Wait, Grain::Units, false, true);
/// New memory, and handles where that is refused.
const GROW_AND_MOVE: Attempt = attempt(Reach::Done, Grain::Units, true, true);
/// Everything.
const ALL: Attempt = attempt(Reach::Wait, Grain::Units, true, true);

/// While memory is ample streams keep apart: a stream takes new memory before anybody else's.
const AMPLE: &[Step] = &[
    Step::InOwn(GROW),
    Step::In(TAKE),
    Step::In(GROW),
    Step::In(TAKE_UNITS),
    Step::In(GROW_AND_MOVE),
    Step::Wait,
    Step::In(ALL),
];
/// Where much lies idle it is used before there is more of it, if the stream has to wait for another.
const IDLE: &[Step] = &[
    Step::In(TAKE_UNITS),
    Step::Wait,
    Step::In(TAKE_IN_USE),
    Step::In(GROW),
    Step::In(GROW_AND_MOVE),
    Step::In(ALL),
];
/// And where very much does, or on demand, handles move as well.
const COMPACT: &[Step] = &[
    Step::In(TAKE_UNITS),
    Step::Wait,
    Step::In(TAKE_IN_USE),
    Step::In(MOVE),
    Step::In(MOVE_IN_USE),
    Step::In(GROW_AND_MOVE),
    Step::In(ALL),
];
/// What is free has been brought together, and looked through.
const TOGETHER: &[Step] = &[Step::In(GROW_AND_MOVE), Step::Wait, Step::In(ALL)];

fn count(counter: &AtomicU64, by: u64) {
    if by > 0 {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// How many times others' memory in hand is waited for before a request is refused.
const OTHERS_TURNS: u32 = 64;

/// Between two looks whether others still have memory in hand.
const SHORTEST_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// Attempts that have taken memory in hand, and those of them that are over.
type Traffic = (u64, u64);

/// How a chain has gone so far.
#[derive(Default)]
struct Progress<'a> {
    reserved: Option<&'a Mutex<Reservation>>,
    /// When the last search began.
    traffic: Traffic,
    /// How often this chain has itself taken memory in hand since.
    own: u64,
    tried: Vec<Tried>,
    refused: Option<NoHandle>,
}

impl Progress<'_> {
    fn note(&mut self, step: &'static str, gave: u64) {
        note(&mut self.tried, step, gave);
    }
}

/// Adds what a step gave.
pub(crate) fn note(tried: &mut Vec<Tried>, step: &'static str, gave: u64) {
    match tried.iter_mut().find(|t| t.step == step) {
        Some(tried) => tried.gave += gave,
        None => tried.push(Tried { step, gave }),
    }
}

impl Inner {
    #[cold]
    pub(crate) fn allocate_slowly(
        self: &Arc<Self>,
        home: &'static Home,
        request: &Request,
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        let mut progress = Progress { reserved, ..Progress::default() };
        let mut block = self.run_chain(home, request, &mut progress);
        let until = deadline(self.config.wait);
        // Memory that others had in hand meanwhile was nobody's, and may be there now.
        for _ in 0..OTHERS_TURNS {
            if !matches!(block, Ok(None)) || !self.had_traffic(&progress) {
                break;
            }
            self.wait_for_traffic(until);
            block = self.run_chain(home, request, &mut progress);
        }
        match block {
            Ok(Some(block)) => Ok(block),
            Ok(None) => {
                count(&self.counters.failures, 1);
                self.report_pool(Action::Fail, request.size(), request.owner());
                // What the chain took aside for this request goes back before it is refused.
                self.drop_spare();
                Err(MemoryError::OutOfMemory(Box::new(self.explain(home, request, progress))))
            }
            Err(error) => {
                count(&self.counters.failures, 1);
                self.report_pool(Action::Fail, request.size(), request.owner());
                Err(error)
            }
        }
    }

    /// Whether another thread had memory in hand since the traffic was noted.
    fn had_traffic(&self, progress: &Progress<'_>) -> bool {
        let Progress { traffic: (departed, arrived), own, .. } = progress;
        departed != arrived || self.traffic() != (departed + own, arrived + own)
    }

    /// Waits until as many attempts are over as have memory in hand now: they may be in long calls of the driver's. Blocks
    /// until the deadline, at most.
    fn wait_for_traffic(&self, until: Option<Instant>) {
        let (departed, _) = self.traffic();
        let mut pause = SHORTEST_PAUSE;
        std::thread::yield_now();
        while self.traffic().1 < departed && until.is_none_or(|until| Instant::now() < until) {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn traffic(&self) -> Traffic {
        match &self.physical {
            Physical::Mapped(mapped) => mapped.traffic(),
            Physical::Plain(_) => (0, 0),
        }
    }

    fn run_chain(
        self: &Arc<Self>,
        home: &'static Home,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let (settled, _) = home.settle(Settle::Done)?;
        progress.note("settle own frees", settled);
        if let Some(block) = self.try_again(home, request, settled) {
            return Ok(Some(block));
        }
        if let Some(block) = self.make_room(home, request, progress)? {
            return Ok(Some(block));
        }
        for handler in &self.config.reclaim {
            loop {
                let offered = handler.reclaim(request.size());
                progress.note("pressure handlers", offered);
                if offered == 0 {
                    break;
                }
                if let Some(block) = self.make_room(home, request, progress)? {
                    return Ok(Some(block));
                }
            }
        }
        let until = deadline(self.config.wait);
        while until.is_none_or(|until| Instant::now() < until) && self.wait_for_oldest(home, until)? {
            count(&self.counters.host_waits, 1);
            progress.note("wait for queued work", 0);
            if let Some(block) = self.make_room(home, request, progress)? {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// The steps that never block.
    fn make_room(
        self: &Arc<Self>,
        home: &'static Home,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        (progress.traffic, progress.own) = (self.traffic(), 0);
        let homes = self.homes();
        let settled = self.look(&homes)?;
        progress.note("fence and poll", settled);
        let sharing = self.config.adoption != Adoption::Never;
        let own = [home];
        let givers: &[&'static Home] = if sharing { &homes } else { &own };
        let together = sharing && self.leasing.is_together();
        if let (true, Physical::Mapped(mapped)) = (together, &self.physical) {
            mapped.pool_together(givers);
            progress.own += 1;
            if let Some(place) = mapped.lowest(home, request) {
                count(&self.counters.adoptions, 1);
                return Ok(Some(self.hand_out(home, place, request, self.ticket())));
            }
        } else if let Some(block) = self.try_again(home, request, settled) {
            return Ok(Some(block));
        }
        let steps = match together {
            true => TOGETHER,
            false if self.config.compact => COMPACT,
            false => match self.leasing.first(request.size()) {
                First::New => AMPLE,
                First::Idle => IDLE,
                First::Moves => COMPACT,
            },
        };
        // An isolated stream waits for nobody, nor does one that captures. Asks the driver, so not before it matters.
        let waits = std::cell::LazyCell::new(|| {
            self.config.adoption == Adoption::Wait && home.timeline().waits_unasked()
        });
        for step in steps {
            let block = match *step {
                Step::InOwn(how) => self.place(home, &own, request, how, progress)?,
                Step::In(how) if how.reach == Reach::Done => {
                    self.place(home, givers, request, how, progress)?
                }
                Step::In(how) if *waits => {
                    let waited_for: Vec<_> =
                        givers.iter().copied().filter(|giver| giver.is_waited_for()).collect();
                    self.place(home, &waited_for, request, how, progress)?
                }
                Step::Wait if *waits => {
                    let settled = self.wait_on_device(&homes)?;
                    progress.note("wait on the device", settled);
                    self.try_again(home, request, settled)
                }
                Step::In(_) | Step::Wait => None,
            };
            if block.is_some() {
                return Ok(block);
            }
        }
        Ok(None)
    }

    /// Makes each stream wait for the other users of what it has freed. Answers with the bytes that are free by that.
    fn wait_on_device(&self, homes: &[&'static Home]) -> Result<u64> {
        let mut settled = 0;
        for &home in homes {
            let (bytes, waits) = home.settle(Settle::Wait)?;
            count(&self.counters.stream_waits, waits);
            settled += bytes;
        }
        Ok(settled)
    }

    fn try_again(&self, home: &'static Home, request: &Request, settled: u64) -> Option<Block> {
        if settled == 0 { None } else { home.try_alloc(self, request) }
    }

    /// Records an event behind every stream that has freed since its last, looks which have passed, and settles what
    /// they let go of. Answers with those bytes. Never blocks.
    pub(crate) fn look(&self, homes: &[&'static Home]) -> Result<u64> {
        let mut held = Vec::with_capacity(homes.len());
        for &home in homes {
            let (timeline, last_free, users) = home.with(|s| {
                held.push(s.holds());
                let users: Vec<_> = s.pending.iter().flat_map(|p| p.uses.stamped()).collect();
                (s.timeline().cloned(), s.last_free, users)
            });
            let Some(timeline) = timeline else { continue };
            count(&self.counters.fences, u64::from(last_free > 0 && timeline.fence(last_free)?.is_new()));
            timeline.poll()?;
            for (user, epoch) in users {
                if !user.is_done(epoch) {
                    count(&self.counters.fences, u64::from(user.fence(epoch)?.is_new()));
                    user.poll()?;
                }
            }
        }
        let shared = match &self.physical {
            Physical::Mapped(mapped) => mapped.spare_bytes(),
            Physical::Plain(_) => 0,
        };
        self.leasing.decide(&self.budget, &held, shared);
        if let Physical::Mapped(mapped) = &self.physical {
            for (timeline, epoch) in mapped.zombie_fences() {
                count(&self.counters.fences, u64::from(timeline.fence(epoch)?.is_new()));
                timeline.poll()?;
            }
        }
        let mut settled = 0;
        for &home in homes {
            settled += home.settle(Settle::Done)?.0;
        }
        Ok(settled)
    }

    /// Takes over what other caches have, and backs addresses, for the request.
    fn place(
        &self,
        home: &'static Home,
        givers: &[&'static Home],
        request: &Request,
        how: Attempt,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let mut effort = Effort { reserved: progress.reserved, ..Effort::default() };
        let place = match &self.physical {
            Physical::Mapped(mapped) => mapped.place(home, givers, request, how, &mut effort)?,
            Physical::Plain(plain) if !how.grow && !how.steal || how.reach == Reach::Wait => {
                plain.adopt(home, givers, request, how.reach, &mut effort)?
            }
            Physical::Plain(plain) if how.grow => plain.place(home, request, &mut effort)?,
            // Segments stay where they are.
            Physical::Plain(_) => None,
        };
        let (step, gave) = match how {
            Attempt { reach: Reach::Wait, .. } => ("take over what is in use", effort.adopted),
            Attempt { steal: true, .. } => ("move what is done", effort.adopted),
            Attempt { grow: true, .. } => ("grow", effort.grown),
            _ => ("take over what is done", effort.adopted),
        };
        progress.note(step, gave);
        progress.own += effort.transits;
        if effort.refused.is_some() {
            progress.refused = effort.refused;
        }
        count(&self.counters.growths, u64::from(effort.grown > 0));
        count(&self.counters.adoptions, u64::from(effort.adopted > 0));
        count(&self.counters.moves, effort.moves);
        count(&self.counters.stream_waits, effort.waits);
        if effort.grown > 0 {
            self.report_pool(Action::Grow, effort.grown, Tag::NONE);
        }
        if effort.adopted > 0 {
            self.report_pool(Action::Adopt, effort.adopted, Tag::NONE);
        }
        if effort.moves > 0 {
            self.report_pool(Action::Move, effort.moves, Tag::NONE);
        }
        Ok(place.map(|place| self.hand_out(home, place, request, self.ticket())))
    }

    /// Waits for the oldest work that keeps something from being free. Says whether there was any.
    fn wait_for_oldest(&self, home: &'static Home, until: Option<Instant>) -> Result<bool> {
        let homes = self.homes();
        for candidate in std::iter::once(home).chain(homes.iter().copied()) {
            match candidate.wait_for_pending(until) {
                Ok(true) => return Ok(true),
                // Nobody can wait for a stream that captures, or fence another thread's, so what those hold is not
                // to be had.
                Ok(false) | Err(MemoryError::Capturing { .. } | MemoryError::OtherThread { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        for &candidate in &homes {
            let (timeline, last_free) = candidate.with(|s| (s.timeline().cloned(), s.last_free));
            if let Some(timeline) = timeline
                && !timeline.is_done(last_free)
            {
                match timeline.wait(last_free, until) {
                    Err(MemoryError::Capturing { .. } | MemoryError::OtherThread { .. }) => {}
                    waited => return waited,
                }
            }
        }
        Ok(false)
    }

    fn drop_spare(&self) {
        if let Physical::Mapped(mapped) = &self.physical {
            mapped.drop_spare();
        }
    }

    /// That there is no room for `bytes`, with what the pool holds as a whole.
    pub(crate) fn out_of_memory(
        &self,
        bytes: u64,
        refused: Option<NoHandle>,
        tried: Vec<Tried>,
    ) -> OutOfMemory {
        let stats = self.stats();
        let mut error = OutOfMemory::new(self.info.device.to_string(), bytes);
        match refused {
            Some(NoHandle::Budget(refused)) => error.refused = Some(refused),
            Some(NoHandle::Driver(refused)) => error.driver = Some(refused),
            None => {}
        }
        (error.live, error.cached) = (stats.live, stats.cached);
        (error.pending, error.physical) = (stats.pending, stats.physical);
        error.tried = tried;
        error
    }

    fn explain(&self, home: &'static Home, request: &Request, progress: Progress<'_>) -> OutOfMemory {
        let mut error = self.out_of_memory(request.size(), progress.refused, progress.tried);
        let mut holders: Vec<Holding> = Vec::new();
        for other in self.homes() {
            other.with(|s| {
                error.largest_free = error.largest_free.max(s.heap.largest_free());
                for holding in s.holdings().filter(|h| h.bytes > 0) {
                    match holders.iter_mut().find(|h| h.tag == holding.tag) {
                        Some(sum) => {
                            sum.bytes += holding.bytes;
                            sum.blocks += holding.blocks;
                        }
                        None => holders.push(holding),
                    }
                }
                let cached = s.heap.stats().free_bytes;
                let pending = s.account.pending;
                if !std::ptr::eq(other, home) && cached + pending > 0 {
                    let stream = s.timeline().map_or(0, |t| t.number());
                    error.stranded.push(Stranded { stream, cached, pending });
                }
            });
        }
        holders.sort_by_key(|h| std::cmp::Reverse(h.bytes));
        error.stranded.sort_by_key(|s| std::cmp::Reverse(s.cached + s.pending));
        error.holders = holders;
        error
    }
}
