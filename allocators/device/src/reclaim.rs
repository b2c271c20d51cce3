//! Requests to others to release memory.
//!
//! - Everything that holds memory under a budget is registered with the budget as long as it lives,
//!   by a weak reference.
//! - An offer is computed from the pool's own accounts, under locks that are never held during a
//!   driver call.
//! - The crate's documentation lists the cost of each kind of offer.

use aquifer_core::{
    Budget, DeviceId,
    budget::{Asking, HookRegistration},
    error::Tried,
    event::MemoryLocation,
};
use aquifer_driver::Driver;
use std::time::Instant;

/// Returns whether memory of that place is the device's. Memory of an integrated device is host
/// memory.
fn is_memory_of(driver: &dyn Driver, device: DeviceId, place: MemoryLocation) -> bool {
    match place {
        MemoryLocation::Device(other) => other == device,
        MemoryLocation::Host(_) => driver.device_info(device).is_ok_and(|info| info.integrated),
        _ => false,
    }
}

/// The reclaimers that a holder of device memory can call, the cheapest first.
pub(crate) struct Reclaimers<'a> {
    asking: Asking<'a>,
    driver: &'a dyn Driver,
    device: DeviceId,
}

impl<'a> Reclaimers<'a> {
    pub(crate) fn new(
        budget: &'a Budget,
        own: Option<&'a HookRegistration>,
        driver: &'a dyn Driver,
        device: DeviceId,
    ) -> Self {
        Self { asking: budget.asking(own), driver, device }
    }

    /// Calls the next reclaimer below the budget that has refused a charge of `bytes`.
    pub(crate) fn for_charge(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        self.asking.for_charge(bytes, deadline)
    }

    /// As [`for_memory`](Self::for_memory), after the driver has refused `bytes`.
    pub(crate) fn after_refusal(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        self.asking.refused_by_driver(bytes);
        self.for_memory(bytes, deadline)
    }

    /// Calls the next reclaimer with memory of this device, under any budget of the tree.
    pub(crate) fn for_memory(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        let Self { asking, driver, device } = self;
        asking.for_memory(bytes, deadline, &|place| is_memory_of(*driver, *device, place))
    }
}
