//! A second allocator for what the first refuses.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{
    Owns,
    blocks::{copy, nothing},
};
use aquifer_core::{
    DeferReuse, DeviceId, Gate, Opaque, PoolStats, Request, Result as MemoryResult, impl_allocator,
};
use std::{ptr::NonNull, sync::Arc};

/// Two allocators: the second serves what the first refuses.
///
/// A block goes back where it came from, and grows and shrinks there; one that the first cannot
/// grow or shrink moves to the second. The first one tells its blocks by their address ([`Owns`]).
/// Blocks of no bytes belong to neither.
///
/// Blocks of [`Opaque`] memory know their way home by themselves. Where the first refuses, for
/// whatever reason, the second answers; both are of one device, so that a stream serves both.
///
/// ```
/// use aquifer_adapters::{Arena, ArenaSettings, Fallback, Owns};
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
    /// Asks `first`, then `second`.
    pub const fn new(first: A, second: B) -> Self {
        Self { first, second }
    }

    /// The allocator that is asked first.
    pub fn first(&self) -> &A {
        &self.first
    }

    /// The allocator that is asked for what the first refuses.
    pub fn second(&self) -> &B {
        &self.second
    }
}

impl_allocator! {
    // SAFETY: 1. Every block is one of `first` or of `second`, or has no bytes, and `Owns` tells which for as long as it
    // lives. 2. A clone has clones of both.
    unsafe impl [A: Allocator + Owns, B: Allocator] for Fallback<A, B> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(nothing(layout));
            }
            self.first.allocate(layout).or_else(|_| self.second.allocate(layout))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(nothing(layout));
            }
            self.first.allocate_zeroed(layout).or_else(|_| self.second.allocate_zeroed(layout))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            if layout.size() == 0 {
                return;
            }
            if self.first.owns(block) {
                // SAFETY: the caller's promise, and the block is `first`'s.
                unsafe { self.first.deallocate(block, layout) };
            } else {
                // SAFETY: the caller's promise, and the block is not `first`'s.
                unsafe { self.second.deallocate(block, layout) };
            }
        }

        unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() == 0 {
                return self.allocate(new);
            }
            if !self.first.owns(block) {
                // SAFETY: the caller's promise, and the block is not `first`'s.
                return unsafe { self.second.grow(block, old, new) };
            }
            // SAFETY: the caller's promise, and the block is `first`'s. If it refuses the block is as it was.
            if let Ok(grown) = unsafe { self.first.grow(block, old, new) } {
                return Ok(grown);
            }
            let moved = self.second.allocate(new)?;
            // SAFETY: both blocks are live and have `old.size()` bytes.
            unsafe { copy(block, moved, old.size()) };
            // SAFETY: the caller hands the block over, and nothing reads it any more.
            unsafe { self.first.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() == 0 {
                return self.allocate_zeroed(new);
            }
            if !self.first.owns(block) {
                // SAFETY: the caller's promise, and the block is not `first`'s.
                return unsafe { self.second.grow_zeroed(block, old, new) };
            }
            // SAFETY: the caller's promise, and the block is `first`'s. If it refuses the block is as it was.
            if let Ok(grown) = unsafe { self.first.grow_zeroed(block, old, new) } {
                return Ok(grown);
            }
            let moved = self.second.allocate_zeroed(new)?;
            // SAFETY: both blocks are live and have `old.size()` bytes.
            unsafe { copy(block, moved, old.size()) };
            // SAFETY: the caller hands the block over, and nothing reads it any more.
            unsafe { self.first.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if new.size() == 0 {
                // SAFETY: the caller hands the block over.
                unsafe { self.deallocate(block, old) };
                return Ok(nothing(new));
            }
            if !self.first.owns(block) {
                // SAFETY: the caller's promise, and the block is not `first`'s.
                return unsafe { self.second.shrink(block, old, new) };
            }
            // SAFETY: the caller's promise, and the block is `first`'s. If it refuses the block is as it was.
            if let Ok(shrunk) = unsafe { self.first.shrink(block, old, new) } {
                return Ok(shrunk);
            }
            let moved = self.second.allocate(new)?;
            // SAFETY: both blocks are live and have `new.size()` bytes.
            unsafe { copy(block, moved, new.size()) };
            // SAFETY: the caller hands the block over, and nothing reads it any more.
            unsafe { self.first.deallocate(block, old) };
            Ok(moved)
        }
    }
}

// SAFETY: every block is one of an allocator that makes this promise, and it is asked.
unsafe impl<A: DeferReuse + Owns, B: DeferReuse> DeferReuse for Fallback<A, B> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        if self.first.owns(address) {
            self.first.defer(address, until)
        } else {
            self.second.defer(address, until)
        }
    }
}

// SAFETY: every block of at least one byte is one of the two.
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
