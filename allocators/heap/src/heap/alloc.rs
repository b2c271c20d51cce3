//! Allocation.

use super::Heap;
use crate::classes::class_of;
use crate::range::{Key, SLAB_BIT};
use crate::records::{NIL, State};
use crate::slab::AllocatedSlot;
use crate::{HeapBlock, HeapError, Range};

/// How many extents an aligned request tries in order of size, before it takes one that fits at any
/// alignment.
const ALIGNED_TRIES: usize = 8;
/// How many slabs with room an aligned request tries.
const ALIGNED_SLAB_TRIES: usize = 8;

/// Returns `bytes` rounded up to a multiple of `align`, which is a power of two, so no division is
/// needed.
#[inline]
const fn round_up(bytes: u64, align: u64) -> Option<u64> {
    match bytes.checked_add(align - 1) {
        Some(beyond) => Some(beyond & !(align - 1)),
        None => None,
    }
}

impl Heap {
    /// Allocates a block of at least `bytes` bytes at a multiple of `align`. Returns `None` if no
    /// free memory fits it now, if `bytes` is zero, or if `align` is not a power of two.
    ///
    /// The block is cut from the low end of the smallest free extent that fits. Sizes up to
    /// [`Config::small_max`](crate::Config::small_max) share slabs. Stamps are ignored: whether
    /// queued work still uses the bytes is up to the caller.
    ///
    /// The time is bounded, with one exception: an aligned request that fits only at a favourable
    /// address is found by visiting all extents that are long enough. This is the last attempt
    /// before `None`.
    #[must_use]
    pub fn alloc(&mut self, bytes: u64, align: u64) -> Option<HeapBlock> {
        // Two fast paths, with the same results as the full search.
        if align == self.config.unit && !(self.live_blocks == 0 && self.slabs.has_several_spares())
        {
            if bytes > self.config.small_max {
                return self.alloc_exact(self.whole_units(bytes)?, align);
            } else if bytes > 0
                && let slab =
                    self.slabs.first_with_room(class_of(((bytes - 1) >> self.unit_shift) + 1))
                && slab != NIL
            {
                return Some(self.alloc_slot(slab));
            }
        }
        self.alloc_slow(bytes, align)
    }

    /// Like [`alloc`](Self::alloc), for any request.
    #[inline(never)]
    fn alloc_slow(&mut self, bytes: u64, align: u64) -> Option<HeapBlock> {
        if bytes == 0 || !align.is_power_of_two() {
            return None;
        }
        if self.live_blocks == 0 && self.slabs.has_several_spares() {
            // No block is live: dissolves the spares if several sizes have one. A program that
            // frees everything and starts again then gets the same addresses as the first time. A
            // loop over one size keeps its slab.
            self.dissolve_spares();
        }
        let align = align.max(self.config.unit);
        if bytes <= self.config.small_max
            && align <= self.config.page
            && let Some(small) =
                round_up(bytes, align).filter(|&small| small <= self.config.small_max)
        {
            return self.alloc_small(small, bytes, align);
        }
        self.alloc_exact(self.whole_units(bytes)?, align)
    }

    /// Allocates exactly the free range `range` as one block.
    ///
    /// It may have any size. The block does not share a slab.
    ///
    /// # Errors
    ///
    /// [`HeapError::BadRange`], [`HeapError::NotFree`], [`HeapError::Border`] if the range is free
    /// but contains a border, or [`HeapError::TooManyRecords`].
    pub fn alloc_at(&mut self, range: Range) -> Result<HeapBlock, HeapError> {
        let first = self.find_free(range)?;
        let mut at = first;
        while self.records[at].end() < range.end() {
            let next = self.records[at].next;
            if !self.records.mergeable(at, next) {
                return Err(HeapError::Border { range, at: self.records[at].end() });
            }
            at = next;
        }
        if !self.records.has_room_for(2) {
            return Err(HeapError::TooManyRecords);
        }
        let extent = self.dissolve_spares_in(range, first);
        let record = self.carve(extent, range.start, range.len);
        Ok(self.mark_live(record))
    }

    /// Returns `bytes` rounded up to whole units.
    pub(super) const fn whole_units(&self, bytes: u64) -> Option<u64> {
        round_up(bytes, self.config.unit)
    }

    /// Allocates a slot for `rounded` bytes, a multiple of `align` and of the unit, or an exact
    /// block of `bytes` if no slab is available.
    fn alloc_small(&mut self, rounded: u64, bytes: u64, align: u64) -> Option<HeapBlock> {
        let class = class_of(rounded >> self.unit_shift);
        if let Some(slab) = self.slab_with_room(class, align) {
            return Some(self.alloc_slot(slab));
        }
        if let Some(slab) = self.new_slab(class, align) {
            return Some(self.alloc_slot(slab));
        }
        if let Some(block) = self.alloc_exact(self.whole_units(bytes)?, align) {
            return Some(block);
        }
        // Last resort: a slot of a larger class, which wastes more than an eighth.
        let mut class = class;
        loop {
            class = self.slabs.class_with_room(class)?;
            if self.slabs.slot_bytes(class).is_multiple_of(align)
                && let Some(slab) = self.slab_with_room(class, align)
            {
                return Some(self.alloc_slot(slab));
            }
            class += 1;
        }
    }

    /// Returns a slab of `class` that has room and whose slots are aligned to `align`.
    fn slab_with_room(&self, class: usize, align: u64) -> Option<u32> {
        let mut at = self.slabs.first_with_room(class);
        if align == self.config.unit {
            return (at != NIL).then_some(at);
        }
        for _ in 0..ALIGNED_SLAB_TRIES {
            if at == NIL {
                return None;
            }
            let slab = self.slabs.slab(at);
            if slab.start.is_multiple_of(align) {
                return Some(at);
            }
            at = slab.next;
        }
        None
    }

    /// Creates a slab of `class` at a multiple of `align`. Its length follows the class's
    /// population, or is the shortest one if that does not fit.
    fn new_slab(&mut self, class: usize, align: u64) -> Option<u32> {
        if !self.records.has_room_for(2) {
            return None;
        }
        let slot = self.slabs.slot_bytes(class);
        let (wanted, shortest) = self.slabs.next_slots(class);
        let (slots, extent, start) = match self.find_fit(wanted * slot, align) {
            Some((extent, start)) => (wanted, extent, start),
            None if wanted == shortest => return None,
            None => {
                let (extent, start) = self.find_fit(shortest * slot, align)?;
                (shortest, extent, start)
            }
        };
        let record = self.carve(extent, start, slots * slot);
        let slab = self.slabs.create(class, slots, record, start, self.records[record].stamp);
        let record = &mut self.records[record];
        debug_assert!(record.start.is_multiple_of(align), "a slab at {:#x}", record.start);
        debug_assert_eq!(record.len, slots * slot, "the slab does not fill its record");
        record.state = State::Slab;
        record.slab = slab;
        Some(slab)
    }

    #[inline]
    fn alloc_slot(&mut self, id: u32) -> HeapBlock {
        let AllocatedSlot { address, bytes, generation } = self.slabs.alloc(id);
        debug_assert!(address.is_multiple_of(self.config.unit), "a slot at {address:#x}");
        self.live_bytes += bytes;
        self.live_blocks += 1;
        HeapBlock { address, bytes, key: Key::new(id | SLAB_BIT, generation) }
    }

    /// Allocates an exact block of `len` bytes, a multiple of the unit.
    fn alloc_exact(&mut self, len: u64, align: u64) -> Option<HeapBlock> {
        if !self.records.has_room_for(2) {
            return None;
        }
        let found = self.find_fit(len, align);
        let found = match found {
            None if self.dissolve_spares() => self.find_fit(len, align),
            found => found,
        };
        let (extent, start) = match found {
            Some(found) => found,
            None if align > self.config.unit => self.find_fit_exhaustive(len, align)?,
            None => return None,
        };
        let record = self.carve(extent, start, len);
        let block = self.mark_live(record);
        debug_assert!(block.address.is_multiple_of(align), "{block:?} is not aligned to {align}");
        debug_assert_eq!(block.bytes, len, "{block:?} is not exact");
        Some(block)
    }

    /// Makes a carved record a live block.
    #[inline]
    fn mark_live(&mut self, id: u32) -> HeapBlock {
        let record = &mut self.records[id];
        debug_assert_eq!(record.state, State::Free, "two blocks at {:#x}", record.start);
        record.state = State::Live;
        self.live_bytes += record.len;
        self.live_blocks += 1;
        HeapBlock { address: record.start, bytes: record.len, key: Key::new(id, record.generation) }
    }

    /// Returns the extent to cut `len` bytes from, and the address.
    fn find_fit(&self, len: u64, align: u64) -> Option<(u32, u64)> {
        let units = len >> self.unit_shift;
        if align <= self.config.unit {
            let id = self.bins.best_fit(&self.records, units)?;
            return Some((id, self.records[id].start));
        }
        // An extent of this length fits at any start address.
        let enough = units.saturating_add((align >> self.unit_shift) - 1);
        let mut wanted = units;
        for _ in 0..ALIGNED_TRIES {
            let id = self.bins.best_fit(&self.records, wanted)?;
            if let Some(start) = self.aligned_start(id, len, align) {
                return Some((id, start));
            }
            wanted = (self.records[id].len >> self.unit_shift) + 1;
            if wanted >= enough {
                break;
            }
        }
        let id = self.bins.best_fit(&self.records, enough.max(wanted))?;
        self.aligned_start(id, len, align).map(|start| (id, start))
    }

    /// Like [`find_fit`](Self::find_fit) for an aligned request, but visits every extent that is
    /// long enough.
    fn find_fit_exhaustive(&self, len: u64, align: u64) -> Option<(u32, u64)> {
        let mut wanted = len >> self.unit_shift;
        loop {
            let mut id = self.bins.best_fit(&self.records, wanted)?;
            wanted = (self.records[id].len >> self.unit_shift) + 1;
            while id != NIL {
                if let Some(start) = self.aligned_start(id, len, align) {
                    return Some((id, start));
                }
                id = self.records[id].next_equal;
            }
        }
    }

    /// Returns the lowest multiple of `align` at which `len` bytes fit into the extent `id`.
    fn aligned_start(&self, id: u32, len: u64, align: u64) -> Option<u64> {
        let extent = &self.records[id];
        let start = round_up(extent.start, align)?;
        (start < extent.end() && extent.end() - start >= len).then_some(start)
    }
}
