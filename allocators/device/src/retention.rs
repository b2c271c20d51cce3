//! Retention: how much idle memory a pool keeps. It is controlled by the release threshold, the
//! warm reserve and the cap on each stream's cache.
//!
//! - None of it is checked while a stream's cache serves a request. The cap is enforced when a slow
//!   path has polled which frees are done. The threshold is enforced after a slow path has served
//!   its request, so that memory the request needs is not released first.
//! - **A loop at the threshold must not thrash.** Releasing memory at each low point and taking it
//!   again at each high point would create and map every handle in every round, at 40 µs or more
//!   each. So memory that was released and taken again is kept in addition to the threshold from
//!   then on. A loop pays once for the memory that it needs, and later rounds make no memory call.
//!   Memory that is not needed again stays released. An explicit trim resets this.

use crate::{
    DevicePool,
    pool::PoolCore,
    slow_path::WaitScope,
    stream_cache::{StreamCache, close::sweep_released},
};
use aquifer_core::{Action, DriverError, MemoryError, Result, Tag};
use aquifer_driver::{leftovers, site};
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// The amounts of memory that a pool keeps.
#[derive(Debug)]
pub(crate) struct Retention {
    /// Idle bytes that are kept; `u64::MAX` for all.
    threshold: u64,
    /// Idle bytes that one stream's cache keeps; `u64::MAX` for all.
    pub(crate) stream_cache: u64,
    /// Bytes, in use or idle, below which nothing is released unless memory is short.
    reserve: AtomicU64,
    history: Mutex<ReleaseHistory>,
}

/// The memory that the threshold has released.
#[derive(Default, Debug)]
struct ReleaseHistory {
    /// Bytes that were not needed again.
    released: u64,
    /// Bytes that were taken again.
    regrown: u64,
}

impl Retention {
    pub(crate) fn new(threshold: u64, stream_cache: u64) -> Self {
        Self { threshold, stream_cache, reserve: AtomicU64::new(0), history: Mutex::default() }
    }

    fn history(&self) -> MutexGuard<'_, ReleaseHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there is no threshold.
    pub(crate) fn retains_all(&self) -> bool {
        self.threshold == u64::MAX
    }

    pub(crate) fn reserve(&self) -> u64 {
        // Relaxed: it guards no memory, and a trim that misses a change counts as an earlier trim.
        self.reserve.load(Ordering::Relaxed)
    }

    pub(crate) fn set_reserve(&self, bytes: u64) {
        self.reserve.store(bytes, Ordering::Relaxed);
    }

    /// Returns the maximum bytes to hold at a quiet point, while `live` of them are in use.
    pub(crate) fn bytes_to_retain(&self, live: u64) -> u64 {
        let idle = self.threshold.saturating_add(self.history().regrown);
        live.saturating_add(idle).max(self.reserve())
    }

    /// Records that the threshold has released bytes.
    pub(crate) fn record_release(&self, bytes: u64) {
        self.history().released += bytes;
    }

    /// Records that the pool takes bytes from the driver.
    pub(crate) fn record_growth(&self, bytes: u64) {
        if self.retains_all() {
            return;
        }
        let mut history = self.history();
        let missed = bytes.min(history.released);
        history.released -= missed;
        history.regrown += missed;
    }

    /// Resets the record of what was needed again.
    pub(crate) fn reset(&self) {
        *self.history() = ReleaseHistory::default();
    }
}

impl DevicePool {
    /// Takes memory from the driver and maps it (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`) until
    /// the caches hold `bytes`, rounded up to handles. The first stream that needs it gets it.
    /// Returns the bytes taken. Blocks only for the driver's own time.
    ///
    /// From now on neither a trim nor the [release threshold](crate::PoolConfig::release_threshold)
    /// releases memory below `bytes` in the caches, in use or idle. This replaces an earlier value,
    /// and 0 removes the reserve. Only these may take it: a request of this pool, for a block or
    /// for stable or reserved memory, for which no other room can be made; another pool under the
    /// same budget; and closing the pool. It is not refilled automatically.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{Call, DeviceId, sim::Sim};
    /// let sim = Sim::h200(1);
    /// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    /// pool.warm(1 << 30)?;
    /// let made = sim.driver().calls().get(Call::HandleCreate);
    /// let block = pool.alloc(&pool.stream()?, Request::bytes(1 << 30))?;
    /// assert_eq!(sim.driver().calls().get(Call::HandleCreate), made);
    /// drop(block);
    /// pool.trim(0)?;
    /// assert_eq!(pool.stats().physical, 1 << 30);
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] on devices without virtual memory mapping, and in bypass mode;
    /// [`MemoryError::OutOfMemory`]; the driver's. In each case the pool holds as much as before,
    /// and the reserve is unchanged.
    #[track_caller]
    pub fn warm(&self, bytes: u64) -> Result<u64> {
        let _site = site::enter();
        self.core().warm(bytes)
    }
}

impl PoolCore {
    /// Releases free memory until at most `keep` bytes are held, but not the warm reserve.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let mut released = self.retry_releases();
        self.tenants.trim();
        let mut excess = false;
        released += self.dedicated.repeat_until_stable(|| {
            self.dedicated.synchronize_untracked()?;
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.wait_unfenceable(&pass, &caches, WaitScope::Abandoned)?;
            let released = self.dedicated.reap()?;
            self.poll_fences(&pass, &caches)?;
            excess |= keep < self.held();
            Ok(released + if excess { self.parkables.trim()? } else { 0 })
        })?;
        if excess {
            self.retention.reset();
        }
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let keep = keep.saturating_sub(self.dedicated.held().now()).max(self.retention.reserve());
        let from_caches =
            self.release_idle(&caches, keep.min(self.retention.bytes_to_retain(live(&caches))))?;
        if !excess {
            self.retention.record_release(from_caches);
        }
        // Retry what was refused just now. What is refused again stays charged and is reported.
        let (retried, swept) = self.retry_leftovers();
        released += retried;
        swept.map_err(|refused| MemoryError::driver(self.info.device, refused))?;
        Ok(released + from_caches)
    }

    /// Drops what drivers keep for graphs that no longer exist, and retries releases that the
    /// driver has refused. Returns the released bytes. What is refused again is left to the next
    /// sweep.
    pub(crate) fn retry_releases(&self) -> u64 {
        sweep_released();
        self.retry_leftovers().0
    }

    /// Retries releases that the driver has refused. Returns the bytes, and the driver's first
    /// refusal.
    fn retry_leftovers(&self) -> (u64, Result<(), DriverError>) {
        let before = self.stuck();
        let outcome = leftovers::sweep(&self.driver);
        let released = before.saturating_sub(self.stuck());
        if released > 0 {
            self.counters.reaped.fetch_add(released, Ordering::Relaxed);
            self.report_pool(Action::Reap, released, Tag::NONE);
        }
        (released, outcome)
    }

    /// Returns the bytes whose release the driver has refused.
    fn stuck(&self) -> u64 {
        self.physical.held().stuck() + self.dedicated.held().stuck()
    }

    /// As [`DevicePool::poll`].
    pub(crate) fn poll(&self) -> Result<()> {
        let rounds = self.dedicated.repeat_until_stable(|| {
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.poll_fences(&pass, &caches)?;
            self.dedicated.reap_nonblocking();
            self.parkables.all().iter().try_for_each(|parkable| parkable.poll_fences())?;
            Ok(0)
        });
        rounds.map(drop)
    }

    /// Trims under memory pressure: the warm reserve is released too.
    pub(crate) fn trim_under_pressure(&self, keep: u64) -> Result<u64> {
        let mut released = self.retry_releases();
        released += self.dedicated.repeat_until_stable(|| {
            let released = self.dedicated.reap()? + self.parkables.trim()?;
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.poll_fences(&pass, &caches)?;
            Ok(released)
        })?;
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let from_caches =
            self.release_idle(&caches, keep.saturating_sub(self.dedicated.held().now()))?;
        Ok(released + from_caches + self.retry_releases())
    }

    /// Enforces the release threshold, if this needs no waiting. A refused release is retried by
    /// the next trim.
    pub(crate) fn enforce_threshold(&self) {
        if !self.physical.is_mapped() || self.retention.retains_all() {
            return;
        }
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let keep = self.retention.bytes_to_retain(live(&caches));
        if self.physical.held().now() > keep {
            self.retention.record_release(self.release_idle(&caches, keep).unwrap_or(0));
        }
    }

    /// Releases free memory whose work is known to be done from the caches until they hold at most
    /// `keep` bytes.
    fn release_idle(&self, caches: &[&'static StreamCache], keep: u64) -> Result<u64> {
        let released = self.physical.trim(caches, keep)?;
        if released > 0 {
            self.counters.reaped.fetch_add(released, Ordering::Relaxed);
            self.report_pool(Action::Reap, released, Tag::NONE);
        }
        Ok(released)
    }

    /// As [`DevicePool::warm`].
    pub(crate) fn warm(&self, bytes: u64) -> Result<u64> {
        let taken = if bytes == 0 {
            0
        } else if self.physical.is_mapped() && !self.config.bypass {
            self.physical.warm(bytes).map_err(|error| self.explain_refusal(bytes, error))?
        } else {
            return Err(MemoryError::Unsupported {
                feature: "a warm reserve (cuMemMap, and no bypass)",
            });
        };
        self.retention.set_reserve(bytes);
        if taken > 0 {
            self.report_pool(Action::Grow, taken, Tag::NONE);
        }
        Ok(taken)
    }
}

/// Returns the bytes in live blocks of these caches.
fn live(caches: &[&'static StreamCache]) -> u64 {
    caches.iter().map(|cache| cache.with(|s| s.footprint().live)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_released_and_needed_again_is_retained() {
        let retention = Retention::new(100, u64::MAX);
        retention.record_growth(500);
        assert_eq!(retention.bytes_to_retain(10), 110, "what is new was never given back");
        retention.record_release(300);
        retention.record_growth(120);
        assert_eq!(retention.bytes_to_retain(10), 230);
        retention.record_growth(500);
        assert_eq!(retention.bytes_to_retain(10), 410, "180 of it had been given back");
        retention.record_growth(500);
        assert_eq!(retention.bytes_to_retain(10), 410);
        retention.set_reserve(1000);
        assert_eq!((retention.bytes_to_retain(10), retention.bytes_to_retain(900)), (1000, 1300));
        retention.reset();
        retention.set_reserve(0);
        assert_eq!(retention.bytes_to_retain(10), 110);
    }
}
