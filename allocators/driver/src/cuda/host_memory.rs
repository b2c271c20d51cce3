//! [`HostMemory`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{CudaDriver, abi, codes};
use crate::{Call, DeviceId, HostMemory, Result};
use std::ptr::NonNull;

// SAFETY: 1. and 3. are guaranteed by the driver. 2. It waits for the device before it ends a
// registration or frees memory.
unsafe impl HostMemory for CudaDriver {
    fn host_alloc(
        &self,
        device: DeviceId,
        bytes: usize,
        write_combined: bool,
    ) -> Result<NonNull<u8>> {
        let combined = if write_combined { abi::HOST_ALLOC_WRITE_COMBINED } else { 0 };
        let flags = abi::HOST_ALLOC_PORTABLE | combined;
        let mut address = std::ptr::null_mut();
        self.call(Call::HostAlloc, device, |functions| {
            // SAFETY: 1. `address` is writable.
            unsafe { (functions.host_alloc)(&raw mut address, bytes, flags) }
        })?;
        // The driver does not succeed without memory. If it did, this would be out of memory.
        NonNull::new(address.cast())
            .ok_or_else(|| codes::error(Call::HostAlloc.name(), codes::OUT_OF_MEMORY))
    }

    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        self.destroy(Call::HostFree, device, |functions| {
            // SAFETY: 1. The caller frees memory from `host_alloc` that is not in use.
            unsafe { (functions.host_free)(address.as_ptr().cast()) }
        })
    }

    unsafe fn host_register(
        &self,
        device: DeviceId,
        address: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        self.call(Call::HostRegister, device, |functions| {
            // SAFETY: 1. The range is mapped, and the caller keeps it mapped while it is
            // registered.
            unsafe {
                (functions.host_register)(
                    address.as_ptr().cast(),
                    bytes,
                    abi::HOST_REGISTER_PORTABLE,
                )
            }
        })
    }

    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        self.destroy(Call::HostUnregister, device, |functions| {
            // SAFETY: 1. The address starts a registration that no queued copy accesses.
            unsafe { (functions.host_unregister)(address.as_ptr().cast()) }
        })
    }
}
