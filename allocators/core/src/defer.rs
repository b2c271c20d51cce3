//! The one unsafe *declaration* of this crate: a promise about blocks that a device may still read.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait and passes its promise on; holds no unsafe block"
)]

use crate::{__api::api2::alloc::Allocator, Gate, Result};
use std::{ptr::NonNull, sync::Arc};

/// An allocator that can hold a freed block back until a gate opens.
///
/// This is what makes asynchronous copies of a `Vec` safe: the vector may be dropped, or forgotten,
/// while the copy is on its way, and its bytes stay what they are until the copy is done.
///
/// # Safety
/// After `defer` has answered `Ok`, the bytes of the block that holds `address` are neither given
/// out again, nor written by the allocator, nor unmapped before `until` is open, whatever is
/// dropped, freed or forgotten meanwhile.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot hold a freed block back until a device is done with it",
    label = "this allocator would give the block out again while a copy is on its way",
    note = "allocators of pinned memory can, and arenas and wrappers over them: `PinnedPool::allocator`",
    note = "memory of other allocators is copied by `Stream::try_scope`, which waits before it returns"
)]
pub unsafe trait DeferReuse: Allocator {
    /// Notes `until` on the live block of this allocator that holds `address`.
    ///
    /// # Errors
    /// [`ForeignBlock`](crate::MemoryError::ForeignBlock) for an address that this allocator has
    /// not given out.
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()>;
}

// SAFETY: 1. the promise of the allocator behind the reference, which serves the same blocks.
unsafe impl<A: DeferReuse + ?Sized> DeferReuse for &A {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()> {
        (**self).defer(address, until)
    }
}
