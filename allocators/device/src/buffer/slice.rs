//! Slices of buffers.

use crate::Block;
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, Typed};
use aquifer_stream::{Account, TrackUses};
use bytemuck::Pod;
use std::{fmt, marker::PhantomData, ops::Range};

/// The position of a slice in its block.
#[derive(Clone, Copy)]
pub(super) struct BlockPart<'a> {
    block: &'a Block,
    /// Offset in bytes from the start of the block.
    offset: u64,
    /// Number of elements.
    len: usize,
    /// Whether no other part of the block can be written, nor this part be written while another
    /// one is used. If so, all borrows that conflict with a use of this part have ended.
    exclusive: bool,
}

/// A shared slice of a [`DeviceBuffer`](crate::DeviceBuffer). Copies of it denote the same
/// elements.
///
/// A use of a slice counts as a use of its whole block: another stream that writes any part of the
/// block waits for it.
pub struct DeviceSlice<'a, T> {
    pub(super) part: BlockPart<'a>,
    pub(super) elements: PhantomData<&'a [T]>,
}

/// A mutable slice of a [`DeviceBuffer`](crate::DeviceBuffer).
///
/// A use of a slice counts as a use of its whole block. Two slices of one buffer can therefore be
/// written on two streams without a race, but not concurrently: each stream waits for the work
/// queued on the other. For concurrent writes, use two buffers.
pub struct DeviceSliceMut<'a, T> {
    // The marker below makes the access exclusive.
    pub(super) part: BlockPart<'a>,
    pub(super) elements: PhantomData<&'a mut [T]>,
}

/// Returns how many elements of `T` these bytes at this address hold, with none left over.
pub(super) fn counted<T>(address: u64, bytes: u64) -> Result<usize> {
    let size = size_of::<T>() as u64;
    if size == 0 {
        return Err(MemoryError::ZeroSize);
    }
    if !bytes.is_multiple_of(size) {
        return Err(MemoryError::LengthMismatch { from: bytes, to: bytes / size * size });
    }
    let align = align_of::<T>() as u64;
    if !address.is_multiple_of(align) {
        return Err(MemoryError::BadAlignment { align });
    }
    Ok((bytes / size) as usize)
}

impl<'a> BlockPart<'a> {
    /// Makes a slice of the first `len` elements. The caller has exclusive or shared read access to
    /// the whole block.
    pub(super) fn whole(block: &'a Block, len: usize) -> Self {
        Self { block, offset: 0, len, exclusive: true }
    }

    /// Makes a slice of `len` elements from byte `offset` of a block.
    fn new<T>(block: &'a Block, offset: u64, len: usize) -> Self {
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        let end = bytes.and_then(|bytes| offset.checked_add(bytes));
        debug_assert!(end.is_some_and(|end| end <= block.bytes()), "a slice beyond its block");
        Self { block, offset, len, exclusive: true }
    }

    fn address(&self) -> u64 {
        self.block.address() + self.offset
    }

    fn slice<T>(self, range: Range<usize>) -> Result<Self> {
        let size = size_of::<T>() as u64;
        if range.start > range.end {
            return Err(MemoryError::ReversedRange {
                start: range.start as u64,
                end: range.end as u64,
            });
        }
        if range.end > self.len {
            return Err(MemoryError::OutOfRange {
                start: range.start as u64,
                end: range.end as u64,
                len: self.len as u64,
            });
        }
        Ok(Self {
            offset: self.offset + range.start as u64 * size,
            len: range.end - range.start,
            ..self
        })
    }

    fn split<T>(self, mid: usize) -> Result<(Self, Self)> {
        // A `mid` beyond the end is refused as out of bounds, not as a reversed range.
        let end = self.len.max(mid);
        Ok((self.slice::<T>(0..mid.min(self.len))?, self.slice::<T>(mid..end)?))
    }

    fn cast<T, U>(self) -> Result<Self> {
        let bytes = (self.len * size_of::<T>()) as u64;
        Ok(Self { len: counted::<U>(self.address(), bytes)?, ..self })
    }

    /// Marks the part as one of several that are written.
    fn non_exclusive(self) -> Self {
        Self { exclusive: false, ..self }
    }

    fn range<T>(&self) -> DeviceRange {
        let bytes = (self.len * size_of::<T>()) as u64;
        DeviceRange { address: self.address(), bytes, ..self.block.range() }
    }

    fn order(
        &self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
        exclusive: bool,
    ) -> Result<()> {
        self.block.order_as(stream, alive, access, self.exclusive && exclusive)
    }
}

impl<'a, T: Pod> DeviceSlice<'a, T> {
    /// Returns the elements in `range` of the slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'a, T>> {
        Ok(Self { part: self.part.slice::<T>(range)?, elements: PhantomData })
    }

    /// Splits the slice at `mid`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn split_at(&self, mid: usize) -> Result<(DeviceSlice<'a, T>, DeviceSlice<'a, T>)> {
        let (left, right) = self.part.split::<T>(mid)?;
        Ok((
            Self { part: left, elements: PhantomData },
            Self { part: right, elements: PhantomData },
        ))
    }

    /// Reinterprets the bytes as elements of another type.
    ///
    /// # Errors
    /// [`MemoryError::LengthMismatch`] if bytes are left over; [`MemoryError::BadAlignment`];
    /// [`MemoryError::ZeroSize`] for elements of no size.
    pub fn cast<U: Pod>(&self) -> Result<DeviceSlice<'a, U>> {
        Ok(DeviceSlice { part: self.part.cast::<T, U>()?, elements: PhantomData })
    }
}

impl<'a, T: Pod> DeviceSliceMut<'a, T> {
    /// Borrows the same elements as a shared slice.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice { part: self.part, elements: PhantomData }
    }

    /// Borrows the same elements as a mutable slice.
    #[must_use]
    pub fn reborrow(&mut self) -> DeviceSliceMut<'_, T> {
        DeviceSliceMut { part: self.part, elements: PhantomData }
    }

    /// Borrows the elements in `range` as a shared slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        self.as_slice().slice(range)
    }

    /// Borrows the elements in `range` as a mutable slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        self.reborrow().into_slice(range)
    }

    /// As [`DeviceSliceMut::slice_mut`], for as long as the buffer is borrowed.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn into_slice(self, range: Range<usize>) -> Result<DeviceSliceMut<'a, T>> {
        Ok(Self { part: self.part.slice::<T>(range)?, elements: PhantomData })
    }

    /// Splits the slice at `mid` into two mutable slices.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn split_at_mut(
        &mut self,
        mid: usize,
    ) -> Result<(DeviceSliceMut<'_, T>, DeviceSliceMut<'_, T>)> {
        self.reborrow().into_split(mid)
    }

    /// As [`DeviceSliceMut::split_at_mut`], for as long as the buffer is borrowed.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn into_split(self, mid: usize) -> Result<(DeviceSliceMut<'a, T>, DeviceSliceMut<'a, T>)> {
        let (left, right) = self.part.non_exclusive().split::<T>(mid)?;
        Ok((
            Self { part: left, elements: PhantomData },
            Self { part: right, elements: PhantomData },
        ))
    }

    /// Reinterprets the bytes as elements of another type.
    ///
    /// # Errors
    /// As [`DeviceSlice::cast`].
    pub fn cast<U: Pod>(self) -> Result<DeviceSliceMut<'a, U>> {
        Ok(DeviceSliceMut { part: self.part.cast::<T, U>()?, elements: PhantomData })
    }
}

macro_rules! part {
    ($slice:ident) => {
        impl<'a, T> $slice<'a, T> {
            /// Makes a slice of `len` elements from byte `offset` of a block. The caller has
            /// checked the bounds, and has exclusive access to the elements of a mutable slice.
            pub(crate) fn of(block: &'a Block, offset: u64, len: usize) -> Self {
                Self { part: BlockPart::new::<T>(block, offset, len), elements: PhantomData }
            }

            /// As [`Self::of`], while other parts of the block may be written.
            pub(crate) fn of_several(block: &'a Block, offset: u64, len: usize) -> Self {
                let part = BlockPart::new::<T>(block, offset, len).non_exclusive();
                Self { part, elements: PhantomData }
            }
        }
        #[expect(unsafe_code, reason = "makes the promises of an operand")]
        // SAFETY: 1. A slice lies within the bounds of a block that is borrowed by Rust's rules:
        // shared with other readers, or mutable, and then no other slice has these elements. 2. As
        // for the block. A use of a slice is recorded as a use of the whole block, which is
        // stricter, and ends no borrow of another slice. 3. As for the block.
        unsafe impl<T> Operand for $slice<'_, T> {
            fn range(&self) -> DeviceRange {
                self.part.range::<T>()
            }
            fn machine(&self) -> Option<u64> {
                self.part.block.machine()
            }
            fn home_stream(&self) -> Option<RawStream> {
                self.part.block.home_stream()
            }
            fn order(
                &self,
                stream: RawStream,
                alive: Option<KeepAlive>,
                access: Access,
            ) -> Result<()> {
                self.part.order(stream, alive, access, !access.writes())
            }
        }
        impl<T> TrackUses for $slice<'_, T> {
            fn account(&self) -> Account<'_> {
                Account { alone: self.part.exclusive, ..self.part.block.account() }
            }
        }
        impl<T> Typed for $slice<'_, T> {
            type Item = T;
            fn len(&self) -> usize {
                self.part.len
            }
        }
        impl<T> fmt::Debug for $slice<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($slice))
                    .field("block", self.part.block)
                    .field("offset", &self.part.offset)
                    .field("len", &self.part.len)
                    .finish()
            }
        }
    };
}

part!(DeviceSlice);
part!(DeviceSliceMut);

impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DeviceSlice<'_, T> {}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. A `&mut` of the slice has exclusive access to its elements: the slice borrows its
// buffer mutably, and was split from other slices without overlap.
unsafe impl<T> OperandMut for DeviceSliceMut<'_, T> {
    fn order_mut(
        &mut self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
    ) -> Result<()> {
        self.part.order(stream, alive, access, true)
    }
}
