//! Extents and blocks in address order.
//!
//! - Every byte of the heap belongs to exactly one record: a free extent, a block above the small
//!   sizes, or a slab.
//! - A record is linked to its neighbours, so a free finds its merge candidates in one step to each
//!   side.
//! - Records are identified by number and not by pointer. The numbers of retired records are
//!   reused, so a heap that has reached its size allocates no host memory.

use core::ops::{Index, IndexMut};

use crate::Range;

/// No record.
pub(crate) const NIL: u32 = u32::MAX;

/// Numbers are below this, so that [`SLAB_BIT`](crate::range::SLAB_BIT) can mark those of slabs.
const MAX_RECORDS: usize = 1 << 30;

/// A border at the record's start: it never merges downwards.
pub(crate) const BORDER_BELOW: u8 = 1;
/// A border at the record's end: it never merges upwards.
pub(crate) const BORDER_ABOVE: u8 = 2;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Unused: its number can be reused.
    Vacant,
    /// A free extent, which is in a bin.
    Free,
    /// One live block.
    Live,
    /// A slab, numbered by [`Record::slab`].
    Slab,
}

/// A range of addresses. One cache line.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// The first address, a multiple of the unit.
    pub(crate) start: u64,
    /// The length in bytes, a multiple of the unit, never zero.
    pub(crate) len: u64,
    /// The largest stamp of any of its bytes, kept while it is in use.
    pub(crate) stamp: u64,
    /// The neighbour below, which may not be adjacent.
    pub(crate) prev: u32,
    /// The neighbour above, which may not be adjacent. The next vacant record if this one is
    /// vacant.
    pub(crate) next: u32,
    /// For a free extent that is a node of its bin's tree: the parent, `NIL` at the root.
    pub(crate) parent: u32,
    /// For a free extent that is a node of its bin's tree: the children.
    pub(crate) children: [u32; 2],
    /// For a free extent: the previous one of equal size, `NIL` for the one in the tree.
    pub(crate) prev_equal: u32,
    /// For a free extent: the next one of equal size.
    pub(crate) next_equal: u32,
    /// Incremented each time a block of this number is freed.
    pub(crate) generation: u32,
    /// The number of the slab.
    pub(crate) slab: u32,
    /// The kind.
    pub(crate) state: State,
    /// [`BORDER_BELOW`] and [`BORDER_ABOVE`].
    pub(crate) borders: u8,
}

impl Record {
    pub(crate) const fn new(start: u64, len: u64, stamp: u64, borders: u8) -> Self {
        Self {
            start,
            len,
            stamp,
            prev: NIL,
            next: NIL,
            parent: NIL,
            children: [NIL; 2],
            prev_equal: NIL,
            next_equal: NIL,
            generation: 0,
            slab: NIL,
            state: State::Free,
            borders,
        }
    }

    pub(crate) const fn end(&self) -> u64 {
        self.start + self.len
    }

    pub(crate) const fn range(&self) -> Range {
        Range::new(self.start, self.len)
    }
}

/// All records of a heap, as one list in address order.
#[derive(Debug)]
pub(crate) struct Records {
    records: Vec<Record>,
    /// The lowest record.
    first: u32,
    /// The head of the list of vacant records, linked by `next`.
    first_vacant: u32,
    /// The number of vacant records.
    vacant_count: usize,
}

impl Records {
    pub(crate) const fn new() -> Self {
        Self { records: Vec::new(), first: NIL, first_vacant: NIL, vacant_count: 0 }
    }

    /// Returns whether `more` records can be created.
    pub(crate) const fn has_room_for(&self, more: usize) -> bool {
        self.records.len() - self.vacant_count + more <= MAX_RECORDS
    }

    pub(crate) const fn first(&self) -> u32 {
        self.first
    }

    /// Looks up a number that may come from a caller.
    pub(crate) fn get(&self, id: u32) -> Option<&Record> {
        self.records.get(id as usize)
    }

    /// Returns how many numbers exist.
    pub(crate) const fn id_count(&self) -> usize {
        self.records.len()
    }

    /// Returns how many of them are vacant.
    pub(crate) const fn vacant_count(&self) -> usize {
        self.vacant_count
    }

    /// Like [`vacant_count`](Self::vacant_count), but counts the list. For the self-check.
    pub(crate) fn count_vacant(&self) -> usize {
        let (mut at, mut count) = (self.first_vacant, 0);
        while at != NIL && count <= self.records.len() {
            count += 1;
            at = self[at].next;
        }
        count
    }

    /// Stores `record` under a free number and links it after `prev`, or as the lowest if that is
    /// `NIL`.
    ///
    /// Inlined, so that the record is built in place instead of copied.
    #[inline(always)]
    pub(crate) fn insert_after(&mut self, prev: u32, record: Record) -> u32 {
        let next = if prev == NIL { self.first } else { self[prev].next };
        let mut record = record;
        record.prev = prev;
        record.next = next;
        let id = self.first_vacant;
        let id = if id == NIL {
            let id = self.records.len() as u32;
            self.records.push(record);
            id
        } else {
            let vacant_record = &mut self.records[id as usize];
            debug_assert_eq!(vacant_record.state, State::Vacant, "a record in use is reused");
            debug_assert!(self.vacant_count > 0, "no record is vacant");
            self.first_vacant = vacant_record.next;
            self.vacant_count -= 1;
            // The generation of a number persists, or a stale key could match.
            record.generation = vacant_record.generation;
            *vacant_record = record;
            id
        };
        if prev == NIL {
            self.first = id;
        } else {
            self[prev].next = id;
        }
        if next != NIL {
            self[next].prev = id;
        }
        id
    }

    /// Unlinks `id` and makes its number vacant.
    pub(crate) fn remove(&mut self, id: u32) {
        let (prev, next) = (self[id].prev, self[id].next);
        debug_assert!(prev != NIL || self.first == id, "not the first record");
        debug_assert!(prev == NIL || self[prev].next == id, "not in the list");
        if prev == NIL {
            self.first = next;
        } else {
            self[prev].next = next;
        }
        if next != NIL {
            self[next].prev = prev;
        }
        let vacant = self.first_vacant;
        let record = &mut self[id];
        record.state = State::Vacant;
        record.next = vacant;
        self.first_vacant = id;
        self.vacant_count += 1;
    }

    /// Returns whether `upper`, the neighbour of `lower`, is adjacent to it with no border between.
    pub(crate) fn mergeable(&self, lower: u32, upper: u32) -> bool {
        let (lower, upper) = (&self[lower], &self[upper]);
        lower.end() == upper.start
            && lower.borders & BORDER_ABOVE == 0
            && upper.borders & BORDER_BELOW == 0
    }
}

impl Index<u32> for Records {
    type Output = Record;

    #[inline]
    fn index(&self, id: u32) -> &Record {
        &self.records[id as usize]
    }
}

impl IndexMut<u32> for Records {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Record {
        &mut self.records[id as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_cache_line() {
        assert_eq!(size_of::<Record>(), 64);
    }

    #[test]
    fn record_numbers_are_reused_and_keep_their_generation() {
        let mut records = Records::new();
        let a = records.insert_after(NIL, Record::new(0, 16, 0, 0));
        let b = records.insert_after(a, Record::new(16, 16, 0, 0));
        records[a].generation = 7;
        records.remove(a);
        assert_eq!(records.first(), b);
        let c = records.insert_after(b, Record::new(64, 16, 0, 0));
        assert_eq!((c, records[c].generation, records.id_count()), (a, 7, 2));
        assert!(!records.mergeable(b, c));
    }
}
