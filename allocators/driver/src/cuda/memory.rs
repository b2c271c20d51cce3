//! [`Memory`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, Object, PoolProperties, object},
    codes::answer,
    table::Table,
};
use crate::{Call, DeviceId, Memory, PoolHandle, PoolUsage, RawStream, Result};

/// Reads one of a pool's figures, all of which are 64 bits.
fn figure(table: &Table, pool: Object, attribute: u32) -> Result<u64> {
    let mut value = 0u64;
    // SAFETY: 1. the handle is alive. 2. `value` is as large as the attribute.
    let code = unsafe { (table.pool_get)(pool, attribute, (&raw mut value).cast()) };
    answer(Call::PoolUsage.name(), code).map(|()| value)
}

// SAFETY: 1. and 2. addresses are the driver's own and its answers are passed on as they are.
unsafe impl Memory for CudaDriver {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64> {
        let mut address = 0;
        self.call(Call::MemAlloc, device, |table| {
            // SAFETY: 1. `address` is writable.
            unsafe { (table.mem_alloc)(&raw mut address, bytes as usize) }
        })?;
        Ok(address)
    }

    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()> {
        self.end(Call::MemFree, device, |table| {
            // SAFETY: 1. the caller gives back what `mem_alloc` gave, unused.
            unsafe { (table.mem_free)(address) }
        })
    }

    fn pool_create(&self, device: DeviceId, max: u64) -> Result<PoolHandle> {
        let properties = PoolProperties::pinned_on(device, max as usize);
        let mut pool = std::ptr::null_mut();
        self.call(Call::PoolCreate, device, |table| {
            // SAFETY: 1. `pool` is writable. 2. `properties` are laid out as the driver expects,
            // and only read.
            unsafe { (table.pool_create)(&raw mut pool, &raw const properties) }
        })?;
        // What is freed stays in the pool: its default is to give everything back at each
        // synchronisation.
        let mut threshold = u64::MAX;
        // SAFETY: 1. the pool has just been made. 2. `threshold` is as large as the attribute, and
        // only read.
        let code = unsafe {
            (self.table.pool_set)(pool, abi::POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast())
        };
        if let Err(refused) = answer("cuMemPoolSetAttribute", code) {
            // SAFETY: 1. nobody else has seen the pool.
            // The refusal above is the one to tell.
            let _ = unsafe { (self.table.pool_destroy)(pool) };
            return Err(refused);
        }
        // SAFETY: 1. the driver has just given it out for this device.
        Ok(unsafe { PoolHandle::from_raw(device, abi::handle(pool)) })
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        self.end(Call::PoolDestroy, pool.device(), |table| {
            // SAFETY: 1. the handle is alive, and the caller lets go of it.
            unsafe { (table.pool_destroy)(object(pool.handle())) }
        })
    }

    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64> {
        let mut address = 0;
        self.call(Call::PoolAlloc, stream.device(), |table| {
            let (pool, stream) = (object(pool.handle()), object(stream.handle()));
            // SAFETY: 1. `address` is writable. 2. both handles are alive.
            unsafe { (table.pool_alloc)(&raw mut address, bytes as usize, pool, stream) }
        })?;
        Ok(address)
    }

    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()> {
        self.end(Call::PoolFree, stream.device(), |table| {
            // SAFETY: 1. the caller gives back what `pool_alloc` gave, behind all that uses it. 2.
            // the handle is alive.
            unsafe { (table.pool_free)(address, object(stream.handle())) }
        })
    }

    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        self.call(Call::PoolTrim, pool.device(), |table| {
            // SAFETY: 1. the handle is alive. Only memory that nobody has is given back.
            unsafe { (table.pool_trim)(object(pool.handle()), keep as usize) }
        })
    }

    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage> {
        self.calls.add(Call::PoolUsage);
        let _bound = self.bind(pool.device())?;
        let pool = object(pool.handle());
        Ok(PoolUsage {
            reserved: figure(&self.table, pool, abi::POOL_RESERVED)?,
            used: figure(&self.table, pool, abi::POOL_USED)?,
            reserved_high: figure(&self.table, pool, abi::POOL_RESERVED_HIGH)?,
        })
    }
}
