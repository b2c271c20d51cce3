//! What a pool gives back for others under its budget, and how it asks them.
//!
//! To unregister memory waits for the whole device and holds up launches on all threads, so pinned
//! memory is the dearest of all that is asked, and only by who has time: see [`Reclaim::waits`].
//!
//! Whoever keeps blocks of a pool that nobody uses now is a [`Keeper`]: a stager with its slots.
//! Where the pool has no memory left or is asked for some, they come back to it first.

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

/// How long launches are held up by a registration that comes or goes.
const STALL: Duration = Duration::from_micros(4400);

/// To unregister a MiB, to populate and to register it anew.
const EACH_MIB: Duration = Duration::from_micros(50);

/// Somebody who keeps blocks of a pool though they are idle.
pub(crate) trait Keeper: Send + Sync {
    /// Bytes of idle blocks. Must not block.
    fn idle(&self) -> u64;

    /// Frees idle blocks. Must not allocate from the pool. Answers with their bytes.
    fn give(&self) -> u64;
}

impl PinnedPool {
    /// Has `keeper` asked for its idle blocks, as long as somebody else keeps it.
    pub(crate) fn keep_asking<K: Keeper + 'static>(&self, keeper: &Arc<K>) {
        let keeper: Weak<K> = Arc::downgrade(keeper);
        let mut all = self.handle.shared.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(keeper);
    }
}

/// What others under the budget ask. It keeps nothing of the pool alive.
struct Giver {
    home: &'static Home,
    generation: u64,
    place: Place,
    waits: bool,
}

/// A pool's place among those under its budget.
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
    /// Has others under the budget ask this pool, as long as it is open.
    pub(super) fn register(&self, home: &'static Home, generation: u64) {
        let waits = self.host.reach.is_some() && self.config.pinning != Pinning::Off;
        let giver = Arc::new(Giver { home, generation, place: self.place(), waits });
        let registration = self.budget.on_need(&giver);
        let _only_once = self.known.set(Known { registration, _giver: giver });
    }

    /// Those who keep idle blocks. Nobody is asked anything under the lock.
    fn keepers<'s>(&self, bump: &'s Bump) -> List<'s, Arc<dyn Keeper>> {
        // What is kept for lists must not grow by memory of the pool's own.
        let _at_work = AtWork::begin();
        let all = self.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        list(bump, all.iter().filter_map(Weak::upgrade))
    }

    /// Has those who keep idle blocks free them. Answers with their bytes.
    pub(super) fn ask_keepers(&self) -> u64 {
        self.keepers(&self.scratch.begin()).iter().map(|keeper| keeper.give()).sum()
    }

    /// Calls `grow` again as long as it is refused by a budget and others below that give something
    /// back.
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
                // Nothing is given back but where its owner says so.
                _ => return 0,
            };
            let free = (state.free_bytes() + tally.cached + kept).saturating_sub(reserve);
            // Only whole regions go.
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
