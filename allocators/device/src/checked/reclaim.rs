//! The quarantine as a reclaimer of its budget.

use super::CheckedPool;
use crate::base::{reclaim_cost::reclaim_cost, waits::has_passed};
use aquifer_core::{
    budget::{Offer, Reclaim},
    event::MemoryLocation,
};
use std::time::{Duration, Instant};

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
