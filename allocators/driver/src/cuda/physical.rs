//! [`Physical`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{AccessDescription, AllocationProperties},
    codes,
};
use crate::{Call, DeviceId, ExportTypes, Physical, PhysicalHandle, Result};

// SAFETY: 1. to 3. Addresses and handles come from the driver, and its results are passed on
// unchanged.
unsafe impl Physical for CudaDriver {
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<u64> {
        let mut address = 0;
        self.call(Call::AddressReserve, device, |functions| {
            // SAFETY: 1. `address` is writable.
            unsafe {
                (functions.address_reserve)(&raw mut address, bytes as usize, align as usize, 0, 0)
            }
        })?;
        Ok(address)
    }

    unsafe fn address_free(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()> {
        self.destroy(Call::AddressFree, device, |functions| {
            // SAFETY: 1. The caller frees a range that it reserved, with nothing mapped in it.
            unsafe { (functions.address_free)(address, bytes as usize) }
        })
    }

    fn handle_create(
        &self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<PhysicalHandle> {
        let properties = AllocationProperties::exportable_on(device, types);
        let mut handle = 0;
        self.call(Call::HandleCreate, device, |functions| {
            // SAFETY: 1. `handle` is writable. 2. `properties` are laid out as the driver expects,
            // and only read.
            unsafe {
                (functions.handle_create)(&raw mut handle, bytes as usize, &raw const properties, 0)
            }
        })?;
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    unsafe fn handle_release(&self, handle: PhysicalHandle) -> Result<()> {
        self.destroy(Call::HandleRelease, handle.device(), |functions| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (functions.handle_release)(handle.handle()) }
        })
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<()> {
        self.call(Call::Map, handle.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. The caller promises that no queued work accesses
            // the range.
            unsafe { (functions.map)(address, bytes as usize, 0, handle.handle(), 0) }
        })
    }

    unsafe fn unmap(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()> {
        self.destroy(Call::Unmap, device, |functions| {
            // SAFETY: 1. The caller promises that no queued work accesses the range through these
            // addresses.
            unsafe { (functions.unmap)(address, bytes as usize) }
        })
    }

    fn set_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()> {
        self.describe_access(address, bytes, devices, AccessDescription::read_write)
    }

    fn set_read_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()> {
        self.describe_access(address, bytes, devices, AccessDescription::read)
    }
}

impl CudaDriver {
    fn describe_access(
        &self,
        address: u64,
        bytes: u64,
        devices: &[DeviceId],
        describe: impl Fn(DeviceId) -> AccessDescription,
    ) -> Result<()> {
        let Some(&first) = devices.first() else {
            self.calls.add(Call::SetAccess);
            return Err(codes::error(Call::SetAccess.name(), codes::INVALID_VALUE));
        };
        let access: Vec<_> = devices.iter().map(|&device| describe(device)).collect();
        self.call(Call::SetAccess, first, |functions| {
            // SAFETY: 1. `access` is readable for its length, and laid out as the driver expects.
            unsafe {
                (functions.set_access)(address, bytes as usize, access.as_ptr(), access.len())
            }
        })
    }
}
