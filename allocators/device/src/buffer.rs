//! Device memory with elements of one type.

mod adopted;

pub use adopted::{Adopted, Declined};

use crate::{Block, Request, Resource};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, Typed};
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::{fmt, marker::PhantomData, ops::Range};

/// A block of `len` elements of `T`, which go home with it.
///
/// The elements are not initialised, and safe code cannot read them on the host: they come down by a copy. Work of
/// [`Stream`] takes a buffer as it is; kernels of other libraries take what it lends.
pub struct DeviceBuffer<T> {
    block: Block,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// `len` elements from `resource`, for work on `stream` from now on. Alignment is that of every block.
    ///
    /// # Errors
    /// [`MemoryError::ZeroSize`] for no elements or elements of no size; [`MemoryError::TooLarge`]; the resource's.
    #[track_caller]
    pub fn new_in(resource: &(impl Resource + ?Sized), stream: &Stream, len: usize) -> Result<Self> {
        // Not by a closure, whose own line would be named as the caller's.
        let request = Self::request(len)?;
        Self::in_block(len, resource.allocate(stream, request)?, request)
    }

    /// `len` elements in the block that `alloc` gives for them.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new_in`]; [`MemoryError::OutOfBounds`] for a block that is too short.
    #[track_caller]
    pub fn from_alloc(len: usize, alloc: impl FnOnce(Request) -> Result<Block>) -> Result<Self> {
        let request = Self::request(len)?;
        Self::in_block(len, alloc(request)?, request)
    }

    fn request(len: usize) -> Result<Request> {
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        bytes
            .map(Request::bytes)
            .ok_or(MemoryError::TooLarge { requested: u64::MAX, limit: crate::request::MAX_BYTES })
    }

    fn in_block(len: usize, block: Block, request: Request) -> Result<Self> {
        if block.bytes() < request.size() {
            return Err(MemoryError::OutOfBounds { offset: 0, len: request.size(), bytes: block.bytes() });
        }
        Ok(Self { block, len, elements: PhantomData })
    }

    /// The elements in `range`, to be read.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        let (offset, len) = self.bounds(range)?;
        Ok(DeviceSlice { block: &self.block, offset, len, elements: PhantomData })
    }

    /// The elements in `range`, to be written.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        let (offset, len) = self.bounds(range)?;
        Ok(DeviceSliceMut { block: &self.block, offset, len, elements: PhantomData })
    }

    fn bounds(&self, range: Range<usize>) -> Result<(u64, usize)> {
        if range.start > range.end || range.end > self.len {
            let size = size_of::<T>() as u64;
            return Err(MemoryError::OutOfBounds {
                offset: range.start as u64 * size,
                len: (range.end.saturating_sub(range.start)) as u64 * size,
                bytes: self.len as u64 * size,
            });
        }
        Ok(((range.start * size_of::<T>()) as u64, range.end - range.start))
    }
}

impl<T> DeviceBuffer<T> {
    /// How many elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a buffer of no elements cannot be had.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The block underneath.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }

    pub(crate) fn block_mut(&mut self) -> &mut Block {
        &mut self.block
    }

    /// The block underneath, without the type.
    #[must_use]
    pub fn into_block(self) -> Block {
        self.block
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("block", &self.block).field("len", &self.len).finish()
    }
}

/// A part of a [`DeviceBuffer`], to be read.
#[derive(Debug)]
pub struct DeviceSlice<'a, T> {
    block: &'a Block,
    /// In bytes.
    offset: u64,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

impl<'a, T> DeviceSlice<'a, T> {
    /// `len` elements from byte `offset` of a block on, which are within its bounds.
    pub(crate) fn of(block: &'a Block, offset: u64, len: usize) -> Self {
        Self { block, offset, len, elements: PhantomData }
    }
}

/// A part of a [`DeviceBuffer`], to be written.
#[derive(Debug)]
pub struct DeviceSliceMut<'a, T> {
    // Exclusive by the marker below.
    block: &'a Block,
    /// In bytes.
    offset: u64,
    len: usize,
    elements: PhantomData<&'a mut [T]>,
}

impl<'a, T> DeviceSliceMut<'a, T> {
    /// `len` elements from byte `offset` of a block on, which are within its bounds and which nobody else borrows.
    pub(crate) fn of(block: &'a Block, offset: u64, len: usize) -> Self {
        Self { block, offset, len, elements: PhantomData }
    }
}

/// How each of the three reaches its block.
trait Part {
    fn whole(&self) -> &Block;
    /// In bytes.
    fn offset(&self) -> u64;
}

impl<T> Part for DeviceBuffer<T> {
    fn whole(&self) -> &Block {
        &self.block
    }
    fn offset(&self) -> u64 {
        0
    }
}
impl<T> Part for DeviceSlice<'_, T> {
    fn whole(&self) -> &Block {
        self.block
    }
    fn offset(&self) -> u64 {
        self.offset
    }
}
impl<T> Part for DeviceSliceMut<'_, T> {
    fn whole(&self) -> &Block {
        self.block
    }
    fn offset(&self) -> u64 {
        self.offset
    }
}

macro_rules! operand {
    ($t:ty) => {
        #[expect(unsafe_code, reason = "makes the promises of an operand")]
        // SAFETY: 1. a part, within its bounds, of a block that the operand owns or borrows as Rust's rules say.
        // 2. the block's own promise; a use of a part is noted as one of the whole, which is stricter.
        unsafe impl<T> Operand for $t {
            fn range(&self) -> DeviceRange {
                let whole = self.whole().range();
                let bytes = (self.len * size_of::<T>()) as u64;
                DeviceRange { address: whole.address + self.offset(), bytes, ..whole }
            }
            fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
                self.whole().order(stream, alive, access)
            }
        }
        impl<T> Typed for $t {
            type Item = T;
            fn len(&self) -> usize {
                self.len
            }
        }
    };
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. a buffer is its owner's alone, and its parts borrow it.
unsafe impl<T> OperandMut for DeviceBuffer<T> {
    fn order_mut(&mut self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        self.block.order_mut(stream, alive, access)
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. it borrows its buffer by `&mut`.
unsafe impl<T> OperandMut for DeviceSliceMut<'_, T> {
    fn order_mut(&mut self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        self.block.order_as(stream, alive, access, true)
    }
}

operand!(DeviceBuffer<T>);
operand!(DeviceSlice<'_, T>);
operand!(DeviceSliceMut<'_, T>);
