//! Attribution of allocations to a tag.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::Rule;
use aquifer_core::{DeviceId, Opaque, PoolStats, Request, Result as MemoryResult, Tag, tagged};
use std::ptr::NonNull;

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

    fn rule(&self) -> &Tag {
        &self.tag
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

adapter_with_rule!(Tagged);

impl Rule for Tag {
    type Grant = ();

    fn admit(&self, _bytes: usize) -> Option<()> {
        Some(())
    }

    fn keep(&self, (): (), _fresh: bool) {}

    fn release(&self, _bytes: usize, _gone: bool) {}

    fn within<R>(&self, call: impl FnOnce() -> R) -> R {
        tagged(*self, call)
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
