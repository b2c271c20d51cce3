//! Pinned memory.
#![expect(unsafe_code, reason = "declares calls that free or unmap memory; holds no unsafe block")]

use crate::{DeviceId, Result};
use std::{fmt::Debug, ptr::NonNull};

/// How pinned memory is allocated or registered. The default is cached, and pinned for every
/// context of the process.
///
/// | flag | effect | cost |
/// |---|---|---|
/// | `portable` | pinned for every context, so copies of all devices are direct | not measurable; on by default |
/// | `mapped` | kernels may use it, at [`HostMemory::host_device_address`] | none to allocate; each access of a kernel crosses the link and is not cached on the device |
/// | `write_combined` | writes bypass the CPU's caches | CPU reads are about 70 times slower, and copies over PCIe are no faster: cached memory already reaches the speed of the link |
/// | `read_only` | memory that may not be written can be registered, such as the pages of a file | writes by a device are refused |
///
/// ```
/// use aquifer::host::HostFlags;
/// let mut flags = HostFlags::default();
/// assert!(flags.portable && !flags.mapped && !flags.write_combined && !flags.read_only);
/// flags.mapped = true;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HostFlags {
    /// Pinned for every context of the process, not for that of one device only (`PORTABLE`).
    pub portable: bool,
    /// Kernels may access it in place (`DEVICEMAP`).
    pub mapped: bool,
    /// Writes bypass the CPU's caches, and reads are about 70 times slower (`WRITECOMBINED`, for
    /// allocation only).
    pub write_combined: bool,
    /// The device only reads it (`READ_ONLY`, for registration only).
    pub read_only: bool,
}

impl Default for HostFlags {
    fn default() -> Self {
        Self { portable: true, mapped: false, write_combined: false, read_only: false }
    }
}

/// Host memory that devices can reach.
///
/// ```
/// use aquifer::{DeviceId, Driver, host::HostFlags, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let pinned = driver.host_alloc(gpu, 4096, HostFlags::default())?;
/// // SAFETY: 1. `host_alloc` returned it. 2. It is not in use.
/// unsafe { driver.host_free(gpu, pinned) }?;
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`HostMemory::host_alloc`] returns memory that is mapped, readable and writable for `bytes`
///    bytes, aligned to a page, and owned by the caller until it is freed.
/// 2. After `Ok` of [`HostMemory::host_unregister`] and [`HostMemory::host_free`] no device
///    accesses the memory.
/// 3. A call that is refused has changed nothing.
pub unsafe trait HostMemory: Debug + Send + Sync {
    /// Allocates pinned memory (`cuMemHostAlloc`). Its pages are placed on the NUMA node of the
    /// calling thread, at 2–3.5 GB/s. `device` selects the context that is used.
    ///
    /// # Errors
    /// Out of memory.
    fn host_alloc(&self, device: DeviceId, bytes: usize, flags: HostFlags) -> Result<NonNull<u8>>;

    /// Frees pinned memory (`cuMemFreeHost`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` was returned by [`HostMemory::host_alloc`] and has not been freed.
    /// 2. It is no longer in use: no queued copy and no slice refers to it.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays allocated.
    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()>;

    /// Pins existing memory (`cuMemHostRegister`). Holds driver-wide locks while it runs. The
    /// driver refuses a single registration of 512 GiB or more.
    ///
    /// # Safety
    /// 1. The range is mapped, and stays mapped to the same pages until it is unregistered.
    ///
    /// # Errors
    /// Errors of the driver. Nothing is pinned. Already registered (code 712) if any part of it is.
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
    /// 2. No queued copy accesses it.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays registered.
    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()>;

    /// Returns the address at which kernels of a device access pinned memory
    /// (`cuMemHostGetDevicePointer`). It equals the host's address if both share one address space.
    ///
    /// # Errors
    /// Invalid value for memory that is not pinned, or that is not [`HostFlags::mapped`] on a
    /// device that requires it.
    fn host_device_address(&self, device: DeviceId, address: NonNull<u8>) -> Result<u64>;
}
