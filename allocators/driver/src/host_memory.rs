//! Pinned memory.
#![expect(unsafe_code, reason = "declares calls that take memory away; holds no unsafe block")]

use crate::{DeviceId, Result};
use std::{fmt::Debug, ptr::NonNull};

/// How pinned memory is to be had. All off is plain cached memory, pinned for every context of the process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct HostFlags {
    /// Writes go around the CPU's caches and reads are some seventy times slower (`WRITECOMBINED`; allocation only).
    pub write_combined: bool,
    /// The device only reads it (`READ_ONLY`; registration only).
    pub read_only: bool,
}

/// Host memory that devices can reach.
pub trait HostMemory: Debug + Send + Sync {
    /// Pinned memory from the driver (`cuMemHostAlloc`, portable): its pages lie where the calling thread runs, at 2–3.5
    /// GB/s. `device` is the one whose context is used.
    ///
    /// # Errors
    /// Out of memory.
    fn host_alloc(&self, device: DeviceId, bytes: usize, flags: HostFlags) -> Result<NonNull<u8>>;

    /// Gives it back (`cuMemFreeHost`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` came from [`HostMemory::host_alloc`] and has not been freed.
    /// 2. Nobody uses it any more: no queued copy, no slice.
    ///
    /// # Errors
    /// The driver's; the memory stays.
    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()>;

    /// Pins memory that is there already (`cuMemHostRegister`, portable). Holds driver-wide locks while it runs, and the
    /// driver refuses a single registration of 512 GiB or more.
    ///
    /// # Safety
    /// 1. The range is mapped, and stays so, with the same pages, until it is unregistered.
    ///
    /// # Errors
    /// The driver's; nothing is pinned. Already registered (code 712) if any of it is.
    unsafe fn host_register(
        &self,
        device: DeviceId,
        address: NonNull<u8>,
        bytes: usize,
        flags: HostFlags,
    ) -> Result<()>;

    /// Ends a registration (`cuMemHostUnregister`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` is the start of a registration.
    /// 2. No queued copy touches it.
    ///
    /// # Errors
    /// The driver's; it stays registered.
    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()>;
}
