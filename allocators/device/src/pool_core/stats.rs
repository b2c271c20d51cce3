//! Statistics of a pool's core.

use super::PoolCore;
use aquifer_core::PoolStats;

/// How often the parts are added up while other threads move memory between them.
const ATTEMPTS: u32 = 16;

impl PoolCore {
    pub(crate) fn stats(&self) -> PoolStats {
        self.stats_with(PoolStats::default())
    }

    /// Adds what the pool holds to `others`. Memory that another thread moves meanwhile may be seen
    /// in two places, so this is repeated until none has moved. If it never stops, memory that was
    /// seen twice is subtracted: from what is free, since only that moves, then from the rest.
    pub(crate) fn stats_with(&self, others: PoolStats) -> PoolStats {
        let version = || {
            let held = self.memory.held().now_of_pool();
            (self.memory.move_counts(), self.dedicated.releases_under_way(), held)
        };
        let mut stats = others;
        for _ in 0..ATTEMPTS {
            let before @ ((moves_begun, moves_ended), releases, _) = version();
            stats = self.add_parts(others);
            if moves_begun == moves_ended && releases == 0 && version() == before {
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

    fn add_parts(&self, mut stats: PoolStats) -> PoolStats {
        let peak = self.peaks.peak_with(|cache| {
            cache.flush_last();
            cache.add_to(&mut stats);
        });
        self.add_beside_caches(&mut stats);
        self.dedicated.add_to(&mut stats);
        peak.set_in(&mut stats);
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
}
