//! The statistics of a heap.

/// The statistics of a heap at one moment.
///
/// `live_bytes + slab_free_bytes + free_bytes` is the managed total.
///
/// See the example of [`Heap`](crate::Heap).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HeapStats {
    /// Bytes that were added and not removed.
    pub managed_bytes: u64,
    /// Actual sizes of the live blocks.
    pub live_bytes: u64,
    /// The number of live blocks.
    pub live_blocks: u64,
    /// Bytes of the free extents.
    pub free_bytes: u64,
    /// Bytes of the free slots in slabs that contain live blocks.
    pub slab_free_bytes: u64,
    /// The size of the longest free extent.
    pub largest_free: u64,
    /// The number of free extents.
    pub free_extents: u64,
}

impl HeapStats {
    /// Returns the fraction of the free memory outside the longest extent: 0 if all of it is in one
    /// extent, near 1 if it is highly fragmented.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.largest_free as f64 / self.free_bytes as f64
    }
}
