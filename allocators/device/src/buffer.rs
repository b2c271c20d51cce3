//! Typed device memory.

mod adopted;
mod slice;

pub use adopted::Adopted;
pub use slice::{DeviceSlice, DeviceSliceMut};

use crate::{Block, Request, Resource};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, Typed};
use aquifer_stream::{Account, Stream, TrackUses};
use bytemuck::Pod;
use slice::BlockPart;
use std::{error, fmt, marker::PhantomData, ops::Range};

/// A block of `len` elements of `T`. They are freed with it.
///
/// **The elements are not initialised**: they hold the previous contents of the memory. This is
/// memory-safe, since the host reads elements only through copies and every bit pattern is a valid
/// `T: Pod`. It can still make results wrong. [`Stream::fill`] and copies initialise elements.
///
/// Work of [`Stream`] takes a buffer or a slice of it directly. Kernels of other libraries take the
/// types that it lends.
///
/// ```
/// use aquifer::{DeviceBuffer, DeviceId, DevicePool, PoolConfig, sim::Sim};
///
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let s = pool.stream()?;
/// let mut x: DeviceBuffer<f32> = pool.buffer(&s, 1000)?;
/// s.fill(&mut x, 1.5)?;
/// let (left, mut right) = x.split_at_mut(500)?;
/// s.copy(&left.slice(0..100)?, &mut right.slice_mut(0..100)?)?;
/// s.fill(&mut x.slice_mut(750..1000)?, 3.0)?;
/// let bits: DeviceBuffer<u32> = x.cast()?;
/// let mut back = vec![0; 1000];
/// s.try_scope(|c| c.download(&bits, &mut back))?;
/// assert_eq!(back[750], 3.0f32.to_bits());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// The types reject data races at compile time. The same buffer as source and destination of a
/// copy:
///
/// ```compile_fail,E0502
/// # use aquifer::{DeviceBuffer, Stream, error::Result};
/// fn onto_itself(s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
///     s.copy(&x.slice(0..10)?, &mut x.slice_mut(5..15)?)
/// }
/// ```
///
/// A shared slice as the destination:
///
/// ```compile_fail,E0277
/// # use aquifer::{DeviceBuffer, Stream, error::Result};
/// fn through_a_shared_part(s: &Stream, x: &DeviceBuffer<f32>) -> Result<()> {
///     s.fill(&mut x.slice(0..10)?, 0.0)
/// }
/// ```
///
/// Two mutable slices that may overlap:
///
/// ```compile_fail,E0499
/// # use aquifer::{DeviceBuffer, Stream, error::Result};
/// fn twice(s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
///     let mut first = x.slice_mut(0..10)?;
///     let mut second = x.slice_mut(5..15)?;
///     s.fill(&mut first, 0.0)?;
///     s.fill(&mut second, 1.0)
/// }
/// ```
///
/// A slice that outlives its buffer:
///
/// ```compile_fail,E0505
/// # use aquifer::{DeviceBuffer, Stream, error::Result};
/// fn too_long(s: &Stream, x: DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
///     let part = x.as_slice();
///     drop(x);
///     s.copy(&part, y)
/// }
/// ```
///
/// Elements that are not plain data:
///
/// ```compile_fail,E0277
/// # use aquifer::{DeviceBuffer, DevicePool, Stream, error::Result};
/// fn of_strings(pool: &DevicePool, s: &Stream) -> Result<DeviceBuffer<String>> {
///     pool.buffer(s, 10) // `String: Pod` does not hold
/// }
/// ```
pub struct DeviceBuffer<T> {
    block: Block,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Allocates `len` elements from `resource`, for work on `stream` from now on. The alignment is
    /// that of every block.
    ///
    /// # Errors
    /// [`MemoryError::ZeroSize`] for elements of no size; [`MemoryError::TooLarge`]; the
    /// resource's.
    #[track_caller]
    pub fn new_in(
        resource: &(impl Resource + ?Sized),
        stream: &Stream,
        len: usize,
    ) -> Result<Self> {
        // Not in a closure: `track_caller` would report the closure's own line.
        let request = Self::request(len)?;
        Self::in_block(len, resource.allocate(stream, request)?, request)
    }

    /// Makes a buffer of `len` elements in the block that `alloc` returns.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new_in`]; [`MemoryError::OutOfBounds`] for a block that is too short.
    #[track_caller]
    pub fn from_alloc(len: usize, alloc: impl FnOnce(Request) -> Result<Block>) -> Result<Self> {
        let request = Self::request(len)?;
        Self::in_block(len, alloc(request)?, request)
    }

    fn request(len: usize) -> Result<Request> {
        if size_of::<T>() == 0 {
            return Err(MemoryError::ZeroSize);
        }
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        bytes
            .map(Request::bytes)
            .ok_or(MemoryError::TooLarge { requested: u64::MAX, limit: crate::request::MAX_OBJECT })
    }

    fn in_block(len: usize, block: Block, request: Request) -> Result<Self> {
        if block.bytes() < request.size() {
            return Err(MemoryError::OutOfBounds {
                offset: 0,
                len: request.size(),
                bytes: block.bytes(),
            });
        }
        Ok(Self { block, len, elements: PhantomData })
    }

    /// Turns `block` into as many elements of `T` as its bytes hold.
    ///
    /// # Errors
    /// [`Declined`] with the block in it: [`MemoryError::LengthMismatch`] if bytes are left over;
    /// [`MemoryError::BadAlignment`]; [`MemoryError::ZeroSize`] for elements of no size.
    pub fn from_block(block: Block) -> Result<Self, Declined<Block>> {
        match slice::counted::<T>(block.address(), block.bytes()) {
            Ok(len) => Ok(Self { block, len, elements: PhantomData }),
            Err(error) => Err(Declined { value: block, error }),
        }
    }

    /// Reinterprets the bytes as elements of another type.
    ///
    /// # Errors
    /// [`Declined`] with the buffer in it: [`MemoryError::LengthMismatch`] if bytes are left over;
    /// [`MemoryError::BadAlignment`]; [`MemoryError::ZeroSize`] for elements of no size.
    pub fn cast<U: Pod>(self) -> Result<DeviceBuffer<U>, Declined<Self>> {
        match slice::counted::<U>(self.block.address(), (self.len * size_of::<T>()) as u64) {
            Ok(len) => Ok(DeviceBuffer { block: self.block, len, elements: PhantomData }),
            Err(error) => Err(Declined { value: self, error }),
        }
    }

    /// Returns all elements as a shared slice.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice { part: BlockPart::whole(&self.block, self.len), elements: PhantomData }
    }

    /// Returns all elements as a mutable slice.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_, T> {
        DeviceSliceMut { part: BlockPart::whole(&self.block, self.len), elements: PhantomData }
    }

    /// Returns the elements in `range` as a shared slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        self.as_slice().slice(range)
    }

    /// Returns the elements in `range` as a mutable slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        self.as_mut_slice().into_slice(range)
    }

    /// Splits the buffer at `mid` into two shared slices.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn split_at(&self, mid: usize) -> Result<(DeviceSlice<'_, T>, DeviceSlice<'_, T>)> {
        self.as_slice().split_at(mid)
    }

    /// Splits the buffer at `mid` into two mutable slices. See [`DeviceSliceMut`] on the order of
    /// their uses.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn split_at_mut(
        &mut self,
        mid: usize,
    ) -> Result<(DeviceSliceMut<'_, T>, DeviceSliceMut<'_, T>)> {
        self.as_mut_slice().into_split(mid)
    }
}

impl<T> DeviceBuffer<T> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements: such a buffer takes no memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the first address on the device, for kernels and libraries that take a pointer. Call
    /// [`Block::prepare`] before work with this address is queued on another stream than the
    /// buffer's own.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    /// Returns a number that distinguishes the block from all others at this address, on a driver
    /// with an observer; 0 on other drivers.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.block.generation()
    }

    /// Returns the underlying block.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }

    pub(crate) fn block_mut(&mut self) -> &mut Block {
        &mut self.block
    }

    /// Returns the underlying block, without the type.
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

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. The elements lie in a block that the buffer owns. 2. and 3. As for the block.
unsafe impl<T> Operand for DeviceBuffer<T> {
    fn range(&self) -> DeviceRange {
        DeviceRange { bytes: (self.len * size_of::<T>()) as u64, ..self.block.range() }
    }
    fn machine(&self) -> Option<u64> {
        self.block.machine()
    }
    fn home_stream(&self) -> Option<RawStream> {
        self.block.home_stream()
    }
    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        self.block.order(stream, alive, access)
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. The owner has exclusive access to the buffer, and its slices borrow it.
unsafe impl<T> OperandMut for DeviceBuffer<T> {
    fn order_mut(
        &mut self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
    ) -> Result<()> {
        self.block.order_mut(stream, alive, access)
    }
}

impl<T> TrackUses for DeviceBuffer<T> {
    fn account(&self) -> Account<'_> {
        self.block.account()
    }
}

impl<T> Typed for DeviceBuffer<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.len
    }
}

/// A value that could not be adopted or returned, with the error.
///
/// See [`Adopted`] for an example.
pub struct Declined<V> {
    /// The value that was handed in.
    pub value: V,
    /// The reason.
    pub error: MemoryError,
}

impl<V> fmt::Debug for Declined<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<V> fmt::Display for Declined<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<V> error::Error for Declined<V> {}

impl<V> From<Declined<V>> for MemoryError {
    fn from(declined: Declined<V>) -> Self {
        declined.error
    }
}
