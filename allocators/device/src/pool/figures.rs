//! Statistics of a pool.

use super::{Detour, Inner};
use crate::{DevicePool, physical::Physical};
use aquifer_core::{PoolStats, Tag, budget::Holding};

impl DevicePool {
    /// Returns the bytes held from the driver now, as [`PoolStats::physical`], without a walk over
    /// the caches.
    #[inline]
    #[must_use]
    pub fn physical(&self) -> u64 {
        match &self.handle.detour {
            None => self.inner().held(),
            Some(Detour::Direct(direct)) => self.inner().held() + direct.stats().physical,
            Some(Detour::Checked(checked)) => self.inner().held() + checked.under().physical(),
        }
    }

    /// Returns the bytes that live blocks of this tag hold in this pool. Walks all caches. Never
    /// waits for the driver.
    #[must_use]
    pub fn held_by(&self, tag: Tag) -> u64 {
        let inner = self.inner();
        let of = |holding: &Holding| if holding.tag == tag { holding.bytes } else { 0 };
        let pass = inner.scratch.begin();
        let cached: u64 = inner
            .homes(&pass)
            .iter()
            .map(|home| home.with(|s| s.holdings().map(|h| of(&h)).sum::<u64>()))
            .sum();
        cached + inner.apart.holdings().iter().map(of).sum::<u64>()
    }

    /// Returns the pool's statistics.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        match &self.handle.detour {
            None => self.inner().stats(),
            Some(Detour::Direct(direct)) => self.inner().stats_over(direct.stats()),
            Some(Detour::Checked(checked)) => checked.stats(self.inner()),
        }
    }

    /// Sets the peaks of [`DevicePool::stats`] to what is held now. Never blocks.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{DeviceId, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// drop(pool.alloc(&pool.stream()?, Request::bytes(4096))?);
    /// assert_eq!(pool.stats().peak_requested, 4096);
    /// pool.reset_peaks();
    /// assert_eq!(pool.stats().peak_requested, 0);
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    pub fn reset_peaks(&self) {
        let inner = self.inner();
        inner.homes(&inner.scratch.begin()).iter().for_each(|home| home.with(|s| s.reset_peaks()));
        match &inner.physical {
            Physical::Mapped(mapped) => mapped.held().reset_peak(),
            Physical::Plain(plain) => plain.held().reset_peak(),
        }
        inner.apart.reset_peaks();
        if let Some(direct) = inner.bypass() {
            direct.reset_peaks();
        }
        if let Some(checked) = self.checked() {
            checked.reset_peaks();
        }
    }
}

impl Inner {
    pub(crate) fn stats(&self) -> PoolStats {
        self.stats_over(PoolStats::default())
    }

    /// Adds what the pool holds to `stats`.
    pub(crate) fn stats_over(&self, mut stats: PoolStats) -> PoolStats {
        for home in self.homes(&self.scratch.begin()) {
            home.with(|s| s.add_to(&mut stats));
        }
        let held = match &self.physical {
            Physical::Mapped(mapped) => {
                stats.cached += mapped.spare_bytes();
                mapped.held()
            }
            Physical::Plain(plain) => plain.held(),
        };
        stats.pending += held.stuck();
        stats.physical += held.now();
        stats.peak_physical += held.peak();
        self.apart.add_to(&mut stats);
        self.counters.add_to(&mut stats);
        stats
    }
}
