//! What other processes are shown of a pool.
//!
//! Magazines count for their pool only. Their figures are published with all others, by slow paths:
//! by those that grow or release regions each time, and by those that refill or empty a magazine
//! from time to time, since that takes a walk over all magazines.

use super::{context::PoolContext, pool_core::PoolCore, thread::InsidePool};
use crate::clock;
use aquifer_status::{PoolFigures, PoolKind, SlotDescription, tightest_limit};
use std::sync::atomic::Ordering;

/// The least time between two publications by magazines that are refilled or emptied.
const INTERVAL_MS: u64 = 10;

/// Returns the description of a pool on this node.
pub(super) fn describe(node: Option<u32>) -> SlotDescription {
    SlotDescription {
        kind: PoolKind::Pinned,
        name: "pinned".to_owned(),
        device: None,
        address: None,
        node,
    }
}

impl PoolCore {
    /// Publishes all figures of the pool. Called with no lock held.
    pub(super) fn publish(&self, shared: &PoolContext) {
        if !aquifer_status::is_published() || !self.is_current_process() {
            return;
        }
        self.published_ms.store(now_ms(), Ordering::Relaxed);
        let _inside = InsidePool::enter();
        shared.status.publish(|| {
            let limit = tightest_limit(&shared.budget);
            self.with_tally_uncounted(|state, tally| PoolFigures {
                stats: state.stats(tally).memory,
                limit,
                largest_free: Some(state.largest_free()),
            })
        });
    }

    /// As [`PoolCore::publish`], at most every [`INTERVAL_MS`]. For slow paths of magazines.
    #[inline]
    pub(super) fn publish_sometimes(&self, generation: u64) {
        if aquifer_status::is_published()
            && now_ms().wrapping_sub(self.published_ms.load(Ordering::Relaxed)) >= INTERVAL_MS
        {
            self.publish_now(generation);
        }
    }

    /// As [`PoolCore::publish`], if the pool of this generation is open.
    #[cold]
    pub(super) fn publish_now(&self, generation: u64) {
        let shared = self.with_uncounted(|state| state.open_as(generation).ok().cloned());
        if let Some(shared) = shared {
            self.publish(&shared);
        }
    }
}

/// Returns the time in milliseconds, by the kernel's tick.
fn now_ms() -> u64 {
    clock::coarse().as_millis() as u64
}
