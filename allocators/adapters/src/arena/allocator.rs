//! Allocator implementations for `&Arena` and `&Scope`.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{Arena, ArenaScope};
use crate::Owns;
use allocator_api2::alloc::Allocator as UpstreamAllocator;
use aquifer_core::{DeferReuse, Gate, Result as MemoryResult, impl_allocator};
use std::{ptr::NonNull, sync::Arc};

/// Implements the allocator traits for both handle types.
macro_rules! bump_allocator {
    ([$($generics:tt)*] $t:ty) => {
        impl_allocator! {
            // SAFETY: 1. Blocks lie in chunks of the upstream allocator, which live as long as the
            // arena, and the type borrows the arena. 2. Two blocks never overlap: `next` moves past
            // each block. It moves back only over the last block when that is deallocated, or at a
            // reset or a rewind. The borrow excludes a reset, and the caller of a rewind guarantees
            // its safety. 3. Copies of the reference refer to the same arena.
            unsafe impl [$($generics)*] for $t {
                #[inline]
                fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    let block = self.bump().allocate(layout).ok_or(AllocError)?;
                    Ok(NonNull::slice_from_raw_parts(block, layout.size()))
                }

                #[inline]
                unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                    // SAFETY: guaranteed by the caller.
                    unsafe { self.bump().deallocate(block, layout.size()) };
                }

                unsafe fn grow(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: guaranteed by the caller.
                    let block = unsafe { self.bump().grow(block, old, new) }.ok_or(AllocError)?;
                    Ok(NonNull::slice_from_raw_parts(block, new.size()))
                }

                unsafe fn grow_zeroed(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: guaranteed by the caller.
                    let block = unsafe { self.bump().grow(block, old, new) }.ok_or(AllocError)?;
                    // SAFETY: the block has `new.size()` bytes, so the new ones are writable.
                    unsafe { block.add(old.size()).write_bytes(0, new.size() - old.size()) };
                    Ok(NonNull::slice_from_raw_parts(block, new.size()))
                }

                unsafe fn shrink(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: guaranteed by the caller.
                    let block = unsafe { self.bump().shrink(block, old, new) }.ok_or(AllocError)?;
                    Ok(NonNull::slice_from_raw_parts(block, new.size()))
                }
            }
        }
    };
}

bump_allocator!([A: UpstreamAllocator] &Arena<A>);
bump_allocator!([A: UpstreamAllocator] &ArenaScope<'_, A>);

// SAFETY: 1. The chunk that contains the address is deferred in the upstream allocator. So no
// reset, drop or forgotten arena lets its bytes be reused or unmapped before the gate is open. 2.
// Inside the arena, no byte below the next free byte of that chunk is allocated before the gate is
// open: `floor` and `deferred` keep allocations above it.
unsafe impl<A: DeferReuse> DeferReuse for &Arena<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.bump().defer(address, until)
    }
}

// SAFETY: as for the arena.
unsafe impl<A: DeferReuse> DeferReuse for &ArenaScope<'_, A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.bump().defer(address, until)
    }
}

// SAFETY: every block lies in a chunk in use, and no other allocator owns a block in a chunk while
// the arena holds it.
unsafe impl<A: UpstreamAllocator> Owns for Arena<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.bump().owns(block.addr().get())
    }
}
