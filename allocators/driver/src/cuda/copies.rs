//! [`Copies`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{POINTER_DEVICE, object},
    codes::answer,
};
use crate::{Call, Copies, DeviceId, RawStream, Result};
use std::ptr::NonNull;

impl CudaDriver {
    /// The device that an address belongs to, where the driver knows one.
    fn device_at(&self, address: u64) -> Option<DeviceId> {
        let mut ordinal = -1i32;
        // SAFETY: 1. `ordinal` is as large as the attribute. An address that is nobody's is refused.
        let code =
            unsafe { (self.table.pointer_attribute)((&raw mut ordinal).cast(), POINTER_DEVICE, address) };
        answer("cuPointerGetAttribute", code).ok()?;
        u32::try_from(ordinal).ok().map(DeviceId)
    }

    /// The devices of a copy, from and to, if they differ. Asks nothing where there is one device only.
    fn apart(&self, from: u64, to: u64) -> Option<(DeviceId, DeviceId)> {
        if self.devices.len() < 2 {
            return None;
        }
        let pair = (self.device_at(from)?, self.device_at(to)?);
        (pair.0 != pair.1).then_some(pair)
    }
}

impl Copies for CudaDriver {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        self.call(Call::CopyToDevice, stream.device(), |table| {
            // SAFETY: 1. the caller keeps both ranges until the copy is done, in order with all else that touches them.
            // 2. the handle is alive.
            unsafe { (table.copy_to_device)(to, from.as_ptr().cast(), bytes, object(stream.handle())) }
        })
    }

    unsafe fn copy_to_host(&self, stream: RawStream, to: NonNull<u8>, from: u64, bytes: usize) -> Result<()> {
        self.call(Call::CopyToHost, stream.device(), |table| {
            // SAFETY: 1. the caller keeps both ranges until the copy is done, in order with all else that touches them.
            // 2. the handle is alive.
            unsafe { (table.copy_to_host)(to.as_ptr().cast(), from, bytes, object(stream.handle())) }
        })
    }

    unsafe fn copy_on_device(&self, stream: RawStream, to: u64, from: u64, bytes: u64) -> Result<()> {
        let Some((source, destination)) = self.apart(from, to) else {
            return self.call(Call::CopyOnDevice, stream.device(), |table| {
                // SAFETY: 1. the caller keeps both ranges until the copy is done, in order with all else that touches
                // them. 2. the handle is alive.
                unsafe { (table.copy_on_device)(to, from, bytes as usize, object(stream.handle())) }
            });
        };
        let source = self.primary(source)?.retain(&self.table)?;
        let destination = self.primary(destination)?.retain(&self.table)?;
        self.call(Call::CopyOnDevice, stream.device(), |table| {
            let (source, destination) = (object(source), object(destination));
            // SAFETY: 1. as above. 2. both contexts are retained.
            unsafe {
                (table.copy_between)(to, destination, from, source, bytes as usize, object(stream.handle()))
            }
        })
    }

    unsafe fn fill(&self, stream: RawStream, to: u64, byte: u8, bytes: u64) -> Result<()> {
        self.call(Call::Fill, stream.device(), |table| {
            // SAFETY: 1. the caller keeps the range until the fill is done, in order with all else that touches it.
            // 2. the handle is alive.
            unsafe { (table.fill)(to, byte, bytes as usize, object(stream.handle())) }
        })
    }
}
