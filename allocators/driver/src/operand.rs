//! Something on a device that work may read or write.
#![expect(unsafe_code, reason = "declares unsafe traits; holds no unsafe block")]

use crate::{DeviceId, RawStream};
use aquifer_core::Result;
use std::{any::Any, sync::Arc};

/// Whatever keeps a stream's handle valid: an `Arc` of another library's stream.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A range of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceRange {
    /// The device.
    pub device: DeviceId,
    /// Its first address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What work does with an operand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes, and reads nothing that was there before.
    Write,
    /// Both.
    ReadWrite,
}

impl Access {
    /// Whether it changes bytes.
    #[must_use]
    pub fn writes(self) -> bool {
        self != Self::Read
    }

    /// Whether the two must not happen at once.
    #[must_use]
    pub fn conflicts(self, other: Access) -> bool {
        self.writes() || other.writes()
    }
}

/// Device memory with an owner who keeps account of the streams that use it: buffers, slices,
/// blocks.
///
/// # Safety
/// 1. [`Operand::range`] is memory of the implementor's that stays mapped while it lives, and no
///    other operand that safe code can reach at the same time overlaps it, unless both are only
///    read.
/// 2. After [`Operand::order`] has answered `Ok`, work queued on `stream` with that access before
///    the next conflicting `order`, and before the operand's memory is given to somebody else, is
///    ordered with every other use; and the memory is not given out, written or unmapped before
///    that work is done, whatever is dropped or forgotten.
/// 3. What [`Operand::home_stream`] answers with may be called for on any thread while the operand
///    is borrowed, unless its owner retires it.
/// 4. [`Operand::machine`] answers with the machine that the range lies on, or with `None`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no device memory",
    label = "device memory is needed here",
    note = "pass a `DeviceBuffer`, a part of one, or a `Block`; foreign memory is taken in by `Adopted`"
)]
pub unsafe trait Operand {
    /// Where it lies.
    fn range(&self) -> DeviceRange;

    /// Returns the [machine](crate::Driver::machine) whose memory it is, so that the stream of
    /// another machine is refused; `None` where it is not known, and any stream of the same device
    /// is taken.
    fn machine(&self) -> Option<u64> {
        None
    }

    /// The stream that the memory lives on, if it has one that any thread may queue work on: there,
    /// [`Operand::order`] makes nothing wait for anything unless another stream has used the
    /// memory. Never blocks.
    fn home_stream(&self) -> Option<RawStream> {
        None
    }

    /// Makes `stream` wait for what must come before `access`, and notes that `stream` uses it. The
    /// host does not wait.
    ///
    /// The note names the stream only: the work itself is queued after this call has returned, so
    /// its place in the stream is taken when the borrow has ended, at the free or at the next
    /// conflicting use. Who writes holds `&mut` and calls [`OperandMut::order_mut`], which proves
    /// that borrows before have ended; a write that is ordered here is ordered with them and proves
    /// nothing.
    ///
    /// A stream of another library is known from its first use here on, and `alive` is kept until
    /// the last use is done: events are recorded on it later, when its handle must still be valid.
    ///
    /// # Errors
    /// [`Busy`](aquifer_core::MemoryError::Busy) if a conflicting use is open;
    /// [`UnknownId`](aquifer_core::MemoryError::UnknownId) for a stream that has not been leased or
    /// adopted, without `alive`; the driver's.
    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()>;
}

/// An [`Operand`] that work may write. What is only borrowed to be read is none, or two of its
/// borrowers could write at once.
///
/// # Safety
/// 1. While somebody holds `&mut` of it, no other operand that safe code can reach overlaps its
///    range.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no device memory that may be written",
    label = "device memory that is borrowed to be written is needed here",
    note = "pass `&mut` of a `DeviceBuffer`, or of what `slice_mut` returns; a `DeviceSlice` can only be read"
)]
pub unsafe trait OperandMut: Operand {
    /// As [`Operand::order`], by somebody who has the range to himself: what was lent of it before
    /// has come back.
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
    message = "`{Self}` is no device memory with elements of one type",
    label = "a buffer of device memory is needed here",
    note = "pass a `DeviceBuffer` or a part of one; `DeviceBuffer::from_block` gives a `Block` a type"
)]
pub trait Typed: Operand {
    /// The elements' type.
    type Item;

    /// How many elements it holds.
    fn len(&self) -> usize;

    /// Whether it holds none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
