//! Ids of the things that a pool hands out.
//!
//! An [`IdSpace`] creates ids that contain the number of the space, so that a pool rejects ids of
//! other pools, and a generation, so that it rejects stale ids.

use std::{
    fmt, hash,
    marker::PhantomData,
    sync::atomic::{AtomicU64, Ordering},
};

/// A device, identified by the driver's ordinal.
///
/// Any ordinal can be written down. The driver returns an error for one that does not exist.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// An id of a `K`, valid only in the space that created it.
///
/// See the example of [`IdSpace`].
pub struct Id<K> {
    space: u64,
    index: u32,
    generation: u32,
    kind: PhantomData<fn() -> K>,
}

/// The source of the [`Id`]s of one owner.
///
/// ```
/// use aquifer_core::IdSpace;
/// struct Stream;
/// let (ours, theirs) = (IdSpace::<Stream>::new(), IdSpace::<Stream>::new());
/// let id = ours.mint(3, 1);
/// assert_eq!(ours.resolve(id), Some((3, 1)));
/// assert_eq!(theirs.resolve(id), None);
/// ```
pub struct IdSpace<K> {
    space: u64,
    kind: PhantomData<fn() -> K>,
}

/// The number of the next space. A 64-bit counter does not overflow.
static NEXT_SPACE: AtomicU64 = AtomicU64::new(1);

impl<K> IdSpace<K> {
    /// Creates a unique space.
    #[must_use]
    pub fn new() -> Self {
        Self { space: NEXT_SPACE.fetch_add(1, Ordering::Relaxed), kind: PhantomData }
    }

    /// Creates the id of slot `index` in its `generation`.
    #[must_use]
    pub fn mint(&self, index: u32, generation: u32) -> Id<K> {
        Id { space: self.space, index, generation, kind: PhantomData }
    }

    /// Returns slot and generation of an id of this space, or `None` if another space created it.
    #[must_use]
    pub fn resolve(&self, id: Id<K>) -> Option<(u32, u32)> {
        (id.space == self.space).then_some((id.index, id.generation))
    }
}

impl<K> Default for IdSpace<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> fmt::Debug for IdSpace<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IdSpace").field(&self.space).finish()
    }
}

impl<K> Id<K> {
    /// Returns the slot, for display only: pools resolve an id instead.
    #[must_use]
    pub fn index(self) -> u32 {
        self.index
    }
}

// Manual impls, since a derive would require the same of `K`.
impl<K> Clone for Id<K> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K> Copy for Id<K> {}
impl<K> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        (self.space, self.index, self.generation) == (other.space, other.index, other.generation)
    }
}
impl<K> Eq for Id<K> {}
impl<K> hash::Hash for Id<K> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        (self.space, self.index, self.generation).hash(state);
    }
}
impl<K> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({}.{}.{})", self.space, self.index, self.generation)
    }
}
impl<K> fmt::Display for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.index)
    }
}

/// The kind of memory, and the device or the NUMA node that it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum MemoryLocation {
    /// Memory of a device.
    Device(DeviceId),
    /// Pinned memory of a NUMA node, or of an unknown node.
    Host(Option<u32>),
    /// The global allocator.
    Global,
}
