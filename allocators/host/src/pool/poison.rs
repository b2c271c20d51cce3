//! Annotations for `AddressSanitizer`: free memory of a pool, and the rest of a slot behind its
//! block, are poisoned.
//!
//! `AddressSanitizer` then reports an access after a free or beyond the end of a block, as it does
//! for `malloc`. In builds without it these functions do nothing.
//!
//! Pending blocks are not poisoned: copies in flight may access them, and the simulator performs
//! copies on the CPU.

use super::span::SlabSpan;
use crate::kernel;
use aquifer_core::sanitizer;
use std::{
    alloc::Layout,
    ptr::{self, NonNull},
};

/// Returns a pointer to an address of a pool.
fn at(address: usize) -> NonNull<u8> {
    NonNull::new(ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
}

/// Unpoisons the bytes of a block that was allocated or has grown. The rest of its slot stays
/// poisoned.
#[inline(always)]
pub(super) fn on_allocate(block: NonNull<u8>, bytes: usize) {
    sanitizer::unpoison(block, bytes);
}

/// Poisons a live block before it is freed, and so before another thread can allocate it.
#[inline(always)]
pub(super) fn on_free(generation: u64, block: NonNull<u8>, layout: Layout) {
    if sanitizer::IS_BUILT_IN
        && layout.size() > 0
        && let address = block.addr().get() as u64
        && let Some((span, slot)) = super::page_map::block_starting_at(address)
        && span.generation() == generation
        && layout.size() as u64 <= span.slot_bytes()
        && span.get(slot) == super::span::SlotState::Live
    {
        on_return_to_heap(span, address);
    }
}

/// Poisons a block that returns to the heap.
#[inline(always)]
pub(super) fn on_return_to_heap(span: &SlabSpan, address: u64) {
    sanitizer::poison(at(address as usize), span.slot_bytes() as usize);
}

/// Poisons a new region.
pub(super) fn on_region_added(region: kernel::Span) {
    sanitizer::poison(at(region.start), region.len);
}

/// Unpoisons a region that leaves the pool, since its addresses may be reused.
pub(super) fn on_region_removed(region: kernel::Span) {
    sanitizer::unpoison(at(region.start), region.len);
}
