//! Allocations and the driver's own pools of the simulated machine.
#![expect(unsafe_code, reason = "makes handles, and implements calls that take memory away")]

use crate::{
    Call, DeviceId, Memory, PoolHandle, PoolUsage, RawStream, Result,
    sim::{
        codes,
        ledger::Act,
        ownership::Owner,
        pool::Pool,
        shared::{Shared, at, here},
        space::Purpose,
        state::{Refused, State},
        violation::ViolationKind,
    },
};

/// The address of a pool's empty blocks. Freeing it has no effect in any call.
const NOTHING: u64 = 0;

impl State {
    fn pool(&mut self, pool: PoolHandle) -> Result<&mut Pool, Refused> {
        match self.pools.pools.get_mut(pool.handle()) {
            Some(there) if there.alive && there.device == pool.device() => Ok(there),
            _ => Err(codes::INVALID_HANDLE),
        }
    }

    fn is_allocation(&self, device: DeviceId, address: u64) -> Option<u64> {
        let there = self.space.reservation(address).filter(|there| there.device == device)?;
        matches!(there.purpose, Purpose::Allocation { pool: false, .. }).then_some(there.bytes)
    }
}

// SAFETY: 1. Ranges come from an address space that is managed here, and none is allocated twice.
// 2. Errors are detected before anything changes.
unsafe impl Memory for Shared {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64> {
        let site = here();
        let call = Call::MemAlloc;
        let mut state = self.enter(call, Some(device))?;
        state.captures.disturb().map_err(at(call))?;
        if bytes == 0 {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let (address, held) = state.allocate(device, bytes, false).map_err(at(call))?;
        self.cost(call, bytes);
        if state.oracle {
            let by = state.host_name(Act::Allocate, "allocation", site);
            state.owners.set(address, held, Owner::Live { generation: None }, by);
        }
        Ok(address)
    }

    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()> {
        let site = here();
        let call = Call::MemFree;
        let mut state = self.enter(call, Some(device))?;
        state.captures.disturb().map_err(at(call))?;
        if address == NOTHING {
            return Ok(());
        }
        let held =
            state.is_allocation(device, address).ok_or_else(|| at(call)(codes::INVALID_VALUE))?;
        self.cost(call, held);
        // The driver waits for the device, but does not guarantee it, so the host clock does not
        // change.
        if state.oracle {
            let mark = state.host_mark(Act::Free, "free", site);
            let mut found = std::mem::take(&mut state.found);
            let host = &state.hosts[state.agent()].clock;
            state.space.in_flight(address, held, ViolationKind::FreeInFlight, host, &mut found);
            state.registered.check(address, held, &mut found);
            state.report(found, mark, Some(device));
        }
        let mut state = self.run_device(state, device);
        state = self.idle(state);
        state.device(device).map_err(at(call))?;
        if state.is_allocation(device, address).is_none() {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        let by = state.host_name(Act::Free, "free", site);
        state.deallocate(address, by);
        Ok(())
    }

    fn pool_create(&self, device: DeviceId, max: u64) -> Result<PoolHandle> {
        let call = Call::PoolCreate;
        let mut state = self.enter(call, Some(device))?;
        if !state.device(device).map_err(at(call))?.info.async_pools {
            return Err(at(call)(codes::NOT_SUPPORTED));
        }
        self.cost(call, 0);
        let handle = state.pools.pools.insert(Pool::new(device, max));
        // SAFETY: 1. The handle belongs to the pool that was just created.
        Ok(unsafe { PoolHandle::from_raw(device, handle) })
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        let call = Call::PoolDestroy;
        let mut state = self.enter(call, Some(pool.device()))?;
        state = self.idle(state);
        state.pool(pool).map_err(at(call))?.alive = false;
        self.cost(call, 0);
        state.sweep_pools();
        Ok(())
    }

    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64> {
        let site = here();
        let call = Call::PoolAlloc;
        let mut state = self.enter(call, Some(pool.device()))?;
        let place = state.stream(stream).map_err(at(call))?;
        if state.streams[place].capture.is_some() {
            // It would become a node whose memory the graph owns, which is not simulated.
            return Err(at(call)(codes::NOT_SUPPORTED));
        }
        state.captures.disturb().map_err(at(call))?;
        if pool.device() != stream.device() {
            return Err(at(call)(codes::INVALID_VALUE));
        }
        state = self.idle(state);
        state.pool(pool).map_err(at(call))?;
        if bytes == 0 {
            return Ok(NOTHING);
        }
        let (address, held, after) =
            state.pool_alloc(pool.handle(), place, bytes).map_err(at(call))?;
        self.cost(call, bytes);
        for point in after.iter().filter(|point| point.stream != place) {
            state.after(place, point, "reuse by the driver's pool", site);
        }
        if state.oracle {
            let mark = state.tail(place, Act::Allocate, "allocation", site);
            let mut found = std::mem::take(&mut state.found);
            let state = &mut *state;
            state.space.hand_over(address, held, &mark, &state.streams[place].clock, &mut found);
            state.report(found, mark, Some(pool.device()));
            state.owners.set(address, held, Owner::Live { generation: None }, mark);
        }
        Ok(address)
    }

    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()> {
        let site = here();
        let call = Call::PoolFree;
        let mut state = self.enter(call, Some(stream.device()))?;
        let place = state.stream(stream).map_err(at(call))?;
        if state.streams[place].capture.is_some() {
            return Err(at(call)(codes::NOT_SUPPORTED));
        }
        if address == NOTHING {
            return Ok(());
        }
        let (held, device) =
            state.pool_block(address).ok_or_else(|| at(call)(codes::INVALID_VALUE))?;
        state = self.idle(state);
        self.cost(call, held);
        let mark = state.tail(place, Act::Free, "free", site);
        if state.oracle {
            let mut found = std::mem::take(&mut state.found);
            let state = &mut *state;
            state.space.hand_over(address, held, &mark, &state.streams[place].clock, &mut found);
            state.registered.check(address, held, &mut found);
            state.report(found, mark, Some(device));
            state.owners.set(address, held, Owner::Free, mark);
        }
        let point = state.point(place);
        state.pool_free(address, point);
        Ok(())
    }

    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        let call = Call::PoolTrim;
        let mut state = self.enter(call, Some(pool.device()))?;
        state.pool(pool).map_err(at(call))?;
        state = self.idle(state);
        self.cost(call, 0);
        state.pool_trim(pool.handle(), keep);
        Ok(())
    }

    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage> {
        let mut state = self.enter(Call::PoolUsage, Some(pool.device()))?;
        self.cost(Call::PoolUsage, 0);
        Ok(state.pool(pool).map_err(at(Call::PoolUsage))?.usage())
    }
}
