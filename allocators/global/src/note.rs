//! The note behind each block of a [`Tracked`](crate::Tracked) allocator, which records the block's
//! tag.
//!
//! ```text
//!   asked of the allocator below   │ the caller's bytes ················ │ note │
//!                                  block                                 + size, unaligned, four bytes
//! ```
//!
//! Every block of such an allocator has a note, so a free needs no table and reads only its own
//! block. The note lies behind the block, because there it needs no padding for alignment. A note
//! is the tag of the block, or the number of its sample, which records the tag.
#![expect(unsafe_code, reason = "reads and writes behind blocks")]

use crate::{
    account::{mine, tags},
    here::HERE,
    sample,
};
use std::{alloc::Layout, ptr};

/// Bytes of a note.
pub(crate) const BYTES: usize = size_of::<u32>();
/// Set in the number of a sample, clear in a tag.
const SAMPLED: u32 = 1 << 31;

/// Returns the layout with room for a note, or `None` if no block can be that large.
#[inline]
pub(crate) fn room_behind(layout: Layout) -> Option<Layout> {
    let most = isize::MAX as usize - BYTES - (layout.align() - 1);
    // SAFETY: 1. The alignment comes from a layout. 2. The size, rounded up to the alignment, is at
    // most `isize::MAX`.
    (layout.size() <= most).then(|| unsafe {
        Layout::from_size_align_unchecked(layout.size() + BYTES, layout.align())
    })
}

/// Returns the pointer of the underlying allocation, with provenance for the note. The provenance
/// of the caller's pointer may be limited to the caller's bytes.
#[inline]
pub(crate) fn whole(block: *mut u8) -> *mut u8 {
    ptr::with_exposed_provenance_mut(block.addr())
}

/// Counts a new block under the current tag, and writes its note.
///
/// # Safety
/// The block is new, from the underlying allocator, and was allocated with [`room_behind`] a layout
/// of this size.
#[inline]
pub(crate) unsafe fn sign(block: *mut u8, size: usize) {
    let slot = HERE.with(mine);
    let tag = tags::hold(slot, size);
    let note = sampled(sample::consider(slot, tag, size), tag);
    // SAFETY: guaranteed by the caller.
    unsafe { write(block, size, note) };
}

/// Returns the note of a live block.
///
/// # Safety
/// The block is live, was signed, and has this size.
#[inline]
pub(crate) unsafe fn read(block: *mut u8, size: usize) -> u32 {
    // SAFETY: 1. The block has `size` bytes and a note behind them, which was written when the
    // block was signed. 2. Its address was exposed then, with provenance for all of it.
    unsafe { whole(block).add(size).cast::<u32>().read_unaligned() }
}

/// # Safety
/// The block has room for a note behind `size` bytes.
#[inline]
unsafe fn write(block: *mut u8, size: usize, note: u32) {
    let _ = block.expose_provenance();
    // SAFETY: guaranteed by the caller.
    unsafe { block.add(size).cast::<u32>().write_unaligned(note) };
}

#[inline]
fn sampled(sample: Option<u32>, tag: u16) -> u32 {
    sample.map_or(u32::from(tag), |sample| sample | SAMPLED)
}

/// Returns the tag in a note, and the sample.
#[inline]
fn meaning(note: u32) -> (u16, Option<u32>) {
    if note & SAMPLED == 0 {
        // A note without a sample is a tag, which fits.
        (note as u16, None)
    } else {
        let sample = note & !SAMPLED;
        (sample::tag(sample), Some(sample))
    }
}

/// Counts that a block with this note is freed.
#[inline]
pub(crate) fn strike(note: u32, size: usize) {
    let (tag, sample) = meaning(note);
    if let Some(sample) = sample {
        sample::forget(sample);
    }
    tags::shrink(HERE.with(mine), tag, size, 1);
}

/// Counts that a block with this note has been resized, and writes its new note. The sampler treats
/// it as a new block.
///
/// # Safety
/// The block has room for a note behind `new_size` bytes.
#[inline]
pub(crate) unsafe fn sign_again(block: *mut u8, note: u32, old_size: usize, new_size: usize) {
    let (tag, sample) = meaning(note);
    if let Some(sample) = sample {
        sample::forget(sample);
    }
    let slot = HERE.with(mine);
    match new_size.checked_sub(old_size) {
        Some(growth) => tags::grow(slot, tag, growth),
        None => tags::shrink(slot, tag, old_size - new_size, 0),
    }
    let note = sampled(sample::consider(slot, tag, new_size), tag);
    // SAFETY: guaranteed by the caller.
    unsafe { write(block, new_size, note) };
}
