//! Whose block is this?
#![expect(unsafe_code, reason = "declares an unsafe trait and passes it on to references")]

use std::ptr::NonNull;

/// An allocator that knows its blocks by their address.
///
/// # Safety
/// As long as it is an allocator, `owns` is true for every block of at least one byte that it has
/// handed out and not taken back, and false for every such block of an allocator that takes its
/// memory from elsewhere. Never unwinds.
pub unsafe trait Owns {
    /// Whether this block, or one that holds this address, is one of its own.
    fn owns(&self, block: NonNull<u8>) -> bool;
}

// SAFETY: the same allocator answers.
unsafe impl<T: Owns + ?Sized> Owns for &T {
    fn owns(&self, block: NonNull<u8>) -> bool {
        (**self).owns(block)
    }
}
