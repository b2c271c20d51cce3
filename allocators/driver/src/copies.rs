//! Moving and filling bytes, in stream order.
#![expect(unsafe_code, reason = "declares calls on raw addresses")]

use crate::{RawStream, Result};
use std::{fmt::Debug, ptr::NonNull};

/// Rows of equal length at equal distances: what a 2D copy or fill goes over. Nothing where either
/// number is 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rows {
    /// The length of a row: bytes in a copy, elements in a fill.
    pub width: u64,
    /// How many rows.
    pub height: u64,
}

/// One side of a 2D copy or fill: where its first row starts, and how far apart rows start, in
/// bytes.
///
/// Its example is that of [`Copies`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pitched<A> {
    /// The first byte of the first row: an address on the device, or a pointer on the host.
    pub start: A,
    /// Bytes from the start of one row to that of the next: at least a row's, and on a GPU at most
    /// 2³¹ − 1.
    pub pitch: u64,
}

/// What a fill writes again and again.
///
/// Its example is that of [`Copies`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pattern {
    /// One byte (`cuMemsetD8…`).
    Byte(u8),
    /// Two bytes, to an address and a pitch that 2 divides (`cuMemsetD16…`).
    Half(u16),
    /// Four bytes, to an address and a pitch that 4 divides (`cuMemsetD32…`).
    Word(u32),
}

impl Pattern {
    /// Bytes of one element: 1, 2 or 4.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Byte(_) => 1,
            Self::Half(_) => 2,
            Self::Word(_) => 4,
        }
    }
}

/// Copies and fills. Each is queued on its stream and the host goes on at once where the host side
/// is pinned; with pageable memory the driver stages it, and a copy to the device may return before
/// the device has it.
///
/// ```
/// use aquifer_driver::{DeviceId, Driver, Pattern, Pitched, Rows, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let (stream, x) = (driver.stream_create(gpu, 0)?, driver.mem_alloc(gpu, 4096)?);
/// // SAFETY: 1. the range is mapped. 2. all of the work is on one stream.
/// unsafe {
///     driver.fill_with(stream, x, Pattern::Word(7), 1024)?;
///     let (every_other_row, rows) = (Pitched { start: x, pitch: 512 }, Rows { width: 256, height: 8 });
///     driver.fill_2d(stream, every_other_row, Pattern::Byte(0), rows)?;
/// }
/// driver.stream_synchronize(stream)?;
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. The work touches the ranges that are named, of that length, in the order of its stream, and
///    nothing else.
/// 2. A call that is refused has queued nothing.
pub unsafe trait Copies: Debug + Send + Sync {
    /// Host to device (`cuMemcpyHtoDAsync`).
    ///
    /// # Safety
    /// 1. `from` is readable for `bytes`, and `to` writable on the device, until the copy is done.
    /// 2. No other work, of host or device, writes the source or touches the destination out of
    ///    order with it.
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
    /// 2. No other work, of host or device, touches the destination or writes the source out of
    ///    order with it.
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

    /// Device to device (`cuMemcpyDtoDAsync`, or the peer copy where the devices differ).
    ///
    /// # Safety
    /// 1. Both ranges are mapped until the copy is done.
    /// 2. No other work touches them out of order with it, but for reads of the source.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()>;

    /// Host to device, row by row (`cuMemcpy2DAsync_v2`). `rows.width` is in bytes.
    ///
    /// # Safety
    /// 1. Each row of `from` is readable, and each of `to` writable on the device, until the copy
    ///    is done.
    /// 2. No other work, of host or device, writes the source's rows or touches the destination's
    ///    out of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for a pitch shorter than a row, and for a host side, from the first row's
    /// start to the last one's end, that spans two registrations.
    unsafe fn copy_2d_to_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<NonNull<u8>>,
        rows: Rows,
    ) -> Result<()>;

    /// Device to host, row by row (`cuMemcpy2DAsync_v2`). `rows.width` is in bytes.
    ///
    /// # Safety
    /// 1. Each row of `to` is writable, and each of `from` readable on the device, until the copy
    ///    is done.
    /// 2. No other work, of host or device, touches the destination's rows or writes the source's
    ///    out of order with it.
    ///
    /// # Errors
    /// As [`Copies::copy_2d_to_device`].
    unsafe fn copy_2d_to_host(
        &self,
        stream: RawStream,
        to: Pitched<NonNull<u8>>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()>;

    /// Device to device, row by row (`cuMemcpy2DAsync_v2`), on one device. `rows.width` is in
    /// bytes.
    ///
    /// # Safety
    /// 1. Each row of both sides is mapped until the copy is done, and no row of the one overlaps a
    ///    row of the other.
    /// 2. No other work touches them out of order with it, but for reads of the source.
    ///
    /// # Errors
    /// Invalid value (1) for a pitch shorter than a row.
    unsafe fn copy_2d_on_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()>;

    /// Fills with `count` elements (`cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`).
    ///
    /// # Safety
    /// 1. The range is mapped until the fill is done.
    /// 2. No other work touches it out of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for an address that the element's size does not divide.
    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()>;

    /// Fills row by row (`cuMemsetD2D8Async`, `cuMemsetD2D16Async`, `cuMemsetD2D32Async`).
    /// `rows.width` is in elements.
    ///
    /// # Safety
    /// 1. Each row is mapped until the fill is done.
    /// 2. No other work touches the rows out of order with it.
    ///
    /// # Errors
    /// Invalid value (1) for an address or a pitch that the element's size does not divide, and for
    /// a pitch shorter than a row.
    unsafe fn fill_2d(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        pattern: Pattern,
        rows: Rows,
    ) -> Result<()>;

    /// Fills with one byte (`cuMemsetD8Async`).
    ///
    /// # Safety
    /// 1. The range is mapped until the fill is done.
    /// 2. No other work touches it out of order with it.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn fill(&self, stream: RawStream, to: u64, byte: u8, bytes: u64) -> Result<()> {
        // SAFETY: 1. and 2. are the caller's.
        unsafe { self.fill_with(stream, to, Pattern::Byte(byte), bytes) }
    }
}
