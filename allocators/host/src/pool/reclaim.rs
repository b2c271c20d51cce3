//! What a pool gives back for others under its budget, and how it asks them.
//!
//! To unregister memory waits for the whole device and holds up launches on all threads, so pinned memory is the dearest
//! of all that is asked, and only by who has time: see [`Reclaim::waits`].

use super::{Grow, Shared, home::Home};
use crate::region::{self, Cause, Pinning, RegionError};
use aquifer_core::{
    budget::{Offer, Reclaim, Registration},
    error::Tried,
    event::Place,
};
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// How long launches are held up by a registration that comes or goes.
const STALL: Duration = Duration::from_micros(4400);

/// To unregister a MiB, to populate and to register it anew.
const EACH_MIB: Duration = Duration::from_micros(50);

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

    /// Calls `grow` again as long as it is refused by a budget and others below that give something back.
    pub(super) fn ask_others(
        &self,
        refused: RegionError,
        deadline: Instant,
        tried: &mut Vec<Tried>,
        mut grow: impl FnMut() -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        let mut asking = self.budget.asking(self.known.get().map(|known| &known.registration));
        let mut error = refused;
        while let Cause::Budget(refused) = &error.cause {
            let Some(asked) = asking.for_charge(refused.requested, Some(deadline)) else { break };
            match tried.iter_mut().find(|earlier| earlier.step == asked.step) {
                Some(earlier) => earlier.gave += asked.gave,
                None => tried.push(asked),
            }
            match grow() {
                Ok(()) => return Ok(()),
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
        let bytes = self.home.with_tally(|state, tally| {
            let reserve = match state.open_as(self.generation).map(|shared| &shared.config) {
                Ok(config) if config.grow == Grow::Now => config.reserve as u64,
                // Nothing is given back but where its owner says so.
                _ => return 0,
            };
            let free = (state.free_bytes() + tally.cached).saturating_sub(reserve);
            // Only whole regions go.
            if state.shortest_region().is_some_and(|bytes| bytes <= free) { free } else { 0 }
        });
        let mib = u32::try_from(bytes / MIB).unwrap_or(u32::MAX);
        Offer { bytes, cost: STALL.saturating_add(EACH_MIB.saturating_mul(mib)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if !self.home.is_here() || self.waits && deadline.is_some_and(|deadline| Instant::now() >= deadline) {
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
