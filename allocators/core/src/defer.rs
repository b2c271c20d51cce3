//! The contract of an allocator whose freed blocks a device may still read: the only unsafe
//! declaration of this crate.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait and passes its promise on; holds no unsafe block"
)]

use crate::{__api::api2::alloc::Allocator, Gate, Result};
use std::{ptr::NonNull, sync::Arc};

/// An allocator that can delay the reuse of a freed block until a gate opens.
///
/// This makes asynchronous copies of a `Vec` safe: the vector may be dropped or forgotten during
/// the copy, and its bytes stay unchanged until the copy is done.
///
/// # Safety
/// After `defer` has returned `Ok`, the bytes of the block that contains `address` are neither
/// allocated again, nor written by the allocator, nor unmapped before `until` is open, whatever is
/// dropped, freed or forgotten in the meantime.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot hold a freed block back until a device is done with it",
    label = "this allocator would give the block out again while a copy is on its way",
    note = "allocators of pinned memory can, and arenas and wrappers over them: `PinnedPool::allocator`",
    note = "memory of other allocators is copied by `Stream::try_scope`, which waits before it returns"
)]
pub unsafe trait DeferReuse: Allocator {
    /// Registers `until` for the live block of this allocator that contains `address`.
    ///
    /// # Errors
    /// [`ForeignBlock`](crate::MemoryError::ForeignBlock) if this allocator has not allocated
    /// `address`.
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()>;
}

// SAFETY: 1. the contract is that of the allocator behind the reference, which serves the same
// blocks.
unsafe impl<A: DeferReuse + ?Sized> DeferReuse for &A {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()> {
        (**self).defer(address, until)
    }
}
