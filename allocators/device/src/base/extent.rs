//! What a block is, wherever it comes from.

use super::record::LiveBlockEntry;
use aquifer_core::{Tag, budget::Leased, panics::Contained};
use std::any::Any;

/// Address and request of a block.
///
/// A cache stores this and a reference to itself for a block, two halves of sixteen bytes. Each
/// half is always copied whole. A value stored in parts and loaded whole cannot be forwarded from
/// the store buffer, which would stall every free.
#[derive(Clone, Copy)]
pub(crate) struct BlockExtent {
    pub(crate) address: u64,
    pub(crate) request: PackedRequest,
}

/// The size and the tag of a request, packed into eight bytes: no request reaches 2⁴⁸.
///
/// In parts, so that compilers copy a [`BlockExtent`] as one value of sixteen bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PackedRequest {
    low: u32,
    high: u16,
    tag: Tag,
}

impl PackedRequest {
    #[inline]
    pub(crate) fn new(bytes: u64, tag: Tag) -> Self {
        debug_assert!(bytes < 1 << 48, "a request was not checked");
        Self { low: bytes as u32, high: (bytes >> 32) as u16, tag }
    }

    #[inline]
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }

    #[inline]
    pub(crate) fn tag(self) -> Tag {
        self.tag
    }
}

/// Metadata that few blocks have.
#[derive(Default)]
pub(crate) struct BlockMeta {
    /// Distinguishes the block from all others at its address, if the driver has an observer; 0 if
    /// not.
    pub(crate) generation: u64,
    /// Values dropped when the memory is really free, such as charges of wrappers.
    pub(crate) until_free: UntilFree,
    /// Live bytes of a tenant and of a tag. They end with the block, even if other streams still
    /// use its memory.
    pub(crate) live: LiveCharges,
}

/// The accounts that a block's live bytes are charged to.
#[derive(Default)]
pub(crate) struct LiveCharges {
    pub(crate) of_tenant: Option<Leased>,
    pub(crate) of_tag: Option<Leased>,
    /// The block's entry in the list of live blocks, if leaks are reported and it is in no cache.
    pub(crate) listed: Option<LiveBlockEntry>,
}

impl LiveCharges {
    /// Returns whether neither account is charged.
    pub(crate) fn is_none(&self) -> bool {
        self.of_tenant.is_none() && self.of_tag.is_none()
    }

    /// Splits `bytes` off each charge that has as many.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let split = |charge: &mut Option<Leased>| charge.as_mut()?.split(bytes);
        Self {
            of_tenant: split(&mut self.of_tenant),
            of_tag: split(&mut self.of_tag),
            listed: None,
        }
    }
}

impl BlockMeta {
    /// Returns whether the cache need not process the extras.
    pub(crate) fn has_only_charges(&self) -> bool {
        self.generation == 0 && self.until_free.is_none()
    }
}

/// Values dropped when a block's memory is really free.
///
/// A panic in one of these drops is contained, since the pool may itself be within a drop.
pub(crate) type UntilFree = Option<Box<Vec<AttachedValue>>>;

/// A value that is dropped when a block's memory is really free.
pub(crate) type AttachedValue = Contained<Box<dyn Any + Send + Sync>>;

/// An optional value that is boxed on demand. If it is absent, the drop costs one comparison.
pub(crate) struct LazyBox<T>(Option<Box<T>>);

impl<T> LazyBox<T> {
    pub(crate) const NONE: Self = Self(None);

    pub(crate) fn new(value: T) -> Self {
        Self(Some(Box::new(value)))
    }

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_deref()
    }

    pub(crate) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    pub(crate) fn get_or_default(&mut self) -> &mut T
    where
        T: Default,
    {
        self.0.get_or_insert_default()
    }

    /// Returns the value, or its default.
    pub(crate) fn or_default(mut self) -> T
    where
        T: Default,
    {
        self.0.take().map_or_else(T::default, |value| *value)
    }
}

impl<T> Drop for LazyBox<T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            discard(value);
        }
    }
}

/// Kept out of line, so that the inlined drop stays small.
#[cold]
#[inline(never)]
fn discard<T>(value: Box<T>) {
    drop(value);
}
