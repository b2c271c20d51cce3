//! The slow allocation path: the steps, in order, when a stream's own cache has no room.
//!
//! After each step the request is tried again, and the cheapest steps come first. Only the waits
//! for queued work and reclaim handlers block. No lock is held over any step:
//!
//! 1. release this stream's own freed blocks that other streams have finished with;
//! 2. record an event behind each stream that has freed since its last event, and poll the events;
//! 3. new physical memory, free memory of other caches, memory in use that this stream waits for on
//!    the device, and handles from under free memory, in the order of one of the lists of [`Step`]s
//!    below, which [`crate::leasing`] chooses;
//! 4. release free handles and create new ones, where the free memory suffices but is fragmented;
//! 5. reclaim from others registered with the budget, without waiting;
//! 6. wait on the host, up to a deadline, for the oldest work that frees something;
//! 7. reclaim from others again, which may now wait until the deadline;
//! 8. an error that names the causes.
//!
//! Stable and reserved memory, which needs new handles, goes through steps 5 to 8 as well.

mod refusal;

use crate::{
    Adoption, Block, Request,
    block::Freed,
    home::{Home, Settle},
    leasing::First,
    physical::{
        Physical,
        handle::{Funds, NoHandle},
        mapped::{Attempt, Effort, Grain, Reach},
        plain::Plain,
    },
    pool::{Inner, deadline},
    reclaim::Others,
};
use aquifer_core::{
    Action, MemoryError, PoolStats, Reservation, Result, Tag,
    error::Tried,
    scratch::{Bump, List, list},
};
use aquifer_stream::Timeline;
use smallvec::SmallVec;
use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Counters of the slow path.
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

/// A step of the slow path.
#[derive(Clone, Copy)]
enum Step {
    /// Search all caches that share.
    In(Attempt),
    /// Search the stream's own cache only.
    InOwn(Attempt),
    /// Make each stream wait on the device for the other users of what it has freed.
    Wait,
}

const fn attempt(reach: Reach, grain: Grain, grow: bool, steal: bool) -> Attempt {
    Attempt { reach, grain, grow, steal }
}

/// Whole slots in any cache that are free, and whose work is done.
const TAKE: Attempt = attempt(Reach::Done, Grain::Slots, false, false);
/// As [`TAKE`], by the unit.
const TAKE_UNITS: Attempt = attempt(Reach::Done, Grain::Units, false, false);
/// As [`TAKE_UNITS`], and memory still in use: the stream waits for it on the device.
const TAKE_IN_USE: Attempt = attempt(Reach::Wait, Grain::Units, false, false);
/// New memory where it is missing.
const GROW: Attempt = attempt(Reach::Done, Grain::Slots, true, false);
/// Handles from under free memory where it is missing.
const MOVE: Attempt = attempt(Reach::Done, Grain::Units, false, true);
/// As [`MOVE`], also from under memory that is still in use.
const MOVE_IN_USE: Attempt = attempt(Reach::Wait, Grain::Units, false, true);
/// New memory, and handles where new memory is refused.
const GROW_AND_MOVE: Attempt = attempt(Reach::Done, Grain::Units, true, true);
/// All of the above.
const ALL: Attempt = attempt(Reach::Wait, Grain::Units, true, true);

/// While memory is ample, streams keep apart: a stream takes new memory before that of others.
const AMPLE: &[Step] = &[
    Step::InOwn(GROW),
    Step::In(TAKE),
    Step::In(GROW),
    Step::In(TAKE_UNITS),
    Step::In(GROW_AND_MOVE),
    Step::Wait,
    Step::In(ALL),
];
/// As [`AMPLE`], where memory has been enough before: shared free ranges come first, also with a
/// wait on the device.
const SETTLED: &[Step] = &[
    Step::InOwn(TAKE_UNITS),
    Step::InOwn(TAKE_IN_USE),
    Step::InOwn(GROW),
    Step::In(TAKE),
    Step::In(GROW),
    Step::In(TAKE_UNITS),
    Step::In(GROW_AND_MOVE),
    Step::Wait,
    Step::In(ALL),
];
/// Where much memory is idle: it is used before new memory, even if the stream has to wait for
/// another.
const IDLE: &[Step] = &[
    Step::In(TAKE_UNITS),
    Step::Wait,
    Step::In(TAKE_IN_USE),
    Step::In(GROW),
    Step::In(GROW_AND_MOVE),
    Step::In(ALL),
];
/// Where most memory is idle, or on request: handles move as well.
const COMPACT: &[Step] = &[
    Step::In(TAKE_UNITS),
    Step::Wait,
    Step::In(TAKE_IN_USE),
    Step::In(MOVE),
    Step::In(MOVE_IN_USE),
    Step::In(GROW_AND_MOVE),
    Step::In(ALL),
];
/// Where all free memory is shared, and has been searched already.
const TOGETHER: &[Step] = &[Step::In(GROW_AND_MOVE), Step::Wait, Step::In(ALL)];

fn count(counter: &AtomicU64, by: u64) {
    if by > 0 {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// How many times moves of other threads are waited for before a request is refused.
const OTHERS_TURNS: u32 = 64;

/// How often a pool gives back its own idle memory between reclaims from others: once for each
/// budget above it, with a margin for the case that another thread takes what was given.
const OWN_TURNS: u32 = 8;

/// Counts down. Returns whether any turn was left.
fn spend(turns: &mut u32) -> bool {
    let left = *turns > 0;
    *turns = turns.saturating_sub(1);
    left
}

/// Number of steps noted without a heap allocation: the steps of one slow path, and some of
/// reclaimers.
const STEPS: usize = 16;

/// Bounds of the pause between two checks of the moves of other threads.
const SHORTEST_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// The number of moves begun, and the number of moves ended.
type Traffic = (u64, u64);

/// The state of a slow path.
#[derive(Default)]
pub(crate) struct Progress<'a> {
    reserved: Option<&'a Mutex<Reservation>>,
    /// The counts when the last search began.
    traffic: Traffic,
    /// Number of moves that this slow path itself has begun since.
    own: u64,
    tried: SmallVec<[Tried; STEPS]>,
    pub(crate) refused: Option<NoHandle>,
}

impl Progress<'_> {
    /// Adds the bytes that a step gave.
    pub(crate) fn note(&mut self, step: &'static str, gave: u64) {
        match self.tried.iter_mut().find(|t| t.step == step) {
            Some(tried) => tried.gave += gave,
            None => self.tried.push(Tried { step, gave }),
        }
    }
}

/// Runs `wait`, and returns whether there was something to wait for. A stream that captures cannot
/// be waited for, one of another thread cannot be fenced, and one may have been destroyed: what
/// those hold is not available, and is no error.
pub(crate) fn waited(wait: impl FnOnce() -> Result<bool>) -> Result<bool> {
    match wait() {
        Err(
            MemoryError::Capturing { .. }
            | MemoryError::OtherThread { .. }
            | MemoryError::UnknownId,
        ) => Ok(false),
        waited => waited,
    }
}

/// Which of the streams that cannot be fenced are waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfenced {
    /// All of them.
    All,
    /// Streams without a lease, which nothing will fence later.
    Abandoned,
}

/// Waits until these epochs are proved, as far as no event can prove them. Waits for the device.
/// Returns whether there were any.
fn outlast(work: impl IntoIterator<Item = (Arc<Timeline>, u64)>, whose: Unfenced) -> Result<bool> {
    let mut waited = false;
    for (timeline, epoch) in work {
        let included = whose == Unfenced::All || !timeline.is_leased();
        if included && timeline.is_out_of_reach(epoch) {
            waited |= timeline.wait(epoch, None)?;
        }
    }
    Ok(waited)
}

impl Inner {
    #[cold]
    pub(crate) fn allocate_slowly(
        self: &Arc<Self>,
        home: &'static Home,
        request: &Request,
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        if let Some(error) = self.refuse_beyond(request.size(), request.owner()) {
            return Err(error);
        }
        let mut progress = Progress { reserved, ..Progress::default() };
        let mut block = self.run_chain(home, request, &mut progress);
        let until = deadline(self.config.wait);
        // Another thread may have been moving memory between caches. Retry, since that memory may
        // be available now.
        for _ in 0..OTHERS_TURNS {
            if !matches!(block, Ok(None)) || !self.had_traffic(&progress) {
                break;
            }
            self.wait_for_traffic(until);
            block = self.run_chain(home, request, &mut progress);
        }
        match block {
            Ok(Some(block)) => {
                self.leasing.served(request.size());
                self.shed();
                Ok(block)
            }
            Ok(None) => {
                count(&self.counters.failures, 1);
                self.report_pool(Action::Fail, request.size(), request.owner());
                // Handles set aside for this request are released before it is refused.
                self.drop_spare();
                Err(MemoryError::OutOfMemory(Box::new(self.explain(
                    request.size(),
                    Some(home),
                    progress,
                ))))
            }
            Err(error) => {
                count(&self.counters.failures, 1);
                self.report_pool(Action::Fail, request.size(), request.owner());
                Err(error)
            }
        }
    }

    /// Returns whether another thread has moved memory since the counts were noted.
    fn had_traffic(&self, progress: &Progress<'_>) -> bool {
        let Progress { traffic: (departed, arrived), own, .. } = progress;
        departed != arrived || self.traffic() != (departed + own, arrived + own)
    }

    /// Waits until as many moves have ended as have begun by now. A move may be in a long driver
    /// call. Blocks until the deadline, at most.
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
        let settled = home.settle_now_and_then()?;
        progress.note("settle own frees", settled);
        if let Some(block) = self.try_again(home, request, settled) {
            return Ok(Some(block));
        }
        self.insist(request.size(), Some(home), progress, |progress| {
            self.make_room(home, request, progress)
        })
    }

    /// Retries `attempt` with reclaim from others and waits for queued work in between. These are
    /// the blocking steps, for memory of any kind. The work of `first` is waited for first.
    pub(crate) fn insist<'a, T>(
        &self,
        wanted: u64,
        first: Option<&'static Home>,
        progress: &mut Progress<'a>,
        mut attempt: impl FnMut(&mut Progress<'a>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        if let Some(taken) = attempt(progress)? {
            return Ok(Some(taken));
        }
        let until = deadline(self.config.wait);
        if let Some(checked) = self.quarantine.get().and_then(Weak::upgrade) {
            loop {
                let gave = checked.give_way(wanted);
                progress.note("let blocks out of quarantine", gave);
                if gave == 0 {
                    break;
                }
                if let Some(taken) = attempt(progress)? {
                    return Ok(Some(taken));
                }
            }
        }
        let mut others = self.others();
        // Memory that is available without a wait comes before a wait for this pool's own work.
        let mut own = OWN_TURNS;
        while self.ask(&mut others, wanted, progress, Some(Instant::now()))
            || spend(&mut own) && self.give_own(wanted, progress)?
        {
            if let Some(taken) = attempt(progress)? {
                return Ok(Some(taken));
            }
        }
        while until.is_none_or(|until| Instant::now() < until)
            && self.wait_for_oldest(first, until)?
        {
            count(&self.counters.host_waits, 1);
            progress.note("wait for queued work", 0);
            if let Some(taken) = attempt(progress)? {
                return Ok(Some(taken));
            }
        }
        let mut own = OWN_TURNS;
        while self.ask(&mut others, wanted, progress, until)
            || spend(&mut own) && self.give_own(wanted, progress)?
        {
            if let Some(taken) = attempt(progress)? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Reclaims from one other user of the budget that refused, or of the device that is full.
    /// Returns whether there was one.
    fn ask(
        &self,
        others: &mut Others<'_>,
        wanted: u64,
        progress: &mut Progress<'_>,
        deadline: Option<Instant>,
    ) -> bool {
        let asked = match progress.refused {
            Some(NoHandle::Driver(_)) => others.for_memory(wanted, deadline),
            Some(NoHandle::Budget(refused)) => {
                let drawn = progress.reserved.map_or(0, |held| {
                    held.lock().unwrap_or_else(PoisonError::into_inner).remaining()
                });
                others.for_charge(refused.requested.saturating_sub(drawn), deadline)
            }
            None => others.for_charge(wanted, deadline),
        };
        asked.is_some_and(|Tried { step, gave }| {
            progress.note(step, gave);
            true
        })
    }

    /// Runs the steps that never block, except where a device without virtual memory takes memory
    /// back.
    fn make_room(
        self: &Arc<Self>,
        home: &'static Home,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        (progress.traffic, progress.own) = (self.traffic(), 0);
        self.apart.reap_quietly();
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let sharing = self.config.adoption != Adoption::Never;
        let own = [home];
        let givers: &[&'static Home] = if sharing { &homes } else { &own };
        // Where much is held, part of it is usually ready, and finding it takes no driver call.
        let gathers =
            sharing && !self.leasing.is_together() && self.leasing.takes_over(request.size());
        if gathers && let Some(block) = self.take_shared(home, givers, request, progress) {
            return Ok(Some(block));
        }
        let mut settled = self.look(&pass, &homes)?;
        let (inherited, transits) = self.share_abandoned(&pass, &homes, home);
        settled += inherited;
        progress.own += transits;
        if let (true, Physical::Mapped(mapped)) =
            (self.retention.stream_cache < u64::MAX, &self.physical)
        {
            progress.own += mapped.cap(&homes, self.retention.stream_cache);
        }
        progress.note("fence and poll", settled);
        let together = sharing && self.leasing.is_together();
        if !together && let Some(block) = self.try_again(home, request, settled) {
            return Ok(Some(block));
        }
        if sharing
            && self.leasing.may_share(request.size())
            && let Some(block) = self.take_shared(home, givers, request, progress)
        {
            return Ok(Some(block));
        }
        let steps = match together {
            true => TOGETHER,
            false if self.config.compact => COMPACT,
            false => match self.leasing.first(request.size()) {
                First::New => AMPLE,
                First::Nobodys => SETTLED,
                First::Idle => IDLE,
                First::Moves => COMPACT,
            },
        };
        // An isolated stream never waits for another, nor does one that captures. Evaluated lazily,
        // since it calls the driver.
        let waits = std::cell::LazyCell::new(|| {
            self.config.adoption == Adoption::Wait && home.timeline().waits_unasked()
        });
        for step in steps {
            let block = match *step {
                Step::InOwn(how) if how.reach == Reach::Done || *waits => {
                    self.place(home, &own, request, how, progress)?
                }
                Step::In(how) if how.reach == Reach::Done => {
                    self.place(home, givers, request, how, progress)?
                }
                Step::In(how) if *waits => {
                    let waited_for =
                        list(&pass, givers.iter().copied().filter(|giver| giver.is_waited_for()));
                    self.place(home, &waited_for, request, how, progress)?
                }
                Step::Wait if *waits => {
                    let settled = self.wait_on_device(&homes)?;
                    progress.note("wait on the device", settled);
                    self.try_again(home, request, settled)
                }
                Step::InOwn(_) | Step::In(_) | Step::Wait => None,
            };
            if block.is_some() {
                return Ok(block);
            }
        }
        self.make_anew(home, request, progress)
    }

    /// Releases free handles and creates new ones, where the free memory and the rest of the budget
    /// suffice together but are fragmented. Releases nothing if the request would not fit then
    /// either.
    fn make_anew(
        &self,
        home: &'static Home,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let gone = self.sweep() + self.apart.reap()? + self.lodgings.trim()?;
        // Blocks that earlier steps have settled are free, but their work is not yet known to be
        // done.
        self.look(&pass, &homes)?;
        let wanted = self.whole(request);
        let idle = self.idle_handles(&homes);
        let short = Funds { budget: &self.budget, reserved: progress.reserved }.shortfall(wanted);
        if gone + idle == 0 || idle < short {
            return Ok(None);
        }
        // If the budget is not short, the device is.
        let short = if short > 0 || gone > 0 { short } else { wanted };
        let gave = if short > 0 { self.press(self.held().saturating_sub(short))? } else { 0 };
        progress.note("give back what is free", gone + gave);
        self.place(home, &[home], request, GROW, progress)
    }

    /// Returns the bytes of physical memory that hold any block of this request.
    fn whole(&self, request: &Request) -> u64 {
        match &self.physical {
            Physical::Mapped(mapped) => mapped.whole(request.size()),
            Physical::Plain(_) => Plain::whole(request),
        }
    }

    /// Returns the bytes that a trim of the caches could give back now.
    fn idle_handles(&self, homes: &[&'static Home]) -> u64 {
        match &self.physical {
            Physical::Mapped(mapped) => mapped.idle(homes),
            Physical::Plain(plain) => plain.idle(homes),
        }
    }

    /// Gives back idle memory of this pool where the budget that refuses has no other user that
    /// could: the others that have to give the rest are found only once the next budget above
    /// refuses. Gives nothing unless it is enough for that budget. Returns whether it gave any.
    fn give_own(&self, wanted: u64, progress: &mut Progress<'_>) -> Result<bool> {
        let Some(NoHandle::Budget(refused)) = progress.refused else { return Ok(false) };
        let wanted = self.whole(&Request::bytes(wanted)).max(refused.requested);
        let Some(refused) = self.budget.refusal(wanted) else { return Ok(false) };
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        self.look(&pass, &homes)?;
        let short = refused.missing();
        if self.idle_handles(&homes) < short {
            return Ok(false);
        }
        let gave = self.press(self.held().saturating_sub(short))?;
        progress.note("give back what is free", gave);
        Ok(gave > 0)
    }

    /// Allocates a block from the shared free list. Caches first give up their ranges to it where
    /// the request is to be served from there.
    fn take_shared(
        self: &Arc<Self>,
        home: &'static Home,
        givers: &[&'static Home],
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Option<Block> {
        let Physical::Mapped(mapped) = &self.physical else { return None };
        if self.leasing.takes_over(request.size()) {
            mapped.pool_together(givers, self.leasing.gives_up());
            progress.own += 1;
        }
        let place = mapped.shared(home, request, self.leasing.fit())?;
        count(&self.counters.adoptions, 1);
        Some(self.hand_out(home, &Freed::found(home, &place, request), self.ticket()))
    }

    /// Makes each stream wait on the device for the other users of what it has freed. Returns the
    /// bytes that become free.
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

    /// Records an event behind every stream that has freed since its last event, polls the events,
    /// and settles blocks whose uses are over. Returns the bytes of these blocks. Never blocks.
    pub(crate) fn look(&self, bump: &Bump, homes: &[&'static Home]) -> Result<u64> {
        let mut held = List::with_capacity_in(homes.len(), bump);
        // All fences come before the first poll, since a device needs a moment to complete the
        // event of an idle stream.
        let mut fenced = List::new_in(bump);
        let mut fence = |timeline: Arc<Timeline>, epoch: u64| -> Result<()> {
            count(&self.counters.fences, u64::from(epoch > 0 && timeline.fence(epoch)?.is_new()));
            if !fenced.iter().any(|other| Arc::ptr_eq(other, &timeline)) {
                fenced.push(timeline);
            }
            Ok(())
        };
        for &home in homes {
            let (timeline, last_free, users) = home.with(|s| {
                held.push(s.holds());
                let users = list(bump, s.pending.iter().flat_map(|p| p.uses.stamped()));
                (s.timeline().cloned(), s.last_free, users)
            });
            let Some(timeline) = timeline else { continue };
            fence(timeline, last_free)?;
            for (user, epoch) in users {
                if !user.is_done(epoch) {
                    fence(user, epoch)?;
                }
            }
        }
        if let Physical::Mapped(mapped) = &self.physical {
            for (timeline, epoch) in mapped.zombie_fences(bump) {
                fence(timeline, epoch)?;
            }
        }
        for timeline in fenced {
            timeline.poll()?;
        }
        let shared = match &self.physical {
            Physical::Mapped(mapped) => mapped.spare_bytes(),
            Physical::Plain(_) => 0,
        };
        // Bytes of the warm reserve do not count as idle.
        self.leasing.decide(&self.budget, &held, shared.saturating_sub(self.retention.reserve()));
        let mut settled = 0;
        for &home in homes {
            settled += home.settle(Settle::Done)?.0;
        }
        Ok(settled)
    }

    /// Takes over memory of other caches and maps memory, so that the request finds room.
    fn place(
        &self,
        home: &'static Home,
        givers: &[&'static Home],
        request: &Request,
        how: Attempt,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let whole = self.leasing.grows_whole(request.size());
        let mut effort = Effort { reserved: progress.reserved, whole, ..Effort::default() };
        let place = match &self.physical {
            Physical::Mapped(mapped) => {
                mapped.place(home, givers, request, how, self.leasing.fit(), &mut effort)?
            }
            Physical::Plain(plain) if !how.grow && !how.steal || how.reach == Reach::Wait => {
                plain.adopt(home, givers, request, how.reach, &mut effort)?
            }
            Physical::Plain(plain) if how.grow => plain.place(home, request, &mut effort)?,
            // Segments cannot be moved.
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
        self.retention.grew(effort.grown);
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
        Ok(place
            .map(|place| self.hand_out(home, &Freed::found(home, &place, request), self.ticket())))
    }

    /// Waits for the oldest work that keeps memory from being free: first of `first`, then of
    /// dedicated memory, then of all other caches. Returns whether there was any. Blocks.
    pub(crate) fn wait_for_oldest(
        &self,
        first: Option<&'static Home>,
        until: Option<Instant>,
    ) -> Result<bool> {
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let pending = |home: &'static Home| move || home.wait_for_pending(until);
        let freed = |home: &'static Home| {
            move || {
                let (timeline, last_free) = home.with(|s| (s.timeline().cloned(), s.last_free));
                let timeline = timeline.filter(|timeline| !timeline.is_done(last_free));
                timeline.map_or(Ok(false), |timeline| timeline.wait(last_free, until))
            }
        };
        if let Some(first) = first
            && waited(pending(first))?
        {
            return Ok(true);
        }
        if self.apart.wait_for_oldest(until)? {
            return Ok(true);
        }
        for &home in &homes {
            if waited(pending(home))? {
                return Ok(true);
            }
        }
        for &home in &homes {
            if waited(freed(home))? {
                return Ok(true);
            }
        }
        self.outlast(&pass, &homes, Unfenced::All)
    }

    /// Waits for the device if caches hold memory of streams that this thread cannot fence, such as
    /// the default streams of threads that have ended: nothing else proves that their work is done.
    /// Does nothing while a capture is announced. Returns whether there was any such memory.
    /// Blocks, with no deadline.
    pub(crate) fn outlast(
        &self,
        bump: &Bump,
        homes: &[&'static Home],
        whose: Unfenced,
    ) -> Result<bool> {
        if self.apart.announced.load(Ordering::Relaxed) > 0 {
            return Ok(false);
        }
        let mut waited = false;
        for &home in homes {
            let work = home.with(|s| {
                let own = s.timeline().map(|timeline| (timeline.clone(), s.last_free));
                list(bump, own.into_iter().chain(s.pending.iter().flat_map(|p| p.uses.stamped())))
            });
            waited |= outlast(work, whose)?;
        }
        for lodging in self.lodgings.all() {
            waited |= outlast(lodging.freed_work(), whose)?;
        }
        waited |= outlast(self.apart.leaving_work(), whose)?;
        Ok(waited)
    }

    fn drop_spare(&self) {
        if let Physical::Mapped(mapped) = &self.physical {
            mapped.drop_spare();
        }
    }
}
