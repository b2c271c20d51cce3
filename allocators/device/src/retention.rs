//! How much of what lies idle a pool keeps: the release threshold, the warm reserve and the cap on
//! each stream's cache.
//!
//! None of it is looked at where a stream's cache serves a request. The cap is held where a slow
//! path has looked which frees are done, the threshold when a slow path has served its request, so
//! that what the request itself needed is not given back first.
//!
//! **A loop at the threshold must not thrash**: to give back at each low point what each high point
//! takes again would cost a creation and a mapping of every handle in every round, at some 40 µs
//! and more each. So what was given back and is taken again is kept on top of the threshold from
//! then on. A loop pays once for what it turns out to need, and its later rounds make no memory
//! call; what it never needed again stays given back. An explicit trim starts this anew.

use crate::{DevicePool, chain::Unfenced, home::Home, physical::Physical, pool::Inner};
use aquifer_core::{Action, DriverError, MemoryError, Result, Tag};
use aquifer_driver::{leftovers, site};
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// What a pool keeps.
#[derive(Debug)]
pub(crate) struct Retention {
    /// Idle bytes that are kept; `u64::MAX` for all.
    threshold: u64,
    /// Idle bytes that one stream's cache keeps; `u64::MAX` for all.
    pub(crate) stream_cache: u64,
    /// Bytes, in use or idle, below which nothing is given back unless memory is short.
    reserve: AtomicU64,
    given: Mutex<Given>,
}

/// What the threshold has given back.
#[derive(Default, Debug)]
struct Given {
    /// Bytes that have not been missed.
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

    /// Whether there is no threshold.
    pub(crate) fn keeps_all(&self) -> bool {
        self.threshold == u64::MAX
    }

    pub(crate) fn reserve(&self) -> u64 {
        // Relaxed: it guards no memory, and whoever learns of it late has trimmed before.
        self.reserve.load(Ordering::Relaxed)
    }

    pub(crate) fn set_reserve(&self, bytes: u64) {
        self.reserve.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that are held at a quiet point, at most, while `live` of them are in use.
    pub(crate) fn keep(&self, live: u64) -> u64 {
        let idle = self.threshold.saturating_add(self.given().again);
        live.saturating_add(idle).max(self.reserve())
    }

    /// The threshold has given bytes back.
    pub(crate) fn gave_back(&self, bytes: u64) {
        self.given().back += bytes;
    }

    /// The pool takes bytes from the driver.
    pub(crate) fn grew(&self, bytes: u64) {
        if self.keeps_all() {
            return;
        }
        let mut given = self.given();
        let missed = bytes.min(given.back);
        given.back -= missed;
        given.again += missed;
    }

    /// What was needed before is not to be kept for that.
    pub(crate) fn forget(&self) {
        *self.given() = Given::default();
    }
}

impl DevicePool {
    /// Takes memory from the driver and maps it (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`) until
    /// the caches hold `bytes`, rounded up to handles; it belongs to whichever stream needs it
    /// first. Answers with the bytes taken. Blocks for nothing but the driver's own time.
    ///
    /// From now on neither a trim nor the [release threshold](crate::PoolConfig::release_threshold)
    /// gives anything back that brings the caches below `bytes`, in use or idle; that is in place
    /// of what was set before, and 0 lets all go again. Only pressure may take it: a request of
    /// this pool, for a block or for stable or reserved memory, that nothing else makes room for;
    /// another pool under the same budget; and the end of the pool. What is taken so does not come
    /// back by itself.
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
    /// [`MemoryError::Unsupported`] on devices that cannot map, and beside bypass;
    /// [`MemoryError::OutOfMemory`]; the driver's. The pool holds what it held then, and the
    /// reserve is as it was.
    #[track_caller]
    pub fn warm(&self, bytes: u64) -> Result<u64> {
        let _site = site::enter();
        self.inner().warm(bytes)
    }
}

impl Inner {
    /// Gives back what is free until no more than `keep` bytes are held, but for the warm reserve.
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
        // What was refused just now is tried once more. What is refused again stays charged, and is
        // reported.
        let (given_later, swept) = self.sweep_leftovers();
        gone += given_later;
        swept.map_err(|refused| MemoryError::driver(self.info.device, refused))?;
        Ok(gone + given)
    }

    /// Lets go of what drivers keep for graphs that are gone, and of what the driver has refused to
    /// release before. Returns the bytes given back. What is refused again is left for the next
    /// sweep.
    pub(crate) fn sweep(&self) -> u64 {
        crate::graphs::sweep();
        self.sweep_leftovers().0
    }

    /// Releases what the driver has refused to release before. Returns the bytes, and the driver's
    /// first refusal.
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

    /// Returns the bytes that the driver has refused to take back.
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

    /// The same for somebody who is short of memory, whom the warm reserve does not stop.
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

    /// Gives back what the release threshold says, where that waits for nothing. A refusal is met
    /// again by whoever trims.
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

    /// Gives back what is free and known to be done in the caches until they hold no more than
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

/// Bytes of these caches that have an owner.
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
