//! What other processes are shown of a pool.
//!
//! Caches count in lines of their own, which their hot paths keep current. Everything else changes
//! on slow paths, which publish it when they are done. Allocations that change no held memory only
//! move bytes between a cache and the shared free list, whose sum is published, and count. They
//! publish from time to time. Nothing is read back.

use super::PoolCore;
use aquifer_core::{PoolStats, event::BlockKind};
use aquifer_status::{PoolFigures, tightest_limit};

impl PoolCore {
    /// Publishes the figures that slow paths change, and records the limit and what is held. Called
    /// at the end of each but a successful allocation, with no lock held.
    pub(crate) fn publish(&self) {
        self.report_held(BlockKind::Cached);
        aquifer_status::resume();
        if aquifer_status::is_published() {
            self.publish_now();
        }
    }

    /// As [`PoolCore::publish`], at the end of an allocation: at most every
    /// 10 ms unless the held memory has changed.
    pub(crate) fn publish_allocation(&self) {
        self.report_held(BlockKind::Cached);
        let has_resumed = aquifer_status::resume();
        if aquifer_status::is_published()
            && (has_resumed || self.status.is_due(self.memory.held().now()))
        {
            self.publish_now();
        }
    }

    fn publish_now(&self) {
        self.status.record_published(self.memory.held().now());
        self.status.slot().publish(|| self.published_figures());
        self.dedicated.publish();
    }

    fn published_figures(&self) -> PoolFigures {
        let limit = tightest_limit(&self.budget);
        if self.status.is_checked() {
            let checked = self.status.checked();
            let stats = checked.map_or_else(|| self.stats(), |checked| checked.stats());
            return PoolFigures { stats, limit, largest_free: None };
        }
        let (mut stats, mut largest_free) = (PoolStats::default(), 0);
        let peak = self.peaks.peak_with(|cache| {
            cache.publish(&mut stats);
            largest_free = largest_free.max(cache.heap.largest_free());
        });
        self.add_beside_caches(&mut stats);
        (stats.peak_live, stats.peak_requested) = (peak.live, peak.requested);
        PoolFigures { stats, limit, largest_free: Some(largest_free) }
    }
}
