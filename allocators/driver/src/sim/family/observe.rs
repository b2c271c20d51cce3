//! The driver trait, and the observer for notes of pools.

use crate::{
    BlockNote, CallCounts, DeviceRange, Driver, HostAccess, Observer,
    sim::{
        Sim,
        machine::{Machine, caller_site},
    },
    site,
};
use std::sync::{Arc, atomic::Ordering};

// SAFETY: 1. All families share one state.
#[expect(unsafe_code, reason = "implements a trusted trait; holds no unsafe block")]
unsafe impl Driver for Machine {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn calls(&self) -> &CallCounts {
        &self.calls
    }

    fn observer(&self) -> Option<&dyn Observer> {
        if self.oracle_on.load(Ordering::Relaxed) { Some(self) } else { None }
    }

    fn machine(&self) -> u64 {
        self.machine_id + 1
    }

    fn simulator(self: Arc<Self>) -> Option<Sim> {
        Some(Sim { machine: self })
    }
}

impl Observer for Machine {
    fn block(&self, note: BlockNote<'_>) {
        let (entered, own) = (site::entered(), caller_site());
        self.lock().record_owner(note, entered, own);
    }

    fn registered(&self, range: DeviceRange) {
        let site = caller_site();
        self.lock().record_registration(range, true, site);
    }

    fn unregistered(&self, range: DeviceRange) {
        let site = caller_site();
        self.lock().record_registration(range, false, site);
    }

    fn kept_for_graphs(&self, range: DeviceRange, keeper: u64) {
        let mut state = self.lock();
        if state.oracle && range.bytes > 0 {
            state.retained.retain(range.address, range.bytes, keeper);
        }
    }

    fn let_go_by_graphs(&self, range: DeviceRange) {
        self.lock().retained.release(range.address, range.bytes);
    }

    fn host(&self, address: u64, bytes: u64, access: HostAccess) {
        let site = caller_site();
        self.lock().check_host_access(address, bytes, access, site);
    }

    fn checkpoint(&self) {
        Machine::checkpoint(self);
    }
}
