//! Small blocks from one allocator, large ones from another.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{Owns, copy_bytes, zero_after};
use aquifer_core::{
    DeferReuse, DeviceId, Gate, Opaque, PoolStats, Request, Result as MemoryResult, impl_allocator,
};
use std::{ptr::NonNull, sync::Arc};

/// Two allocators: one for blocks up to a threshold, one for larger blocks.
///
/// The size of a block alone determines its allocator, so neither allocator needs to identify its
/// blocks. For this, a small block is cut to the threshold if the allocator returned more. A block
/// that grows or shrinks across the threshold moves.
///
/// If one refuses, the other is not tried. [`Fallback`](super::Fallback) does that. Both may be
/// sources of [`Opaque`] memory of one device.
///
/// ```
/// use aquifer::adapters::{CountingAllocator, Segregate};
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let (nodes, buffers) = (CountingAllocator::new(Global), CountingAllocator::new(Global));
/// let by_size = Segregate::new(4096, &nodes, &buffers);
/// let small: Vec<u8, _> = Vec::with_capacity_in(4096, &by_size);
/// let large: Vec<u8, _> = Vec::with_capacity_in(4097, &by_size);
/// assert_eq!((nodes.stats().live, buffers.stats().live), (4096, 4097));
/// # drop((small, large));
/// ```
#[derive(Clone, Debug)]
pub struct Segregate<S, L> {
    threshold: usize,
    small: S,
    large: L,
}

impl<S, L> Segregate<S, L> {
    /// Creates an allocator that takes blocks of up to `threshold` bytes from `small`, and others
    /// from `large`.
    pub const fn new(threshold: usize, small: S, large: L) -> Self {
        Self { threshold, small, large }
    }

    /// Returns the largest size of a small block.
    pub const fn threshold(&self) -> usize {
        self.threshold
    }

    /// Returns the allocator of small blocks.
    pub const fn small(&self) -> &S {
        &self.small
    }

    /// Returns the allocator of large blocks.
    pub const fn large(&self) -> &L {
        &self.large
    }

    /// Cuts a block of `small` to at most the threshold, so that every size that fits it is small
    /// too.
    fn truncate(&self, block: NonNull<[u8]>) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(block.cast(), block.len().min(self.threshold))
    }
}

impl_allocator! {
    // SAFETY: 1. Every block belongs to `small` or to `large`. 2. Any size that fits it determines
    // which: blocks of `small` are cut to the threshold, and blocks of `large` are longer. 3. A
    // clone contains clones of both and the same threshold.
    unsafe impl [S: Allocator, L: Allocator] for Segregate<S, L> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() > self.threshold {
                return self.large.allocate(layout);
            }
            self.small.allocate(layout).map(|block| self.truncate(block))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() > self.threshold {
                return self.large.allocate_zeroed(layout);
            }
            self.small.allocate_zeroed(layout).map(|block| self.truncate(block))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            if layout.size() > self.threshold {
                // SAFETY: guaranteed by the caller, and by its size the block belongs to `large`.
                unsafe { self.large.deallocate(block, layout) };
            } else {
                // SAFETY: guaranteed by the caller, and by its size the block belongs to `small`.
                unsafe { self.small.deallocate(block, layout) };
            }
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > self.threshold {
                // SAFETY: guaranteed by the caller, and by its size the block belongs to `large`.
                return unsafe { self.large.grow(block, old, new) };
            }
            if new.size() <= self.threshold {
                // SAFETY: guaranteed by the caller, and by its size the block belongs to `small`.
                return unsafe { self.small.grow(block, old, new) }.map(|block| self.truncate(block));
            }
            let moved = self.large.allocate(new)?;
            // SAFETY: 1. The block is live and has that many bytes. 2. So does the new one.
            unsafe { copy_bytes(block, moved, old.size()) };
            // SAFETY: the caller gives up the block, which by its size belongs to `small`, and
            // nothing reads it any more.
            unsafe { self.small.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            let grown = unsafe { self.grow(block, old, new) }?;
            // SAFETY: the block is live, belongs to the caller, and has more than the old bytes.
            unsafe { zero_after(grown, old.size()) };
            Ok(grown)
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() <= self.threshold {
                // SAFETY: guaranteed by the caller, and by its size the block belongs to `small`.
                return unsafe { self.small.shrink(block, old, new) }.map(|block| self.truncate(block));
            }
            if new.size() > self.threshold {
                // SAFETY: guaranteed by the caller, and by its size the block belongs to `large`.
                return unsafe { self.large.shrink(block, old, new) };
            }
            let moved = self.small.allocate(new).map(|block| self.truncate(block))?;
            // SAFETY: 1. The block is live and has that many bytes. 2. So does the new one.
            unsafe { copy_bytes(block, moved, new.size()) };
            // SAFETY: the caller gives up the block, which by its size belongs to `large`, and
            // nothing reads it any more.
            unsafe { self.large.deallocate(block, old) };
            Ok(moved)
        }
    }
}

// SAFETY: the call is forwarded to the allocator of the block, which gives this guarantee.
unsafe impl<S: DeferReuse + Owns, L: DeferReuse> DeferReuse for Segregate<S, L> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        if self.small.owns(address) {
            self.small.defer(address, until)
        } else {
            self.large.defer(address, until)
        }
    }
}

// SAFETY: every block belongs to one of the two.
unsafe impl<S: Owns, L: Owns> Owns for Segregate<S, L> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.small.owns(block) || self.large.owns(block)
    }
}

impl<S: Opaque, L: Opaque<Stream = S::Stream, Block = S::Block>> Opaque for Segregate<S, L> {
    type Stream = S::Stream;
    type Block = S::Block;

    fn device(&self) -> DeviceId {
        self.small.device()
    }

    #[track_caller]
    fn allocate(&self, stream: &S::Stream, request: Request) -> MemoryResult<S::Block> {
        if request.size() > self.threshold as u64 {
            return self.large.allocate(stream, request);
        }
        self.small.allocate(stream, request)
    }

    fn stats(&self) -> PoolStats {
        self.small.stats() + self.large.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        Ok(self.small.trim(keep)? + self.large.trim(keep)?)
    }
}
