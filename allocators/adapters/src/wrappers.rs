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

/// What an adapter over one allocator does about each block.
trait Rule {
    /// The permission to allocate, held while the upstream allocator is called.
    type Grant;

    /// Admits `bytes` more. `None` refuses them, and the upstream allocator is not called.
    fn admit(&self, bytes: usize) -> Option<Self::Grant>;

    /// The upstream allocator has served the request. `fresh`: with a new block.
    fn keep(&self, grant: Self::Grant, fresh: bool);

    /// Bytes have been freed. `gone`: with their block.
    fn release(&self, bytes: usize, gone: bool);

    /// The upstream allocator has refused.
    fn refused(&self) {}

    /// Calls the upstream allocator.
    fn within<R>(&self, call: impl FnOnce() -> R) -> R {
        call()
    }
}

/// Allocates a block (`old` is `None`) or resizes one, under a rule. Returns the block, cut to the
/// requested size.
fn obtain<R: Rule, E>(
    rule: &R,
    old: Option<usize>,
    new: usize,
    refusal: E,
    call: impl FnOnce() -> Result<NonNull<[u8]>, E>,
) -> Result<NonNull<[u8]>, E> {
    let size = old.unwrap_or(0);
    let grant = rule.admit(new.saturating_sub(size)).ok_or(refusal)?;
    match rule.within(call) {
        Ok(block) => {
            rule.keep(grant, old.is_none());
            if new < size {
                rule.release(size - new, false);
            }
            Ok(cut(block, new))
        }
        Err(refused) => {
            drop(grant);
            rule.refused();
            Err(refused)
        }
    }
}

/// A live opaque block under a rule. Dropped when its memory is free.
struct LiveBlock<R: Rule> {
    rule: Arc<R>,
    bytes: usize,
}

impl<R: Rule> Drop for LiveBlock<R> {
    fn drop(&mut self) {
        self.rule.release(self.bytes, true);
    }
}

/// Implements the traits of an adapter with a field `inner` and a method `rule`.
macro_rules! adapter_with_rule {
    ($adapter:ident) => {
        aquifer_core::impl_allocator! {
            // SAFETY: 1. Every block belongs to the upstream allocator, cut to the requested size,
            // which fits it. 2. A clone contains a clone of that allocator.
            unsafe impl [A: Allocator] for $adapter<A> {
                fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    let call = || self.inner.allocate(layout);
                    super::obtain(self.rule(), None, layout.size(), AllocError, call)
                }

                fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    let call = || self.inner.allocate_zeroed(layout);
                    super::obtain(self.rule(), None, layout.size(), AllocError, call)
                }

                unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                    // SAFETY: guaranteed by the caller. The block belongs to the upstream
                    // allocator.
                    unsafe { self.inner.deallocate(block, layout) };
                    super::Rule::release(self.rule(), layout.size(), true);
                }

                unsafe fn grow(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: guaranteed by the caller.
                    let call = || unsafe { self.inner.grow(block, old, new) };
                    super::obtain(self.rule(), Some(old.size()), new.size(), AllocError, call)
                }

                unsafe fn grow_zeroed(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: guaranteed by the caller. `old` is exact, so all bytes after it
                    // become zero.
                    let call = || unsafe { self.inner.grow_zeroed(block, old, new) };
                    super::obtain(self.rule(), Some(old.size()), new.size(), AllocError, call)
                }

                unsafe fn shrink(
                    &self,
                    block: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: guaranteed by the caller.
                    let call = || unsafe { self.inner.shrink(block, old, new) };
                    super::obtain(self.rule(), Some(old.size()), new.size(), AllocError, call)
                }
            }
        }

        // SAFETY: all blocks belong to the upstream allocator, which gives this guarantee.
        unsafe impl<A: aquifer_core::DeferReuse> aquifer_core::DeferReuse for $adapter<A> {
            fn defer(
                &self,
                address: NonNull<u8>,
                until: std::sync::Arc<dyn aquifer_core::Gate>,
            ) -> aquifer_core::Result<()> {
                self.inner.defer(address, until)
            }
        }

        // SAFETY: all blocks belong to the upstream allocator.
        unsafe impl<A: super::Owns> super::Owns for $adapter<A> {
            fn owns(&self, block: NonNull<u8>) -> bool {
                self.inner.owns(block)
            }
        }
    };
}

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

use std::{alloc::Layout, num::NonZero, ptr::NonNull, sync::Arc};

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

/// Zeroes what a block has grown by.
///
/// # Safety
/// The block is live, has at least `old` bytes, and nobody else accesses it.
unsafe fn zero_after(block: NonNull<[u8]>, old: usize) {
    debug_assert!(block.len() >= old, "a block of {} bytes has grown from {old}", block.len());
    // SAFETY: guaranteed by the caller.
    unsafe { block.cast::<u8>().add(old).write_bytes(0, block.len() - old) };
}

/// Cuts a block to the size that was requested and counted.
fn cut(block: NonNull<[u8]>, bytes: usize) -> NonNull<[u8]> {
    debug_assert!(block.len() >= bytes, "a block of {} bytes for {bytes}", block.len());
    NonNull::slice_from_raw_parts(block.cast(), bytes)
}
