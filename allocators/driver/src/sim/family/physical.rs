//! Virtual memory management of the simulated machine.
#![expect(unsafe_code, reason = "makes handles, and implements calls that take memory away")]

use crate::{
    Call, DeviceId, ExportTypes, Physical, PhysicalHandle, Result,
    sim::{
        codes,
        ledger::Act,
        shared::{Shared, at, here},
        space::{Purpose, Space},
        state::{Refused, State, bit},
        violation::ViolationKind,
    },
};

/// Returns the device of the reservation that contains an address.
fn device_of(space: &Space, address: u64) -> Result<DeviceId, Refused> {
    space.device_of(address).ok_or(codes::INVALID_VALUE)
}

/// Refuses an empty range, and one that is not aligned to the granularity.
fn granules(bytes: u64, address: u64, granularity: u64) -> Result<(), Refused> {
    let whole =
        bytes > 0 && bytes.is_multiple_of(granularity) && address.is_multiple_of(granularity);
    if whole { Ok(()) } else { Err(codes::INVALID_VALUE) }
}

impl State {
    /// Allocates memory of a device and returns its handle.
    pub(crate) fn create(
        &mut self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<u64, Refused> {
        let granularity = self.virtual_memory(device)?;
        granules(bytes, 0, granularity)?;
        self.take(device, bytes)?;
        self.space.create(device, bytes, types).inspect_err(|_| self.give(device, bytes))
    }

    /// Returns a handle's size, if it is valid.
    pub(crate) fn handle(&self, handle: PhysicalHandle) -> Result<u64, Refused> {
        match self.space.object(handle.handle()) {
            Some(object) if object.device == handle.device() && object.handles > 0 => {
                Ok(object.bytes)
            }
            _ => Err(codes::INVALID_HANDLE),
        }
    }
}

// SAFETY: 1. As for the driver's own allocations. Handles are numbered. 2. The address space
// resolves each access to the handle that is mapped there. 3. Errors are detected before anything
// changes.
unsafe impl Physical for Shared {
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<u64> {
        let call = Call::AddressReserve;
        let mut state = self.enter(call, Some(device))?;
        let granularity = state.virtual_memory(device).map_err(at(call))?;
        granules(bytes, 0, granularity).map_err(at(call))?;
        if align != 0 && !align.is_power_of_two() {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let align = align.max(granularity);
        let address = state
            .space
            .reserve(device, bytes, align, granularity, Purpose::Range)
            .map_err(at(call))?;
        state.owners.clear(address, bytes);
        self.cost(call, bytes);
        Ok(address)
    }

    unsafe fn address_free(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()> {
        let site = here();
        let call = Call::AddressFree;
        let mut state = self.enter(call, Some(device))?;
        let whole = state.space.reservation(address).is_some_and(|there| {
            (there.device, there.bytes, there.purpose) == (device, bytes, Purpose::Range)
        });
        if !whole || !state.space.is_empty(address, bytes) {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let by = state.host_name(Act::Free, "free of an address range", site);
        state.space.unreserve(address, by);
        state.owners.clear(address, bytes);
        self.cost(call, bytes);
        Ok(())
    }

    fn handle_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle> {
        let call = Call::HandleCreate;
        let mut state = self.enter(call, Some(device))?;
        let handle = state.create(device, bytes, ExportTypes::NONE).map_err(at(call))?;
        self.cost(call, bytes);
        // SAFETY: 1. The handle belongs to the memory that was just allocated.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    unsafe fn handle_release(&self, handle: PhysicalHandle) -> Result<()> {
        let call = Call::HandleRelease;
        let mut state = self.enter(call, Some(handle.device()))?;
        let bytes = state.handle(handle).map_err(at(call))?;
        self.cost(call, bytes);
        let back = state.space.release(handle.handle());
        state.give(handle.device(), back);
        Ok(())
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<()> {
        let site = here();
        let call = Call::Map;
        let mut state = self.enter(call, Some(handle.device()))?;
        let granularity = state.virtual_memory(handle.device()).map_err(at(call))?;
        if bytes == 0 || !address.is_multiple_of(granularity) {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        state.handle(handle).map_err(at(call))?;
        state = self.idle(state);
        let mut found = std::mem::take(&mut state.found);
        let agent = state.agent();
        let machine = &mut *state;
        let host = &machine.hosts[agent].clock;
        let mapped = machine.space.map(address, bytes, handle.handle(), host, &mut found);
        if machine.oracle && mapped.is_ok() {
            machine.registered.check(address, bytes, &mut found);
        } else if !machine.oracle {
            found.clear();
        }
        let mark = machine.host_name(Act::Write, "map", site);
        machine.report(found, mark, Some(handle.device()));
        mapped.map_err(at(call))?;
        self.cost(call, bytes);
        Ok(())
    }

    unsafe fn unmap(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()> {
        let site = here();
        let call = Call::Unmap;
        let mut state = self.enter(call, Some(device))?;
        let granularity = state.virtual_memory(device).map_err(at(call))?;
        granules(bytes, address, granularity).map_err(at(call))?;
        state = self.idle(state);
        if !state.space.is_range(address, bytes) {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let mark = state.host_name(Act::Free, "unmap", site);
        let mut found = std::mem::take(&mut state.found);
        let agent = state.agent();
        let machine = &mut *state;
        let host = &machine.hosts[agent].clock;
        if machine.oracle {
            machine.space.in_flight(address, bytes, ViolationKind::UnmapInFlight, host, &mut found);
            if !machine.space.is_empty(address, bytes) {
                machine.registered.check(address, bytes, &mut found);
            }
        }
        let gone = machine.space.unmap(address, bytes, mark, host);
        if gone.is_err() {
            found.clear();
        }
        machine.report(found, mark, Some(device));
        for (size, device, back) in gone.map_err(at(call))? {
            self.cost(call, size);
            state.give(device, back);
        }
        Ok(())
    }

    fn set_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()> {
        let call = Call::SetAccess;
        let mut state = self.enter(call, None)?;
        state = self.idle(state);
        let home = device_of(&state.space, address).map_err(at(call))?;
        let granularity = state.virtual_memory(home).map_err(at(call))?;
        granules(bytes, address, granularity).map_err(at(call))?;
        if !state.space.is_range(address, bytes) {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let mut set = 0;
        for &device in devices {
            state.device(device).map_err(at(call))?;
            if device != home && !state.config.peers {
                return Err(at(call)(codes::PEER_ACCESS_UNSUPPORTED));
            }
            set |= bit(device);
        }
        let sizes = state.space.set_access(address, bytes, set).map_err(at(call))?;
        let peers = (set & !bit(home)).count_ones();
        sizes.into_iter().for_each(|size| self.cost_of_opening(size, peers));
        Ok(())
    }
}
