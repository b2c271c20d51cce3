//! Deliberate mistakes, which a driver rejects, or ignores if they do no harm.
//!
//! Mapping and unmapping across the end of the range are not included, since their result on a GPU
//! depends on the adjacent addresses.
#![expect(unsafe_code, reason = "breaks the conditions of driver calls that must refuse")]

use super::{
    EVENTS, FIRST_HALF, GRANULE, HOSTS, HostPart, PAGEABLE, RANGE,
    generate::{BLOCKS, Generator, Memory},
    machine::Machine,
};
use aquifer_driver::{CaptureMode, DeviceId, HostFlags};

/// More than any device has.
const TOO_MUCH: u64 = 1 << 46;

impl Generator<'_> {
    /// Makes a mistake, if there is what it needs.
    pub(super) fn mistake(&mut self) {
        self.try_mistake();
        self.machine.mistake = None;
    }

    /// Returns the machine, whose calls are this mistake from here on.
    fn wrongly(&mut self, mistake: &'static str) -> &mut Machine {
        self.machine.mistake = Some(mistake);
        &mut self.machine
    }

    fn try_mistake(&mut self) -> Option<()> {
        let open = self.open_handles();
        let stream = self.stream();
        match self.choices.below(25) {
            0 => self.wrongly("reserves zero bytes of addresses").reserve(0),
            1 => self.wrongly("reserves half a granule of addresses").reserve(GRANULE / 2),
            2 => self.wrongly("creates zero bytes of memory").create_only(0),
            3 => self.wrongly("creates half a granule of memory").create_only(GRANULE / 2),
            4 => self.wrongly("creates more than any device has").create_only(TOO_MUCH),
            5 => {
                let (handle, granules) = self.choices.pick(&open)?;
                let taken: Vec<_> =
                    self.handles.iter().flatten().flat_map(|h| h.at.iter().copied()).collect();
                let at = self.choices.pick(&taken)?.min(RANGE - granules);
                let address = self.machine.range + at * GRANULE;
                self.wrongly("maps where something is mapped").map_at(handle, address, granules);
            }
            6 => {
                let (handle, granules) = self.choices.pick(&open)?;
                self.wrongly("maps what is not reserved").map_at(handle, GRANULE, granules);
            }
            7 | 8 => {
                let free = self.free_ranges(1);
                let at = self.choices.pick(&free)?;
                let (address, device) = (self.machine.range + at * GRANULE, self.machine.device);
                if self.choices.below(2) == 0 {
                    let machine = self.wrongly("unmaps nothing, which is no error");
                    // SAFETY: 1. nothing is mapped there, so no queued work uses it.
                    let result = unsafe { machine.driver.unmap(device, address, GRANULE) };
                    machine.note("unmap", result);
                } else {
                    let machine = self.wrongly("sets access to nothing");
                    let result = machine.driver.set_access(address, GRANULE, &[device]);
                    machine.note("set_access", result);
                }
            }
            9 => self.wrongly("allocates zero bytes").allocate_only(0),
            10 => self.wrongly("allocates more than any device has").allocate_only(TOO_MUCH),
            11 => {
                let inside = |slot: &usize| {
                    self.blocks[*slot].is_some_and(|block| !block.pooled && block.bytes > 512)
                };
                let direct: Vec<_> = (0..BLOCKS).filter(inside).collect();
                let slot = self.choices.pick(&direct)?;
                let machine = self.wrongly("frees an address inside a block");
                let address = machine.blocks.get(&slot).map(|block| block.0 + 256);
                // SAFETY: 1. violated on purpose: the address is inside a block.
                let free = |address| unsafe { machine.driver.mem_free(machine.device, address) };
                let result = address.map(free);
                machine.note_if("mem_free", result);
            }
            12 => {
                self.wrongly("allocates zero bytes from the pool, which must succeed")
                    .pool_allocate_only(stream, 0);
            }
            13 => {
                self.wrongly("allocates more from the pool than any device has")
                    .pool_allocate_only(stream, TOO_MUCH);
            }
            14 => {
                let machine = self.wrongly("registers registered memory");
                let bytes = HOSTS[FIRST_HALF];
                let half = machine.hosts.address(HostPart { host: FIRST_HALF, offset: 0, bytes });
                let flags = HostFlags::default();
                // SAFETY: 1. the pages live until the end of the program.
                let result =
                    unsafe { machine.driver.host_register(machine.device, half, bytes, flags) };
                machine.note("host_register", result);
            }
            15 => {
                let machine = self.wrongly("unregisters what is not registered");
                let bytes = HOSTS[PAGEABLE];
                let pageable = machine.hosts.address(HostPart { host: PAGEABLE, offset: 0, bytes });
                // SAFETY: 1. violated on purpose: nothing is registered there.
                let result = unsafe { machine.driver.host_unregister(machine.device, pageable) };
                machine.note("host_unregister", result);
            }
            side @ (16 | 17) => {
                let room = (HOSTS[FIRST_HALF] + HOSTS[FIRST_HALF + 1]) as u64;
                let large =
                    |slot: &usize| self.blocks[*slot].is_some_and(|block| block.bytes >= room);
                let slots: Vec<_> = (0..BLOCKS).filter(large).collect();
                let slot = self.choices.pick(&slots)?;
                let up = side == 16;
                // The copy is ordered correctly. Only its two registrations are wrong.
                self.order(stream, Memory::Host(FIRST_HALF), !up);
                self.order(stream, Memory::Host(FIRST_HALF + 1), !up);
                self.order(stream, Memory::Block(slot), up);
                let machine = self.wrongly(match up {
                    true => "copies from two registrations at once",
                    false => "copies to two registrations at once",
                });
                machine.across(stream, slot, up);
            }
            18 => {
                let machine = self.wrongly("uses a device that does not exist");
                let result = machine.driver.device_info(DeviceId(9999));
                machine.note("device_info", result);
            }
            19 => self.wrongly("ends a capture that was not begun").capture_end_alone(stream),
            20 => {
                let machine = self.wrongly("begins a capture twice");
                machine.capture_begin(stream, CaptureMode::ThreadLocal);
                machine.capture_begin(stream, CaptureMode::ThreadLocal);
                machine.capture_end_alone(stream);
            }
            21 => {
                let machine = self.wrongly("queries a capturing stream, which invalidates it");
                machine.capture_begin(stream, CaptureMode::ThreadLocal);
                let result = machine.driver.stream_query(machine.streams[stream]);
                machine.note("stream_query", result);
                machine.capture_end_alone(stream);
            }
            22 => {
                let event = self.choices.index(EVENTS);
                self.record(event, stream);
                let machine = self.wrongly("waits in a capture for an event from outside");
                machine.capture_begin(stream, CaptureMode::ThreadLocal);
                machine.wait_always(stream, event);
                machine.capture_end_alone(stream);
            }
            23 => {
                let live: Vec<_> =
                    (0..BLOCKS).filter(|&slot| self.blocks[slot].is_some()).collect();
                let slot = self.choices.pick(&live)?;
                let (other, event) = ((stream + 1) % self.streams, self.choices.index(EVENTS));
                let machine = self.wrongly("ends a capture before another stream is joined");
                if let Some(&(address, ..)) = machine.blocks.get(&slot) {
                    machine.capture_begin(stream, CaptureMode::ThreadLocal);
                    machine.record(event, stream);
                    machine.wait_always(other, event);
                    // SAFETY: 1. and 2. it never runs.
                    let result =
                        unsafe { machine.driver.fill(machine.streams[other], address, 0, 1) };
                    machine.note("fill", result);
                    machine.capture_end_alone(stream);
                } else {
                    machine.note_if::<()>("capture_begin", None);
                }
                self.record_again(event, stream);
            }
            _ => {
                let event = self.choices.index(EVENTS);
                let machine = self.wrongly("queries an event that was recorded in a capture");
                machine.capture_begin(stream, CaptureMode::ThreadLocal);
                machine.record(event, stream);
                machine.capture_end_alone(stream);
                let result = machine.driver.event_query(machine.events[event]);
                machine.note("event_query", result);
                self.record_again(event, stream);
            }
        }
        Some(())
    }

    /// Records an event again outside a capture, as other steps expect.
    fn record_again(&mut self, event: usize, stream: usize) {
        self.machine.mistake = None;
        self.record(event, stream);
    }
}

/// Calls that must fail. Where one succeeds, its code shows it, and the result is freed.
impl Machine {
    fn reserve(&mut self, bytes: u64) {
        let result = self.driver.address_reserve(self.device, bytes, 0);
        if let Some(address) = self.note("address_reserve", result) {
            // SAFETY: 1. nothing is mapped there, and the address is not stored.
            let _ = unsafe { self.driver.address_free(self.device, address, bytes) };
        }
    }

    fn create_only(&mut self, bytes: u64) {
        let result = self.driver.handle_create(self.device, bytes);
        if let Some(handle) = self.note("handle_create", result) {
            // SAFETY: 1. no copy of the handle exists.
            let _ = unsafe { self.driver.handle_release(handle) };
        }
    }

    fn allocate_only(&mut self, bytes: u64) {
        let result = self.driver.mem_alloc(self.device, bytes);
        if let Some(address) = self.note("mem_alloc", result) {
            // SAFETY: 1. it came from there. 2. no work uses it.
            let _ = unsafe { self.driver.mem_free(self.device, address) };
        }
    }

    fn pool_allocate_only(&mut self, stream: usize, bytes: u64) {
        let stream = self.streams[stream];
        let result = self.driver.pool_alloc(self.pool, stream, bytes);
        if let Some(address) = self.note("pool_alloc", result) {
            // SAFETY: 1. it came from there. 2. no work uses it.
            let _ = unsafe { self.driver.pool_free(stream, address) };
        }
    }

    /// Ends a capture and destroys its graph, if it is valid, without launching it.
    fn capture_end_alone(&mut self, stream: usize) {
        let result = self.driver.capture_end(self.streams[stream]);
        if let Some(graph) = self.note("capture_end", result) {
            // SAFETY: 1. no copy of the handle is kept.
            let _ = unsafe { self.driver.graph_destroy(graph) };
        }
    }

    /// Copies between a block and both halves of the registered pages.
    fn across(&mut self, stream: usize, slot: usize, up: bool) {
        let bytes = HOSTS[FIRST_HALF] + HOSTS[FIRST_HALF + 1];
        let host = self.hosts.address(HostPart { host: FIRST_HALF, offset: 0, bytes });
        let stream = self.streams[stream];
        // SAFETY: 1. both sides live until the host has waited for the stream; the two halves are
        // adjacent. 2. the copy would be in order.
        let copy = |&(address, ..): &(u64, u64, bool)| unsafe {
            match up {
                true => self.driver.copy_to_device(stream, address, host, bytes),
                false => self.driver.copy_to_host(stream, host, address, bytes),
            }
        };
        let result = self.blocks.get(&slot).map(copy);
        self.note_if(if up { "copy_to_device" } else { "copy_to_host" }, result);
    }
}
