//! Statistics of a pool's core, and what other processes are shown of it.
//!
//! Caches count in lines of their own, which their hot paths keep current. Everything else changes
//! on slow paths, which publish it when they are done. Allocations that change no held memory only
//! move bytes between a cache and the shared free list, whose sum is published, and count. They
//! publish from time to time. Nothing is read back.

use super::PoolCore;
use crate::base::usage::JointPeak;
use aquifer_core::{PoolStats, event::BlockKind};
use aquifer_status::{PoolFigures, tightest_limit};

/// How often the parts are added up while other threads move memory between them.
const ATTEMPTS: u32 = 16;

impl PoolCore {
    /// Returns the statistics. Memory that another thread moves meanwhile may be seen in two places,
    /// so this is repeated until none has moved. If it never stops, memory that was seen twice is
    /// subtracted: from what is free, since only that moves, then from the rest.
    pub(crate) fn stats(&self) -> PoolStats {
        let version = || {
            let held = self.memory.held().now_of_pool();
            (self.memory.transfer_counts(), self.dedicated.release_counts(), held)
        };
        let mut stats = PoolStats::default();
        for _ in 0..ATTEMPTS {
            let before @ (transfers, releases, _) = version();
            stats = self.add_parts();
            let none_under_way = transfers.0 == transfers.1 && releases.0 == releases.1;
            if none_under_way && version() == before {
                return stats;
            }
            std::thread::yield_now();
        }
        let mut excess = (stats.live + stats.cached + stats.pending).saturating_sub(stats.physical);
        for part in [&mut stats.cached, &mut stats.pending, &mut stats.live] {
            let twice = excess.min(*part);
            *part -= twice;
            excess -= twice;
        }
        stats
    }

    fn add_parts(&self) -> PoolStats {
        let mut stats = PoolStats::default();
        let pass = self.scratch.begin();
        for cache in self.caches(&pass) {
            cache.with(|cache| cache.add_to(&mut stats));
        }
        self.add_beside_caches(&mut stats);
        self.dedicated.add_to(&mut stats);
        self.peaks.peak().set_in(&mut stats);
        stats
    }

    /// Adds what is neither in the caches nor dedicated.
    pub(super) fn add_beside_caches(&self, stats: &mut PoolStats) {
        stats.cached += self.memory.uncached_bytes();
        let held = self.memory.held();
        stats.pending += held.stuck();
        stats.physical += held.now();
        stats.peak_physical += held.peak_of_pool();
        self.counters.add_to(stats);
        self.hooks().for_each(|hook| hook.add_to(stats));
    }

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
        let (mut stats, mut largest_free) = (PoolStats::default(), 0);
        let pass = self.scratch.begin();
        for cache in self.caches(&pass) {
            cache.with_unflushed(|cache| {
                cache.publish(&mut stats);
                largest_free = largest_free.max(cache.heap.largest_free());
            });
        }
        let peak = self.peaks.peak();
        self.add_beside_caches(&mut stats);
        (stats.peak_live, stats.peak_requested) = (peak.live, peak.requested);
        PoolFigures { stats, limit, largest_free: Some(largest_free) }
    }
}
