//! Moving and filling bytes, in stream order.
#![expect(unsafe_code, reason = "declares calls on raw addresses; holds no unsafe block")]

use crate::{RawStream, Result};
use std::{fmt::Debug, ptr::NonNull};

/// Copies and fills. Each is queued on its stream and the host goes on at once where the host side is pinned; with
/// pageable memory the driver stages it, and a copy to the device may return before the device has it.
pub trait Copies: Debug + Send + Sync {
    /// Host to device (`cuMemcpyHtoDAsync`).
    ///
    /// # Safety
    /// 1. `from` is readable for `bytes`, and `to` writable on the device, until the copy is done.
    /// 2. No other work, of host or device, writes the source or touches the destination out of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for a host range that spans two registrations.
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()>;

    /// Device to host (`cuMemcpyDtoHAsync`).
    ///
    /// # Safety
    /// 1. `to` is writable for `bytes`, and `from` readable on the device, until the copy is done.
    /// 2. No other work, of host or device, touches the destination or writes the source out of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for a host range that spans two registrations.
    unsafe fn copy_to_host(&self, stream: RawStream, to: NonNull<u8>, from: u64, bytes: usize) -> Result<()>;

    /// Device to device (`cuMemcpyDtoDAsync`, or the peer copy where the devices differ).
    ///
    /// # Safety
    /// 1. Both ranges are mapped until the copy is done.
    /// 2. No other work touches them out of order with it, but for reads of the source.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn copy_on_device(&self, stream: RawStream, to: u64, from: u64, bytes: u64) -> Result<()>;

    /// Fills with one byte (`cuMemsetD8Async`).
    ///
    /// # Safety
    /// 1. The range is mapped until the fill is done.
    /// 2. No other work touches it out of order with it.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn fill(&self, stream: RawStream, to: u64, byte: u8, bytes: u64) -> Result<()>;
}
