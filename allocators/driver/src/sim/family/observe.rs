//! The observer for notes of pools.

use crate::{
    BlockNote, DeviceRange, HostAccess, Observer,
    sim::machine::{Machine, caller_site},
    site,
};

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
