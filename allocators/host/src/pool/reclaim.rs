//! Reclaim of pinned memory: what a pool offers to others under its budget, and how it uses their
//! offers.
//!
//! Unregistering memory waits for the whole device and stalls launches on all threads. Pinned
//! memory is therefore the most expensive offer, and only a caller that may wait can use it
//! ([`Reclaim::waits`]).
//!
//! An [`IdleHolder`](super::IdleHolder) keeps idle blocks of a pool, such as a stager with its
//! slots. The pool takes these blocks back first when it runs out of memory or is reclaimed from.

use super::{
    config::Grow,
    context::{BudgetRegistration, PoolContext},
    pool_core::PoolCore,
};
use crate::{
    kernel::is_forked_child,
    region::{self, Pinning},
};
use aquifer_core::{
    budget::{Offer, Reclaim},
    event::MemoryLocation,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// Time that launches stall when memory is registered or unregistered.
const STALL: Duration = Duration::from_micros(4400);

/// Time to unregister one MiB, and later populate and register it again.
const EACH_MIB: Duration = Duration::from_micros(50);

/// The reclaimer that a pool registers with its budget. It keeps no part of the pool alive.
struct PoolReclaimer {
    core: &'static PoolCore,
    generation: u64,
    place: MemoryLocation,
    waits: bool,
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
}

impl Reclaim for PoolReclaimer {
    fn name(&self) -> &'static str {
        "regions of a pinned pool"
    }

    fn offer(&self) -> Offer {
        if is_forked_child() {
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
            let grows = |shared: &Arc<PoolContext>| shared.config.grow == Grow::Now;
            if !state.open_as(self.generation).is_ok_and(grows) {
                // Such a pool releases regions only when its owner calls for it.
                return 0;
            }
            let free = state.free_bytes() + tally.cached + idle;
            // Only whole regions can be released.
            if state.shortest_region().is_some_and(|bytes| bytes <= free) { free } else { 0 }
        });
        let mib = u32::try_from(bytes / MIB).unwrap_or(u32::MAX);
        Offer { bytes, cost: STALL.saturating_add(EACH_MIB.saturating_mul(mib)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if is_forked_child()
            || self.waits && deadline.is_some_and(|deadline| Instant::now() >= deadline)
        {
            return;
        }
        let ended = region::end_retired();
        if ended < bytes {
            self.core.release_for_reclaim(self.generation, bytes - ended);
        }
        self.core.publish_now(self.generation);
    }

    fn waits(&self) -> bool {
        self.waits
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(self.place)
    }
}
