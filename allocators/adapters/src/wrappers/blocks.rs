//! Block helpers shared by several adapters.
#![expect(unsafe_code, reason = "copies from block to block")]

use std::{alloc::Layout, num::NonZero, ptr::NonNull};

/// Returns an empty block, which belongs to no allocator.
pub(super) fn empty_block(layout: Layout) -> NonNull<[u8]> {
    // An alignment is never zero.
    let address = NonZero::new(layout.align()).unwrap_or(NonZero::<usize>::MIN);
    NonNull::slice_from_raw_parts(NonNull::without_provenance(address), 0)
}

/// Copies the first `bytes` of a block into another.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, and both are live blocks.
pub(super) unsafe fn copy_bytes(from: NonNull<u8>, to: NonNull<[u8]>, bytes: usize) {
    // SAFETY: guaranteed by the caller. Live blocks do not overlap, and bytes need no alignment.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(from, bytes) };
}
