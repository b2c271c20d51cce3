//! Queries of a heap's contents.

use core::iter::{self, successors};
use core::ops::ControlFlow::{self, Continue};

use super::Heap;
use crate::records::{NIL, State};
use crate::{Extent, Range};

impl Heap {
    /// An iterator over all entirely free ranges, in address order.
    ///
    /// Free slots of slabs with a live block are not included. The iteration visits every record,
    /// including those of live blocks.
    pub fn free_extents(&self) -> impl Iterator<Item = Extent> + '_ {
        let mut at = self.records.first();
        iter::from_fn(move || {
            while at != NIL && !self.is_wholly_free(at) {
                at = self.records[at].next;
            }
            let (extent, after) = (at != NIL).then(|| self.free_run_from(at))?;
            at = after;
            Some(extent)
        })
    }

    /// Calls `visit` with each free extent of at least `least` bytes, until it breaks. The cost
    /// depends on these alone, and not on smaller ones or on live blocks. Smaller sizes come first,
    /// in steps of a 32nd of a doubling.
    ///
    /// ```
    /// use aquifer_heap::{Config, Heap, Range};
    /// use core::ops::ControlFlow;
    ///
    /// let mut heap = Heap::new(Config::device());
    /// heap.add(Range::new(0, 1 << 20), 0)?;
    /// heap.add(Range::new(4 << 20, 8 << 20), 0)?;
    /// let mut long = Vec::new();
    /// let _ = heap.visit_free(2 << 20, |extent| {
    ///     long.push(extent.range);
    ///     ControlFlow::Continue(())
    /// });
    /// assert_eq!(long, [Range::new(4 << 20, 8 << 20)]);
    /// # Ok::<(), aquifer_heap::HeapError>(())
    /// ```
    pub fn visit_free(
        &self,
        least: u64,
        mut visit: impl FnMut(Extent) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let units = least.div_ceil(self.config.unit).max(1);
        self.bins.visit_from(&self.records, units, &mut |id| {
            if self.leads(id, least) { visit(self.free_run_around(id)) } else { Continue(()) }
        })?;
        let mut spares = self.slabs.spares().map(|spare| self.slabs.slab(spare).record);
        spares.try_for_each(|id| {
            let run = self.free_run_around(id);
            if run.range.len >= least && self.leads(id, least) { visit(run) } else { Continue(()) }
        })
    }

    /// Returns whether a free run is visited at this record: the lowest that is long enough alone,
    /// or the lowest spare if none is.
    fn leads(&self, id: u32, least: u64) -> bool {
        let record = |id: u32| &self.records[id];
        let long = |id: u32| record(id).state == State::Free && record(id).len >= least;
        let mut below = successors(self.joined_below(id), |&at| self.joined_below(at));
        let mut above = successors(self.joined_above(id), |&at| self.joined_above(at));
        if long(id) {
            !below.any(long)
        } else {
            !below.any(|at| long(at) || record(at).state == State::Slab) && !above.any(long)
        }
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
}
