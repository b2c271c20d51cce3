//! Identification of an allocator's blocks by address.
#![expect(unsafe_code, reason = "declares an unsafe trait and passes it on to references")]

use std::ptr::NonNull;

/// An allocator that can identify its blocks by their address.
///
/// # Safety
/// As long as it is an allocator, `owns` returns `true` for every block of at least one byte that
/// it has allocated and that was not freed, and `false` for every such block of an allocator whose
/// memory comes from elsewhere. Never unwinds.
pub unsafe trait Owns {
    /// Returns whether the block that contains this address belongs to this allocator.
    fn owns(&self, block: NonNull<u8>) -> bool;
}

// SAFETY: forwards to the same allocator.
unsafe impl<T: Owns + ?Sized> Owns for &T {
    fn owns(&self, block: NonNull<u8>) -> bool {
        (**self).owns(block)
    }
}
