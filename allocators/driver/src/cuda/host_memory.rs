//! [`HostMemory`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{CudaDriver, abi, codes};
use crate::{Call, DeviceId, HostFlags, HostMemory, Result};
use std::ptr::NonNull;

fn bits(flags: &[(bool, u32)]) -> u32 {
    flags.iter().filter(|(on, _)| *on).fold(0, |bits, (_, bit)| bits | bit)
}

// SAFETY: 1. and 3. are guaranteed by the driver. 2. It waits for the device before it ends a
// registration or frees memory.
unsafe impl HostMemory for CudaDriver {
    fn host_alloc(&self, device: DeviceId, bytes: usize, flags: HostFlags) -> Result<NonNull<u8>> {
        if flags.read_only {
            // There is no such flag: memory that the driver allocates can be written.
            return Err(codes::error(Call::HostAlloc.name(), codes::INVALID_VALUE));
        }
        let bits = bits(&[
            (flags.portable, abi::HOST_ALLOC_PORTABLE),
            (flags.mapped, abi::HOST_ALLOC_MAPPED),
            (flags.write_combined, abi::HOST_ALLOC_WRITE_COMBINED),
        ]);
        let mut address = std::ptr::null_mut();
        self.call(Call::HostAlloc, device, |functions| {
            // SAFETY: 1. `address` is writable.
            unsafe { (functions.host_alloc)(&raw mut address, bytes, bits) }
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
        flags: HostFlags,
    ) -> Result<()> {
        if flags.write_combined {
            // There is no such flag: the cache mode was fixed when the memory was mapped.
            return Err(codes::error(Call::HostRegister.name(), codes::INVALID_VALUE));
        }
        let bits = bits(&[
            (flags.portable, abi::HOST_REGISTER_PORTABLE),
            (flags.mapped, abi::HOST_REGISTER_MAPPED),
            (flags.read_only, abi::HOST_REGISTER_READ_ONLY),
        ]);
        self.call(Call::HostRegister, device, |functions| {
            // SAFETY: 1. The range is mapped, and the caller keeps it mapped while it is
            // registered.
            unsafe { (functions.host_register)(address.as_ptr().cast(), bytes, bits) }
        })
    }

    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()> {
        self.destroy(Call::HostUnregister, device, |functions| {
            // SAFETY: 1. The address starts a registration that no queued copy accesses.
            unsafe { (functions.host_unregister)(address.as_ptr().cast()) }
        })
    }

    fn host_device_address(&self, device: DeviceId, address: NonNull<u8>) -> Result<u64> {
        let mut device_address = 0;
        self.call(Call::HostDeviceAddress, device, |functions| {
            // SAFETY: 1. `device_address` is writable. 2. An address that is not pinned is refused.
            unsafe {
                (functions.host_device_address)(&raw mut device_address, address.as_ptr().cast(), 0)
            }
        })?;
        Ok(device_address)
    }
}
