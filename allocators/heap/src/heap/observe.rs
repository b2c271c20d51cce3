//! Queries of a heap's contents.

use core::iter::FusedIterator;

use super::Heap;
use crate::records::NIL;
use crate::{Extent, HeapStats, Range};

impl Heap {
    /// An iterator over all entirely free ranges, in address order.
    ///
    /// Free slots of slabs with a live block are not included. The iteration visits every record,
    /// including those of live blocks.
    #[must_use]
    pub fn free_extents(&self) -> FreeExtents<'_> {
        FreeExtents { heap: self, at: self.records.first() }
    }

    /// Returns the free extent that contains `address`.
    #[must_use]
    pub fn free_extent_at(&self, address: u64) -> Option<Extent> {
        let id = self.record_containing(address).filter(|&id| self.is_wholly_free(id))?;
        Some(self.free_run_around(id))
    }

    /// Returns whether every byte of `range` is free, so that it can be [removed](Self::remove).
    #[must_use]
    pub fn is_free(&self, range: Range) -> bool {
        self.find_free(range).is_ok()
    }

    /// Returns whether `address` is in the heap.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        self.record_containing(address).is_some()
    }

    /// Returns the size of the longest free extent, in bytes.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        let extent = self.bins.longest(&self.records).map_or(0, |id| self.records[id].len);
        let spares = self
            .slabs
            .spares()
            .map(|slab| self.free_run_around(self.slabs.slab(slab).record).range.len);
        spares.fold(extent, u64::max)
    }

    /// Returns the bytes of the free extents.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes + self.slabs.spare_bytes()
    }

    /// Returns the actual sizes of the live blocks, in bytes.
    #[must_use]
    pub const fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Returns the number of live blocks.
    #[must_use]
    pub const fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    /// Returns the bytes that were added and not removed.
    #[must_use]
    pub const fn managed_bytes(&self) -> u64 {
        self.managed_bytes
    }

    /// Returns the statistics. Visits every record to count the extents.
    #[must_use]
    pub fn stats(&self) -> HeapStats {
        let free_bytes = self.free_bytes();
        let (mut largest_free, mut free_extents) = (0, 0);
        for extent in self.free_extents() {
            largest_free = extent.range.len.max(largest_free);
            free_extents += 1;
        }
        HeapStats {
            managed_bytes: self.managed_bytes,
            live_bytes: self.live_bytes,
            live_blocks: self.live_blocks,
            free_bytes,
            slab_free_bytes: self.managed_bytes - self.live_bytes - free_bytes,
            largest_free,
            free_extents,
        }
    }
}

/// An iterator over the free extents of a heap in address order, from [`Heap::free_extents`].
#[derive(Clone, Debug)]
pub struct FreeExtents<'a> {
    heap: &'a Heap,
    /// The next record.
    at: u32,
}

impl Iterator for FreeExtents<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        while self.at != NIL {
            if self.heap.is_wholly_free(self.at) {
                let (extent, after) = self.heap.free_run_from(self.at);
                self.at = after;
                return Some(extent);
            }
            self.at = self.heap.records[self.at].next;
        }
        None
    }
}

impl FusedIterator for FreeExtents<'_> {}
