//! Whole allocations, and the driver's own stream-ordered pools.
#![expect(unsafe_code, reason = "declares calls that free or unmap memory; holds no unsafe block")]

use crate::{DeviceId, PoolHandle, RawStream, Result};
use std::fmt::Debug;

/// The bytes that a pool of the driver holds.
///
/// Returned by [`Memory::pool_usage`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolUsage {
    /// Allocated from the device.
    pub reserved: u64,
    /// Allocated by users of the pool.
    pub used: u64,
    /// The maximum of `reserved` so far.
    pub reserved_high: u64,
}

/// Device memory from the driver's own allocators.
///
/// # Safety
/// 1. A range that an allocation returns is mapped and aligned as documented, overlaps no other
///    range that has not been freed, and is owned by the caller until it is freed.
/// 2. A call that is refused has changed nothing: memory whose free is refused stays allocated.
pub unsafe trait Memory: Debug + Send + Sync {
    /// Allocates device memory (`cuMemAlloc`, 50–400 µs). It is aligned to at least 256 bytes.
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64>;

    /// Frees an allocation (`cuMemFree`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` was returned by [`Memory::mem_alloc`] and has not been freed.
    /// 2. No queued work accesses it, in an order that the driver knows.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays allocated.
    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()>;

    /// Creates a stream-ordered pool (`cuMemPoolCreate`) that keeps freed memory and never holds
    /// more than `max` bytes. 0 means no limit.
    ///
    /// # Errors
    /// Errors of the driver.
    fn pool_create(&self, device: DeviceId, max: u64) -> Result<PoolHandle>;

    /// Destroys a pool (`cuMemPoolDestroy`). Blocks that are still allocated stay valid.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()>;

    /// Allocates memory that work queued on `stream` from now on may use
    /// (`cuMemAllocFromPoolAsync`).
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64>;

    /// Frees memory after all work queued on `stream` (`cuMemFreeAsync`). The host does not wait.
    ///
    /// # Safety
    /// 1. `address` was returned by [`Memory::pool_alloc`] and has not been freed.
    /// 2. All work that accesses it is queued on `stream`, or `stream` waits for it.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays allocated.
    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()>;

    /// Releases free memory of the pool to the device, down to `keep` reserved bytes
    /// (`cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()>;

    /// Returns what the pool holds (`cuMemPoolGetAttribute`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage>;
}
