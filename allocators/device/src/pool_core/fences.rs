//! Queued work that keeps memory from being free: polled, or waited for.

use super::{PoolCore, count};
use crate::{
    Adoption,
    base::{
        pending::raise,
        waits::{has_passed, try_wait, wait_for_epoch},
    },
    stream_cache::{CollectMode, StreamCache},
};
use aquifer_core::{
    Result,
    scratch::{Bump, List, list},
};
use aquifer_stream::Timeline;
use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

/// Which freed memory of a cache is fenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FenceScope {
    /// Free memory.
    Free,
    /// Free memory, and blocks that are pending: once their uses on other streams are over, they
    /// are proved to be idle at once. For steps that release idle memory.
    FreeAndPending,
}

/// Which of the streams that cannot be fenced are waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitScope {
    /// All of them. For [`PoolCore::wait_for_freed_work`] when it has found no other work to wait
    /// for: in step 6 of an allocation without room, and in a reclaim before its deadline.
    All,
    /// Streams without a lease, which nothing will fence later. For a trim. No step of an
    /// allocation uses this scope.
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
    /// Returns what step 2 of the slow path fences. Later steps wait on the device for memory that
    /// is not known to be done. A pool without such steps needs the proof at once.
    pub(crate) fn first_fence_scope(&self) -> FenceScope {
        if self.config.adoption == Adoption::Wait {
            FenceScope::Free
        } else {
            FenceScope::FreeAndPending
        }
    }

    /// Makes each stream wait on the device for the other users of what it has freed. Returns the
    /// bytes that become free.
    pub(crate) fn wait_on_device(&self, caches: &[&'static StreamCache]) -> Result<u64> {
        let mut collected = 0;
        for &cache in caches {
            let (bytes, waits) = cache.collect_pending(CollectMode::WaitOnDevice)?;
            count(&self.counters.stream_waits, waits);
            collected += bytes;
        }
        Ok(collected)
    }

    /// Records an event behind every stream whose freed memory, as far as `scope` includes it, has
    /// none yet, and behind the users of pending frees. Polls the events, and collects blocks whose
    /// uses are over. Returns the bytes of these blocks. Never blocks.
    pub(crate) fn poll_fences(
        &self,
        bump: &Bump,
        caches: &[&'static StreamCache],
        scope: FenceScope,
    ) -> Result<u64> {
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
                held.extend(s.stream_footprint());
                // One fence of a stream covers all its uses.
                let mut users: List<'_, (Arc<Timeline>, u64)> = List::new_in(bump);
                for pending in &s.pending {
                    pending.uses.for_each_unfinished(|on, epoch| {
                        if !raise(&mut users, on, epoch) {
                            users.push((on.clone(), epoch));
                        }
                    });
                }
                let last = match scope {
                    FenceScope::Free => s.last_free,
                    FenceScope::FreeAndPending => s.last_freed_epoch(),
                };
                (s.timeline().cloned(), last, users)
            });
            let Some(timeline) = timeline else { continue };
            fence(timeline, last_free)?;
            for (user, epoch) in users {
                fence(user, epoch)?;
            }
        }
        for (timeline, epoch) in self.memory.zombie_fences(bump) {
            fence(timeline, epoch)?;
        }
        for timeline in fenced {
            timeline.poll()?;
        }
        let shared = self.memory.uncached_bytes();
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

    /// Waits for the oldest work that keeps memory from being free: first of `first`, then of
    /// dedicated memory, then of all other caches, then of features. If there is none, waits for
    /// the device if nothing else can prove work to be done. Returns whether there was any.
    ///
    /// Blocks until `until`. A wait for the device has no deadline, since the driver has none for
    /// it, but it does not begin after `until`.
    pub(crate) fn wait_for_freed_work(
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
                timeline.map_or(Ok(false), |timeline| wait_for_epoch(&timeline, last_free, until))
            }
        };
        if let Some(first) = first
            && try_wait(pending(first))?
        {
            return Ok(true);
        }
        if self.dedicated.wait_for_freed_work(until)? {
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
        for hook in self.hooks() {
            for (timeline, epoch) in hook.freed_work() {
                if !timeline.is_done(epoch) && try_wait(|| wait_for_epoch(&timeline, epoch, until))?
                {
                    return Ok(true);
                }
            }
        }
        if has_passed(until) {
            return Ok(false);
        }
        self.wait_unfenceable(&pass, &caches, WaitScope::All)
    }

    /// Waits for the device if caches hold memory of streams that this thread cannot fence, such as
    /// the default streams of threads that have ended: nothing else proves that their work is done.
    /// Does nothing while a capture is announced. Returns whether there was any such memory.
    /// Blocks, with no deadline.
    ///
    /// Called by each [`PoolCore::trim`] for [`WaitScope::Abandoned`], and by
    /// [`PoolCore::wait_for_freed_work`] for [`WaitScope::All`]. The reclaim of steps 5 and 7 of an
    /// allocation reaches it only within another pool's
    /// [`wait_for_freed_work`](Self::wait_for_freed_work).
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
                let own = s.timeline().map(|t| (t.clone(), s.last_freed_epoch()));
                list(bump, own.into_iter().chain(s.pending.iter().flat_map(|p| p.uses.stamped())))
            });
            waited |= wait_unfenceable(work, scope)?;
        }
        for hook in self.hooks() {
            waited |= wait_unfenceable(hook.freed_work(), scope)?;
        }
        waited |= wait_unfenceable(self.dedicated.retiring_work(), scope)?;
        Ok(waited)
    }
}
