//! What `AddressSanitizer` is told: free memory of a pool is nobody's, and neither is what lies
//! behind a block's end.
//!
//! It then stops a program at the instruction that touches a block after its free, or beyond its
//! end, as it does for `malloc`. Builds without it have none of this.
//!
//! Pending blocks are left alone: copies that are on their way may touch them, and the simulator
//! makes those by the CPU.

use super::span::Span;
use crate::kernel;
use aquifer_core::sanitizer;
use std::{
    alloc::Layout,
    ptr::{self, NonNull},
};

/// The memory at an address of a pool's.
fn at(address: usize) -> NonNull<u8> {
    NonNull::new(ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
}

/// A block has been given out, or has become longer: its bytes may be touched, and those behind it
/// not.
#[inline(always)]
pub(super) fn given(block: NonNull<u8>, bytes: usize) {
    sanitizer::unpoison(block, bytes);
}

/// A block is about to be freed, if it is one: nobody may touch it from now on. Before anybody else
/// can have it.
#[inline(always)]
pub(super) fn going(generation: u64, block: NonNull<u8>, layout: Layout) {
    if sanitizer::IS_BUILT_IN
        && layout.size() > 0
        && let address = block.addr().get() as u64
        && let Some((span, slot)) = super::map::block_from(address)
        && span.life() == generation
        && layout.size() as u64 <= span.slot_bytes()
        && span.get(slot) == super::span::Slot::Live
    {
        free(span, address);
    }
}

/// A block goes back into the books.
#[inline(always)]
pub(super) fn free(span: &Span, address: u64) {
    sanitizer::poison(at(address as usize), span.slot_bytes() as usize);
}

/// A region has come to a pool.
pub(super) fn come(region: kernel::Span) {
    sanitizer::poison(at(region.start), region.len);
}

/// A region leaves, and its addresses may become anybody's.
pub(super) fn gone(region: kernel::Span) {
    sanitizer::unpoison(at(region.start), region.len);
}
