//! Statistics of a pool's core.

use super::PoolCore;
use aquifer_core::PoolStats;

impl PoolCore {
    pub(crate) fn stats(&self) -> PoolStats {
        self.stats_with(PoolStats::default())
    }

    /// Adds what the pool holds to `stats`.
    pub(crate) fn stats_with(&self, mut stats: PoolStats) -> PoolStats {
        for cache in self.caches(&self.scratch.begin()) {
            cache.with(|s| s.add_to(&mut stats));
        }
        stats.cached += self.physical.spare_bytes();
        let held = self.physical.held();
        stats.pending += held.stuck();
        stats.physical += held.now();
        stats.peak_physical += held.peak();
        self.dedicated.add_to(&mut stats);
        self.counters.add_to(&mut stats);
        stats
    }
}
