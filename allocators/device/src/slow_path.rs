//! The slow allocation path: the steps, in order, when a stream's own cache has no room.
//!
//! After each step the request is tried again, and the cheapest steps come first. Only the waits
//! for queued work and reclaim handlers block. No lock is held over any step:
//!
//! 1. release this stream's own freed blocks that other streams have finished with;
//! 2. record an event behind each stream that has freed since its last event, and poll the events;
//! 3. new physical memory, free memory of other caches, memory in use that this stream waits for on
//!    the device, and handles from under free memory, in the order of one of the lists of [`Step`]s
//!    below, which [`crate::sharing_policy`] chooses;
//! 4. release free handles and create new ones, where the free memory suffices but is fragmented;
//! 5. reclaim from others registered with the budget, without waiting;
//! 6. wait on the host, up to a deadline, for the oldest work that frees something;
//! 7. reclaim from others again, which may now wait until the deadline;
//! 8. an error that names the causes.
//!
//! Stable and reserved memory, which needs new handles, goes through steps 5 to 8 as well.

mod oom;

use crate::{
    Adoption, Block, Request,
    base::waits::{deadline, try_wait},
    physical::{
        handle::{Funds, HandleError},
        options::{Granularity, PlaceOptions, PlaceOutcome, Readiness},
    },
    pool::PoolCore,
    reclaim::Reclaimers,
    sharing_policy::GrowthOrder,
    stream_cache::{BlockToken, StreamCache, pending::CollectMode},
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
    FromAll(PlaceOptions),
    /// Search the stream's own cache only.
    FromOwn(PlaceOptions),
    /// Make each stream wait on the device for the other users of what it has freed.
    Wait,
}

const fn options(
    readiness: Readiness,
    granularity: Granularity,
    grow: bool,
    move_handles: bool,
) -> PlaceOptions {
    PlaceOptions { readiness, granularity, grow, move_handles }
}

/// Whole slots in any cache that are free, and whose work is done.
const ADOPT: PlaceOptions = options(Readiness::Completed, Granularity::Slots, false, false);
/// As [`ADOPT`], by the unit.
const ADOPT_UNITS: PlaceOptions = options(Readiness::Completed, Granularity::Units, false, false);
/// As [`ADOPT_UNITS`], and memory still in use: the stream waits for it on the device.
const ADOPT_IN_USE: PlaceOptions = options(Readiness::MayWait, Granularity::Units, false, false);
/// New memory where it is missing.
const GROW: PlaceOptions = options(Readiness::Completed, Granularity::Slots, true, false);
/// Handles from under free memory where it is missing.
const MOVE: PlaceOptions = options(Readiness::Completed, Granularity::Units, false, true);
/// As [`MOVE`], also from under memory that is still in use.
const MOVE_IN_USE: PlaceOptions = options(Readiness::MayWait, Granularity::Units, false, true);
/// New memory, and handles where new memory is refused.
const GROW_AND_MOVE: PlaceOptions = options(Readiness::Completed, Granularity::Units, true, true);
/// All of the above.
const ALL: PlaceOptions = options(Readiness::MayWait, Granularity::Units, true, true);

/// While memory is ample, streams stay separate: a stream takes new memory before that of others.
const GROW_FIRST: &[Step] = &[
    Step::FromOwn(GROW),
    Step::FromAll(ADOPT),
    Step::FromAll(GROW),
    Step::FromAll(ADOPT_UNITS),
    Step::FromAll(GROW_AND_MOVE),
    Step::Wait,
    Step::FromAll(ALL),
];
/// As [`GROW_FIRST`], where memory has been enough before: shared free ranges come first, also with
/// a wait on the device.
const SHARED_FIRST: &[Step] = &[
    Step::FromOwn(ADOPT_UNITS),
    Step::FromOwn(ADOPT_IN_USE),
    Step::FromOwn(GROW),
    Step::FromAll(ADOPT),
    Step::FromAll(GROW),
    Step::FromAll(ADOPT_UNITS),
    Step::FromAll(GROW_AND_MOVE),
    Step::Wait,
    Step::FromAll(ALL),
];
/// Where much memory is idle: it is used before new memory, even if the stream has to wait for
/// another.
const REUSE_FIRST: &[Step] = &[
    Step::FromAll(ADOPT_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(GROW),
    Step::FromAll(GROW_AND_MOVE),
    Step::FromAll(ALL),
];
/// Where most memory is idle, or on request: handles move as well.
const COMPACT_FIRST: &[Step] = &[
    Step::FromAll(ADOPT_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(MOVE),
    Step::FromAll(MOVE_IN_USE),
    Step::FromAll(GROW_AND_MOVE),
    Step::FromAll(ALL),
];
/// Where all free memory is shared, and has been searched already.
const SHARED_ONLY: &[Step] = &[Step::FromAll(GROW_AND_MOVE), Step::Wait, Step::FromAll(ALL)];

fn count(counter: &AtomicU64, by: u64) {
    if by > 0 {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// How many times moves of other threads are waited for before a request is refused.
const MOVE_RETRIES: u32 = 64;

/// How often a pool gives back its own idle memory between reclaims from others: once for each
/// budget above it, with a margin for the case that another thread takes what was given.
const OWN_RECLAIMS: u32 = 8;

/// Counts down. Returns whether any turn was left.
fn take_turn(turns: &mut u32) -> bool {
    let left = *turns > 0;
    *turns = turns.saturating_sub(1);
    left
}

/// Number of steps recorded without a heap allocation: the steps of one slow path, and some of
/// reclaimers.
const INLINE_STEPS: usize = 16;

/// Bounds of the pause between two checks of the moves of other threads.
const SHORTEST_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// The number of moves begun, and the number of moves ended.
type MoveCounts = (u64, u64);

/// The state of a slow path.
#[derive(Default)]
pub(crate) struct Progress<'a> {
    reserved: Option<&'a Mutex<Reservation>>,
    /// The counts when the last search began.
    move_counts: MoveCounts,
    /// Number of moves that this slow path itself has begun since.
    own_moves: u64,
    tried: SmallVec<[Tried; INLINE_STEPS]>,
    pub(crate) refused: Option<HandleError>,
}

impl Progress<'_> {
    /// Adds the bytes that a step gave.
    pub(crate) fn record(&mut self, step: &'static str, gave: u64) {
        match self.tried.iter_mut().find(|t| t.step == step) {
            Some(tried) => tried.gave += gave,
            None => self.tried.push(Tried { step, gave }),
        }
    }
}

/// Which of the streams that cannot be fenced are waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitScope {
    /// All of them.
    All,
    /// Streams without a lease, which nothing will fence later.
    Abandoned,
}

/// Waits until these epochs are proved, as far as no event can prove them. Waits for the device.
/// Returns whether there were any.
fn wait_unfenceable(
    work: impl IntoIterator<Item = (Arc<Timeline>, u64)>,
    scope: WaitScope,
) -> Result<bool> {
    let mut waited = false;
    for (timeline, epoch) in work {
        let included = scope == WaitScope::All || !timeline.is_leased();
        if included && timeline.is_out_of_reach(epoch) {
            waited |= timeline.wait(epoch, None)?;
        }
    }
    Ok(waited)
}

impl PoolCore {
    #[cold]
    pub(crate) fn allocate_slow(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        request: &Request,
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        if let Some(error) = self.refuse_oversized(request.size(), request.owner()) {
            return Err(error);
        }
        let mut progress = Progress { reserved, ..Progress::default() };
        let mut block = self.run_slow_path(cache, request, &mut progress);
        let until = deadline(self.config.wait);
        // Another thread may have been moving memory between caches. Retry, since that memory may
        // be available now.
        for _ in 0..MOVE_RETRIES {
            if !matches!(block, Ok(None)) || !self.memory_moved(&progress) {
                break;
            }
            self.wait_for_moves(until);
            block = self.run_slow_path(cache, request, &mut progress);
        }
        match block {
            Ok(Some(block)) => {
                self.sharing_policy.record_served(request.size());
                self.enforce_threshold();
                Ok(block)
            }
            Ok(None) => {
                count(&self.counters.failures, 1);
                self.report_pool(Action::Fail, request.size(), request.owner());
                // Handles set aside for this request are released before it is refused.
                self.physical.drop_spare();
                Err(MemoryError::OutOfMemory(Box::new(self.explain(
                    request.size(),
                    Some(cache),
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

    /// Returns whether another thread has moved memory since the counts were recorded.
    fn memory_moved(&self, progress: &Progress<'_>) -> bool {
        let Progress { move_counts: (moves_begun, moves_ended), own_moves: own, .. } = progress;
        moves_begun != moves_ended || self.move_counts() != (moves_begun + own, moves_ended + own)
    }

    /// Waits until as many moves have ended as have begun by now. A move may be in a long driver
    /// call. Blocks until the deadline, at most.
    fn wait_for_moves(&self, until: Option<Instant>) {
        let (moves_begun, _) = self.move_counts();
        let mut pause = SHORTEST_PAUSE;
        std::thread::yield_now();
        while self.move_counts().1 < moves_begun && until.is_none_or(|until| Instant::now() < until)
        {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn move_counts(&self) -> MoveCounts {
        self.physical.move_counts()
    }

    fn run_slow_path(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let collected = cache.collect_throttled()?;
        progress.record("settle own frees", collected);
        if let Some(block) = self.retry_cache(cache, request, collected) {
            return Ok(Some(block));
        }
        self.retry_with_reclaim(request.size(), Some(cache), progress, |progress| {
            self.make_room(cache, request, progress)
        })
    }

    /// Retries `attempt` with reclaim from others and waits for queued work in between. These are
    /// the blocking steps, for memory of any kind. The work of `first` is waited for first.
    pub(crate) fn retry_with_reclaim<'a, T>(
        &self,
        wanted: u64,
        first: Option<&'static StreamCache>,
        progress: &mut Progress<'a>,
        mut attempt: impl FnMut(&mut Progress<'a>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        if let Some(gained) = attempt(progress)? {
            return Ok(Some(gained));
        }
        let until = deadline(self.config.wait);
        if let Some(checked) = self.quarantine.get().and_then(Weak::upgrade) {
            loop {
                let gave = checked.reclaim_quarantine(wanted);
                progress.record("let blocks out of quarantine", gave);
                if gave == 0 {
                    break;
                }
                if let Some(gained) = attempt(progress)? {
                    return Ok(Some(gained));
                }
            }
        }
        let mut reclaimers = self.reclaimers();
        // Memory that is available without a wait comes before a wait for this pool's own work.
        let mut own = OWN_RECLAIMS;
        while self.reclaim_from_others(&mut reclaimers, wanted, progress, Some(Instant::now()))
            || take_turn(&mut own) && self.reclaim_own(wanted, progress)?
        {
            if let Some(gained) = attempt(progress)? {
                return Ok(Some(gained));
            }
        }
        while until.is_none_or(|until| Instant::now() < until)
            && self.wait_for_oldest(first, until)?
        {
            count(&self.counters.host_waits, 1);
            progress.record("wait for queued work", 0);
            if let Some(gained) = attempt(progress)? {
                return Ok(Some(gained));
            }
        }
        let mut own = OWN_RECLAIMS;
        while self.reclaim_from_others(&mut reclaimers, wanted, progress, until)
            || take_turn(&mut own) && self.reclaim_own(wanted, progress)?
        {
            if let Some(gained) = attempt(progress)? {
                return Ok(Some(gained));
            }
        }
        Ok(None)
    }

    /// Reclaims from one other user of the budget that refused, or of the device that is full.
    /// Returns whether there was one.
    fn reclaim_from_others(
        &self,
        reclaimers: &mut Reclaimers<'_>,
        wanted: u64,
        progress: &mut Progress<'_>,
        deadline: Option<Instant>,
    ) -> bool {
        let reclaimed = match progress.refused {
            Some(HandleError::Driver(_)) => reclaimers.for_memory(wanted, deadline),
            Some(HandleError::Budget(refused)) => {
                let drawn = progress.reserved.map_or(0, |held| {
                    held.lock().unwrap_or_else(PoisonError::into_inner).remaining()
                });
                reclaimers.for_charge(refused.requested.saturating_sub(drawn), deadline)
            }
            None => reclaimers.for_charge(wanted, deadline),
        };
        reclaimed.is_some_and(|Tried { step, gave }| {
            progress.record(step, gave);
            true
        })
    }

    /// Runs the steps that never block, except where a device without virtual memory takes memory
    /// back.
    fn make_room(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        (progress.move_counts, progress.own_moves) = (self.move_counts(), 0);
        self.dedicated.reap_nonblocking();
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let sharing = self.config.adoption != Adoption::Never;
        let own = [cache];
        let donors: &[&'static StreamCache] = if sharing { &caches } else { &own };
        // Where much is held, part of it is usually ready, and finding it takes no driver call.
        let prefers_shared = sharing
            && !self.sharing_policy.shares_all()
            && self.sharing_policy.prefers_shared(request.size());
        if prefers_shared
            && let Some(block) = self.allocate_shared(cache, donors, request, progress)
        {
            return Ok(Some(block));
        }
        let mut collected = self.poll_fences(&pass, &caches)?;
        let (inherited, own_moves) = self.share_abandoned(&pass, &caches, cache);
        collected += inherited;
        progress.own_moves += own_moves;
        if self.retention.stream_cache < u64::MAX {
            progress.own_moves += self.physical.cap_caches(&caches, self.retention.stream_cache);
        }
        progress.record("fence and poll", collected);
        let shares_all = sharing && self.sharing_policy.shares_all();
        if !shares_all && let Some(block) = self.retry_cache(cache, request, collected) {
            return Ok(Some(block));
        }
        if sharing
            && self.sharing_policy.may_share(request.size())
            && let Some(block) = self.allocate_shared(cache, donors, request, progress)
        {
            return Ok(Some(block));
        }
        let steps = match shares_all {
            true => SHARED_ONLY,
            false if self.config.compact => COMPACT_FIRST,
            false => match self.sharing_policy.growth_order(request.size()) {
                GrowthOrder::GrowFirst => GROW_FIRST,
                GrowthOrder::SharedFirst => SHARED_FIRST,
                GrowthOrder::ReuseFirst => REUSE_FIRST,
                GrowthOrder::CompactFirst => COMPACT_FIRST,
            },
        };
        // An isolated stream never waits for another, nor does one that captures. Evaluated lazily,
        // since it calls the driver.
        let waits = std::cell::LazyCell::new(|| {
            self.config.adoption == Adoption::Wait && cache.timeline().waits_unasked()
        });
        for step in steps {
            let block = match *step {
                Step::FromOwn(options) if options.readiness == Readiness::Completed || *waits => {
                    self.place(cache, &own, request, options, progress)?
                }
                Step::FromAll(options) if options.readiness == Readiness::Completed => {
                    self.place(cache, donors, request, options, progress)?
                }
                Step::FromAll(options) if *waits => {
                    let waited_for =
                        list(&pass, donors.iter().copied().filter(|donor| donor.is_waited_for()));
                    self.place(cache, &waited_for, request, options, progress)?
                }
                Step::Wait if *waits => {
                    let collected = self.wait_on_device(&caches)?;
                    progress.record("wait on the device", collected);
                    self.retry_cache(cache, request, collected)
                }
                Step::FromOwn(_) | Step::FromAll(_) | Step::Wait => None,
            };
            if block.is_some() {
                return Ok(block);
            }
        }
        self.recreate_handles(cache, request, progress)
    }

    /// Releases free handles and creates new ones, where the free memory and the rest of the budget
    /// suffice together but are fragmented. Releases nothing if the request would not fit then
    /// either.
    fn recreate_handles(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let gone = self.retry_releases() + self.dedicated.reap()? + self.parkables.trim()?;
        // Blocks that earlier steps have collected are free, but their work is not yet known to be
        // done.
        self.poll_fences(&pass, &caches)?;
        let wanted = self.physical.backing_bytes(request);
        let idle = self.physical.idle(&caches);
        let short = Funds { budget: &self.budget, reserved: progress.reserved }.shortfall(wanted);
        if gone + idle == 0 || idle < short {
            return Ok(None);
        }
        // If the budget is not short, the device is.
        let short = if short > 0 || gone > 0 { short } else { wanted };
        let gave = if short > 0 {
            self.trim_under_pressure(self.held().saturating_sub(short))?
        } else {
            0
        };
        progress.record("give back what is free", gone + gave);
        self.place(cache, &[cache], request, GROW, progress)
    }

    /// Gives back idle memory of this pool where the budget that refuses has no other user that
    /// could: the others that have to give the rest are found only once the next budget above
    /// refuses. Gives nothing unless it is enough for that budget. Returns whether it gave any.
    fn reclaim_own(&self, wanted: u64, progress: &mut Progress<'_>) -> Result<bool> {
        let Some(HandleError::Budget(refused)) = progress.refused else { return Ok(false) };
        let wanted = self.physical.backing_bytes(&Request::bytes(wanted)).max(refused.requested);
        let Some(refused) = self.budget.refusal(wanted) else { return Ok(false) };
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        self.poll_fences(&pass, &caches)?;
        let short = refused.missing();
        if self.physical.idle(&caches) < short {
            return Ok(false);
        }
        let gave = self.trim_under_pressure(self.held().saturating_sub(short))?;
        progress.record("give back what is free", gave);
        Ok(gave > 0)
    }

    /// Allocates a block from the shared free list. Caches first give up their ranges to it where
    /// the request is to be served from there.
    fn allocate_shared(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Option<Block> {
        if !self.physical.is_mapped() {
            return None;
        }
        if self.sharing_policy.prefers_shared(request.size()) {
            self.physical.share_free(donors, self.sharing_policy.min_shared_extent());
            progress.own_moves += 1;
        }
        let place = self.physical.allocate_shared(cache, request, self.sharing_policy.fit())?;
        count(&self.counters.adoptions, 1);
        Some(self.make_block(cache, &BlockToken::new(cache, &place, request), self.ticket()))
    }

    /// Makes each stream wait on the device for the other users of what it has freed. Returns the
    /// bytes that become free.
    fn wait_on_device(&self, caches: &[&'static StreamCache]) -> Result<u64> {
        let mut collected = 0;
        for &cache in caches {
            let (bytes, waits) = cache.collect_pending(CollectMode::WaitOnDevice)?;
            count(&self.counters.stream_waits, waits);
            collected += bytes;
        }
        Ok(collected)
    }

    fn retry_cache(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        collected: u64,
    ) -> Option<Block> {
        if collected == 0 { None } else { self.try_cache(cache, request) }
    }

    /// Records an event behind every stream that has freed since its last event, polls the events,
    /// and collects blocks whose uses are over. Returns the bytes of these blocks. Never blocks.
    pub(crate) fn poll_fences(&self, bump: &Bump, caches: &[&'static StreamCache]) -> Result<u64> {
        let mut held = List::with_capacity_in(caches.len(), bump);
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
        for &cache in caches {
            let (timeline, last_free, users) = cache.with(|s| {
                held.push(s.footprint());
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
        for (timeline, epoch) in self.physical.zombie_fences(bump) {
            fence(timeline, epoch)?;
        }
        for timeline in fenced {
            timeline.poll()?;
        }
        let shared = self.physical.spare_bytes();
        // Bytes of the warm reserve do not count as idle.
        self.sharing_policy.update(
            &self.budget,
            &held,
            shared.saturating_sub(self.retention.reserve()),
        );
        let mut collected = 0;
        for &cache in caches {
            collected += cache.collect_pending(CollectMode::Completed)?.0;
        }
        Ok(collected)
    }

    /// Takes over memory of other caches and maps memory, so that the request finds room.
    fn place(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        options: PlaceOptions,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let whole = self.sharing_policy.grows_whole_blocks(request.size());
        let mut outcome =
            PlaceOutcome { reserved: progress.reserved, whole, ..PlaceOutcome::default() };
        let fit = self.sharing_policy.fit();
        let place = self.physical.place(cache, donors, request, options, fit, &mut outcome)?;
        let (step, gave) = match options {
            PlaceOptions { readiness: Readiness::MayWait, .. } => {
                ("take over what is in use", outcome.adopted)
            }
            PlaceOptions { move_handles: true, .. } => ("move what is done", outcome.adopted),
            PlaceOptions { grow: true, .. } => ("grow", outcome.grown),
            _ => ("take over what is done", outcome.adopted),
        };
        progress.record(step, gave);
        progress.own_moves += outcome.own_moves;
        if outcome.refused.is_some() {
            progress.refused = outcome.refused;
        }
        self.retention.record_growth(outcome.grown);
        count(&self.counters.growths, u64::from(outcome.grown > 0));
        count(&self.counters.adoptions, u64::from(outcome.adopted > 0));
        count(&self.counters.moves, outcome.moves);
        count(&self.counters.stream_waits, outcome.waits);
        if outcome.grown > 0 {
            self.report_pool(Action::Grow, outcome.grown, Tag::NONE);
        }
        if outcome.adopted > 0 {
            self.report_pool(Action::Adopt, outcome.adopted, Tag::NONE);
        }
        if outcome.moves > 0 {
            self.report_pool(Action::Move, outcome.moves, Tag::NONE);
        }
        Ok(place.map(|place| {
            self.make_block(cache, &BlockToken::new(cache, &place, request), self.ticket())
        }))
    }

    /// Waits for the oldest work that keeps memory from being free: first of `first`, then of
    /// dedicated memory, then of all other caches. Returns whether there was any. Blocks.
    pub(crate) fn wait_for_oldest(
        &self,
        first: Option<&'static StreamCache>,
        until: Option<Instant>,
    ) -> Result<bool> {
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let pending = |cache: &'static StreamCache| move || cache.wait_for_pending(until);
        let freed = |cache: &'static StreamCache| {
            move || {
                let (timeline, last_free) = cache.with(|s| (s.timeline().cloned(), s.last_free));
                let timeline = timeline.filter(|timeline| !timeline.is_done(last_free));
                timeline.map_or(Ok(false), |timeline| timeline.wait(last_free, until))
            }
        };
        if let Some(first) = first
            && try_wait(pending(first))?
        {
            return Ok(true);
        }
        if self.dedicated.wait_for_oldest(until)? {
            return Ok(true);
        }
        for &cache in &caches {
            if try_wait(pending(cache))? {
                return Ok(true);
            }
        }
        for &cache in &caches {
            if try_wait(freed(cache))? {
                return Ok(true);
            }
        }
        self.wait_unfenceable(&pass, &caches, WaitScope::All)
    }

    /// Waits for the device if caches hold memory of streams that this thread cannot fence, such as
    /// the default streams of threads that have ended: nothing else proves that their work is done.
    /// Does nothing while a capture is announced. Returns whether there was any such memory.
    /// Blocks, with no deadline.
    pub(crate) fn wait_unfenceable(
        &self,
        bump: &Bump,
        caches: &[&'static StreamCache],
        scope: WaitScope,
    ) -> Result<bool> {
        if self.dedicated.announced.load(Ordering::Relaxed) > 0 {
            return Ok(false);
        }
        let mut waited = false;
        for &cache in caches {
            let work = cache.with(|s| {
                let own = s.timeline().map(|timeline| (timeline.clone(), s.last_free));
                list(bump, own.into_iter().chain(s.pending.iter().flat_map(|p| p.uses.stamped())))
            });
            waited |= wait_unfenceable(work, scope)?;
        }
        for parkable in self.parkables.all() {
            waited |= wait_unfenceable(parkable.freed_work(), scope)?;
        }
        waited |= wait_unfenceable(self.dedicated.retiring_work(), scope)?;
        Ok(waited)
    }
}
