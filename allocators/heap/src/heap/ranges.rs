//! Adding and removing ranges.

use super::Heap;
use crate::records::{BORDER_ABOVE, BORDER_BELOW, NIL, Record, State};
use crate::{Extent, HeapError, Range};

impl Heap {
    /// Adds `range` as free memory with `stamp`. Start and length are multiples of the unit.
    ///
    /// It is merged with adjacent free memory.
    ///
    /// # Errors
    ///
    /// [`HeapError::BadRange`], [`HeapError::Overlap`] or [`HeapError::TooManyRecords`].
    pub fn add(&mut self, range: Range, stamp: u64) -> Result<(), HeapError> {
        self.insert(range, stamp, 0)
    }

    /// Like [`add`](Self::add), but no block or free extent will ever cross the ends of `range`.
    /// For memory from one driver call that may be used, or must be released, only as a unit.
    ///
    /// The ends stop being borders when the memory at them is [removed](Self::remove).
    ///
    /// # Errors
    ///
    /// Those of [`add`](Self::add).
    ///
    /// ```
    /// use aquifer_heap::{Config, Heap, Range};
    ///
    /// let mut heap = Heap::new(Config::device());
    /// heap.add_segment(Range::new(0, 1 << 20), 0)?;
    /// heap.add_segment(Range::new(1 << 20, 1 << 20), 0)?;
    /// assert!(heap.alloc(2 << 20, 512).is_none());
    /// # Ok::<(), aquifer_heap::HeapError>(())
    /// ```
    pub fn add_segment(&mut self, range: Range, stamp: u64) -> Result<(), HeapError> {
        self.insert(range, stamp, BORDER_BELOW | BORDER_ABOVE)
    }

    fn insert(&mut self, range: Range, stamp: u64, borders: u8) -> Result<(), HeapError> {
        self.validate(range)?;
        let below = self.last_at_or_below(range.start);
        if let Some(below) = below
            && self.records[below].end() > range.start
        {
            return Err(HeapError::Overlap { range, with: self.records[below].range() });
        }
        let above = below.map_or(self.records.first(), |below| self.records[below].next);
        if above != NIL && self.records[above].start < range.end() {
            return Err(HeapError::Overlap { range, with: self.records[above].range() });
        }
        if !self.records.has_room_for(1) {
            return Err(HeapError::TooManyRecords);
        }
        let record = Record::new(range.start, range.len, stamp, borders);
        let id = self.insert_after(below.unwrap_or(NIL), record);
        self.free_and_coalesce(id);
        self.managed_bytes += range.len;
        debug_assert!(self.free_bytes <= self.managed_bytes, "more is free than was added");
        Ok(())
    }

    /// Removes the free range `range` from the heap. The rest on either side stays.
    ///
    /// The range may span borders, and slabs without live blocks.
    ///
    /// Returns the largest stamp of the removed memory.
    ///
    /// # Errors
    ///
    /// [`HeapError::BadRange`], [`HeapError::NotFree`] with the first address that is in use or not
    /// in the heap, or [`HeapError::TooManyRecords`].
    pub fn remove(&mut self, range: Range) -> Result<u64, HeapError> {
        let first = self.find_free(range)?;
        if !self.records.has_room_for(2) {
            return Err(HeapError::TooManyRecords);
        }
        let mut stamp = 0;
        let mut at = self.dissolve_spares_in(range, first);
        loop {
            let record = &self.records[at];
            let (end, next) = (record.end(), record.next);
            stamp = stamp.max(record.stamp);
            let from = record.start.max(range.start);
            let piece = self.carve(at, from, end.min(range.end()) - from);
            self.remove_record(piece);
            if end >= range.end() {
                break;
            }
            at = next;
        }
        debug_assert!(self.managed_bytes >= range.len, "more is removed than was added");
        self.managed_bytes -= range.len;
        Ok(stamp)
    }

    /// Removes every free extent of at least `least` bytes, and passes it to `visit`, the longest
    /// first.
    ///
    /// The cost depends only on what is removed, and not on live blocks. Slabs without live blocks
    /// are dissolved first if `least` is at most [`Config::page`](crate::Config::page), and are
    /// kept otherwise.
    ///
    /// ```
    /// use aquifer_heap::{Config, Heap, Range};
    ///
    /// let mut heap = Heap::new(Config::device());
    /// heap.add(Range::new(0, 1 << 20), 3)?;
    /// let block = heap.alloc(1 << 19, 512).ok_or("no room")?;
    /// let mut taken = Vec::new();
    /// heap.drain(0, |extent| taken.push((extent.range, extent.stamp)));
    /// assert_eq!(taken, [(Range::new(1 << 19, 1 << 19), 3)]);
    /// assert_eq!((heap.free_bytes(), heap.managed_bytes()), (0, block.bytes));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain(&mut self, least: u64, mut visit: impl FnMut(Extent)) {
        if least <= self.config.page {
            self.dissolve_spares();
        }
        while let Some(id) = self.bins.longest(&self.records) {
            let Record { start, len, stamp, .. } = self.records[id];
            if len < least {
                break;
            }
            let piece = self.carve(id, start, len);
            self.remove_record(piece);
            self.managed_bytes -= len;
            visit(Extent { range: Range::new(start, len), stamp });
        }
    }

    /// Returns the first record of `range`, all of which must be free.
    pub(super) fn find_free(&self, range: Range) -> Result<u32, HeapError> {
        self.validate(range)?;
        let not_free = |at| HeapError::NotFree { range, at };
        let first = self.record_containing(range.start).ok_or(not_free(range.start))?;
        let mut at = first;
        loop {
            let record = &self.records[at];
            if !self.is_wholly_free(at) {
                return Err(not_free(record.start.max(range.start)));
            }
            if record.end() >= range.end() {
                return Ok(first);
            }
            if record.next == NIL || self.records[record.next].start != record.end() {
                return Err(not_free(record.end()));
            }
            at = record.next;
        }
    }

    /// Dissolves the spare slabs in `range`, which is free and whose first record is `first`.
    /// Returns the first record afterwards.
    pub(super) fn dissolve_spares_in(&mut self, range: Range, first: u32) -> u32 {
        let mut first = first;
        let mut at = first;
        loop {
            let Record { state, slab, .. } = self.records[at];
            if state == State::Slab {
                // The merged extent starts no later, so it is in the range or covers its start.
                at = self.dissolve(slab);
                if self.records[at].start <= range.start {
                    first = at;
                }
            }
            let record = &self.records[at];
            if record.end() >= range.end() {
                return first;
            }
            at = record.next;
        }
    }
}
