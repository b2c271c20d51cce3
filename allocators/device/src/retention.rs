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

use crate::{DevicePool, chain::Unfenced, home::Home, physical::Physical, pool::Inner};
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
    given: Mutex<Given>,
}

/// The memory that the threshold has released.
#[derive(Default, Debug)]
struct Given {
    /// Bytes that were not needed again.
    back: u64,
    /// Bytes that were taken again.
    again: u64,
}

impl Retention {
    pub(crate) fn new(threshold: u64, stream_cache: u64) -> Self {
        Self { threshold, stream_cache, reserve: AtomicU64::new(0), given: Mutex::default() }
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there is no threshold.
    pub(crate) fn keeps_all(&self) -> bool {
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
    pub(crate) fn keep(&self, live: u64) -> u64 {
        let idle = self.threshold.saturating_add(self.given().again);
        live.saturating_add(idle).max(self.reserve())
    }

    /// Records that the threshold has released bytes.
    pub(crate) fn gave_back(&self, bytes: u64) {
        self.given().back += bytes;
    }

    /// Records that the pool takes bytes from the driver.
    pub(crate) fn grew(&self, bytes: u64) {
        if self.keeps_all() {
            return;
        }
        let mut given = self.given();
        let missed = bytes.min(given.back);
        given.back -= missed;
        given.again += missed;
    }

    /// Resets the record of what was needed again.
    pub(crate) fn forget(&self) {
        *self.given() = Given::default();
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
        self.inner().warm(bytes)
    }
}

impl Inner {
    /// Releases free memory until at most `keep` bytes are held, but not the warm reserve.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let mut gone = self.sweep();
        self.tenants.trim();
        let mut asked = false;
        gone += self.apart.in_rounds(|| {
            self.apart.outlast()?;
            let pass = self.scratch.begin();
            let homes = self.homes(&pass);
            self.outlast(&pass, &homes, Unfenced::Abandoned)?;
            let gone = self.apart.reap()?;
            self.look(&pass, &homes)?;
            asked |= keep < self.held();
            Ok(gone + if asked { self.lodgings.trim()? } else { 0 })
        })?;
        if asked {
            self.retention.forget();
        }
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let keep = keep.saturating_sub(self.apart.held().now()).max(self.retention.reserve());
        let given = self.give_back(&homes, keep.min(self.retention.keep(live(&homes))))?;
        if !asked {
            self.retention.gave_back(given);
        }
        // Retry what was refused just now. What is refused again stays charged and is reported.
        let (given_later, swept) = self.sweep_leftovers();
        gone += given_later;
        swept.map_err(|refused| MemoryError::driver(self.info.device, refused))?;
        Ok(gone + given)
    }

    /// Drops what drivers keep for graphs that no longer exist, and retries releases that the
    /// driver has refused. Returns the released bytes. What is refused again is left to the next
    /// sweep.
    pub(crate) fn sweep(&self) -> u64 {
        crate::graphs::sweep();
        self.sweep_leftovers().0
    }

    /// Retries releases that the driver has refused. Returns the bytes, and the driver's first
    /// refusal.
    fn sweep_leftovers(&self) -> (u64, Result<(), DriverError>) {
        let before = self.stuck();
        let outcome = leftovers::sweep(&self.driver);
        let given = before.saturating_sub(self.stuck());
        if given > 0 {
            self.counters.reaped.fetch_add(given, Ordering::Relaxed);
            self.report_pool(Action::Reap, given, Tag::NONE);
        }
        (given, outcome)
    }

    /// Returns the bytes whose release the driver has refused.
    fn stuck(&self) -> u64 {
        let cached = match &self.physical {
            Physical::Mapped(mapped) => mapped.held().stuck(),
            Physical::Plain(plain) => plain.held().stuck(),
        };
        cached + self.apart.held().stuck()
    }

    /// As [`DevicePool::poll`].
    pub(crate) fn poll(&self) -> Result<()> {
        let rounds = self.apart.in_rounds(|| {
            let pass = self.scratch.begin();
            let homes = self.homes(&pass);
            self.look(&pass, &homes)?;
            self.apart.reap_quietly();
            self.lodgings.all().iter().try_for_each(|lodging| lodging.look())?;
            Ok(0)
        });
        rounds.map(drop)
    }

    /// Trims under memory pressure: the warm reserve is released too.
    pub(crate) fn press(&self, keep: u64) -> Result<u64> {
        let mut gone = self.sweep();
        gone += self.apart.in_rounds(|| {
            let gone = self.apart.reap()? + self.lodgings.trim()?;
            let pass = self.scratch.begin();
            let homes = self.homes(&pass);
            self.look(&pass, &homes)?;
            Ok(gone)
        })?;
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let given = self.give_back(&homes, keep.saturating_sub(self.apart.held().now()))?;
        Ok(gone + given + self.sweep())
    }

    /// Enforces the release threshold, if this needs no waiting. A refused release is retried by
    /// the next trim.
    pub(crate) fn shed(&self) {
        let Physical::Mapped(mapped) = &self.physical else { return };
        if self.retention.keeps_all() {
            return;
        }
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let keep = self.retention.keep(live(&homes));
        if mapped.held().now() > keep {
            self.retention.gave_back(self.give_back(&homes, keep).unwrap_or(0));
        }
    }

    /// Releases free memory whose work is known to be done from the caches until they hold at most
    /// `keep` bytes.
    fn give_back(&self, homes: &[&'static Home], keep: u64) -> Result<u64> {
        let given = match &self.physical {
            Physical::Mapped(mapped) => mapped.trim(homes, keep)?,
            Physical::Plain(plain) => plain.trim(homes, keep)?,
        };
        if given > 0 {
            self.counters.reaped.fetch_add(given, Ordering::Relaxed);
            self.report_pool(Action::Reap, given, Tag::NONE);
        }
        Ok(given)
    }

    /// As [`DevicePool::warm`].
    pub(crate) fn warm(&self, bytes: u64) -> Result<u64> {
        let taken = match &self.physical {
            _ if bytes == 0 => 0,
            Physical::Mapped(mapped) if self.bypass().is_none() => {
                mapped.warm(bytes).map_err(|error| self.explained(bytes, error))?
            }
            _ => {
                return Err(MemoryError::Unsupported {
                    feature: "a warm reserve (cuMemMap, and no bypass)",
                });
            }
        };
        self.retention.set_reserve(bytes);
        if taken > 0 {
            self.report_pool(Action::Grow, taken, Tag::NONE);
        }
        Ok(taken)
    }
}

/// Returns the bytes in live blocks of these caches.
fn live(homes: &[&'static Home]) -> u64 {
    homes.iter().map(|home| home.with(|s| s.holds().live)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_and_taken_again_is_kept_and_no_more_than_that() {
        let retention = Retention::new(100, u64::MAX);
        retention.grew(500);
        assert_eq!(retention.keep(10), 110, "what is new was never given back");
        retention.gave_back(300);
        retention.grew(120);
        assert_eq!(retention.keep(10), 230);
        retention.grew(500);
        assert_eq!(retention.keep(10), 410, "180 of it had been given back");
        retention.grew(500);
        assert_eq!(retention.keep(10), 410);
        retention.set_reserve(1000);
        assert_eq!((retention.keep(10), retention.keep(900)), (1000, 1300));
        retention.forget();
        retention.set_reserve(0);
        assert_eq!(retention.keep(10), 110);
    }
}
