//! Pinned memory.
#![expect(unsafe_code, reason = "declares calls that take memory away; holds no unsafe block")]

use crate::{DeviceId, Result};
use std::{fmt::Debug, ptr::NonNull};

/// How pinned memory is to be had. By default: cached, and pinned for every context of the process.
///
/// | flag | what it gives | what it costs |
/// |---|---|---|
/// | `portable` | pinned for every context, so copies of all devices are direct | nothing that could be measured; on by default |
/// | `mapped` | kernels may use it, at [`HostMemory::host_device_address`] | nothing to make; each access of a kernel crosses the link, and is not cached there |
/// | `write_combined` | writes go around the CPU's caches | CPU reads are some 70 times slower, and copies over PCIe no faster: cached memory reaches the link's speed already |
/// | `read_only` | memory that may not be written can be registered: a file's pages | whatever a device writes there is refused |
///
/// ```
/// use aquifer_driver::HostFlags;
/// let mut flags = HostFlags::default();
/// assert!(flags.portable && !flags.mapped && !flags.write_combined && !flags.read_only);
/// flags.mapped = true;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HostFlags {
    /// Pinned for every context of the process, not for one device's alone (`PORTABLE`).
    pub portable: bool,
    /// Kernels may use it where it lies (`DEVICEMAP`).
    pub mapped: bool,
    /// Writes go around the CPU's caches and reads are some seventy times slower (`WRITECOMBINED`;
    /// allocation only).
    pub write_combined: bool,
    /// The device only reads it (`READ_ONLY`; registration only).
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
/// use aquifer_driver::{DeviceId, Driver, HostFlags, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let pinned = driver.host_alloc(gpu, 4096, HostFlags::default())?;
/// // SAFETY: 1. it came from there. 2. nobody uses it.
/// unsafe { driver.host_free(gpu, pinned) }?;
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`HostMemory::host_alloc`] answers with memory that is mapped, readable and writable for as
///    many bytes, aligned to a page, and the caller's until it is freed.
/// 2. After `Ok` of [`HostMemory::host_unregister`] and [`HostMemory::host_free`] no device touches
///    the memory.
/// 3. A call that is refused has changed nothing.
pub unsafe trait HostMemory: Debug + Send + Sync {
    /// Pinned memory from the driver (`cuMemHostAlloc`): its pages lie where the calling thread
    /// runs, at 2–3.5 GB/s. `device` is the one whose context is used.
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

    /// Pins memory that is there already (`cuMemHostRegister`). Holds driver-wide locks while it
    /// runs, and the driver refuses a single registration of 512 GiB or more.
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

    /// The address by which kernels of a device use pinned memory (`cuMemHostGetDevicePointer`):
    /// the host's own wherever both share one address space.
    ///
    /// # Errors
    /// Invalid value for memory that is not pinned, or not [`HostFlags::mapped`] on a device that
    /// asks for it.
    fn host_device_address(&self, device: DeviceId, address: NonNull<u8>) -> Result<u64>;
}
