//! The quarantine as a reclaimer, of its budget and of its pool.

use super::CheckedPool;
use crate::{
    base::{
        reclaim_cost::reclaim_cost,
        waits::{deadline, has_passed},
    },
    pool_core::PoolHook,
};
use aquifer_core::{
    budget::{Offer, Reclaim},
    event::MemoryLocation,
};
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// Lets the pool release the quarantine before it reclaims from others. It has no reference of its
/// own, since the quarantine has one to the pool.
pub(crate) struct QuarantineHook(Weak<CheckedPool>);

impl QuarantineHook {
    pub(crate) fn new(checked: &Arc<CheckedPool>) -> Self {
        Self(Arc::downgrade(checked))
    }
}

impl PoolHook for QuarantineHook {
    fn release_held_back(&self, bytes: u64) -> Option<u64> {
        let checked = self.0.upgrade()?;
        Some(checked.reclaim_quarantine(bytes, deadline(checked.wait)))
    }
}

impl Reclaim for CheckedPool {
    fn name(&self) -> &'static str {
        "quarantine of a pool"
    }

    fn offer(&self) -> Offer {
        let bytes = self.held_back();
        Offer { bytes, cost: reclaim_cost(0, Duration::ZERO, bytes, Duration::from_micros(54)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if has_passed(deadline) {
            return;
        }
        self.reclaim_quarantine(bytes, deadline);
        self.source().reclaim(bytes, deadline);
    }

    fn waits(&self) -> bool {
        true
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.device()))
    }
}
