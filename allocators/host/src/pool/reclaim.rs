//! Reclaim of pinned memory: what a pool offers to others under its budget, and how it uses their
//! offers.
//!
//! Unregistering memory waits for the whole device and stalls launches on all threads. Pinned
//! memory is therefore the most expensive offer, and only a caller that may wait can use it
//! ([`Reclaim::waits`]).
//!
//! A [`Keeper`] keeps idle blocks of a pool, such as a stager with its slots. The pool takes these
//! blocks back first when it runs out of memory or is reclaimed from.

use super::{Grow, PinnedPool, Shared, home::Home, thread::AtWork};
use crate::region::{self, Cause, Pinning, RegionError};
use aquifer_core::{
    budget::{Offer, Reclaim, Registration},
    error::Tried,
    event::Place,
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
pub(crate) trait Keeper: Send + Sync {
    /// Returns the bytes of idle blocks. Must not block.
    fn idle(&self) -> u64;

    /// Frees idle blocks. Must not allocate from the pool. Returns their bytes.
    fn give(&self) -> u64;
}

impl PinnedPool {
    /// Registers `keeper`, whose idle blocks the pool may take back. The pool holds a weak
    /// reference.
    pub(crate) fn keep_asking<K: Keeper + 'static>(&self, keeper: &Arc<K>) {
        let keeper: Weak<K> = Arc::downgrade(keeper);
        let mut all = self.handle.shared.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(keeper);
    }
}

/// The reclaimer that a pool registers with its budget. It keeps no part of the pool alive.
struct Giver {
    home: &'static Home,
    generation: u64,
    place: Place,
    waits: bool,
}

/// A pool's registration with its budget.
pub(super) struct Known {
    registration: Registration,
    _giver: Arc<Giver>,
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registration.fmt(f)
    }
}

impl Shared {
    /// Registers this pool's reclaimer with the budget. It offers memory as long as the pool is
    /// open.
    pub(super) fn register(&self, home: &'static Home, generation: u64) {
        let waits = self.host.reach.is_some() && self.config.pinning != Pinning::Off;
        let giver = Arc::new(Giver { home, generation, place: self.place(), waits });
        let registration = self.budget.on_need(&giver);
        let _only_once = self.known.set(Known { registration, _giver: giver });
    }

    /// Returns the keepers. Their methods must be called outside the lock.
    fn keepers<'s>(&self, bump: &'s Bump) -> List<'s, Arc<dyn Keeper>> {
        // The list's memory must not come from this pool.
        let _at_work = AtWork::begin();
        let all = self.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        list(bump, all.iter().filter_map(Weak::upgrade))
    }

    /// Makes all keepers free their idle blocks. Returns the bytes freed.
    pub(super) fn ask_keepers(&self) -> u64 {
        self.keepers(&self.scratch.begin()).iter().map(|keeper| keeper.give()).sum()
    }

    /// Retries `grow` while a budget refuses it and other pools below that budget give memory back.
    pub(super) fn ask_others<T>(
        &self,
        refused: RegionError,
        deadline: Instant,
        tried: &mut Vec<Tried>,
        mut grow: impl FnMut() -> Result<T, RegionError>,
    ) -> Result<T, RegionError> {
        let mut asking = self.budget.asking(self.known.get().map(|known| &known.registration));
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

impl Reclaim for Giver {
    fn name(&self) -> &'static str {
        "regions of a pinned pool"
    }

    fn offer(&self) -> Offer {
        if !self.home.is_here() {
            return Offer::default();
        }
        let shared = self.home.with(|state| state.open_as(self.generation).cloned());
        let kept: u64 = shared.map_or(0, |shared| {
            shared.keepers(&shared.scratch.begin()).iter().map(|keeper| keeper.idle()).sum()
        });
        let bytes = self.home.with_tally(|state, tally| {
            let reserve = match state.open_as(self.generation).map(|shared| &shared.config) {
                Ok(config) if config.grow == Grow::Now => config.reserve as u64,
                // Such a pool releases regions only when its owner calls for it.
                _ => return 0,
            };
            let free = (state.free_bytes() + tally.cached + kept).saturating_sub(reserve);
            // Only whole regions can be released.
            if state.shortest_region().is_some_and(|bytes| bytes <= free) { free } else { 0 }
        });
        let mib = u32::try_from(bytes / MIB).unwrap_or(u32::MAX);
        Offer { bytes, cost: STALL.saturating_add(EACH_MIB.saturating_mul(mib)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if !self.home.is_here()
            || self.waits && deadline.is_some_and(|deadline| Instant::now() >= deadline)
        {
            return;
        }
        let ended = region::end_retired();
        if ended < bytes {
            self.home.give_back(self.generation, bytes - ended);
        }
    }

    fn waits(&self) -> bool {
        self.waits
    }

    fn place(&self) -> Option<Place> {
        Some(self.place)
    }
}
