//! Statistics of a pool's core.

use super::PoolCore;
use aquifer_core::PoolStats;

impl PoolCore {
    pub(crate) fn stats(&self) -> PoolStats {
        self.stats_with(PoolStats::default())
    }

    /// Adds what the pool holds to `stats`.
    pub(crate) fn stats_with(&self, mut stats: PoolStats) -> PoolStats {
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
        stats.cached += self.physical.uncached_bytes();
        let held = self.physical.held();
        stats.pending += held.stuck();
        stats.physical += held.now();
        stats.peak_physical += held.peak_of_pool();
        self.counters.add_to(stats);
        self.hooks().for_each(|hook| hook.add_to(stats));
    }
}
