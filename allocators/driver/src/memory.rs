//! Whole allocations, and the driver's own stream-ordered pools.
#![expect(unsafe_code, reason = "declares calls that take memory away; holds no unsafe block")]

use crate::{DeviceId, PoolHandle, RawStream, Result};
use std::fmt::Debug;

/// What a pool of the driver holds, in bytes.
///
/// Its example is that of [`Memory`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolUsage {
    /// Taken from the device.
    pub reserved: u64,
    /// Given out.
    pub used: u64,
    /// The most that `reserved` has been.
    pub reserved_high: u64,
}

/// Device memory by the driver's own allocators.
///
/// # Safety
/// 1. A range that an allocation answers with is mapped, aligned as told, overlaps no other that
///    has not been given back, and stays the caller's until it is.
/// 2. A call that is refused has changed nothing: what was to be given back is there still.
pub unsafe trait Memory: Debug + Send + Sync {
    /// An allocation of its own (`cuMemAlloc`, 50–400 µs). Aligned to 256 bytes at least.
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64>;

    /// Gives it back (`cuMemFree`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` came from [`Memory::mem_alloc`] and has not been freed.
    /// 2. No queued work touches it, in an order that the driver was told of.
    ///
    /// # Errors
    /// The driver's; the memory stays allocated.
    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()>;

    /// A stream-ordered pool of its own (`cuMemPoolCreate`) that keeps what is freed and never
    /// holds more than `max` bytes; 0 for no limit.
    ///
    /// # Errors
    /// The driver's.
    fn pool_create(&self, device: DeviceId, max: u64) -> Result<PoolHandle>;

    /// Ends a pool (`cuMemPoolDestroy`); blocks that are still allocated live on.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()>;

    /// Memory that work queued on `stream` from now on may use (`cuMemAllocFromPoolAsync`).
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64>;

    /// Gives it back behind all that is queued on `stream` (`cuMemFreeAsync`). The host does not
    /// wait.
    ///
    /// # Safety
    /// 1. `address` came from [`Memory::pool_alloc`] and has not been freed.
    /// 2. All work that touches it is queued on `stream`, or `stream` was made to wait for it.
    ///
    /// # Errors
    /// The driver's; the memory stays allocated.
    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()>;

    /// Gives free memory of the pool back to the device, down to `keep` bytes reserved
    /// (`cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// The driver's.
    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()>;

    /// What the pool holds (`cuMemPoolGetAttribute`).
    ///
    /// # Errors
    /// The driver's.
    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage>;
}
