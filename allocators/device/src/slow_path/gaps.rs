//! Closing the gaps that moves leave, while much memory is free.

use crate::{
    Adoption,
    physical::options::{GapOutcome, PlaceOutcome},
    pool_core::{PoolCore, counters::count, fences::FenceScope},
    sharing_policy::GapPolicy,
    stream_cache::StreamCache,
};

/// How many gaps are closed before a block, at most.
const GAPS_AT_ONCE: u32 = 64;

impl PoolCore {
    /// Closes gaps if much of what is held is free, and returns to the fast path once there are
    /// none. What cannot be done now is tried again later. Never blocks.
    #[cold]
    pub(crate) fn close_gaps(&self, cache: &'static StreamCache) {
        let (pass, gaps) = (self.scratch.begin(), &self.sharing_policy.gaps);
        let (caches, own) = (self.caches(&pass), [cache]);
        let free = caches.iter().map(|cache| cache.with(|s| s.footprint().free)).sum::<u64>()
            + self.physical.uncached_bytes();
        if !GapPolicy::has_room(free, self.held()) {
            return;
        }
        let shares = self.config.adoption != Adoption::Never;
        let donors: &[&'static StreamCache] = if shares { &caches } else { &own };
        // An error is that of the block which is allocated next as well.
        let polled = self.poll_fences(&pass, &caches, FenceScope::FreeAndPending).is_ok();
        let mut closed = GapOutcome::NoHandle;
        if !gaps.is_scant() {
            closed = GapOutcome::NoGap;
        } else if polled {
            for _ in 0..GAPS_AT_ONCE {
                let mut outcome = PlaceOutcome::default();
                closed = self
                    .physical
                    .close_gap(cache, donors, &mut outcome)
                    .unwrap_or(GapOutcome::NoHandle);
                count(&self.counters.moves, outcome.moves);
                if closed != GapOutcome::Closed {
                    break;
                }
            }
        }
        match closed {
            GapOutcome::NoGap => {
                if gaps.end() {
                    self.remove_full_path_reason();
                }
            }
            GapOutcome::NoHandle => gaps.postpone(),
            GapOutcome::Closed => {}
        }
    }
}
