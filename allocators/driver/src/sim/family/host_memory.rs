//! Pinned memory.
#![expect(unsafe_code, reason = "implements calls that take memory away")]

use crate::{
    Call, DeviceId, HostAccess, HostFlags, HostMemory, Result,
    sim::{
        codes,
        ledger::Act,
        pinned::{Origin, Side},
        shared::{Guard, Shared, at, here},
        store,
    },
};
use std::{panic::Location, ptr::NonNull};

/// The driver refuses to register so much at once.
const TOO_MUCH: usize = 512 << 30;

impl Shared {
    /// What a free and the end of a registration have in common: whoever works on the memory is
    /// looked for, and the driver waits for the device, from which the host learns nothing. The
    /// bytes that it had.
    fn unpin<'a>(
        &'a self,
        mut state: Guard<'a>,
        device: DeviceId,
        address: u64,
        origin: Origin,
        site: &'static Location<'static>,
    ) -> Result<(Guard<'a>, u64), u32> {
        // The end of a registration is refused by one code inside pinned memory and by another
        // where there is none.
        let wrong = match (origin, state.pinned.side(address, 1)) {
            (Origin::Registered, Side::Pageable) => codes::HOST_MEMORY_NOT_REGISTERED,
            _ => codes::INVALID_VALUE,
        };
        let pinned =
            state.pinned.get(address).filter(|pinned| pinned.origin == origin).ok_or(wrong)?;
        let bytes = pinned.bytes;
        state.host_touch(address, bytes, HostAccess::Free, site);
        let mut state = self.run_device(state, device);
        state.device(device)?;
        // Another thread may have done the same meanwhile.
        state.pinned.get(address).filter(|pinned| pinned.origin == origin).ok_or(wrong)?;
        state.pinned.remove(address);
        Ok((state, bytes))
    }
}

// SAFETY: 1. whole pages of the system, which are unmapped when they are freed. 2. the device's
// queues have run by then. 3. faults are looked for before anything changes.
unsafe impl HostMemory for Shared {
    fn host_alloc(&self, device: DeviceId, bytes: usize, flags: HostFlags) -> Result<NonNull<u8>> {
        let site = here();
        let call = Call::HostAlloc;
        let mut state = self.enter(call, Some(device))?;
        if flags.read_only {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        if bytes == 0 {
            // Of all codes the driver answers with this one.
            return Err(at(call)(codes::OUT_OF_MEMORY));
        }
        let address =
            store::host_pages(bytes as u64).ok_or_else(|| at(call)(codes::OUT_OF_MEMORY))?;
        self.cost(call, bytes as u64);
        let by = state.host_name(Act::Write, "allocation of host memory", site);
        // Fresh pages of the system overlap nothing that is registered and still there.
        state.pinned.add(address, bytes as u64, device, Origin::Allocated, by);
        NonNull::new(address as *mut u8).ok_or_else(|| at(call)(codes::OUT_OF_MEMORY))
    }

    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        let site = here();
        let call = Call::HostFree;
        let state = self.enter(call, Some(device))?;
        let address = address.as_ptr() as u64;
        let (_state, bytes) =
            self.unpin(state, device, address, Origin::Allocated, site).map_err(at(call))?;
        self.cost(call, bytes);
        // SAFETY: 1. `host_alloc` got these pages for as many bytes, and nobody uses them any more,
        // by the caller's word; what was queued on the device has run.
        unsafe { store::free_host_pages(address, bytes) };
        Ok(())
    }

    unsafe fn host_register(
        &self,
        device: DeviceId,
        address: NonNull<u8>,
        bytes: usize,
        flags: HostFlags,
    ) -> Result<()> {
        let site = here();
        let call = Call::HostRegister;
        let mut state = self.enter(call, Some(device))?;
        state.captures.disturb().map_err(at(call))?;
        if bytes == 0 || bytes >= TOO_MUCH || flags.write_combined {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let (address, length) = (address.as_ptr() as u64, bytes as u64);
        if state.pinned.overlaps(address, length, Origin::Allocated) {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let by = state.host_name(Act::Write, "registration", site);
        if !state.pinned.add(address, length, device, Origin::Registered, by) {
            return Err(at(call)(codes::HOST_MEMORY_ALREADY_REGISTERED));
        }
        if flags.read_only {
            state.pinned.protect(address);
        }
        self.cost(call, bytes as u64);
        Ok(())
    }

    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        let site = here();
        let call = Call::HostUnregister;
        let state = self.enter(call, Some(device))?;
        let (_state, bytes) = self
            .unpin(state, device, address.as_ptr() as u64, Origin::Registered, site)
            .map_err(at(call))?;
        self.cost(call, bytes);
        Ok(())
    }

    fn host_device_address(&self, device: DeviceId, address: NonNull<u8>) -> Result<u64> {
        let call = Call::HostDeviceAddress;
        let state = self.enter(call, Some(device))?;
        let address = address.as_ptr() as u64;
        // One address space for host and devices, as on every 64-bit Linux: the flag is not asked
        // for there.
        state.pinned.holding(address).ok_or_else(|| at(call)(codes::INVALID_VALUE))?;
        self.cost(call, 0);
        Ok(address)
    }
}
