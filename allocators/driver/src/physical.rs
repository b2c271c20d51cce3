//! Virtual memory management: address ranges, physical handles and mappings.
#![expect(unsafe_code, reason = "declares calls that free or unmap memory; holds no unsafe block")]

use crate::{DeviceId, PhysicalHandle, Result};
use std::fmt::Debug;

/// Virtual memory management. Sizes and addresses are multiples of the device's granularity
/// (usually 2 MiB).
///
/// None of these calls waits for the device, and none is ordered with streams: mapping and
/// unmapping take effect during the call, even if work is queued. The driver runs them one at a
/// time. Moving a handle takes about 40 µs.
///
/// ```
/// use aquifer::{DeviceId, Driver, sim::Sim};
/// let (sim, gpu, unit) = (Sim::h200(1), DeviceId(0), 2 << 20);
/// let driver = sim.driver();
/// let address = driver.address_reserve(gpu, 4 * unit, 0)?;
/// let handle = driver.handle_create(gpu, unit)?;
/// // SAFETY: 1. Nothing is mapped there, and no work is queued.
/// unsafe { driver.map(address, unit, handle) }?;
/// driver.set_access(address, unit, &[gpu])?;
/// // SAFETY: 1. No queued work accesses it.
/// unsafe { driver.unmap(gpu, address, unit) }?;
/// // SAFETY: 1. The handle and the range are not used afterwards.
/// unsafe {
///     driver.handle_release(handle)?;
///     driver.address_free(gpu, address, 4 * unit)?;
/// }
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. A range that [`Physical::address_reserve`] returns overlaps no other range that has not been
///    freed. A handle is a new one, of the requested size.
/// 2. After `Ok` of [`Physical::map`] and [`Physical::set_access`], the range refers to the
///    handle's memory on the named devices until it is unmapped.
/// 3. A call that is refused has changed nothing.
pub unsafe trait Physical: Debug + Send + Sync {
    /// Reserves a range of addresses without memory (`cuMemAddressReserve`). With `align` 0 the
    /// driver chooses the alignment.
    ///
    /// # Errors
    /// Out of memory if the address space of the process is exhausted. Not supported on devices
    /// without virtual memory management.
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<u64>;

    /// Frees a whole reserved range (`cuMemAddressFree`).
    ///
    /// # Safety
    /// 1. The range was returned by [`Physical::address_reserve`], nothing is mapped in it, and its
    ///    addresses are not in use.
    ///
    /// # Errors
    /// Errors of the driver. The range stays reserved.
    unsafe fn address_free(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()>;

    /// Allocates physical memory (`cuMemCreate`).
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn handle_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle>;

    /// Releases a physical handle (`cuMemRelease`). The memory returns to the device when its last
    /// mapping is gone as well.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver. The handle stays valid.
    unsafe fn handle_release(&self, handle: PhysicalHandle) -> Result<()>;

    /// Maps a whole handle at an address inside a reserved range (`cuMemMap`). The memory can be
    /// accessed after [`Physical::set_access`]. One handle may be mapped at several addresses at
    /// once.
    ///
    /// # Safety
    /// 1. Nothing is mapped there, and no queued work accesses the range.
    ///
    /// # Errors
    /// Errors of the driver. Nothing is mapped.
    unsafe fn map(&self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<()>;

    /// Unmaps whole mappings immediately (`cuMemUnmap`).
    ///
    /// # Safety
    /// 1. The host has established that no queued work accesses the range through these addresses,
    ///    by an event that it has seen complete or a stream that it has synchronised. A wait
    ///    between streams is not enough.
    ///
    /// # Errors
    /// Errors of the driver. The mappings stay.
    unsafe fn unmap(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()>;

    /// Makes a fully mapped range readable and writable for `devices` (`cuMemSetAccess`).
    ///
    /// # Errors
    /// Errors of the driver. Access is unchanged.
    fn set_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()>;

    /// Makes a fully mapped range readable, but not writable, for `devices`
    /// (`cuMemSetAccess` with `CU_MEM_ACCESS_FLAGS_PROT_READ`).
    ///
    /// # Errors
    /// Errors of the driver. Access is unchanged.
    fn set_read_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()>;
}
