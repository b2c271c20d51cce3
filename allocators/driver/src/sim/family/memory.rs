//! Allocations and the driver's own pools of the simulated machine.
#![expect(unsafe_code, reason = "creates handles, and implements calls that free or unmap memory")]

use crate::{
    Call, DeviceId, DeviceRange, Memory, PoolHandle, PoolUsage, RawStream, Result,
    sim::{
        access_history::ActionKind,
        address_space::ReservationPurpose,
        codes::{self, ErrorCode},
        driver_pool::DriverPool,
        machine::{Machine, caller_site, error_of},
        machine_state::MachineState,
        owner_map::Owner,
        violation::ViolationKind,
    },
    site,
};

/// The address of a pool's empty blocks. Freeing it has no effect in any call.
const EMPTY_BLOCK: u64 = 0;

impl MachineState {
    fn pool(&mut self, pool: PoolHandle) -> Result<&mut DriverPool, ErrorCode> {
        match self.pools.pools.get_mut(pool.handle()) {
            Some(entry) if entry.alive && entry.device == pool.device() => Ok(entry),
            _ => Err(codes::INVALID_HANDLE),
        }
    }

    fn allocation_bytes(&self, device: DeviceId, address: u64) -> Option<u64> {
        let entry = self.space.reservation(address).filter(|entry| entry.device == device)?;
        matches!(entry.purpose, ReservationPurpose::Allocation { pool: false, .. })
            .then_some(entry.bytes)
    }
}

// SAFETY: 1. Ranges come from an address space that is managed here, and none is allocated twice.
// 2. Errors are detected before anything changes.
unsafe impl Memory for Machine {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64> {
        let site = caller_site();
        let call = Call::MemAlloc;
        let mut state = self.enter(call, Some(device))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        if bytes == 0 {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let (address, size) = state.allocate(device, bytes, false).map_err(error_of(call))?;
        if state.oracle {
            let cause = state.current_host_action(ActionKind::Allocate, "allocation", site);
            state.owners.set(address, size, Owner::Live { generation: None }, cause);
        }
        Ok(address)
    }

    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()> {
        let site = caller_site();
        let call = Call::MemFree;
        let mut state = self.enter(call, Some(device))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        if address == EMPTY_BLOCK {
            return Ok(());
        }
        let size = state
            .allocation_bytes(device, address)
            .ok_or_else(|| error_of(call)(codes::INVALID_VALUE))?;
        // The driver waits for the device, but does not guarantee it, so the host clock does not
        // change.
        if state.oracle {
            let action = state.new_host_action(ActionKind::Free, "free", site);
            let mut findings = Vec::new();
            let host = &state.host.clock;
            state.space.report_in_flight(
                address,
                size,
                ViolationKind::FreeInFlight,
                host,
                &mut findings,
            );
            state.registrations.check(address, size, &mut findings);
            state.report(findings, action, Some(device));
        }
        let mut state = self.run_device(state, device);
        state = self.wait_until_idle(state);
        state.device(device).map_err(error_of(call))?;
        if state.allocation_bytes(device, address).is_none() {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        let cause = state.current_host_action(ActionKind::Free, "free", site);
        state.deallocate(address, cause);
        Ok(())
    }

    fn pool_create(&self, device: DeviceId) -> Result<PoolHandle> {
        let call = Call::PoolCreate;
        let mut state = self.enter(call, Some(device))?;
        if !state.device(device).map_err(error_of(call))?.info.async_pools {
            return Err(error_of(call)(codes::NOT_SUPPORTED));
        }
        let handle = state.pools.pools.insert(DriverPool::new(device));
        // SAFETY: 1. The handle belongs to the pool that was just created.
        Ok(unsafe { PoolHandle::from_raw(device, handle) })
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        let call = Call::PoolDestroy;
        let mut state = self.enter(call, Some(pool.device()))?;
        state = self.wait_until_idle(state);
        state.pool(pool).map_err(error_of(call))?.alive = false;
        state.release_destroyed_pools();
        Ok(())
    }

    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64> {
        let site = caller_site();
        let call = Call::PoolAlloc;
        let mut state = self.enter(call, Some(pool.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        if state.streams[index].capture.is_some() {
            // It would become a node whose memory the graph owns, which is not simulated.
            return Err(error_of(call)(codes::NOT_SUPPORTED));
        }
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        if pool.device() != stream.device() {
            return Err(error_of(call)(codes::INVALID_VALUE));
        }
        state = self.wait_until_idle(state);
        state.pool(pool).map_err(error_of(call))?;
        if bytes == 0 {
            return Ok(EMPTY_BLOCK);
        }
        let (address, size, freed_at) =
            state.pool_alloc(pool.handle(), index, bytes).map_err(error_of(call))?;
        for point in freed_at.iter().filter(|point| point.stream != index) {
            state.wait_for_point(index, point, "reuse by the driver's pool", site);
        }
        if state.oracle {
            let action = state.next_stream_action(index, ActionKind::Allocate, "allocation", site);
            let mut findings = Vec::new();
            let state = &mut *state;
            let range = DeviceRange { device: pool.device(), address, bytes: size };
            let clock = &state.streams[index].clock;
            state.space.record_bytes(range, &action, clock, &mut findings);
            state.report(findings, action, Some(pool.device()));
            state.owners.set(address, size, Owner::Live { generation: None }, action);
        }
        Ok(address)
    }

    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()> {
        let (entered, own) = (site::entered(), caller_site());
        let call = Call::PoolFree;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        if state.streams[index].capture.is_some() {
            return Err(error_of(call)(codes::NOT_SUPPORTED));
        }
        if address == EMPTY_BLOCK {
            return Ok(());
        }
        let (size, device) =
            state.pool_block(address).ok_or_else(|| error_of(call)(codes::INVALID_VALUE))?;
        state = self.wait_until_idle(state);
        let (freed, site) = state.cause_of_free(address, entered, own);
        let action = state.next_stream_action(index, ActionKind::Free, freed, site);
        if state.oracle {
            let mut findings = Vec::new();
            let state = &mut *state;
            let range = DeviceRange { device, address, bytes: size };
            let clock = &state.streams[index].clock;
            state.space.record_bytes(range, &action, clock, &mut findings);
            state.registrations.check(address, size, &mut findings);
            state.report(findings, action, Some(device));
            state.owners.set(address, size, Owner::Free, action);
        }
        let point = state.point(index);
        state.pool_free(address, point);
        Ok(())
    }

    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        let call = Call::PoolTrim;
        let mut state = self.enter(call, Some(pool.device()))?;
        state.pool(pool).map_err(error_of(call))?;
        state = self.wait_until_idle(state);
        state.pool_trim(pool.handle(), keep);
        Ok(())
    }

    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage> {
        let mut state = self.enter(Call::PoolUsage, Some(pool.device()))?;
        Ok(state.pool(pool).map_err(error_of(Call::PoolUsage))?.usage())
    }
}
