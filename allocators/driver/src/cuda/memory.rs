//! [`Memory`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, Object, PoolProperties, object},
    codes::answer,
    table::Table,
};
use crate::{Call, DeviceId, Memory, PoolHandle, PoolUsage, RawStream, Result};

/// Returns an attribute of a pool. All of them are 64 bits.
fn figure(table: &Table, pool: Object, attribute: u32) -> Result<u64> {
    let mut value = 0u64;
    // SAFETY: 1. The handle is alive. 2. `value` is as large as the attribute.
    let code = unsafe { (table.pool_get)(pool, attribute, (&raw mut value).cast()) };
    answer(Call::PoolUsage.name(), code).map(|()| value)
}

// SAFETY: 1. and 2. Addresses come from the driver, and its results are passed on unchanged.
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
            // SAFETY: 1. The caller frees memory from `mem_alloc` that is not in use.
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
        // Keep freed memory in the pool. By default it is released at each synchronisation.
        let mut threshold = u64::MAX;
        // SAFETY: 1. The pool has just been created. 2. `threshold` is as large as the attribute,
        // and only read.
        let code = unsafe {
            (self.table.pool_set)(pool, abi::POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast())
        };
        if let Err(refused) = answer("cuMemPoolSetAttribute", code) {
            // SAFETY: 1. The pool has no other user. The refusal above is the one to return.
            let _ = unsafe { (self.table.pool_destroy)(pool) };
            return Err(refused);
        }
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { PoolHandle::from_raw(device, abi::handle(pool)) })
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        self.end(Call::PoolDestroy, pool.device(), |table| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (table.pool_destroy)(object(pool.handle())) }
        })
    }

    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64> {
        let mut address = 0;
        self.call(Call::PoolAlloc, stream.device(), |table| {
            let (pool, stream) = (object(pool.handle()), object(stream.handle()));
            // SAFETY: 1. `address` is writable. 2. Both handles are alive.
            unsafe { (table.pool_alloc)(&raw mut address, bytes as usize, pool, stream) }
        })?;
        Ok(address)
    }

    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()> {
        self.end(Call::PoolFree, stream.device(), |table| {
            // SAFETY: 1. The caller frees memory from `pool_alloc`, after all work that uses it. 2.
            // The handle is alive.
            unsafe { (table.pool_free)(address, object(stream.handle())) }
        })
    }

    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        self.call(Call::PoolTrim, pool.device(), |table| {
            // SAFETY: 1. The handle is alive. Only free memory is released.
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
