//! `&Arena` and `&Scope` as allocators.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{Arena, Scope};
use crate::Owns;
use allocator_api2::alloc::Allocator as UpstreamAllocator;
use aquifer_core::{DeferReuse, Gate, Result as MemoryResult, impl_allocator};
use std::{ptr::NonNull, sync::Arc};

/// One body for both: they lead to the same engine.
macro_rules! bump_allocator {
    ([$($generics:tt)*] $t:ty) => {
        impl_allocator! {
            // SAFETY: 1. Blocks lie in chunks of the allocator below, which stay while the arena does: a borrow of it
            // stands in the type. 2. Two blocks never overlap: `next` moves past each, and back only over the last
            // block when that is given up, or at a reset or a rewind, which the borrow excludes or whose caller
            // answers for it. 3. Copies of the reference lead to the same arena.
            unsafe impl [$($generics)*] for $t {
                #[inline]
                fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    let block = self.bump().allocate(layout).ok_or(AllocError)?;
                    Ok(NonNull::slice_from_raw_parts(block, layout.size()))
                }

                #[inline]
                unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                    // SAFETY: the caller's promise.
                    unsafe { self.bump().deallocate(block, layout.size()) };
                }

                unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: the caller's promise.
                    let block = unsafe { self.bump().grow(block, old, new) }.ok_or(AllocError)?;
                    Ok(NonNull::slice_from_raw_parts(block, new.size()))
                }

                unsafe fn grow_zeroed(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: the caller's promise.
                    let block = unsafe { self.bump().grow(block, old, new) }.ok_or(AllocError)?;
                    // SAFETY: the block has `new.size()` bytes, so the new ones are writable.
                    unsafe { block.add(old.size()).write_bytes(0, new.size() - old.size()) };
                    Ok(NonNull::slice_from_raw_parts(block, new.size()))
                }

                unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: the caller's promise.
                    let block = unsafe { self.bump().shrink(block, old, new) }.ok_or(AllocError)?;
                    Ok(NonNull::slice_from_raw_parts(block, new.size()))
                }
            }
        }
    };
}

bump_allocator!([A: UpstreamAllocator] &Arena<A>);
bump_allocator!([A: UpstreamAllocator] &Scope<'_, A>);

// SAFETY: 1. The chunk that holds the address is deferred in the allocator below, so neither a
// reset, a drop nor a forgotten arena gives its bytes to anybody, or unmaps them, before the gate
// is open. 2. Inside the arena nothing below the next free byte of that chunk is handed out before
// the gate is open: `floor` and `held` keep the engine above it.
unsafe impl<A: DeferReuse> DeferReuse for &Arena<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.bump().defer(address, until)
    }
}

// SAFETY: as for the arena.
unsafe impl<A: DeferReuse> DeferReuse for &Scope<'_, A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.bump().defer(address, until)
    }
}

// SAFETY: every block lies in a chunk in use, and while the arena holds a chunk nobody else can own
// a block in it.
unsafe impl<A: UpstreamAllocator> Owns for Arena<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.bump().owns(block.addr().get())
    }
}
