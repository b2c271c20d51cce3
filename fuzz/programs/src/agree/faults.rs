//! Deliberate mistakes.
#![expect(unsafe_code, reason = "breaks the conditions of driver calls that must refuse")]

use super::{FIRST_HALF, Fault, GRANULE, HOSTS, HostPart, PAGEABLE, execute::Run};
use aquifer_driver::{CaptureMode, DeviceId, HostFlags};

/// More than any device has.
const TOO_MUCH: u64 = 1 << 46;

impl Run {
    /// Makes a call that must fail. If it succeeds, the recorded code shows it, and the result is
    /// freed if possible.
    pub(super) fn mistake(&mut self, fault: Fault) {
        let (driver, device) = (self.driver.clone(), self.device);
        match fault {
            Fault::ReserveNothing => {
                let result = driver.address_reserve(device, 0, 0);
                self.note("address_reserve", result);
            }
            Fault::ReserveOffGranule => {
                let result = driver.address_reserve(device, GRANULE / 2, 0);
                if let Some(address) = self.note("address_reserve", result) {
                    // SAFETY: 1. nothing is mapped there, and the address is not stored.
                    let _ = unsafe { driver.address_free(device, address, GRANULE / 2) };
                }
            }
            Fault::CreateNothing => self.create(0),
            Fault::CreateOffGranule => self.create(GRANULE / 2),
            Fault::CreateTooMuch => self.create(TOO_MUCH),
            Fault::MapTwice { handle, at, granules } => {
                self.map_at(handle, self.range + at * GRANULE, granules);
            }
            Fault::MapUnreserved { handle, granules } => self.map_at(handle, GRANULE, granules),
            Fault::UnmapNothing { at } => {
                // SAFETY: 1. nothing is mapped there, so no queued work uses it.
                let result = unsafe { driver.unmap(device, self.range + at * GRANULE, GRANULE) };
                self.note("unmap", result);
            }
            Fault::AccessNothing { at } => {
                let result = driver.set_access(self.range + at * GRANULE, GRANULE, &[device]);
                self.note("set_access", result);
            }
            Fault::AllocateNothing => self.allocate(0),
            Fault::AllocateTooMuch => self.allocate(TOO_MUCH),
            Fault::FreeInside { slot } => {
                let Some(&(address, ..)) = self.blocks.get(&slot) else {
                    return self.skip("mem_free");
                };
                // SAFETY: 1. violated on purpose: the address is inside a block.
                let result = unsafe { driver.mem_free(device, address + 256) };
                self.note("mem_free", result);
            }
            Fault::PoolAllocateNothing { stream } => self.pool_allocate(stream, 0),
            Fault::PoolAllocateTooMuch { stream } => self.pool_allocate(stream, TOO_MUCH),
            Fault::RegisterTwice => {
                let half = self.hosts.address(HostPart {
                    host: FIRST_HALF,
                    offset: 0,
                    bytes: HOSTS[FIRST_HALF],
                });
                // SAFETY: 1. the pages live until the end of the program.
                let result = unsafe {
                    driver.host_register(device, half, HOSTS[FIRST_HALF], HostFlags::default())
                };
                self.note("host_register", result);
            }
            Fault::UnregisterNothing => {
                let pageable = self.hosts.address(HostPart {
                    host: PAGEABLE,
                    offset: 0,
                    bytes: HOSTS[PAGEABLE],
                });
                // SAFETY: 1. violated on purpose: nothing is registered there.
                let result = unsafe { driver.host_unregister(device, pageable) };
                self.note("host_unregister", result);
            }
            Fault::UploadAcross { stream, slot } => self.across(stream, slot, true),
            Fault::DownloadAcross { stream, slot } => self.across(stream, slot, false),
            Fault::NoSuchDevice => {
                let result = driver.device_info(DeviceId(9999));
                self.note("device_info", result);
            }
            Fault::EndNothing { stream } => self.capture_end_alone(stream),
            Fault::CaptureTwice { stream } => {
                self.capture_begin(stream);
                self.capture_begin(stream);
                self.capture_end_alone(stream);
            }
            Fault::QueryCapturing { stream } => {
                self.capture_begin(stream);
                let result = driver.stream_query(self.streams[stream]);
                self.note("stream_query", result);
                self.capture_end_alone(stream);
            }
            Fault::WaitFromOutside { stream, event } => {
                self.capture_begin(stream);
                let result = driver.stream_wait_event(self.streams[stream], self.events[event]);
                self.note("stream_wait_event", result);
                self.capture_end_alone(stream);
            }
            Fault::LeaveUnjoined { stream, other, event, slot } => {
                let Some(&(address, ..)) = self.blocks.get(&slot) else {
                    return self.skip("capture_begin");
                };
                self.capture_begin(stream);
                let result = driver.event_record(self.events[event], self.streams[stream]);
                self.note("event_record", result);
                let result = driver.stream_wait_event(self.streams[other], self.events[event]);
                self.note("stream_wait_event", result);
                // SAFETY: 1. and 2. it never runs.
                let result = unsafe { driver.fill(self.streams[other], address, 0, 1) };
                self.note("fill", result);
                self.capture_end_alone(stream);
            }
            Fault::QueryCaptured { stream, event } => {
                self.capture_begin(stream);
                let result = driver.event_record(self.events[event], self.streams[stream]);
                self.note("event_record", result);
                self.capture_end_alone(stream);
                let result = driver.event_query(self.events[event]);
                self.note("event_query", result);
            }
        }
    }

    fn capture_begin(&mut self, stream: usize) {
        let result = self.driver.capture_begin(self.streams[stream], CaptureMode::ThreadLocal);
        self.note("capture_begin", result);
    }

    /// Ends a capture and destroys its graph, if it is valid, without launching it.
    fn capture_end_alone(&mut self, stream: usize) {
        let result = self.driver.capture_end(self.streams[stream]);
        if let Some(graph) = self.note("capture_end", result) {
            // SAFETY: 1. no copy of the handle is kept.
            let _ = unsafe { self.driver.graph_destroy(graph) };
        }
    }

    fn create(&mut self, bytes: u64) {
        let result = self.driver.handle_create(self.device, bytes);
        if let Some(handle) = self.note("handle_create", result) {
            // SAFETY: 1. no copy of the handle exists.
            let _ = unsafe { self.driver.handle_release(handle) };
        }
    }

    fn map_at(&mut self, handle: usize, address: u64, granules: u64) {
        let Some(&raw) = self.handles.get(&handle) else { return self.skip("map") };
        // SAFETY: 1. violated on purpose: something is mapped there, or it is not reserved.
        let result = unsafe { self.driver.map(address, granules * GRANULE, raw) };
        self.note("map", result);
    }

    fn allocate(&mut self, bytes: u64) {
        let result = self.driver.mem_alloc(self.device, bytes);
        if let Some(address) = self.note("mem_alloc", result) {
            // SAFETY: 1. it came from there. 2. no work uses it.
            let _ = unsafe { self.driver.mem_free(self.device, address) };
        }
    }

    fn pool_allocate(&mut self, stream: usize, bytes: u64) {
        let stream = self.streams[stream];
        let result = self.driver.pool_alloc(self.pool, stream, bytes);
        if let Some(address) = self.note("pool_alloc", result) {
            // SAFETY: 1. it came from there. 2. no work uses it.
            let _ = unsafe { self.driver.pool_free(stream, address) };
        }
    }

    fn across(&mut self, stream: usize, slot: usize, up: bool) {
        let call = if up { "copy_to_device" } else { "copy_to_host" };
        let Some(&(address, ..)) = self.blocks.get(&slot) else { return self.skip(call) };
        let bytes = HOSTS[FIRST_HALF] + HOSTS[FIRST_HALF + 1];
        let host = self.hosts.address(HostPart { host: FIRST_HALF, offset: 0, bytes });
        // SAFETY: 1. both sides live until the host has waited for the stream; the two halves are
        // adjacent. 2. the copy would be in order.
        let result = unsafe {
            match up {
                true => self.driver.copy_to_device(self.streams[stream], address, host, bytes),
                false => self.driver.copy_to_host(self.streams[stream], host, address, bytes),
            }
        };
        self.note(call, result);
    }
}
