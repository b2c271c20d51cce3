//! Device memory that work may read or write.
#![expect(unsafe_code, reason = "declares unsafe traits; holds no unsafe block")]

use crate::{DeviceId, RawStream};
use aquifer_core::Result;
use std::{any::Any, sync::Arc};

/// Keeps the handle of a stream valid, for example an `Arc` of another library's stream.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A range of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceRange {
    /// The device.
    pub device: DeviceId,
    /// The first address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

/// How work uses an operand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes. Reads nothing that was there before.
    Write,
    /// Reads and writes.
    ReadWrite,
}

impl Access {
    /// Returns whether the access changes bytes.
    #[must_use]
    pub fn writes(self) -> bool {
        self != Self::Read
    }

    /// Returns whether the two accesses must be ordered with each other.
    #[must_use]
    pub fn conflicts(self, other: Access) -> bool {
        self.writes() || other.writes()
    }
}

/// Device memory whose owner tracks the streams that use it: buffers, slices, blocks.
///
/// # Safety
/// 1. [`Operand::range`] is memory of the implementor that stays mapped while the operand lives. No
///    other operand that safe code can reach at the same time overlaps it, unless both are only
///    read.
/// 2. After [`Operand::order`] has returned `Ok`, work queued on `stream` with that access is
///    ordered with every other use, if it is queued before the next conflicting `order` and before
///    the operand's memory is allocated to another owner. The memory is not allocated again,
///    written or unmapped before that work is done, even if values are dropped or forgotten.
/// 3. Any thread may make calls for the stream that [`Operand::home_stream`] returns while the
///    operand is borrowed, unless the stream's owner retires it.
/// 4. [`Operand::machine`] returns the machine that the range lies on, or `None`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory",
    label = "device memory is needed here",
    note = "pass a `DeviceBuffer`, a part of one, or a `Block`; foreign memory is taken in by `Adopted`"
)]
pub unsafe trait Operand {
    /// Returns the range of device memory.
    fn range(&self) -> DeviceRange;

    /// Returns the [machine](crate::Driver::machine) of the memory, so that a stream of another
    /// machine is refused. Returns `None` if the machine is unknown: any stream of the same device
    /// is then accepted.
    fn machine(&self) -> Option<u64> {
        None
    }

    /// Returns the stream that owns the memory, if any thread may queue work on it. On that stream,
    /// [`Operand::order`] adds no waits unless another stream has used the memory. Never blocks.
    fn home_stream(&self) -> Option<RawStream> {
        None
    }

    /// Makes `stream` wait for the work that `access` depends on, and records that `stream` uses
    /// the memory. The host does not wait.
    ///
    /// Only the stream is recorded, since the work itself is queued after this call has returned.
    /// The position in the stream is taken when the borrow has ended: at the free, or at the next
    /// conflicting use. A writer that holds `&mut` calls [`OperandMut::order_mut`], which proves
    /// that earlier borrows have ended. A write that is ordered here is ordered with them, but
    /// proves nothing.
    ///
    /// A stream of another library is known from its first use here. `alive` is kept until the last
    /// use is done, since events are recorded on the stream later, when its handle must still be
    /// valid.
    ///
    /// # Errors
    /// [`Busy`](aquifer_core::MemoryError::Busy) if a conflicting use is open.
    /// [`UnknownId`](aquifer_core::MemoryError::UnknownId) for a stream that has not been leased or
    /// adopted, if `alive` is `None`. Errors of the driver.
    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()>;
}

macro_rules! borrowed {
    ($($borrow:ty),+) => {$(
        // SAFETY: 1. to 4. As for the operand that is borrowed, whose methods these are.
        unsafe impl<D: Operand + ?Sized> Operand for $borrow {
            fn range(&self) -> DeviceRange {
                (**self).range()
            }
            fn machine(&self) -> Option<u64> {
                (**self).machine()
            }
            fn home_stream(&self) -> Option<RawStream> {
                (**self).home_stream()
            }
            fn order(
                &self,
                stream: RawStream,
                alive: Option<KeepAlive>,
                access: Access,
            ) -> Result<()> {
                (**self).order(stream, alive, access)
            }
        }

        impl<D: Typed + ?Sized> Typed for $borrow {
            type Item = D::Item;
            fn len(&self) -> usize {
                (**self).len()
            }
        }
    )+};
}

// A copy takes its source by value, so that it takes a buffer by reference and a slice as it is.
borrowed!(&D, &mut D);

/// An [`Operand`] that work may write. Memory that is borrowed only to be read does not implement
/// this trait, because two borrowers could write at once.
///
/// # Safety
/// 1. While `&mut` of the operand is held, no other operand that safe code can reach overlaps its
///    range.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that may be written",
    label = "device memory that is borrowed to be written is needed here",
    note = "pass `&mut` of a `DeviceBuffer`, or of what `slice_mut` returns; a `DeviceSlice` can only be read"
)]
pub unsafe trait OperandMut: Operand {
    /// As [`Operand::order`], with exclusive access: all earlier borrows of the range have ended.
    ///
    /// # Errors
    /// As [`Operand::order`].
    fn order_mut(
        &mut self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
    ) -> Result<()> {
        self.order(stream, alive, access)
    }
}

/// An [`Operand`] with elements of one type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory with elements of one type",
    label = "a buffer of device memory is needed here",
    note = "pass a `DeviceBuffer` or a part of one; `DeviceBuffer::from_block` gives a `Block` a type"
)]
pub trait Typed: Operand {
    /// The elements' type.
    type Item;

    /// Returns the number of elements.
    fn len(&self) -> usize;

    /// Returns whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
