//! Pinned memory of the simulated machine.
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

/// The driver refuses to register this many bytes at once.
const TOO_MUCH: usize = 512 << 30;

impl Shared {
    /// The common part of a free and the end of a registration: checks for work on the memory, and
    /// waits for the device as the driver does, without ordering the host. Returns the bytes it
    /// had.
    fn unpin<'a>(
        &'a self,
        mut state: Guard<'a>,
        device: DeviceId,
        address: u64,
        origin: Origin,
        site: &'static Location<'static>,
    ) -> Result<(Guard<'a>, u64), u32> {
        // Unregistration has one error code inside pinned memory and another outside.
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
        // Another thread may have unpinned it meanwhile.
        state.pinned.get(address).filter(|pinned| pinned.origin == origin).ok_or(wrong)?;
        state.pinned.remove(address);
        Ok((state, bytes))
    }
}

// SAFETY: 1. The memory consists of whole pages of the system, which are unmapped when they are
// freed. 2. The device's queues have run by then. 3. Errors are detected before anything changes.
unsafe impl HostMemory for Shared {
    fn host_alloc(&self, device: DeviceId, bytes: usize, flags: HostFlags) -> Result<NonNull<u8>> {
        let site = here();
        let call = Call::HostAlloc;
        let mut state = self.enter(call, Some(device))?;
        if flags.read_only {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        if bytes == 0 {
            // The code that the driver returns for this.
            return Err(at(call)(codes::OUT_OF_MEMORY));
        }
        let address =
            store::host_pages(bytes as u64).ok_or_else(|| at(call)(codes::OUT_OF_MEMORY))?;
        self.cost(call, bytes as u64);
        let by = state.host_name(Act::Write, "allocation of host memory", site);
        // Fresh pages of the system overlap no existing registration.
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
        // SAFETY: 1. `host_alloc` allocated these pages with this size. The caller promises that
        // they are no longer in use, and the work queued on the device has run.
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
        // Host and devices share one address space, as on every 64-bit Linux, where the `mapped`
        // flag is not required.
        state.pinned.holding(address).ok_or_else(|| at(call)(codes::INVALID_VALUE))?;
        self.cost(call, 0);
        Ok(address)
    }
}
