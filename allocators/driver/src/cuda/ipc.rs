//! [`Ipc`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{HANDLE_POSIX_FD, POINTER_LEGACY_IPC, RANGE_DMA_BUF_FD},
};
use crate::{Call, DeviceId, Ipc, PhysicalHandle, Result};
use std::{
    ffi::c_int,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

// SAFETY: 1. and 2. Handles come from the driver, and its results are passed on unchanged.
unsafe impl Ipc for CudaDriver {
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

    unsafe fn handle_import(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<PhysicalHandle> {
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        let mut handle = 0;
        self.call(Call::HandleImport, device, |functions| {
            // SAFETY: 1. `handle` is writable. 2. For this type the descriptor itself is passed in
            // place of a pointer. It is borrowed during the call.
            unsafe { (functions.handle_import)(&raw mut handle, number, HANDLE_POSIX_FD) }
        })?;
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }
}
