//! Where the bytes are.

/// Where a heap's bytes are, at one moment.
///
/// `live_bytes + slab_free_bytes + free_bytes` is what the heap manages.
///
/// Its example is that of [`Heap`](crate::Heap).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HeapStats {
    /// Bytes that were added and not removed.
    pub managed_bytes: u64,
    /// Real sizes of the live blocks.
    pub live_bytes: u64,
    /// How many blocks are live.
    pub live_blocks: u64,
    /// Bytes of the free extents.
    pub free_bytes: u64,
    /// Free slots of slabs that live blocks keep.
    pub slab_free_bytes: u64,
    /// The longest free extent.
    pub largest_free: u64,
    /// How many free extents there are.
    pub free_extents: u64,
}

impl HeapStats {
    /// How much of the free memory lies outside the longest extent: 0 when it is all in one,
    /// near 1 when it is dust.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.largest_free as f64 / self.free_bytes as f64
    }
}
