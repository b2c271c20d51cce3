//! What other processes are shown of a pool.
//!
//! Magazines count for their pool only. Their figures are published with all others, by slow paths:
//! by those that grow or release regions each time, and by those that refill or empty a magazine
//! from time to time, since that takes a walk over all magazines.

use super::{context::PoolContext, pool_core::PoolCore, thread::InsidePool};
use crate::kernel::is_forked_child;
use aquifer_status::{PoolFigures, PoolKind, SlotDescription, tightest_limit};

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
        if !aquifer_status::is_published() || is_forked_child() {
            return;
        }
        self.publish_timer.restart();
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

    /// As [`PoolCore::publish`], at most every 10 ms. For slow paths of magazines.
    #[inline]
    pub(super) fn publish_sometimes(&self, generation: u64) {
        if aquifer_status::is_published() && self.publish_timer.is_due() {
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
