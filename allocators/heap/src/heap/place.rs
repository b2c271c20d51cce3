//! Making blocks.

use super::Heap;
use crate::classes::class_of;
use crate::range::{Key, SLOT};
use crate::records::{NIL, State};
use crate::slab::Taken;
use crate::{Block, HeapError, Range};

/// How many extents a request with a large alignment tries in order of size before it takes one
/// that is long enough wherever it starts.
const ALIGNED_TRIES: usize = 8;
/// How many slabs with room such a request looks at.
const ALIGNED_SLABS: usize = 8;

/// `bytes` rounded up to a multiple of `align`, a power of two, which saves the division that a
/// multiple of any number takes.
#[inline]
const fn round_up(bytes: u64, align: u64) -> Option<u64> {
    match bytes.checked_add(align - 1) {
        Some(beyond) => Some(beyond & !(align - 1)),
        None => None,
    }
}

impl Heap {
    /// A block of at least `bytes` bytes at a multiple of `align`, or `None` when nothing free
    /// holds it now.
    ///
    /// The smallest free extent that fits is taken, from its low end. Sizes up to
    /// [`Config::small_max`](crate::Config::small_max) share slabs. Also `None` for zero bytes
    /// and for an `align` that is not a power of two. What the block held before, and whether it
    /// is still in use by something queued, is for the caller to know: stamps are not looked at.
    ///
    /// Bounded in time, with one exception: a request aligned beyond the unit that only fits
    /// where the alignment happens to fall well is found by walking all extents of nearly its
    /// size, just before the answer would be `None`.
    #[must_use]
    pub fn alloc(&mut self, bytes: u64, align: u64) -> Option<Block> {
        // The two ways that loops take, which end where the full one would.
        if align == self.config.unit && !(self.live_blocks == 0 && self.slabs.has_several_spares())
        {
            if bytes > self.config.small_max {
                return self.alloc_exact(self.whole_units(bytes)?, align);
            } else if bytes > 0
                && let slab = self.slabs.room(class_of(((bytes - 1) >> self.unit_shift) + 1))
                && slab != NIL
            {
                return Some(self.take_slot(slab));
            }
        }
        self.alloc_fully(bytes, align)
    }

    /// As [`alloc`](Self::alloc), for any request.
    #[inline(never)]
    fn alloc_fully(&mut self, bytes: u64, align: u64) -> Option<Block> {
        if bytes == 0 || !align.is_power_of_two() {
            return None;
        }
        if self.live_blocks == 0 && self.slabs.has_several_spares() {
            // Nothing lives: gives up what is kept for several sizes, so that a program that frees
            // all it has and begins again finds what it found the first time, and takes the same
            // places. A loop over one size keeps its slab.
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

    /// Exactly the free range `range` as one block.
    ///
    /// It may be of any size: the block is exact, and shares nothing.
    ///
    /// # Errors
    ///
    /// [`HeapError::BadRange`], [`HeapError::NotFree`], [`HeapError::Border`] when the range is
    /// free and a border lies inside it, or [`HeapError::TooManyRecords`].
    pub fn alloc_at(&mut self, range: Range) -> Result<Block, HeapError> {
        let first = self.find_free(range)?;
        let mut at = first;
        while self.records[at].end() < range.end() {
            let next = self.records[at].next;
            if !self.records.joined(at, next) {
                return Err(HeapError::Border { range, at: self.records[at].end() });
            }
            at = next;
        }
        if !self.records.room(2) {
            return Err(HeapError::TooManyRecords);
        }
        let extent = self.merge_in(range, first);
        let record = self.carve(extent, range.start, range.len);
        Ok(self.make_live(record))
    }

    /// `bytes` rounded up to whole units.
    pub(super) const fn whole_units(&self, bytes: u64) -> Option<u64> {
        round_up(bytes, self.config.unit)
    }

    /// A slot for `rounded` bytes, which is a multiple of `align` as well as of the unit, or an
    /// exact block for `bytes` where no slab can be had.
    fn alloc_small(&mut self, rounded: u64, bytes: u64, align: u64) -> Option<Block> {
        let class = class_of(rounded >> self.unit_shift);
        if let Some(slab) = self.slab_with_room(class, align) {
            return Some(self.take_slot(slab));
        }
        if let Some(slab) = self.new_slab(class, align) {
            return Some(self.take_slot(slab));
        }
        if let Some(block) = self.alloc_exact(self.whole_units(bytes)?, align) {
            return Some(block);
        }
        // Nothing else is left: a slot of a larger class wastes more than an eighth, and fits.
        let mut class = class;
        loop {
            class = self.slabs.class_with_room(class)?;
            if self.slabs.slot_bytes(class).is_multiple_of(align)
                && let Some(slab) = self.slab_with_room(class, align)
            {
                return Some(self.take_slot(slab));
            }
            class += 1;
        }
    }

    /// A slab of `class` with room, whose slots are aligned to `align`.
    fn slab_with_room(&self, class: usize, align: u64) -> Option<u32> {
        let mut at = self.slabs.room(class);
        if align == self.config.unit {
            return (at != NIL).then_some(at);
        }
        for _ in 0..ALIGNED_SLABS {
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

    /// Cuts a new slab of `class` that starts at a multiple of `align`: as long as the class's
    /// population asks for, or else as short as they come.
    fn new_slab(&mut self, class: usize, align: u64) -> Option<u32> {
        if !self.records.room(2) {
            return None;
        }
        let slot = self.slabs.slot_bytes(class);
        let (wanted, shortest) = self.slabs.next_slots(class);
        let (slots, extent, start) = match self.fit(wanted * slot, align) {
            Some((extent, start)) => (wanted, extent, start),
            None if wanted == shortest => return None,
            None => {
                let (extent, start) = self.fit(shortest * slot, align)?;
                (shortest, extent, start)
            }
        };
        let record = self.carve(extent, start, slots * slot);
        let slab = self.slabs.make(class, slots, record, start, self.records[record].stamp);
        let record = &mut self.records[record];
        record.state = State::Slab;
        record.slab = slab;
        Some(slab)
    }

    #[inline]
    fn take_slot(&mut self, id: u32) -> Block {
        let Taken { address, bytes, generation } = self.slabs.take(id);
        self.live_bytes += bytes;
        self.live_blocks += 1;
        Block { address, bytes, key: Key::new(id | SLOT, generation) }
    }

    /// An exact block of `len` bytes, a multiple of the unit.
    fn alloc_exact(&mut self, len: u64, align: u64) -> Option<Block> {
        if !self.records.room(2) {
            return None;
        }
        let found = self.fit(len, align);
        let found = match found {
            None if self.dissolve_spares() => self.fit(len, align),
            found => found,
        };
        let (extent, start) = match found {
            Some(found) => found,
            None if align > self.config.unit => self.fit_by_walking(len, align)?,
            None => return None,
        };
        let record = self.carve(extent, start, len);
        Some(self.make_live(record))
    }

    /// Makes a carved record a live block.
    #[inline]
    fn make_live(&mut self, id: u32) -> Block {
        let record = &mut self.records[id];
        record.state = State::Live;
        self.live_bytes += record.len;
        self.live_blocks += 1;
        Block { address: record.start, bytes: record.len, key: Key::new(id, record.generation) }
    }

    /// The extent to cut `len` bytes from, and where.
    fn fit(&self, len: u64, align: u64) -> Option<(u32, u64)> {
        let units = len >> self.unit_shift;
        if align <= self.config.unit {
            let id = self.bins.best_fit(&self.records, units)?;
            return Some((id, self.records[id].start));
        }
        // Anything of this length fits, wherever it starts.
        let enough = units.saturating_add((align >> self.unit_shift) - 1);
        let mut wanted = units;
        for _ in 0..ALIGNED_TRIES {
            let id = self.bins.best_fit(&self.records, wanted)?;
            if let Some(start) = self.fits_at(id, len, align) {
                return Some((id, start));
            }
            wanted = (self.records[id].len >> self.unit_shift) + 1;
            if wanted >= enough {
                break;
            }
        }
        let id = self.bins.best_fit(&self.records, enough.max(wanted))?;
        self.fits_at(id, len, align).map(|start| (id, start))
    }

    /// As [`fit`](Self::fit) for a large alignment, over every extent that is long enough.
    fn fit_by_walking(&self, len: u64, align: u64) -> Option<(u32, u64)> {
        let mut wanted = len >> self.unit_shift;
        loop {
            let mut id = self.bins.best_fit(&self.records, wanted)?;
            wanted = (self.records[id].len >> self.unit_shift) + 1;
            while id != NIL {
                if let Some(start) = self.fits_at(id, len, align) {
                    return Some((id, start));
                }
                id = self.records[id].after;
            }
        }
    }

    /// The lowest multiple of `align` where `len` bytes lie inside the extent `id`.
    fn fits_at(&self, id: u32, len: u64, align: u64) -> Option<u64> {
        let extent = &self.records[id];
        let start = round_up(extent.start, align)?;
        (start < extent.end() && extent.end() - start >= len).then_some(start)
    }
}
