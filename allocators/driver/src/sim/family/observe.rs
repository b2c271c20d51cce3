//! The observer for notes of pools.

use crate::{
    BlockNote, DeviceRange, HostAccess, Observer, RawStream,
    sim::{
        machine::{Machine, caller_site},
        queue,
    },
    site,
};

impl Observer for Machine {
    #[expect(unsafe_code, reason = "makes the handle of a stream of this machine")]
    fn on_every_thread(&self, stream: RawStream) -> RawStream {
        match self.lock().stream(stream) {
            Ok(index) => {
                let handle = queue::stream_handle(self.machine_id, index);
                // SAFETY: 1. It is a stream of this machine, which default streams are for ever.
                unsafe { RawStream::from_raw(stream.device(), handle) }
            }
            Err(_) => stream,
        }
    }

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
        let (entered, own) = (site::entered(), caller_site());
        self.lock().check_host_access(address, bytes, access, entered, own);
    }
}
