//! [`Copies`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{POINTER_DEVICE, driver_ptr},
    codes::check,
};
use crate::{Call, Copies, DeviceId, Pattern, RawStream, Result, Rows};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};
use std::ptr::{NonNull, null, null_mut};

impl CudaDriver {
    /// Returns the device that an address belongs to, if the driver knows one.
    fn device_at(&self, address: u64) -> Option<DeviceId> {
        let mut ordinal = -1i32;
        // SAFETY: 1. `ordinal` is as large as the attribute. An unknown address is refused.
        let code = unsafe {
            (self.functions.pointer_attribute)((&raw mut ordinal).cast(), POINTER_DEVICE, address)
        };
        check("cuPointerGetAttribute", code).ok()?;
        u32::try_from(ordinal).ok().map(DeviceId)
    }

    /// Returns the source and destination devices of a copy if they differ. Makes no call if there
    /// is only one device.
    fn devices_if_different(&self, from: u64, to: u64) -> Option<(DeviceId, DeviceId)> {
        if self.devices.len() < 2 {
            return None;
        }
        let pair = (self.device_at(from)?, self.device_at(to)?);
        (pair.0 != pair.1).then_some(pair)
    }
}

// SAFETY: The driver performs the requested copies in stream order, and queues none that it refuses
// (CUDA driver API, "Memory Management").
unsafe impl Copies for CudaDriver {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        self.call(Call::CopyToDevice, stream.device(), |functions| {
            // SAFETY: 1. The caller keeps both ranges valid until the copy is done, in order with
            // all other accesses. 2. The handle is alive.
            unsafe {
                (functions.copy_to_device)(
                    to,
                    from.as_ptr().cast(),
                    bytes,
                    driver_ptr(stream.handle()),
                )
            }
        })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        self.call(Call::CopyToHost, stream.device(), |functions| {
            // SAFETY: 1. The caller keeps both ranges valid until the copy is done, in order with
            // all other accesses. 2. The handle is alive.
            unsafe {
                (functions.copy_to_host)(
                    to.as_ptr().cast(),
                    from,
                    bytes,
                    driver_ptr(stream.handle()),
                )
            }
        })
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let Some((source, destination)) = self.devices_if_different(from, to) else {
            return self.call(Call::CopyOnDevice, stream.device(), |functions| {
                // SAFETY: 1. The caller keeps both ranges valid until the copy is done, in order
                // with all other accesses. 2. The handle is alive.
                unsafe {
                    (functions.copy_on_device)(
                        to,
                        from,
                        bytes as usize,
                        driver_ptr(stream.handle()),
                    )
                }
            });
        };
        let other = if source == stream.device() { destination } else { source };
        let source = self.primary(source)?.retain(&self.functions)?;
        let destination = self.primary(destination)?.retain(&self.functions)?;
        self.call_between(Call::CopyOnDevice, stream.device(), other, |functions| {
            let (source, destination) = (driver_ptr(source), driver_ptr(destination));
            // SAFETY: 1. As above. 2. Both contexts are retained.
            unsafe {
                (functions.copy_between)(
                    to,
                    destination,
                    from,
                    source,
                    bytes as usize,
                    driver_ptr(stream.handle()),
                )
            }
        })
    }

    unsafe fn copy_rows(&self, stream: RawStream, to: u64, from: u64, rows: Rows) -> Result<()> {
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: null(),
            srcDevice: from,
            srcArray: null_mut(),
            srcPitch: rows.from_pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: null_mut(),
            dstDevice: to,
            dstArray: null_mut(),
            dstPitch: rows.to_pitch as usize,
            WidthInBytes: rows.width as usize,
            Height: rows.height as usize,
        };
        self.call(Call::CopyRows, stream.device(), |functions| {
            // SAFETY: 1. The description is readable, and is read before the call returns. 2. The
            // caller keeps both sides valid until the copy is done, in order with all other
            // accesses. 3. The handle is alive.
            unsafe { (functions.copy_rows)(&raw const copy, driver_ptr(stream.handle())) }
        })
    }

    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()> {
        self.call(Call::of_fill(pattern), stream.device(), |functions| {
            let (count, stream) = (count as usize, driver_ptr(stream.handle()));
            // SAFETY: 1. The caller keeps the range valid until the fill is done, in order with all
            // other accesses. 2. The handle is alive.
            unsafe {
                match pattern {
                    Pattern::Byte(byte) => (functions.fill)(to, byte, count, stream),
                    Pattern::Half(half) => (functions.fill_16)(to, half, count, stream),
                    Pattern::Word(word) => (functions.fill_32)(to, word, count, stream),
                }
            }
        })
    }
}
