//! The slow allocation path: the steps, in order, when a stream's own cache has no room.
//!
//! After each step the request is tried again, and the cheapest steps come first. Steps 5 to 7 may
//! block, step 4 to free a legacy block, and so may the wait for transfers of other threads. No
//! lock is held over any step:
//!
//! 1. release this stream's own freed blocks that other streams have finished with;
//! 2. record an event behind each stream whose free memory has none yet, and behind the users of
//!    pending frees, and poll the events;
//! 3. the shared free list, after it has got the free memory of streams without a lease; then new
//!    physical memory, free memory of other caches, memory in use that this stream waits for on the
//!    device, and handles from under free memory, in the order of one of the lists of [`Step`]s,
//!    which [`crate::sharing_policy`] chooses;
//! 4. release free handles and create new ones, where the free memory suffices but is fragmented;
//! 5. reclaim from others registered with the budget, without waiting, and release idle memory of
//!    this pool where that is enough for the budget that refuses;
//! 6. wait on the host, up to a deadline, for work that frees something;
//! 7. step 5 again, and the others may now wait until the deadline;
//! 8. an error that names the causes.
//!
//! While free memory is shared, all but small blocks search the shared free list before step 2 as
//! well, after it has got what the stream itself has freed. That is enough for most of them.
//!
//! If another thread had memory in transfer between caches meanwhile, the request waits for the end
//! of the transfer and repeats the steps. The deadline is that of the request, which
//! [`crate::base::waits`] keeps for its thread.
//!
//! Stable and reserved memory, which needs new handles, goes through steps 5 to 8 as well.

mod oom;
mod progress;
mod room;

use crate::{
    Adoption, Block, Request,
    backing::handle::{Funds, HandleError},
    base::{
        released::Released,
        waits::{begin_request, deadline},
    },
    mapped_memory::search::{PlaceOutcome, Supply},
    pool_core::{PoolCore, count, fences::FenceScope},
    reclaim::Reclaimers,
    sharing_policy::steps::{GROW, PlaceOptions, Step},
    stream_cache::{BlockToken, StreamCache},
};
use aquifer_core::{
    Action, MemoryError, Reservation, Result, Tag, error::Tried, event::BlockKind, scratch::list,
};
use progress::{Progress, TransferCounts};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How many times transfers of other threads are waited for before a request is refused.
const TRANSFER_RETRIES: u32 = 64;

/// How often a pool gives back its own idle memory between reclaims from others: once for each
/// budget above it, with a margin for the case that another thread takes what was given.
const OWN_RECLAIMS: u32 = 8;

/// Counts down. Returns whether any turn was left.
fn take_turn(turns: &mut u32) -> bool {
    let left = *turns > 0;
    *turns = turns.saturating_sub(1);
    left
}

/// Bounds of the pause between two checks of the transfers of other threads.
const SHORTEST_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

impl PoolCore {
    #[cold]
    pub(crate) fn allocate_slow(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        request: &Request,
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        if let Some(error) = self.refuse_oversized(request.size(), request.owner()) {
            self.publish();
            return Err(error);
        }
        // One deadline for all rounds.
        let _request = begin_request();
        let _counted = self.sharing_policy.enter_slow_path(request.size());
        let mut progress = Progress { reserved, ..Progress::default() };
        let mut block = self.run_slow_path(cache, request, &mut progress);
        // Another thread may have been moving memory between caches. Retry, since that memory may
        // be available now.
        for _ in 0..TRANSFER_RETRIES {
            if !matches!(block, Ok(None)) || !self.memory_in_transfer(&progress) {
                break;
            }
            self.wait_for_transfers(deadline(self.config.wait));
            block = self.run_slow_path(cache, request, &mut progress);
        }
        let refused = match block {
            Ok(Some(block)) => {
                self.peaks.settle_cache(cache);
                if progress.polled {
                    self.sharing_policy.record_served(request.size());
                }
                self.enforce_threshold();
                self.publish_allocation();
                return Ok(block);
            }
            Ok(None) => None,
            Err(error) => Some(error),
        };
        count(&self.counters.failures, 1);
        let by_budget = progress.refused_by_budget().filter(|_| refused.is_none());
        let by_budget = by_budget.map(|refused| (&self.budget, refused));
        self.report_failure(request.size(), request.owner(), by_budget);
        let error = refused.unwrap_or_else(|| {
            // Handles set aside for this request are released before it is refused.
            self.memory.drop_spare();
            let causes = self.explain(request.size(), Some(cache), progress);
            MemoryError::OutOfMemory(Box::new(causes))
        });
        self.publish();
        Err(error)
    }

    /// Returns whether another thread has had memory in transfer since the counts were recorded.
    fn memory_in_transfer(&self, progress: &Progress<'_>) -> bool {
        let Progress { transfer_counts: (begun, ended), own_transfers: own, .. } = progress;
        begun != ended || self.transfer_counts() != (begun + own, ended + own)
    }

    /// Waits until as many transfers have ended as have begun by now. One may be in a long driver
    /// call. Blocks until the deadline, at most.
    fn wait_for_transfers(&self, until: Option<Instant>) {
        let (transfers_begun, _) = self.transfer_counts();
        let mut pause = SHORTEST_PAUSE;
        std::thread::yield_now();
        while self.transfer_counts().1 < transfers_begun
            && until.is_none_or(|until| Instant::now() < until)
        {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn transfer_counts(&self) -> TransferCounts {
        self.memory.transfer_counts()
    }

    fn run_slow_path(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        let collected = cache.collect_throttled()?;
        progress.record("collect own frees", collected);
        if let Some(block) = self.retry_cache(cache, request, collected) {
            return Ok(Some(block));
        }
        self.retry_with_reclaim(request.size(), Some(cache), progress, |progress| {
            self.make_room(cache, request, progress)
        })
    }

    fn reclaimers(&self) -> Reclaimers<'_> {
        Reclaimers::new(&self.budget, self.registration.get(), &*self.driver, self.info.device)
    }

    /// Retries `attempt` with reclaim from others and waits for queued work in between. These are
    /// the blocking steps, for memory of any kind. The work of `first` is waited for first.
    fn retry_with_reclaim<'a, T>(
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
            && self.wait_for_freed_work(first, until)?
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
            Some(HandleError::Driver(_)) => reclaimers.after_refusal(wanted, deadline),
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

    /// Runs steps 1 to 4.
    fn make_room(
        self: &Arc<Self>,
        cache: &'static StreamCache,
        request: &Request,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Block>> {
        (progress.transfer_counts, progress.own_transfers) = (self.transfer_counts(), 0);
        let sharing = self.config.adoption != Adoption::Never;
        let own = [cache];
        // What this stream itself has freed is often enough, and no other is disturbed then.
        if sharing
            && self.sharing_policy.searches_shared_first(request.size())
            && let Some(block) = self.allocate_shared(cache, &own, request, progress)
        {
            return Ok(Some(block));
        }
        self.dedicated.reap_nonblocking();
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let donors: &[&'static StreamCache] = if sharing { &caches } else { &own };
        let collected = self.poll_fences(&pass, &caches, self.first_fence_scope())?;
        progress.polled = true;
        progress.own_transfers += self.share_abandoned(&pass, &caches);
        if self.retention.stream_cache < u64::MAX {
            progress.own_transfers += self.memory.cap_caches(&caches, self.retention.stream_cache);
        }
        progress.record("fence and poll", collected);
        let shares_all = sharing && self.sharing_policy.shares_all();
        if !shares_all && let Some(block) = self.retry_cache(cache, request, collected) {
            return Ok(Some(block));
        }
        if sharing && let Some(block) = self.allocate_shared(cache, donors, request, progress) {
            return Ok(Some(block));
        }
        // An isolated stream never waits for another, nor does one that captures. Evaluated lazily,
        // since it calls the driver.
        let waits = std::cell::LazyCell::new(|| {
            self.config.adoption == Adoption::Wait && cache.timeline().waits_unasked()
        });
        for step in self.sharing_policy.steps(request.size()) {
            let block = match *step {
                Step::FromOwn(options) if !options.may_wait || *waits => {
                    self.place(cache, &own, request, options, progress)?
                }
                Step::FromAll(options) if !options.may_wait => {
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
        let mut gone = Released::from(self.retry_releases());
        gone += self.dedicated.reap();
        gone += self.release_free();
        gone.device_lost()?;
        // Blocks that earlier steps have collected are free, but their work is not yet known to be
        // done.
        self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
        let wanted = self.memory.backing_bytes(request);
        let idle = self.memory.idle(&caches);
        let short = Funds { budget: &self.budget, reserved: progress.reserved }.shortfall(wanted);
        if gone.bytes + idle == 0 || idle < short {
            progress.record_refusal(&gone);
            return Ok(None);
        }
        // If the budget is not short, the device is.
        let short = if short > 0 || gone.bytes > 0 { short } else { wanted };
        if short > 0 {
            gone += self.trim_under_pressure(self.held().saturating_sub(short))?;
        }
        progress.record_released(gone);
        self.place(cache, &[cache], request, GROW, progress)
    }

    /// Gives back idle memory of this pool where the budget that refuses has no other user that
    /// could: the others that have to give the rest are found only once the next budget above
    /// refuses. Gives nothing unless it is enough for that budget. Returns whether it gave any, or
    /// there is room without that.
    fn reclaim_own(&self, wanted: u64, progress: &mut Progress<'_>) -> Result<bool> {
        let Some(HandleError::Budget(refused)) = progress.refused else { return Ok(false) };
        let wanted = self.memory.backing_bytes(&Request::bytes(wanted)).max(refused.requested);
        // Others may have made room meanwhile, as processes do that share the device.
        let Some(refused) = self.budget.refusal(wanted) else { return Ok(true) };
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
        let short = refused.missing();
        if self.memory.idle(&caches) < short {
            return Ok(false);
        }
        let gave = self.trim_under_pressure(self.held().saturating_sub(short))?;
        Ok(progress.record_released(gave) > 0)
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
        if self.sharing_policy.prefers_shared(request.size()) {
            self.memory.share_free(donors, self.sharing_policy.min_shared_extent());
            progress.own_transfers += 1;
        }
        let place = self.memory.allocate_shared(cache, request)?;
        count(&self.counters.adoptions, 1);
        Some(self.make_block(cache, &BlockToken::new(cache, &place, request), self.ticket()))
    }

    fn retry_cache(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        collected: u64,
    ) -> Option<Block> {
        if collected == 0 { None } else { self.try_cache(cache, request) }
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
        let max_growth = if options.bounded {
            self.sharing_policy.growth_before_moves(request.size())
        } else {
            u64::MAX
        };
        if options.grow {
            let bytes = self.memory.backing_bytes(request);
            self.hooks().for_each(|hook| hook.release_before_growth(bytes));
        }
        let supply = Supply { donors, options, reserved: progress.reserved, max_growth };
        let mut outcome = PlaceOutcome::default();
        let place = self.memory.place(cache, request, &supply, &mut outcome)?;
        let (step, gave) = match options {
            PlaceOptions { may_wait: true, .. } => ("take over what is in use", outcome.adopted),
            PlaceOptions { move_handles: true, .. } => ("move what is done", outcome.adopted),
            PlaceOptions { grow: true, .. } => ("grow", outcome.grown),
            _ => ("take over what is done", outcome.adopted),
        };
        progress.record(step, gave);
        progress.own_transfers += outcome.own_transfers;
        if outcome.refused.is_some() {
            progress.refused = outcome.refused;
        }
        progress.unreleased = progress.unreleased.or(outcome.unreleased);
        count(&self.counters.growths, u64::from(outcome.grown > 0));
        count(&self.counters.adoptions, u64::from(outcome.adopted > 0));
        count(&self.counters.moves, outcome.moves);
        count(&self.counters.stream_waits, outcome.waits);
        self.report_held(BlockKind::Cached);
        if outcome.adopted > 0 {
            self.report_pool(Action::Adopt, outcome.adopted, Tag::NONE);
        }
        if outcome.moved > 0 {
            self.report_pool(Action::Move, outcome.moved, Tag::NONE);
        }
        Ok(place.map(|place| {
            self.make_block(cache, &BlockToken::new(cache, &place, request), self.ticket())
        }))
    }
}
