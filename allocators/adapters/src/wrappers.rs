//! Adapters that each add one rule to another allocator.
//!
//! | wrapper | rule |
//! |---|---|
//! | [`Limit`] | live bytes are bounded by a [`Budget`](aquifer_core::Budget) |
//! | [`CountingAllocator`] | counts live bytes and blocks, their peak, and the calls of each kind |
//! | [`Tagged`] | attributes allocations to one [`Tag`](aquifer_core::Tag) in the pools below |
//! | [`Fallback`] | a second allocator serves requests that the first refuses |
//! | [`Segregate`] | small blocks come from one allocator, larger ones from another |
//!
//! They wrap both kinds of memory. Over an `Allocator` they are allocators. Over a source
//! of [`Opaque`](aquifer_core::Opaque) blocks, such as a device pool, they are such a source. An
//! opaque source never becomes an allocator of host memory:
//!
//! ```compile_fail,E0277
//! use aquifer::{Limit, Opaque};
//! fn on_the_device<M: Opaque>(pool: Limit<M>) -> allocator_api2::vec::Vec<u8, Limit<M>> {
//!     allocator_api2::vec::Vec::new_in(pool)
//! }
//! ```
//!
//! An adapter that counts bytes returns blocks of exactly the requested size, even if the upstream
//! allocator returned more. A block may be freed with any size between both, so only equal sizes
//! can be counted exactly.
//!
//! No adapter blocks or unwinds, unless the upstream allocator does.
#![expect(unsafe_code, reason = "declares an unsafe trait, and copies from block to block")]

mod counted;
mod fallback;
mod limit;
mod segregate;
mod tagged;

pub use counted::CountingAllocator;
pub use fallback::Fallback;
pub use limit::Limit;
pub use segregate::Segregate;
pub use tagged::Tagged;

use std::{alloc::Layout, num::NonZero, ptr::NonNull};

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

/// Returns an empty block, which belongs to no allocator.
fn empty_block(layout: Layout) -> NonNull<[u8]> {
    // An alignment is never zero.
    let address = NonZero::new(layout.align()).unwrap_or(NonZero::<usize>::MIN);
    NonNull::slice_from_raw_parts(NonNull::without_provenance(address), 0)
}

/// Copies the first `bytes` of a block into another.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, and both are live blocks.
unsafe fn copy_bytes(from: NonNull<u8>, to: NonNull<[u8]>, bytes: usize) {
    // SAFETY: guaranteed by the caller. Live blocks do not overlap, and bytes need no alignment.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(from, bytes) };
}

/// Cuts a block to the size that was requested and counted.
fn cut(block: NonNull<[u8]>, bytes: usize) -> NonNull<[u8]> {
    debug_assert!(block.len() >= bytes, "a block of {} bytes for {bytes}", block.len());
    NonNull::slice_from_raw_parts(block.cast(), bytes)
}
