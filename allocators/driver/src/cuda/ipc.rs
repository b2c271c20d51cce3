//! [`Ipc`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{AllocationProperties, HANDLE_FABRIC, HANDLE_POSIX_FD},
};
use crate::{Call, DeviceId, ExportTypes, FabricHandle, Ipc, PhysicalHandle, Result};
use std::{
    ffi::{c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

impl CudaDriver {
    /// Imports what `shareable` names, which is the descriptor itself or points to the fabric's
    /// name.
    ///
    /// # Safety
    /// 1. `shareable` is what `kind` says, and stays so until this returns.
    unsafe fn import(
        &self,
        device: DeviceId,
        shareable: *mut c_void,
        kind: u32,
    ) -> Result<PhysicalHandle> {
        let mut handle = 0;
        self.call(Call::HandleImport, device, |table| {
            // SAFETY: 1. `handle` is writable. 2. `shareable` is what `kind` says, by the caller's
            // word.
            unsafe { (table.handle_import)(&raw mut handle, shareable, kind) }
        })?;
        // SAFETY: 1. the driver has just given it out for this device.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }
}

// SAFETY: 1. and 2. handles are the driver's own and its answers are passed on as they are.
unsafe impl Ipc for CudaDriver {
    fn handle_create_exportable(
        &self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<PhysicalHandle> {
        let properties = AllocationProperties::exportable_on(device, types);
        let mut handle = 0;
        self.call(Call::HandleCreate, device, |table| {
            // SAFETY: 1. `handle` is writable. 2. `properties` are laid out as the driver expects,
            // and only read.
            unsafe {
                (table.handle_create)(&raw mut handle, bytes as usize, &raw const properties, 0)
            }
        })?;
        // SAFETY: 1. the driver has just given it out for this device.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    fn handle_export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        self.call(Call::HandleExport, handle.device(), |table| {
            // SAFETY: 1. the handle is alive. 2. `fd` is as large as what this type of handle is
            // told by.
            unsafe {
                (table.handle_export)((&raw mut fd).cast(), handle.handle(), HANDLE_POSIX_FD, 0)
            }
        })?;
        // SAFETY: 1. the driver has just opened it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn handle_export_fabric(&self, handle: PhysicalHandle) -> Result<FabricHandle> {
        let mut name = FabricHandle([0; 64]);
        self.call(Call::HandleExport, handle.device(), |table| {
            // SAFETY: 1. the handle is alive. 2. `name` is as large as what this type of handle is
            // told by.
            unsafe {
                (table.handle_export)((&raw mut name.0).cast(), handle.handle(), HANDLE_FABRIC, 0)
            }
        })?;
        Ok(name)
    }

    unsafe fn handle_import(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<PhysicalHandle> {
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: 1. for this type the descriptor itself is given where a pointer would be; it is
        // borrowed meanwhile.
        unsafe { self.import(device, number, HANDLE_POSIX_FD) }
    }

    unsafe fn handle_import_fabric(
        &self,
        device: DeviceId,
        name: &FabricHandle,
    ) -> Result<PhysicalHandle> {
        let mut name = *name;
        // SAFETY: 1. `name` is the 64 bytes that this type is told by, and lives until the call has
        // returned.
        unsafe { self.import(device, (&raw mut name.0).cast(), HANDLE_FABRIC) }
    }
}
