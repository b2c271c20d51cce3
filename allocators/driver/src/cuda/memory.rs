//! [`Memory`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, DriverPtr, PoolProperties, driver_ptr},
    codes::check,
    function_table::FunctionTable,
};
use crate::{Call, DeviceId, Memory, PoolHandle, PoolUsage, RawStream, Result};

/// Returns an attribute of a pool. All of them are 64 bits.
fn pool_attribute(functions: &FunctionTable, pool: DriverPtr, attribute: u32) -> Result<u64> {
    let mut value = 0u64;
    // SAFETY: 1. The handle is alive. 2. `value` is as large as the attribute.
    let code = unsafe { (functions.pool_get)(pool, attribute, (&raw mut value).cast()) };
    check(Call::PoolUsage.name(), code).map(|()| value)
}

// SAFETY: 1. and 2. Addresses come from the driver, and its results are passed on unchanged.
unsafe impl Memory for CudaDriver {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64> {
        let mut address = 0;
        self.call(Call::MemAlloc, device, |functions| {
            // SAFETY: 1. `address` is writable.
            unsafe { (functions.mem_alloc)(&raw mut address, bytes as usize) }
        })?;
        Ok(address)
    }

    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()> {
        self.destroy(Call::MemFree, device, |functions| {
            // SAFETY: 1. The caller frees memory from `mem_alloc` that is not in use.
            unsafe { (functions.mem_free)(address) }
        })
    }

    fn pool_create(&self, device: DeviceId) -> Result<PoolHandle> {
        let properties = PoolProperties::pinned_on(device);
        let mut pool = std::ptr::null_mut();
        self.call(Call::PoolCreate, device, |functions| {
            // SAFETY: 1. `pool` is writable. 2. `properties` are laid out as the driver expects,
            // and only read.
            unsafe { (functions.pool_create)(&raw mut pool, &raw const properties) }
        })?;
        // Keep freed memory in the pool. By default it is released at each synchronisation.
        let mut threshold = u64::MAX;
        // SAFETY: 1. The pool has just been created. 2. `threshold` is as large as the attribute,
        // and only read.
        let code = unsafe {
            (self.functions.pool_set)(
                pool,
                abi::POOL_RELEASE_THRESHOLD,
                (&raw mut threshold).cast(),
            )
        };
        if let Err(refused) = check("cuMemPoolSetAttribute", code) {
            // SAFETY: 1. The pool has no other user. The refusal above is the one to return.
            let _ = unsafe { (self.functions.pool_destroy)(pool) };
            return Err(refused);
        }
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { PoolHandle::from_raw(device, abi::handle_of(pool)) })
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        self.destroy(Call::PoolDestroy, pool.device(), |functions| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (functions.pool_destroy)(driver_ptr(pool.handle())) }
        })
    }

    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64> {
        let mut address = 0;
        self.call(Call::PoolAlloc, stream.device(), |functions| {
            let (pool, stream) = (driver_ptr(pool.handle()), driver_ptr(stream.handle()));
            // SAFETY: 1. `address` is writable. 2. Both handles are alive.
            unsafe { (functions.pool_alloc)(&raw mut address, bytes as usize, pool, stream) }
        })?;
        Ok(address)
    }

    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()> {
        self.destroy(Call::PoolFree, stream.device(), |functions| {
            // SAFETY: 1. The caller frees memory from `pool_alloc`, after all work that uses it. 2.
            // The handle is alive.
            unsafe { (functions.pool_free)(address, driver_ptr(stream.handle())) }
        })
    }

    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        self.call(Call::PoolTrim, pool.device(), |functions| {
            // SAFETY: 1. The handle is alive. Only free memory is released.
            unsafe { (functions.pool_trim)(driver_ptr(pool.handle()), keep as usize) }
        })
    }

    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage> {
        self.calls.add(Call::PoolUsage);
        let _context = self.bind(pool.device())?;
        let pool = driver_ptr(pool.handle());
        Ok(PoolUsage {
            reserved: pool_attribute(&self.functions, pool, abi::POOL_RESERVED)?,
            used: pool_attribute(&self.functions, pool, abi::POOL_USED)?,
            reserved_high: pool_attribute(&self.functions, pool, abi::POOL_RESERVED_HIGH)?,
        })
    }
}
