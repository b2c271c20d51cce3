//! Copies and fills in stream order.
#![expect(unsafe_code, reason = "declares calls on raw addresses")]

use crate::{RawStream, Result};
use std::{fmt::Debug, ptr::NonNull};

/// The element that a fill repeats.
///
/// See [`Copies`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pattern {
    /// One byte (`cuMemsetD8…`).
    Byte(u8),
    /// Two bytes. The address must be a multiple of 2 (`cuMemsetD16…`).
    Half(u16),
    /// Four bytes. The address must be a multiple of 4 (`cuMemsetD32…`).
    Word(u32),
}

impl Pattern {
    /// Returns the bytes of one element: 1, 2 or 4.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Byte(_) => 1,
            Self::Half(_) => 2,
            Self::Word(_) => 4,
        }
    }
}

/// The rows of a copy, in bytes.
///
/// ```
/// use aquifer_driver::Rows;
/// let tile = Rows { width: 256, height: 16, from_pitch: 7680, to_pitch: 256 };
/// assert_eq!(tile.span(tile.from_pitch), Some(15 * 7680 + 256));
/// assert_eq!(Rows { from_pitch: 100, ..tile }.span(100), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rows {
    /// Bytes of a row.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
    /// From the start of one row of the source to the start of the next.
    pub from_pitch: u64,
    /// The same for the destination.
    pub to_pitch: u64,
}

impl Rows {
    /// Returns the bytes from the start of the first row to the end of the last one, on the side
    /// with this pitch. `None` if the pitch is less than the width, or the sum overflows.
    #[must_use]
    pub fn span(self, pitch: u64) -> Option<u64> {
        if self.width == 0 || self.height == 0 {
            return Some(0);
        }
        let before = pitch.checked_mul(self.height - 1).filter(|_| pitch >= self.width)?;
        before.checked_add(self.width)
    }

    /// An iterator over the offsets of the rows, in the destination and in the source. Rows of no
    /// bytes are none.
    pub(crate) fn offsets(self) -> impl Iterator<Item = (u64, u64)> {
        let rows = if self.width == 0 { 0 } else { self.height };
        (0..rows).map(move |row| (row * self.to_pitch, row * self.from_pitch))
    }
}

/// Copies and fills. Each is queued on its stream. If the host side is pinned, the call returns at
/// once. Pageable memory is staged by the driver, and a copy to the device may return before the
/// data is on the device.
///
/// ```
/// use aquifer_driver::{DeviceId, Driver, Pattern, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let (stream, x) = (driver.stream_create(gpu, 0)?, driver.mem_alloc(gpu, 4096)?);
/// // SAFETY: 1. The range is mapped. 2. All work is on one stream.
/// unsafe { driver.fill_with(stream, x, Pattern::Word(7), 1024)? };
/// driver.stream_synchronize(stream)?;
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. The work accesses the ranges that are named, with the given length, in the order of its
///    stream, and nothing else.
/// 2. A call that is refused has queued nothing.
pub unsafe trait Copies: Debug + Send + Sync {
    /// Copies from the host to the device (`cuMemcpyHtoDAsync`).
    ///
    /// # Safety
    /// 1. `from` is readable for `bytes`, and `to` writable on the device, until the copy is done.
    /// 2. No other work of the host or the device writes the source or accesses the destination out
    ///    of order with it.
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

    /// Copies from the device to the host (`cuMemcpyDtoHAsync`).
    ///
    /// # Safety
    /// 1. `to` is writable for `bytes`, and `from` readable on the device, until the copy is done.
    /// 2. No other work of the host or the device accesses the destination or writes the source out
    ///    of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for a host range that spans two registrations.
    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
    ) -> Result<()>;

    /// Copies on the device (`cuMemcpyDtoDAsync`), or between devices by the peer copy if they
    /// differ.
    ///
    /// # Safety
    /// 1. Both ranges are mapped until the copy is done.
    /// 2. No other work accesses them out of order with it, except for reads of the source.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()>;

    /// Copies rows within the device (`cuMemcpy2DAsync`). The bytes between the rows of the
    /// destination are unchanged.
    ///
    /// # Safety
    /// 1. Every row of both sides is mapped until the copy is done.
    /// 2. No other work accesses the rows out of order with it, except for reads of the source.
    ///
    /// # Errors
    /// Invalid value (1) for a pitch that is less than the width, or above 2 GiB.
    unsafe fn copy_rows(&self, stream: RawStream, to: u64, from: u64, rows: Rows) -> Result<()>;

    /// Fills with `count` elements (`cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`).
    ///
    /// # Safety
    /// 1. The range is mapped until the fill is done.
    /// 2. No other work accesses it out of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for an address that is not a multiple of the element size.
    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()>;

    /// Fills with one byte (`cuMemsetD8Async`).
    ///
    /// # Safety
    /// 1. The range is mapped until the fill is done.
    /// 2. No other work accesses it out of order with it.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn fill(&self, stream: RawStream, to: u64, byte: u8, bytes: u64) -> Result<()> {
        // SAFETY: 1. and 2. are promised by the caller.
        unsafe { self.fill_with(stream, to, Pattern::Byte(byte), bytes) }
    }
}
