//! [`HostMemory`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{CudaDriver, abi, codes};
use crate::{Call, DeviceId, HostFlags, HostMemory, Result};
use std::ptr::NonNull;

impl HostMemory for CudaDriver {
    fn host_alloc(&self, device: DeviceId, bytes: usize, flags: HostFlags) -> Result<NonNull<u8>> {
        let mut bits = abi::HOST_ALLOC_PORTABLE;
        if flags.write_combined {
            bits |= abi::HOST_ALLOC_WRITE_COMBINED;
        }
        let mut address = std::ptr::null_mut();
        self.call(Call::HostAlloc, device, |table| {
            // SAFETY: 1. `address` is writable.
            unsafe { (table.host_alloc)(&raw mut address, bytes, bits) }
        })?;
        // The driver does not succeed without memory; if it did, out of memory would be the word for it.
        NonNull::new(address.cast()).ok_or_else(|| codes::error(Call::HostAlloc.name(), codes::OUT_OF_MEMORY))
    }

    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        self.end(Call::HostFree, device, |table| {
            // SAFETY: 1. the caller gives back what `host_alloc` gave, unused.
            unsafe { (table.host_free)(address.as_ptr().cast()) }
        })
    }

    unsafe fn host_register(
        &self,
        device: DeviceId,
        address: NonNull<u8>,
        bytes: usize,
        flags: HostFlags,
    ) -> Result<()> {
        let mut bits = abi::HOST_REGISTER_PORTABLE;
        if flags.read_only {
            bits |= abi::HOST_REGISTER_READ_ONLY;
        }
        self.call(Call::HostRegister, device, |table| {
            // SAFETY: 1. the range is mapped, and the caller keeps it so while it is registered.
            unsafe { (table.host_register)(address.as_ptr().cast(), bytes, bits) }
        })
    }

    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        self.end(Call::HostUnregister, device, |table| {
            // SAFETY: 1. the address starts a registration that no queued copy touches.
            unsafe { (table.host_unregister)(address.as_ptr().cast()) }
        })
    }
}
