//! [`Ipc`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{
        AllocationProperties, HANDLE_FABRIC, HANDLE_POSIX_FD, POINTER_LEGACY_IPC, RANGE_DMA_BUF_FD,
    },
};
use crate::{Call, DeviceId, ExportTypes, FabricHandle, Ipc, PhysicalHandle, Result};
use std::{
    ffi::{c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

impl CudaDriver {
    /// Imports `shareable`, which is the descriptor itself or a pointer to the name on the fabric.
    ///
    /// # Safety
    /// 1. `shareable` is of the type `kind`, and stays valid until this returns.
    unsafe fn import(
        &self,
        device: DeviceId,
        shareable: *mut c_void,
        kind: u32,
    ) -> Result<PhysicalHandle> {
        let mut handle = 0;
        self.call(Call::HandleImport, device, |functions| {
            // SAFETY: 1. `handle` is writable. 2. The caller promises that `shareable` is of the
            // type `kind`.
            unsafe { (functions.handle_import)(&raw mut handle, shareable, kind) }
        })?;
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }
}

// SAFETY: 1. and 2. Handles come from the driver, and its results are passed on unchanged.
unsafe impl Ipc for CudaDriver {
    fn handle_create_exportable(
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

    fn is_legacy_ipc_capable(&self, device: DeviceId, address: u64) -> Result<bool> {
        let mut capable = 0_u32;
        self.call(Call::PointerAttribute, device, |functions| {
            let value = (&raw mut capable).cast();
            // SAFETY: 1. `capable` is as large as the attribute. An unknown address is refused.
            unsafe { (functions.pointer_attribute)(value, POINTER_LEGACY_IPC, address) }
        })?;
        Ok(capable != 0)
    }

    fn dma_buf_export(&self, device: DeviceId, address: u64, bytes: u64) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        self.call(Call::DmaBufExport, device, |functions| {
            let handle = (&raw mut fd).cast();
            // SAFETY: 1. `fd` has the size of this handle type. A range that is no memory is
            // refused.
            unsafe {
                (functions.range_handle)(handle, address, bytes as usize, RANGE_DMA_BUF_FD, 0)
            }
        })?;
        // SAFETY: 1. The driver has just opened it for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn handle_export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        self.call(Call::HandleExport, handle.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `fd` has the size of this handle type.
            unsafe {
                (functions.handle_export)((&raw mut fd).cast(), handle.handle(), HANDLE_POSIX_FD, 0)
            }
        })?;
        // SAFETY: 1. The driver has just opened it for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn handle_export_fabric(&self, handle: PhysicalHandle) -> Result<FabricHandle> {
        let mut name = FabricHandle([0; 64]);
        self.call(Call::HandleExport, handle.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `name` has the size of this handle type.
            unsafe {
                (functions.handle_export)(
                    (&raw mut name.0).cast(),
                    handle.handle(),
                    HANDLE_FABRIC,
                    0,
                )
            }
        })?;
        Ok(name)
    }

    unsafe fn handle_import(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<PhysicalHandle> {
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: 1. For this type the descriptor itself is passed in place of a pointer. It is
        // borrowed during the call.
        unsafe { self.import(device, number, HANDLE_POSIX_FD) }
    }

    unsafe fn handle_import_fabric(
        &self,
        device: DeviceId,
        name: &FabricHandle,
    ) -> Result<PhysicalHandle> {
        let mut name = *name;
        // SAFETY: 1. `name` is the 64 bytes of this handle type, and lives until the call has
        // returned.
        unsafe { self.import(device, (&raw mut name.0).cast(), HANDLE_FABRIC) }
    }
}
