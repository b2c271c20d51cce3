//! Statistics of a pool.

use super::AllocPath;
use crate::DevicePool;
use aquifer_core::{PoolStats, Tag, budget::Holding};

impl DevicePool {
    /// Returns the bytes held from the driver now, as [`PoolStats::physical`], without a walk over
    /// the caches.
    #[inline]
    #[must_use]
    pub fn physical(&self) -> u64 {
        match &self.handle.alloc_path {
            None => self.core().held(),
            Some(AllocPath::Direct(direct)) => self.core().held() + direct.stats().physical,
            Some(AllocPath::Checked(checked)) => self.core().held() + checked.source().physical(),
        }
    }

    /// Returns the bytes that live blocks of this tag hold in this pool. Walks all caches. Never
    /// waits for the driver.
    #[must_use]
    pub fn held_by(&self, tag: Tag) -> u64 {
        let core = self.core();
        let of = |holding: &Holding| if holding.tag == tag { holding.bytes } else { 0 };
        let pass = core.scratch.begin();
        let cached: u64 = core
            .caches(&pass)
            .iter()
            .map(|cache| cache.with(|s| s.holdings().map(|h| of(&h)).sum::<u64>()))
            .sum();
        let direct = self.bypass_source().map_or(0, |direct| direct.held_by(tag));
        cached + direct + core.holdings_beside_caches().iter().map(of).sum::<u64>()
    }

    /// Returns the pool's statistics.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let stats = match &self.handle.alloc_path {
            None => self.core().stats(),
            Some(AllocPath::Direct(direct)) => self.core().stats_with(direct.stats()),
            Some(AllocPath::Checked(checked)) => checked.stats(),
        };
        self.core().publish();
        stats
    }

    /// Sets the peaks of [`DevicePool::stats`] to what is held now. Never waits for the driver.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// drop(pool.alloc(&pool.stream()?, Request::bytes(4096))?);
    /// assert_eq!(pool.stats().peak_requested, 4096);
    /// pool.reset_peaks();
    /// assert_eq!(pool.stats().peak_requested, 0);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    pub fn reset_peaks(&self) {
        let core = self.core();
        core.peaks.reset();
        core.memory.held().reset_peak_of_pool();
        if let Some(direct) = self.bypass_source() {
            direct.reset_peaks();
        }
        core.publish();
    }
}
