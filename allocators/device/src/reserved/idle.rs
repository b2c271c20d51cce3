//! Idle steps of reserved memory: still mapped and charged, and given back where memory is needed.

use crate::{
    base::{
        pending::poll,
        released::reclaim_cost,
        waits::{has_passed, try_wait, wait_for_epoch},
    },
    dedicated::{DedicatedPool, Span},
};
use aquifer_core::{
    budget::{Offer, Reclaim},
    event::{BlockKind, MemoryLocation},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The idle steps of one reservation, as a reclaimer of the pool's budget.
pub(super) struct IdleSteps {
    pub(super) dedicated: Arc<DedicatedPool>,
    pub(super) span: Arc<Span>,
}

impl IdleSteps {
    /// Gives back idle steps of at least `bytes`, those with the highest addresses first, as far as
    /// their work is done. Until `deadline` it waits for that work. Returns the bytes released.
    pub(super) fn release(&self, bytes: u64, deadline: Option<Instant>) -> u64 {
        let Self { dedicated, span } = self;
        let (mut missing, mut released, mut is_polled) = (bytes.div_ceil(span.slot), 0, false);
        loop {
            let (taken, unfinished) = span.take_idle(missing);
            if let Some(taken) = taken {
                let count = taken.slots.len() as u64;
                missing -= count;
                dedicated.slots_retired(BlockKind::Reserved, count * span.slot);
                span.retire_taken(taken);
                // What the driver refuses stays listed, and the next slow path tries again.
                released += dedicated.reap_span(span).bytes;
            }
            let Some((timeline, epoch)) = unfinished.first() else { return released };
            if missing == 0 {
                return released;
            }
            if !std::mem::replace(&mut is_polled, true) {
                // After an error of the driver the work counts as not done.
                let _polled = poll(unfinished.iter().cloned());
            } else if has_passed(deadline)
                || !try_wait(|| wait_for_epoch(timeline, *epoch, deadline)).unwrap_or(false)
            {
                return released;
            }
        }
    }
}

impl Reclaim for IdleSteps {
    fn name(&self) -> &'static str {
        "idle reserved memory"
    }

    fn offer(&self) -> Offer {
        let bytes = self.span.idle_bytes();
        // As of the caches' handles.
        let (each, each_mib) = (Duration::from_micros(44), Duration::from_nanos(1300));
        let cost = reclaim_cost(bytes / self.span.slot, each, bytes, each_mib);
        Offer { bytes, cost }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        self.release(bytes, deadline);
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.dedicated.device))
    }
}
