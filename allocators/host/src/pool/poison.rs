//! What `AddressSanitizer` is told: free memory of a pool is nobody's, and neither is what lies behind a block's end.
//!
//! It then stops a program at the instruction that touches a block after its free, or beyond its end, as it does for
//! `malloc`. Builds without it have none of this.
//!
//! Pending blocks are left alone: copies that are on their way may touch them, and the simulator makes those by the CPU.
#![cfg_attr(asan, expect(unsafe_code, reason = "calls AddressSanitizer's runtime"))]

use super::span::Span;
use crate::kernel;
use std::{alloc::Layout, ptr::NonNull};

#[cfg(asan)]
mod told {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn __asan_poison_memory_region(start: *const c_void, bytes: usize);
        fn __asan_unpoison_memory_region(start: *const c_void, bytes: usize);
    }

    pub(super) fn poison(address: u64, bytes: u64) {
        // SAFETY: 1. the memory is mapped, and nobody's.
        unsafe { __asan_poison_memory_region(address as *const c_void, bytes as usize) }
    }

    pub(super) fn unpoison(address: u64, bytes: u64) {
        // SAFETY: 1. the memory is mapped.
        unsafe { __asan_unpoison_memory_region(address as *const c_void, bytes as usize) }
    }
}

#[cfg(not(asan))]
mod told {
    #[inline(always)]
    pub(super) fn poison(_: u64, _: u64) {}

    #[inline(always)]
    pub(super) fn unpoison(_: u64, _: u64) {}
}

/// A block has been given out, or has become longer: its bytes may be touched, and those behind it not.
#[inline(always)]
pub(super) fn given(block: NonNull<u8>, bytes: usize) {
    told::unpoison(block.addr().get() as u64, bytes as u64);
}

/// A block is about to be freed, if it is one: nobody may touch it from now on. Before anybody else can have it.
#[inline(always)]
pub(super) fn going(generation: u64, block: NonNull<u8>, layout: Layout) {
    #[cfg(asan)]
    if layout.size() > 0
        && let address = block.addr().get() as u64
        && let Some((span, slot)) = super::map::block_from(address)
        && span.life() == generation
        && layout.size() as u64 <= span.slot_bytes()
        && span.get(slot) == super::span::Slot::Live
    {
        free(span, address);
    }
    #[cfg(not(asan))]
    let _ = (generation, block, layout);
}

/// A block goes back into the books.
#[inline(always)]
pub(super) fn free(span: &Span, address: u64) {
    told::poison(address, span.slot_bytes());
}

/// A region has come to a pool.
pub(super) fn come(region: kernel::Span) {
    told::poison(region.start as u64, region.len as u64);
}

/// A region leaves, and its addresses may become anybody's.
pub(super) fn gone(region: kernel::Span) {
    told::unpoison(region.start as u64, region.len as u64);
}
