//! The footer behind each block of a [`Tracked`](crate::Tracked) allocator, which records the
//! block's tag.
//!
//! ```text
//!   allocated from the inner one   │ the caller's bytes ················ │ footer │
//!                                  block                                 + size, unaligned, four bytes
//! ```
//!
//! Every block of such an allocator has a footer, so a free needs no table and reads only its own
//! block. The footer lies behind the block, because there it needs no padding for alignment. A
//! footer is the tag of the block, or the number of its sample, which records the tag.
#![expect(unsafe_code, reason = "reads and writes behind blocks")]

use crate::{
    account::{tags, thread_slot},
    sample,
    thread_state::THREAD_STATE,
};
use std::{alloc::Layout, ptr};

/// Bytes of a footer.
pub(crate) const BYTES: usize = size_of::<u32>();
/// Set in the number of a sample, clear in a tag.
const SAMPLED: u32 = 1 << 31;

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
    let footer = encode(sample::maybe_sample(slot, tag, size), tag);
    // SAFETY: guaranteed by the caller.
    unsafe { write(block, size, footer) };
}

/// Returns the footer of a live block.
///
/// # Safety
/// The block is live, was recorded, and has this size.
#[inline]
pub(crate) unsafe fn read(block: *mut u8, size: usize) -> u32 {
    // SAFETY: 1. The block has `size` bytes and a footer behind them, which was written when the
    // block was recorded. 2. Its address was exposed then, with provenance for all of it.
    unsafe { underlying(block).add(size).cast::<u32>().read_unaligned() }
}

/// # Safety
/// The block has room for a footer behind `size` bytes.
#[inline]
unsafe fn write(block: *mut u8, size: usize, footer: u32) {
    let _ = block.expose_provenance();
    // SAFETY: guaranteed by the caller.
    unsafe { block.add(size).cast::<u32>().write_unaligned(footer) };
}

#[inline]
fn encode(sample: Option<u32>, tag: u16) -> u32 {
    sample.map_or(u32::from(tag), |sample| sample | SAMPLED)
}

/// Returns the tag in a footer, and the sample.
#[inline]
fn decode(footer: u32) -> (u16, Option<u32>) {
    if footer & SAMPLED == 0 {
        // A footer without a sample is a tag, which fits.
        (footer as u16, None)
    } else {
        let sample = footer & !SAMPLED;
        (sample::tag(sample), Some(sample))
    }
}

/// Counts that a block with this footer is freed.
#[inline]
pub(crate) fn record_free(footer: u32, size: usize) {
    let (tag, sample) = decode(footer);
    if let Some(sample) = sample {
        sample::free(sample);
    }
    tags::shrink(THREAD_STATE.with(thread_slot), tag, size, 1);
}

/// Counts that a block with this footer has been resized, and writes its new footer. The sampler
/// treats it as a new block.
///
/// # Safety
/// The block has room for a footer behind `new_size` bytes.
#[inline]
pub(crate) unsafe fn record_resize(block: *mut u8, footer: u32, old_size: usize, new_size: usize) {
    let (tag, sample) = decode(footer);
    if let Some(sample) = sample {
        sample::free(sample);
    }
    let slot = THREAD_STATE.with(thread_slot);
    match new_size.checked_sub(old_size) {
        Some(growth) => tags::grow(slot, tag, growth),
        None => tags::shrink(slot, tag, old_size - new_size, 0),
    }
    let footer = encode(sample::maybe_sample(slot, tag, new_size), tag);
    // SAFETY: guaranteed by the caller.
    unsafe { write(block, new_size, footer) };
}
