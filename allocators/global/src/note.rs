//! What is written behind each block of a [`Tracked`](crate::Tracked) allocator: whose it is.
//!
//! ```text
//!   asked of the allocator below   │ the caller's bytes ················ │ note │
//!                                  block                                 + size, unaligned, four bytes
//! ```
//!
//! Every block of such an allocator has one, so a free knows without a table and without reading
//! what it should not. Behind and not before the block, since then alignment costs nothing. A note
//! is the block's tag, or the number of its sample, which knows the tag.
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

/// The layout with room for a note; `None` if no block can be that large.
#[inline]
pub(crate) fn room_behind(layout: Layout) -> Option<Layout> {
    let most = isize::MAX as usize - BYTES - (layout.align() - 1);
    // SAFETY: 1. The alignment is that of a layout. 2. The size, rounded up to it, is at most
    // `isize::MAX`.
    (layout.size() <= most).then(|| unsafe {
        Layout::from_size_align_unchecked(layout.size() + BYTES, layout.align())
    })
}

/// The block's pointer as it came from the allocator below, with access to the note: the caller's
/// may have been narrowed to the caller's bytes.
#[inline]
pub(crate) fn whole(block: *mut u8) -> *mut u8 {
    ptr::with_exposed_provenance_mut(block.addr())
}

/// Counts a fresh block under the current tag, and notes whose it is.
///
/// # Safety
/// The block is fresh from the allocator below, which was asked for [`room_behind`] a layout of
/// this size.
#[inline]
pub(crate) unsafe fn sign(block: *mut u8, size: usize) {
    let slot = HERE.with(mine);
    let tag = tags::hold(slot, size);
    let note = sampled(sample::consider(slot, tag, size), tag);
    // SAFETY: the caller's promise.
    unsafe { write(block, size, note) };
}

/// The note of a live block.
///
/// # Safety
/// The block is live, was signed, and has this size.
#[inline]
pub(crate) unsafe fn read(block: *mut u8, size: usize) -> u32 {
    // SAFETY: 1. The block has as many bytes and a note behind them, written when it was signed. 2.
    // Its address was exposed then, with access to all of it.
    unsafe { whole(block).add(size).cast::<u32>().read_unaligned() }
}

/// # Safety
/// The block has room for a note behind so many bytes.
#[inline]
unsafe fn write(block: *mut u8, size: usize, note: u32) {
    let _ = block.expose_provenance();
    // SAFETY: the caller's promise.
    unsafe { block.add(size).cast::<u32>().write_unaligned(note) };
}

#[inline]
fn sampled(sample: Option<u32>, tag: u16) -> u32 {
    sample.map_or(u32::from(tag), |sample| sample | SAMPLED)
}

/// The tag in a note, and the sample.
#[inline]
fn meaning(note: u32) -> (u16, Option<u32>) {
    if note & SAMPLED == 0 {
        // Tags are no wider.
        (note as u16, None)
    } else {
        let sample = note & !SAMPLED;
        (sample::tag(sample), Some(sample))
    }
}

/// Counts that a block with this note is gone.
#[inline]
pub(crate) fn strike(note: u32, size: usize) {
    let (tag, sample) = meaning(note);
    if let Some(sample) = sample {
        sample::forget(sample);
    }
    tags::shrink(HERE.with(mine), tag, size, 1);
}

/// Counts that a block with this note has been resized, and notes whose it is. To the sampler it is
/// a new one.
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
    // SAFETY: the caller's promise.
    unsafe { write(block, new_size, note) };
}
