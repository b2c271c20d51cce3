//! A second allocator for requests that the first refuses.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{Owns, copy_bytes, empty_block, zero_after};
use aquifer_core::{
    DeferReuse, DeviceId, Gate, Opaque, PoolStats, Request, Result as MemoryResult, impl_allocator,
};
use std::{ptr::NonNull, sync::Arc};

/// Two allocators, of which the second serves the requests that the first refuses.
///
/// A block is freed, grown and shrunk by the allocator it came from. If the first cannot grow or
/// shrink a block, the block moves to the second. The first must identify its blocks by their
/// address ([`Owns`]). Empty blocks belong to neither.
///
/// [`Opaque`] blocks return to their pool by themselves. If the first source refuses for any
/// reason, the second is tried. Both must be of one device, so that a stream fits both.
///
/// ```
/// use aquifer::{Arena, adapters::{ArenaSettings, Fallback, Owns}};
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let arena = Arena::with_settings_in(ArenaSettings::new().limit(4096), Global);
/// let both = Fallback::new(&arena, Global);
/// let small: Vec<u8, _> = Vec::with_capacity_in(1000, &both);
/// let large: Vec<u8, _> = Vec::with_capacity_in(10_000, &both);
/// assert_eq!(arena.stats().allocated, 1000);
/// # drop((small, large));
/// ```
#[derive(Clone, Debug)]
pub struct Fallback<A, B> {
    first: A,
    second: B,
}

impl<A, B> Fallback<A, B> {
    /// Creates an allocator that tries `first`, then `second`.
    pub const fn new(first: A, second: B) -> Self {
        Self { first, second }
    }

    /// Returns the first allocator.
    pub fn first(&self) -> &A {
        &self.first
    }

    /// Returns the allocator for requests that the first refuses.
    pub fn second(&self) -> &B {
        &self.second
    }
}

impl_allocator! {
    // SAFETY: 1. Every block belongs to `first` or to `second`, or is empty, and `Owns` identifies
    // which for as long as it lives. 2. A clone contains clones of both.
    unsafe impl [A: Allocator + Owns, B: Allocator] for Fallback<A, B> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(empty_block(layout));
            }
            self.first.allocate(layout).or_else(|_| self.second.allocate(layout))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(empty_block(layout));
            }
            self.first.allocate_zeroed(layout).or_else(|_| self.second.allocate_zeroed(layout))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            if layout.size() == 0 {
                return;
            }
            if self.first.owns(block) {
                // SAFETY: guaranteed by the caller, and the block belongs to `first`.
                unsafe { self.first.deallocate(block, layout) };
            } else {
                // SAFETY: guaranteed by the caller, and the block does not belong to `first`.
                unsafe { self.second.deallocate(block, layout) };
            }
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() == 0 {
                return self.allocate(new);
            }
            if !self.first.owns(block) {
                // SAFETY: guaranteed by the caller, and the block does not belong to `first`.
                return unsafe { self.second.grow(block, old, new) };
            }
            // SAFETY: guaranteed by the caller, and the block belongs to `first`. A refusal leaves
            // it unchanged.
            if let Ok(grown) = unsafe { self.first.grow(block, old, new) } {
                return Ok(grown);
            }
            let moved = self.second.allocate(new)?;
            // SAFETY: both blocks are live and have `old.size()` bytes.
            unsafe { copy_bytes(block, moved, old.size()) };
            // SAFETY: the caller gives up the block, and nothing reads it any more.
            unsafe { self.first.deallocate(block, old) };
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
            if new.size() == 0 {
                // SAFETY: the caller gives up the block.
                unsafe { self.deallocate(block, old) };
                return Ok(empty_block(new));
            }
            if !self.first.owns(block) {
                // SAFETY: guaranteed by the caller, and the block does not belong to `first`.
                return unsafe { self.second.shrink(block, old, new) };
            }
            // SAFETY: guaranteed by the caller, and the block belongs to `first`. A refusal leaves
            // it unchanged.
            if let Ok(shrunk) = unsafe { self.first.shrink(block, old, new) } {
                return Ok(shrunk);
            }
            let moved = self.second.allocate(new)?;
            // SAFETY: both blocks are live and have `new.size()` bytes.
            unsafe { copy_bytes(block, moved, new.size()) };
            // SAFETY: the caller gives up the block, and nothing reads it any more.
            unsafe { self.first.deallocate(block, old) };
            Ok(moved)
        }
    }
}

// SAFETY: the call is forwarded to the allocator of the block, which gives this guarantee.
unsafe impl<A: DeferReuse + Owns, B: DeferReuse> DeferReuse for Fallback<A, B> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        if self.first.owns(address) {
            self.first.defer(address, until)
        } else {
            self.second.defer(address, until)
        }
    }
}

// SAFETY: every block of at least one byte belongs to one of the two.
unsafe impl<A: Owns, B: Owns> Owns for Fallback<A, B> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.first.owns(block) || self.second.owns(block)
    }
}

impl<A: Opaque, B: Opaque<Stream = A::Stream, Block = A::Block>> Opaque for Fallback<A, B> {
    type Stream = A::Stream;
    type Block = A::Block;

    fn device(&self) -> DeviceId {
        self.first.device()
    }

    #[track_caller]
    fn allocate(&self, stream: &A::Stream, request: Request) -> MemoryResult<A::Block> {
        match self.first.allocate(stream, request) {
            Ok(block) => Ok(block),
            Err(_) => self.second.allocate(stream, request),
        }
    }

    fn stats(&self) -> PoolStats {
        self.first.stats() + self.second.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        Ok(self.first.trim(keep)? + self.second.trim(keep)?)
    }
}
