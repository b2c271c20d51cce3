//! Address ranges, physical handles, and which is mapped where.
#![expect(unsafe_code, reason = "declares calls that take memory away; holds no unsafe block")]

use crate::{DeviceId, PhysicalHandle, Result};
use std::fmt::Debug;

/// Virtual memory management. Sizes and addresses are multiples of the device's granularity (2 MiB
/// as a rule).
///
/// None of these calls waits for the device, and none is ordered with streams: mapping and
/// unmapping happen when the call is made, whatever is queued. They run one after another inside
/// the driver, about 40 µs for a move.
///
/// ```
/// use aquifer_driver::{DeviceId, Driver, sim::Sim};
/// let (sim, gpu, unit) = (Sim::h200(1), DeviceId(0), 2 << 20);
/// let driver = sim.driver();
/// let address = driver.address_reserve(gpu, 4 * unit, 0)?;
/// let handle = driver.handle_create(gpu, unit)?;
/// // SAFETY: 1. nothing is mapped there, and no work is queued.
/// unsafe { driver.map(address, unit, handle) }?;
/// driver.set_access(address, unit, &[gpu])?;
/// // SAFETY: 1. no work has been queued that could touch it.
/// unsafe { driver.unmap(gpu, address, unit) }?;
/// // SAFETY: 1. the handle and the range are not used any more.
/// unsafe {
///     driver.handle_release(handle)?;
///     driver.address_free(gpu, address, 4 * unit)?;
/// }
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. A range that [`Physical::address_reserve`] answers with overlaps no other that has not been
///    given back, and a handle is a new one, of as many bytes as were asked for.
/// 2. After `Ok` of [`Physical::map`] and [`Physical::set_access`] the range leads to the handle's
///    memory, for the devices that were named, until it is unmapped.
/// 3. A call that is refused has changed nothing.
pub unsafe trait Physical: Debug + Send + Sync {
    /// Reserves a range of addresses with nothing behind it (`cuMemAddressReserve`). `align` 0
    /// leaves it to the driver.
    ///
    /// # Errors
    /// Out of memory when the process's address space is used up; not supported on devices without
    /// it.
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<u64>;

    /// Gives a reserved range back whole (`cuMemAddressFree`).
    ///
    /// # Safety
    /// 1. The range came from [`Physical::address_reserve`], nothing is mapped in it, nobody uses
    ///    its addresses.
    ///
    /// # Errors
    /// The driver's; the range stays reserved.
    unsafe fn address_free(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()>;

    /// Takes physical memory from the device (`cuMemCreate`).
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn handle_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle>;

    /// Lets go of it (`cuMemRelease`). The device has the memory back when the last mapping is gone
    /// as well.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// The driver's; the handle stays.
    unsafe fn handle_release(&self, handle: PhysicalHandle) -> Result<()>;

    /// Maps a whole handle at an address inside a reserved range (`cuMemMap`). It can be touched
    /// after [`Physical::set_access`]. One handle may be mapped at several addresses at once.
    ///
    /// # Safety
    /// 1. Nothing is mapped there, and no queued work touches the range.
    ///
    /// # Errors
    /// The driver's; nothing is mapped.
    unsafe fn map(&self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<()>;

    /// Takes whole mappings away (`cuMemUnmap`), at once.
    ///
    /// # Safety
    /// 1. The host knows that no queued work touches the range through these addresses: an event it
    ///    has seen done, or a stream it has synchronised. A wait between streams is not enough.
    ///
    /// # Errors
    /// The driver's; the mappings stay.
    unsafe fn unmap(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()>;

    /// Lets `devices` read and write a range in which everything is mapped (`cuMemSetAccess`).
    ///
    /// # Errors
    /// The driver's; access is as it was.
    fn set_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()>;
}
