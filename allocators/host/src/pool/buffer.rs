//! A typed buffer in pinned memory.
#![expect(unsafe_code, reason = "views a block as elements, and promises that it stays")]

use super::{PinnedAllocator, PinnedPool};
use allocator_api2::{alloc::Allocator, boxed::Box as AllocBox};
use aquifer_core::{DeferReuse, Gate, MemoryError, Result};
use aquifer_stream::HostOwned;
use bytemuck::Pod;
use std::{
    alloc::Layout,
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::Arc,
};

/// An owned slice of plain elements in pinned memory.
///
/// Streams take it by value and return it when the copy is done.
///
/// ```
/// use aquifer::{PinnedBuf, Runtime};
/// let rt = Runtime::builder().or_sim_quietly().build()?;
/// let mut weights = PinnedBuf::<f32>::new_in(rt.pinned_near(0), 1024)?;
/// weights[3] = 0.5;
/// assert_eq!(weights.iter().sum::<f32>(), 0.5);
/// assert!(weights.is_pinned());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// A copy owns its buffer until it is done, so the buffer cannot be written, freed or grown before
/// that:
///
/// ```compile_fail,E0382
/// use aquifer::{OperandMut, PinnedBuf, Stream, Typed, error::Result};
/// fn race(s: &Stream, mut from: PinnedBuf<u8>, to: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<()> {
///     let flight = s.upload(from, to)?;
///     from[0] = 1; // the copy may still be reading it
///     flight.wait().map(drop)
/// }
/// ```
///
/// A scope borrows the buffer instead, and waits for its copies before it returns:
///
/// ```compile_fail,E0502
/// use allocator_api2::vec::Vec;
/// use aquifer::{OperandMut, PinnedAllocator, Stream, Typed, error::Result};
/// fn race(
///     s: &Stream,
///     from: &mut Vec<u8, PinnedAllocator>,
///     to: &mut (impl Typed<Item = u8> + OperandMut),
/// ) -> Result<()> {
///     s.scope(|c| {
///         c.upload(&from[..], to)?;
///         from.push(1); // may reallocate the block that is being copied
///         Ok(())
///     })?
/// }
/// ```
pub struct PinnedBuf<T: Pod> {
    elements: AllocBox<[T], PinnedAllocator>,
    pinned: bool,
}

impl PinnedPool {
    /// Allocates a buffer of `len` zeroed elements.
    ///
    /// # Errors
    /// As [`PinnedPool::allocate`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, len: usize) -> Result<PinnedBuf<T>> {
        PinnedBuf::new_in(self, len)
    }
}

impl<T: Pod> PinnedBuf<T> {
    /// Creates a buffer of `len` zeroed elements. Blocks when the pool has to grow.
    ///
    /// # Errors
    /// As [`PinnedPool::allocate`].
    #[track_caller]
    pub fn new_in(pool: &PinnedPool, len: usize) -> Result<Self> {
        Self::filled_by(pool, len, |block, bytes| {
            // SAFETY: 1. the block has that many bytes and is not shared.
            unsafe { block.write_bytes(0, bytes) };
        })
    }

    /// Creates a buffer with a copy of `elements`. Blocks when the pool has to grow.
    ///
    /// # Errors
    /// As [`PinnedPool::allocate`].
    #[track_caller]
    pub fn copy_in(pool: &PinnedPool, elements: &[T]) -> Result<Self> {
        Self::filled_by(pool, elements.len(), |block, bytes| {
            // SAFETY: 1. both have that many bytes. 2. a new block does not overlap borrowed
            // memory.
            unsafe { block.copy_from_nonoverlapping(NonNull::from(elements).cast(), bytes) };
        })
    }

    #[track_caller]
    fn filled_by(
        pool: &PinnedPool,
        len: usize,
        fill: impl FnOnce(NonNull<u8>, usize),
    ) -> Result<Self> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let layout = Layout::array::<T>(len)
            .map_err(|_| MemoryError::TooLarge { requested: bytes, limit: isize::MAX as u64 })?;
        let block = pool.allocate(layout)?.cast::<u8>();
        fill(block, layout.size());
        let elements = NonNull::slice_from_raw_parts(block.cast::<T>(), len);
        let pinned = layout.size() > 0 && pool.is_pinned(block).unwrap_or(false);
        // SAFETY: 1. the block belongs to this allocator's pool and generation, with the layout of
        // `[T; len]`. 2. its bytes are initialised, and any bytes are a valid `T`.
        let elements = unsafe { AllocBox::from_raw_in(elements.as_ptr(), pool.allocator()) };
        Ok(Self { elements, pinned })
    }

    /// Returns whether devices can access the buffer directly, without staging.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Converts the buffer into a boxed slice.
    #[must_use]
    pub fn into_boxed_slice(self) -> AllocBox<[T], PinnedAllocator> {
        self.elements
    }
}

impl<T: Pod> Deref for PinnedBuf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.elements
    }
}

impl<T: Pod> DerefMut for PinnedBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.elements
    }
}

// SAFETY: 1. the elements lie in the pool's memory, not in the buffer. 2. `DeferReuse` of the
// allocator guarantees it. A buffer without bytes has nothing to defer.
unsafe impl<T: Pod> HostOwned for PinnedBuf<T> {
    type Item = T;

    fn bytes(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self.elements[..])
    }

    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()> {
        if size_of_val(&self.elements[..]) == 0 {
            return Ok(());
        }
        let block = NonNull::from(&mut self.elements[..]).cast();
        DeferReuse::defer(AllocBox::allocator(&self.elements), block, until)
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for PinnedBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

const _: fn(PinnedAllocator) = |allocator| {
    fn is_allocator(_: impl Allocator + Send + Sync + Copy + 'static) {}
    is_allocator(allocator);
};
