//! Attribution of allocations to a tag.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::Owns;
use aquifer_core::{
    DeferReuse, DeviceId, Gate, Opaque, PoolStats, Request, Result as MemoryResult, Tag,
    impl_allocator, tagged,
};
use std::{ptr::NonNull, sync::Arc};

/// An allocator whose allocations all have one [`Tag`], independent of the current scope.
///
/// The pools below see it as [`Tag::current`] and count under it. Over [`Opaque`] memory it
/// replaces the tag of the request.
///
/// ```
/// use aquifer::{Tag, adapters::Tagged};
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let kv = Tagged::new(Global, Tag::named("kv-cache"));
/// let pages: Vec<u8, _> = Vec::with_capacity_in(4096, &kv);
/// # drop(pages);
/// ```
#[derive(Clone, Debug)]
pub struct Tagged<A> {
    inner: A,
    tag: Tag,
}

impl<A> Tagged<A> {
    /// Creates an adapter that allocates from `inner` under `tag`.
    pub fn new(inner: A, tag: Tag) -> Self {
        Self { inner, tag }
    }

    /// Returns the tag.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

impl_allocator! {
    // SAFETY: every call is forwarded to the upstream allocator, which gives these guarantees.
    unsafe impl [A: Allocator] for Tagged<A> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            tagged(self.tag, || self.inner.allocate(layout))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            tagged(self.tag, || self.inner.allocate_zeroed(layout))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.deallocate(block, layout) };
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            tagged(self.tag, || unsafe { self.inner.grow(block, old, new) })
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            tagged(self.tag, || unsafe { self.inner.grow_zeroed(block, old, new) })
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            tagged(self.tag, || unsafe { self.inner.shrink(block, old, new) })
        }
    }
}

// SAFETY: all blocks belong to the upstream allocator, which gives this guarantee.
unsafe impl<A: DeferReuse> DeferReuse for Tagged<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.inner.defer(address, until)
    }
}

// SAFETY: all blocks belong to the upstream allocator.
unsafe impl<A: Owns> Owns for Tagged<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.inner.owns(block)
    }
}

impl<M: Opaque> Opaque for Tagged<M> {
    type Stream = M::Stream;
    type Block = M::Block;

    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    #[track_caller]
    fn allocate(&self, stream: &M::Stream, request: Request) -> MemoryResult<M::Block> {
        self.inner.allocate(stream, request.tag(self.tag))
    }

    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        self.inner.trim(keep)
    }
}
