//! Virtual memory management of the simulated machine.
#![expect(unsafe_code, reason = "creates handles, and implements calls that free or unmap memory")]

use crate::{
    Call, DeviceId, ExportTypes, Physical, PhysicalHandle, Result,
    sim::{
        access_history::ActionKind,
        address_space::{AddressSpace, ReservationPurpose},
        codes::{self, ErrorCode},
        machine::{Machine, caller_site, error_of},
        machine_state::{MachineState, device_bit},
        violation::ViolationKind,
    },
};

/// Returns the device of the reservation that contains an address.
fn device_of(space: &AddressSpace, address: u64) -> Result<DeviceId, ErrorCode> {
    space.device_of(address).ok_or(codes::INVALID_VALUE)
}

/// Refuses an empty range, and one that is not aligned to the granularity.
fn check_granularity(bytes: u64, address: u64, granularity: u64) -> Result<(), ErrorCode> {
    let whole =
        bytes > 0 && bytes.is_multiple_of(granularity) && address.is_multiple_of(granularity);
    if whole { Ok(()) } else { Err(codes::INVALID_VALUE) }
}

impl MachineState {
    /// Allocates memory of a device and returns its handle.
    pub(crate) fn create(
        &mut self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<u64, ErrorCode> {
        let granularity = self.virtual_memory(device)?;
        check_granularity(bytes, 0, granularity)?;
        self.charge_memory(device, bytes)?;
        self.space.create(device, bytes, types).inspect_err(|_| self.refund_memory(device, bytes))
    }

    /// Returns a handle's size, if it is valid.
    pub(crate) fn handle(&self, handle: PhysicalHandle) -> Result<u64, ErrorCode> {
        match self.space.object(handle.handle()) {
            Some(object) if object.device == handle.device() && object.handle_count > 0 => {
                Ok(object.bytes)
            }
            _ => Err(codes::INVALID_HANDLE),
        }
    }
}

// SAFETY: 1. As for the driver's own allocations. Handles are numbered. 2. The address space
// resolves each access to the handle that is mapped there. 3. Errors are detected before anything
// changes.
unsafe impl Physical for Machine {
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<u64> {
        let call = Call::AddressReserve;
        let mut state = self.enter(call, Some(device))?;
        let granularity = state.virtual_memory(device).map_err(error_of(call))?;
        check_granularity(bytes, 0, granularity).map_err(error_of(call))?;
        if align != 0 && !align.is_power_of_two() {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let align = align.max(granularity);
        let address = state
            .space
            .reserve(device, bytes, align, granularity, ReservationPurpose::Range)
            .map_err(error_of(call))?;
        state.owners.clear(address, bytes);
        Ok(address)
    }

    unsafe fn address_free(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()> {
        let site = caller_site();
        let call = Call::AddressFree;
        let mut state = self.enter(call, Some(device))?;
        let whole = state.space.reservation(address).is_some_and(|reservation| {
            (reservation.device, reservation.bytes, reservation.purpose)
                == (device, bytes, ReservationPurpose::Range)
        });
        if !whole || !state.space.is_empty(address, bytes) {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let cause = state.current_host_action(ActionKind::Free, "free of an address range", site);
        state.space.unreserve(address, cause);
        state.owners.clear(address, bytes);
        Ok(())
    }

    fn handle_create(
        &self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<PhysicalHandle> {
        let call = Call::HandleCreate;
        let mut state = self.enter(call, Some(device))?;
        if !state.device(device).map_err(error_of(call))?.info.export_types.covers(types) {
            return Err(error_of(call)(codes::NOT_SUPPORTED));
        }
        let handle = state.create(device, bytes, types).map_err(error_of(call))?;
        // SAFETY: 1. The handle belongs to the memory that was just allocated.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    unsafe fn handle_release(&self, handle: PhysicalHandle) -> Result<()> {
        let call = Call::HandleRelease;
        let mut state = self.enter(call, Some(handle.device()))?;
        state.handle(handle).map_err(error_of(call))?;
        let freed = state.space.release(handle.handle());
        state.refund_memory(handle.device(), freed);
        Ok(())
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<()> {
        let site = caller_site();
        let call = Call::Map;
        let mut state = self.enter(call, Some(handle.device()))?;
        let granularity = state.virtual_memory(handle.device()).map_err(error_of(call))?;
        if bytes == 0 || !address.is_multiple_of(granularity) {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        state.handle(handle).map_err(error_of(call))?;
        state = self.wait_until_idle(state);
        state.space.map(address, bytes, handle.handle()).map_err(error_of(call))?;
        if state.oracle {
            let mut findings = Vec::new();
            state.registrations.check(address, bytes, &mut findings);
            let action = state.current_host_action(ActionKind::Write, "map", site);
            state.report(findings, action, Some(handle.device()));
        }
        Ok(())
    }

    unsafe fn unmap(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()> {
        let site = caller_site();
        let call = Call::Unmap;
        let mut state = self.enter(call, Some(device))?;
        let granularity = state.virtual_memory(device).map_err(error_of(call))?;
        check_granularity(bytes, address, granularity).map_err(error_of(call))?;
        state = self.wait_until_idle(state);
        if !state.space.is_in_range_reservation(address, bytes) {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let action = state.current_host_action(ActionKind::Free, "unmap", site);
        let mut findings = Vec::new();
        let state = &mut *state;
        let host = &state.host.clock;
        if state.oracle {
            state.space.report_in_flight(
                address,
                bytes,
                ViolationKind::UnmapInFlight,
                host,
                &mut findings,
            );
            if !state.space.is_empty(address, bytes) {
                state.registrations.check(address, bytes, &mut findings);
            }
        }
        let unmapped = state.space.unmap(address, bytes, action);
        if unmapped.is_err() {
            findings.clear();
        }
        state.report(findings, action, Some(device));
        for (device, freed) in unmapped.map_err(error_of(call))? {
            state.refund_memory(device, freed);
        }
        Ok(())
    }

    fn set_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()> {
        self.grant_access(address, bytes, devices, true)
    }

    fn set_read_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()> {
        self.grant_access(address, bytes, devices, false)
    }
}

impl Machine {
    fn grant_access(
        &self,
        address: u64,
        bytes: u64,
        devices: &[DeviceId],
        writable: bool,
    ) -> Result<()> {
        let call = Call::SetAccess;
        let mut state = self.enter(call, None)?;
        state = self.wait_until_idle(state);
        let own_device = device_of(&state.space, address).map_err(error_of(call))?;
        let granularity = state.virtual_memory(own_device).map_err(error_of(call))?;
        check_granularity(bytes, address, granularity).map_err(error_of(call))?;
        if !state.space.is_in_range_reservation(address, bytes) {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let mut access = 0;
        for &device in devices {
            state.device(device).map_err(error_of(call))?;
            if device != own_device && !state.config.peers {
                return Err(error_of(call)(codes::PEER_ACCESS_UNSUPPORTED));
            }
            access |= device_bit(device);
        }
        state.space.set_access(address, bytes, access, writable).map_err(error_of(call))
    }
}
