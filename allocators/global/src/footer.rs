//! The footer behind each block of a [`Tracked`](crate::Tracked) allocator, which records the
//! block's tag.
//!
//! ```text
//!   allocated from the inner one   │ the caller's bytes ················ │ footer │
//!                                  block                                 + size, unaligned, two bytes
//! ```
//!
//! Every block of such an allocator has a footer, so a free needs no table and reads only its own
//! block. The footer lies behind the block, because there it needs no padding for alignment.
#![expect(unsafe_code, reason = "reads and writes behind blocks")]

use crate::{
    account::{tags, thread_slot},
    thread_state::THREAD_STATE,
};
use std::{alloc::Layout, ptr};

/// Bytes of a footer.
pub(crate) const BYTES: usize = size_of::<u16>();

/// Returns the layout with room for a footer, or `None` if no block can be that large.
#[inline]
pub(crate) fn with_footer(layout: Layout) -> Option<Layout> {
    let most = isize::MAX as usize - BYTES - (layout.align() - 1);
    // SAFETY: 1. The alignment comes from a layout. 2. The size, rounded up to the alignment, is at
    // most `isize::MAX`.
    (layout.size() <= most).then(|| unsafe {
        Layout::from_size_align_unchecked(layout.size() + BYTES, layout.align())
    })
}

/// Returns the pointer of the underlying allocation, with provenance for the footer. The provenance
/// of the caller's pointer may be limited to the caller's bytes.
#[inline]
pub(crate) fn underlying(block: *mut u8) -> *mut u8 {
    ptr::with_exposed_provenance_mut(block.addr())
}

/// Counts a new block under the current tag, and writes its footer.
///
/// # Safety
/// The block is new, from the underlying allocator, and was allocated with [`with_footer`] a layout
/// of this size.
#[inline]
pub(crate) unsafe fn record_new(block: *mut u8, size: usize) {
    let slot = THREAD_STATE.with(thread_slot);
    let tag = tags::count_block(slot, size);
    // SAFETY: guaranteed by the caller.
    unsafe { write(block, size, tag) };
}

/// Returns the footer of a live block: its tag.
///
/// # Safety
/// The block is live, was recorded, and has this size.
#[inline]
pub(crate) unsafe fn read(block: *mut u8, size: usize) -> u16 {
    // SAFETY: 1. The block has `size` bytes and a footer behind them, which was written when the
    // block was recorded. 2. Its address was exposed then, with provenance for all of it.
    unsafe { underlying(block).add(size).cast::<u16>().read_unaligned() }
}

/// # Safety
/// The block has room for a footer behind `size` bytes.
#[inline]
unsafe fn write(block: *mut u8, size: usize, tag: u16) {
    let _ = block.expose_provenance();
    // SAFETY: guaranteed by the caller.
    unsafe { block.add(size).cast::<u16>().write_unaligned(tag) };
}

/// Counts that a block of this tag is freed.
#[inline]
pub(crate) fn record_free(tag: u16, size: usize) {
    tags::shrink(THREAD_STATE.with(thread_slot), tag, size, 1);
}

/// Counts that a block of this tag has been resized, and writes its new footer.
///
/// # Safety
/// The block has room for a footer behind `new_size` bytes.
#[inline]
pub(crate) unsafe fn record_resize(block: *mut u8, tag: u16, old_size: usize, new_size: usize) {
    let slot = THREAD_STATE.with(thread_slot);
    match new_size.checked_sub(old_size) {
        Some(growth) => tags::grow(slot, tag, growth),
        None => tags::shrink(slot, tag, old_size - new_size, 0),
    }
    // SAFETY: guaranteed by the caller.
    unsafe { write(block, new_size, tag) };
}
