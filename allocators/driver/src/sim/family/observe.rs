//! The driver trait, and the observer for notes of pools.

use crate::{
    BlockNote, CallCounts, DeviceRange, Driver, HostAccess, Observer,
    sim::{
        Sim,
        shared::{Shared, here},
    },
    site,
};
use std::sync::{Arc, atomic::Ordering};

// SAFETY: 1. All families share one state.
#[expect(unsafe_code, reason = "promises what a driver answers; holds no unsafe block")]
unsafe impl Driver for Shared {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn calls(&self) -> &CallCounts {
        &self.calls
    }

    fn observer(&self) -> Option<&dyn Observer> {
        if self.watched.load(Ordering::Relaxed) { Some(self) } else { None }
    }

    fn machine(&self) -> u64 {
        self.machine + 1
    }

    fn simulator(self: Arc<Self>) -> Option<Sim> {
        Some(Sim { shared: self })
    }
}

impl Observer for Shared {
    fn block(&self, note: BlockNote<'_>) {
        let (entered, own) = (site::entered(), here());
        self.lock().note(note, entered, own);
    }

    fn registered(&self, range: DeviceRange) {
        let site = here();
        self.lock().note_registered(range, true, site);
    }

    fn unregistered(&self, range: DeviceRange) {
        let site = here();
        self.lock().note_registered(range, false, site);
    }

    fn kept_for_graphs(&self, range: DeviceRange, keeper: u64) {
        let mut state = self.lock();
        if state.oracle && range.bytes > 0 {
            state.kept.keep(range.address, range.bytes, keeper);
        }
    }

    fn let_go_by_graphs(&self, range: DeviceRange) {
        self.lock().kept.let_go(range.address, range.bytes);
    }

    fn host(&self, address: u64, bytes: u64, access: HostAccess) {
        let site = here();
        self.lock().host_touch(address, bytes, access, site);
    }

    fn checkpoint(&self) {
        Shared::checkpoint(self);
    }
}
