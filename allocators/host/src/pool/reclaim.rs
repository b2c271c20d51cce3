//! Reclaim of pinned memory: what a pool offers to others under its budget, and how it uses their
//! offers.
//!
//! Unregistering memory waits for the whole device and stalls launches on all threads. Pinned
//! memory is therefore the most expensive offer, and only a caller that may wait can use it
//! ([`Reclaim::waits`]).
//!
//! An [`IdleHolder`] keeps idle blocks of a pool, such as a stager with its slots. The pool takes
//! these blocks back first when it runs out of memory or is reclaimed from.

use super::{Grow, PinnedPool, PoolContext, pool_core::PoolCore, thread::InsidePool};
use crate::region::{self, Cause, Pinning, RegionError};
use aquifer_core::{
    budget::{HookRegistration, Offer, Reclaim},
    error::Tried,
    event::MemoryLocation,
    scratch::{Bump, List, list},
};
use std::{
    fmt,
    sync::{Arc, PoisonError, Weak},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// Time that launches stall when memory is registered or unregistered.
const STALL: Duration = Duration::from_micros(4400);

/// Time to unregister one MiB, and later populate and register it again.
const EACH_MIB: Duration = Duration::from_micros(50);

/// A holder of idle blocks of a pool.
pub(crate) trait IdleHolder: Send + Sync {
    /// Returns the bytes of idle blocks. Must not block.
    fn idle_bytes(&self) -> u64;

    /// Frees idle blocks. Must not allocate from the pool. Returns their bytes.
    fn release_idle(&self) -> u64;
}

impl PinnedPool {
    /// Registers `holder`, whose idle blocks the pool may take back. The pool holds a weak
    /// reference.
    pub(crate) fn register_idle_holder<K: IdleHolder + 'static>(&self, holder: &Arc<K>) {
        let holder: Weak<K> = Arc::downgrade(holder);
        let mut all =
            self.handle.shared.idle_holders.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(holder);
    }
}

/// The reclaimer that a pool registers with its budget. It keeps no part of the pool alive.
struct PoolReclaimer {
    core: &'static PoolCore,
    generation: u64,
    place: MemoryLocation,
    waits: bool,
}

/// A pool's registration with its budget.
pub(super) struct BudgetRegistration {
    registration: HookRegistration,
    _reclaimer: Arc<PoolReclaimer>,
}

impl fmt::Debug for BudgetRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registration.fmt(f)
    }
}

impl PoolContext {
    /// Registers this pool's reclaimer with the budget. It offers memory as long as the pool is
    /// open.
    pub(super) fn register(&self, core: &'static PoolCore, generation: u64) {
        let waits = self.host.reach.is_some() && self.config.pinning != Pinning::Off;
        let reclaimer = Arc::new(PoolReclaimer { core, generation, place: self.place(), waits });
        let registration = self.budget.on_need(&reclaimer);
        let _only_once =
            self.registration.set(BudgetRegistration { registration, _reclaimer: reclaimer });
    }

    /// Returns the idle holders. Their methods must be called outside the lock.
    fn idle_holders<'s>(&self, bump: &'s Bump) -> List<'s, Arc<dyn IdleHolder>> {
        // The list's memory must not come from this pool.
        let _inside = InsidePool::enter();
        let all = self.idle_holders.lock().unwrap_or_else(PoisonError::into_inner);
        list(bump, all.iter().filter_map(Weak::upgrade))
    }

    /// Makes all idle holders free their idle blocks. Returns the bytes freed.
    pub(super) fn reclaim_idle(&self) -> u64 {
        self.idle_holders(&self.scratch.begin()).iter().map(|holder| holder.release_idle()).sum()
    }

    /// Retries `grow` while a budget refuses it and other pools below that budget give memory back.
    pub(super) fn reclaim_from_others<T>(
        &self,
        refused: RegionError,
        deadline: Instant,
        tried: &mut Vec<Tried>,
        mut grow: impl FnMut() -> Result<T, RegionError>,
    ) -> Result<T, RegionError> {
        let mut asking = self.budget.asking(self.registration.get().map(|held| &held.registration));
        let mut error = refused;
        while let Cause::Budget(refused) = &error.cause {
            let Some(asked) = asking.for_charge(refused.requested, Some(deadline)) else { break };
            match tried.iter_mut().find(|earlier| earlier.step == asked.step) {
                Some(earlier) => earlier.gave += asked.gave,
                None => tried.push(asked),
            }
            match grow() {
                Ok(grown) => return Ok(grown),
                Err(again) => error = again,
            }
        }
        Err(error)
    }
}

impl Reclaim for PoolReclaimer {
    fn name(&self) -> &'static str {
        "regions of a pinned pool"
    }

    fn offer(&self) -> Offer {
        if !self.core.is_current_process() {
            return Offer::default();
        }
        let shared = self.core.with(|state| state.open_as(self.generation).cloned());
        let idle: u64 = shared.map_or(0, |shared| {
            shared
                .idle_holders(&shared.scratch.begin())
                .iter()
                .map(|holder| holder.idle_bytes())
                .sum()
        });
        let bytes = self.core.with_tally(|state, tally| {
            let reserve = match state.open_as(self.generation).map(|shared| &shared.config) {
                Ok(config) if config.grow == Grow::Now => config.reserve as u64,
                // Such a pool releases regions only when its owner calls for it.
                _ => return 0,
            };
            let free = (state.free_bytes() + tally.cached + idle).saturating_sub(reserve);
            // Only whole regions can be released.
            if state.shortest_region().is_some_and(|bytes| bytes <= free) { free } else { 0 }
        });
        let mib = u32::try_from(bytes / MIB).unwrap_or(u32::MAX);
        Offer { bytes, cost: STALL.saturating_add(EACH_MIB.saturating_mul(mib)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if !self.core.is_current_process()
            || self.waits && deadline.is_some_and(|deadline| Instant::now() >= deadline)
        {
            return;
        }
        let ended = region::end_retired();
        if ended < bytes {
            self.core.release_for_reclaim(self.generation, bytes - ended);
        }
    }

    fn waits(&self) -> bool {
        self.waits
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(self.place)
    }
}
