//! The general allocator: add ranges, allocate blocks, free by key.

use core::{fmt, iter::successors};

use crate::bins::Bins;
use crate::page_map::PageMap;
use crate::records::{NIL, Record, Records, State};
use crate::slab::Slabs;
use crate::{Config, Extent, HeapError, Range};

mod alloc;
mod check;
mod free;
mod observe;
mod ranges;
mod resize;

pub use check::InvariantViolation;

/// An allocator for address ranges whose memory it never accesses.
///
/// It starts empty. [`add`](Self::add) adds ranges, and [`remove`](Self::remove) removes free ones.
/// [`alloc`](Self::alloc) and [`alloc_at`](Self::alloc_at) allocate blocks, and
/// [`free_block`](Self::free_block) frees them.
///
/// * `None` from [`alloc`](Self::alloc) is exact: no free extent fits the request.
/// * A block of at most [`Config::small_max`] may share its slab with others. The free slots of a
///   slab are not part of [`free_extents`](Self::free_extents) while it contains a live block.
/// * Dropping a heap forgets its blocks. Nothing else ties a block to its heap.
///
/// ```
/// use aquifer_heap::{Config, Heap, HeapError, Range};
///
/// let mut heap = Heap::new(Config::device());
/// heap.add(Range::new(1 << 30, 1 << 20), 0)?;
/// let a = heap.alloc(100, 1).ok_or("no room")?;
/// assert_eq!(a.bytes, 512);
///
/// heap.free_block(&a, 1)?;
/// assert_eq!(heap.free_block(&a, 2), Err(HeapError::DoubleFree { address: a.address }));
/// assert_eq!(heap.block_at(7), Err(HeapError::Foreign { address: 7 }));
///
/// // Everything is free again, so the whole range can be removed.
/// assert_eq!(heap.remove(Range::new(1 << 30, 1 << 20))?, 1);
/// assert_eq!(heap.managed_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Heap {
    config: Config,
    /// A unit is `1 << unit_shift` bytes.
    unit_shift: u32,
    /// A page of the address map is `1 << grain_shift` bytes.
    grain_shift: u32,
    records: Records,
    bins: Bins,
    page_map: PageMap,
    slabs: Slabs,
    /// Bytes that were added and not removed: `live + free + slab_free`.
    managed_bytes: u64,
    /// Actual sizes of the live blocks.
    live_bytes: u64,
    live_blocks: u64,
    /// Bytes of the extents in the bins. Spare slabs are free in addition.
    free_bytes: u64,
}

impl Heap {
    /// Creates an empty heap.
    ///
    /// # Panics
    ///
    /// If a field of `config` violates its documentation.
    #[must_use]
    pub fn new(config: Config) -> Self {
        config.check();
        let unit_shift = config.unit.trailing_zeros();
        Self {
            config,
            unit_shift,
            grain_shift: config.grain.trailing_zeros(),
            records: Records::new(),
            bins: Bins::new(unit_shift),
            page_map: PageMap::new(),
            slabs: Slabs::new(&config),
            managed_bytes: 0,
            live_bytes: 0,
            live_blocks: 0,
            free_bytes: 0,
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Rejects a range that is empty, wraps around, or does not consist of whole units.
    fn validate(&self, range: Range) -> Result<(), HeapError> {
        let mask = self.config.unit - 1;
        let whole = range.start & mask == 0 && range.len & mask == 0;
        if range.len == 0 || !whole || range.start.checked_add(range.len).is_none() {
            return Err(HeapError::BadRange { range, unit: self.config.unit });
        }
        Ok(())
    }

    const fn page_of(&self, address: u64) -> u64 {
        address >> self.grain_shift
    }

    /// Returns the last record that starts at or below `address`.
    ///
    /// Visits at most the records that start in one grain of the map. If the grain is a page, these
    /// are few, since slabs and blocks above the small sizes take a good part of a page each. Only
    /// many small blocks from `alloc_at` can make it longer, up to one per unit.
    fn last_at_or_below(&self, address: u64) -> Option<u32> {
        let page = self.page_of(address);
        let mut at = match self.page_map.get(page) {
            Some(first) if self.records[first].start > address => {
                let below = self.records[first].prev;
                return (below != NIL).then_some(below);
            }
            Some(first) => first,
            None => self.page_map.last_before(page)?,
        };
        loop {
            let next = self.records[at].next;
            if next == NIL || self.records[next].start > address {
                return Some(at);
            }
            at = next;
        }
    }

    /// Returns the record that contains `address`.
    fn record_containing(&self, address: u64) -> Option<u32> {
        let id = self.last_at_or_below(address)?;
        (address < self.records[id].end()).then_some(id)
    }

    /// Returns whether the whole record is free: a free extent, or a slab without live blocks.
    fn is_wholly_free(&self, id: u32) -> bool {
        let record = &self.records[id];
        match record.state {
            State::Free => true,
            State::Slab => self.slabs.slab(record.slab).used == 0,
            State::Live | State::Vacant => false,
        }
    }

    /// Returns the stamp of the record, including that of its slab.
    fn stamp_of(&self, id: u32) -> u64 {
        let record = &self.records[id];
        if record.state == State::Slab {
            record.stamp.max(self.slabs.slab(record.slab).stamp)
        } else {
            record.stamp
        }
    }

    /// Inserts a new record after `prev`, and adds it to the map.
    fn insert_after(&mut self, prev: u32, record: Record) -> u32 {
        debug_assert!(record.len > 0, "an empty record at {:#x}", record.start);
        debug_assert!(prev == NIL || self.records[prev].end() <= record.start, "out of order");
        let page = self.page_of(record.start);
        let id = self.records.insert_after(prev, record);
        debug_assert!(
            self.records[id].next == NIL
                || self.records[id].end() <= self.records[self.records[id].next].start,
            "the record overlaps the next one"
        );
        // If the previous record starts in the same page, the map has it or an earlier one.
        if prev == NIL || self.page_of(self.records[prev].start) != page {
            self.page_map.set(page, id);
        }
        id
    }

    /// Removes a record from the map and the list.
    fn remove_record(&mut self, id: u32) {
        let Record { start, prev, next, state, .. } = self.records[id];
        debug_assert_ne!(state, State::Vacant, "the record at {start:#x} is removed twice");
        let page = self.page_of(start);
        if prev == NIL || self.page_of(self.records[prev].start) != page {
            if next != NIL && self.page_of(self.records[next].start) == page {
                self.page_map.set(page, next);
            } else {
                self.page_map.remove(page);
            }
        }
        self.records.remove(id);
    }

    /// Cuts `[start, start + len)` out of the free record `id`. The rest on either side stays free.
    /// Returns the record of the piece, which is free and in no bin.
    fn carve(&mut self, id: u32, start: u64, len: u64) -> u32 {
        use crate::records::{BORDER_ABOVE, BORDER_BELOW};
        debug_assert!(len > 0 && len.is_multiple_of(self.config.unit), "{len} bytes");
        debug_assert!(self.free_bytes >= len, "more is carved than is free");
        self.bins.remove(&mut self.records, id);
        self.free_bytes -= len;
        let record = &mut self.records[id];
        debug_assert_eq!(record.state, State::Free, "carved from a record that is not free");
        debug_assert!(
            record.range().covers(&Range::new(start, len)),
            "{len} bytes at {start:#x} do not lie in {:?}",
            record.range()
        );
        let (lead, tail) = (start - record.start, record.end() - (start + len));
        let (stamp, borders) = (record.stamp, record.borders);
        let mut piece = id;
        if lead > 0 {
            record.len = lead;
            record.borders = borders & BORDER_BELOW;
            piece = self.insert_after(id, Record::new(start, len, stamp, borders & BORDER_ABOVE));
            self.bins.insert(&mut self.records, id);
        } else {
            record.len = len;
        }
        if tail > 0 {
            self.records[piece].borders &= BORDER_BELOW;
            let rest = self
                .insert_after(piece, Record::new(start + len, tail, stamp, borders & BORDER_ABOVE));
            self.bins.insert(&mut self.records, rest);
        }
        piece
    }

    /// Makes the record `id`, which is in no bin, a free extent, and coalesces it with its
    /// neighbours. Returns the record of the result.
    fn free_and_coalesce(&mut self, id: u32) -> u32 {
        debug_assert_ne!(self.records[id].state, State::Vacant, "a vacant record is freed");
        self.free_bytes += self.records[id].len;
        self.records[id].state = State::Free;
        let mut id = id;
        let Record { prev, next, .. } = self.records[id];
        if next != NIL
            && self.records[next].state == State::Free
            && self.records.mergeable(id, next)
        {
            self.bins.remove(&mut self.records, next);
            self.merge(id, next);
        }
        if prev != NIL
            && self.records[prev].state == State::Free
            && self.records.mergeable(prev, id)
        {
            self.bins.remove(&mut self.records, prev);
            self.merge(prev, id);
            id = prev;
        }
        self.bins.insert(&mut self.records, id);
        id
    }

    /// Merges `upper` into its neighbour `lower`. Neither is in a bin.
    fn merge(&mut self, lower: u32, upper: u32) {
        use crate::records::{BORDER_ABOVE, BORDER_BELOW};
        debug_assert!(self.records.mergeable(lower, upper), "a border lies between them");
        debug_assert_eq!(self.records[lower].next, upper, "they are not neighbours");
        let Record { len, stamp, borders, .. } = self.records[upper];
        let record = &mut self.records[lower];
        record.len += len;
        record.stamp = record.stamp.max(stamp);
        record.borders = record.borders & BORDER_BELOW | borders & BORDER_ABOVE;
        self.remove_record(upper);
    }

    /// Returns the memory of an empty slab to the extents. Returns the record of the merged extent.
    fn dissolve(&mut self, slab: u32) -> u32 {
        debug_assert_eq!(self.slabs.slab(slab).used, 0, "a slab with live blocks is dissolved");
        let record = self.slabs.slab(slab).record;
        debug_assert_eq!(self.records[record].slab, slab, "the record is another slab's");
        let stamp = self.stamp_of(record);
        self.slabs.dissolve(slab);
        self.records[record].stamp = stamp;
        self.records[record].slab = NIL;
        self.free_and_coalesce(record)
    }

    /// Dissolves every spare slab. Returns whether there was one.
    fn dissolve_spares(&mut self) -> bool {
        let mut any = false;
        while let Some(spare) = self.slabs.first_spare() {
            self.dissolve(spare);
            any = true;
        }
        any
    }

    /// Returns the free record below that would merge with the free record `id`, but for spares.
    fn joined_below(&self, id: u32) -> Option<u32> {
        let prev = self.records[id].prev;
        let joined = prev != NIL && self.is_wholly_free(prev) && self.records.mergeable(prev, id);
        joined.then_some(prev)
    }

    /// As [`joined_below`](Self::joined_below), above.
    fn joined_above(&self, id: u32) -> Option<u32> {
        let next = self.records[id].next;
        let joined = next != NIL && self.is_wholly_free(next) && self.records.mergeable(id, next);
        joined.then_some(next)
    }

    /// Returns the free run that contains the free record `id`, as if all of it were merged.
    fn free_run_around(&self, id: u32) -> Extent {
        let low = successors(Some(id), |&at| self.joined_below(at)).last();
        self.free_run_from(low.unwrap_or(id)).0
    }

    /// Returns the free run that begins with the free record `low`, and the record after it.
    fn free_run_from(&self, low: u32) -> (Extent, u32) {
        let mut range = self.records[low].range();
        let mut stamp = self.stamp_of(low);
        let mut at = low;
        while let Some(next) = self.joined_above(at) {
            range.len += self.records[next].len;
            stamp = stamp.max(self.stamp_of(next));
            at = next;
        }
        (Extent { range, stamp }, self.records[at].next)
    }
}

impl Default for Heap {
    /// Creates an empty heap for device memory.
    fn default() -> Self {
        Self::new(Config::device())
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("config", &self.config)
            .field("managed_bytes", &self.managed_bytes)
            .field("live_bytes", &self.live_bytes)
            .field("live_blocks", &self.live_blocks)
            .field("free_bytes", &self.free_bytes())
            .finish_non_exhaustive()
    }
}
