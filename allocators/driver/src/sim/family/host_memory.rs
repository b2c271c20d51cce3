//! Pinned memory of the simulated machine.
#![expect(unsafe_code, reason = "implements calls that free or unmap memory")]

use crate::{
    Call, DeviceId, HostAccess, HostMemory, Result,
    sim::{
        access_history::ActionKind,
        codes::{self, ErrorCode},
        machine::{Machine, StateGuard, caller_site, error_of},
        pinned::{HostMemoryKind, PinKind},
        store,
    },
    site::Site,
};
use std::ptr::NonNull;

/// The driver refuses to register this many bytes at once.
const REGISTRATION_LIMIT: usize = 512 << 30;

impl Machine {
    /// The common part of a free and the end of a registration: checks for work on the memory, and
    /// waits for the device as the driver does, without ordering the host. Returns the bytes it
    /// had.
    fn unpin<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        device: DeviceId,
        address: u64,
        kind: PinKind,
        site: Site,
    ) -> Result<(StateGuard<'a>, u64), ErrorCode> {
        // Unregistration has one error code inside pinned memory and another outside.
        let error = match (kind, state.pinned.classify(address, 1)) {
            (PinKind::Registered, HostMemoryKind::Pageable) => codes::HOST_MEMORY_NOT_REGISTERED,
            _ => codes::INVALID_VALUE,
        };
        let pinned = state.pinned.get(address).filter(|pinned| pinned.kind == kind).ok_or(error)?;
        let bytes = pinned.bytes;
        state.check_host_access(address, bytes, HostAccess::Free, crate::site::entered(), site);
        let mut state = self.run_device(state, device);
        state.device(device)?;
        // Another thread may have unpinned it meanwhile.
        state.pinned.get(address).filter(|pinned| pinned.kind == kind).ok_or(error)?;
        state.pinned.remove(address);
        Ok((state, bytes))
    }
}

// SAFETY: 1. The memory consists of whole pages of the system, which are unmapped when they are
// freed. 2. The device's queues have run by then. 3. Errors are detected before anything changes.
unsafe impl HostMemory for Machine {
    fn host_alloc(
        &self,
        device: DeviceId,
        bytes: usize,
        _write_combined: bool,
    ) -> Result<NonNull<u8>> {
        let site = caller_site();
        let call = Call::HostAlloc;
        let mut state = self.enter(call, Some(device))?;
        if bytes == 0 {
            // The code that the driver returns for this.
            return Err(error_of(call)(codes::OUT_OF_MEMORY));
        }
        let address =
            store::host_pages(bytes as u64).ok_or_else(|| error_of(call)(codes::OUT_OF_MEMORY))?;
        let cause = state.current_host_action(ActionKind::Write, "allocation of host memory", site);
        // Fresh pages of the system overlap no existing registration.
        state.pinned.add(address, bytes as u64, device, PinKind::Allocated, cause);
        NonNull::new(address as *mut u8).ok_or_else(|| error_of(call)(codes::OUT_OF_MEMORY))
    }

    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        let site = caller_site();
        let call = Call::HostFree;
        let state = self.enter(call, Some(device))?;
        let address = address.as_ptr() as u64;
        let (_state, bytes) =
            self.unpin(state, device, address, PinKind::Allocated, site).map_err(error_of(call))?;
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
    ) -> Result<()> {
        let site = caller_site();
        let call = Call::HostRegister;
        let mut state = self.enter(call, Some(device))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        if bytes == 0 || bytes >= REGISTRATION_LIMIT {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let (address, length) = (address.as_ptr() as u64, bytes as u64);
        if state.pinned.overlaps(address, length, PinKind::Allocated) {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let cause = state.current_host_action(ActionKind::Write, "registration", site);
        if !state.pinned.add(address, length, device, PinKind::Registered, cause) {
            return Err(error_of(call)(codes::HOST_MEMORY_ALREADY_REGISTERED));
        }
        Ok(())
    }

    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        let site = caller_site();
        let call = Call::HostUnregister;
        let state = self.enter(call, Some(device))?;
        self.unpin(state, device, address.as_ptr() as u64, PinKind::Registered, site)
            .map(drop)
            .map_err(error_of(call))
    }
}
