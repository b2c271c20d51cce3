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

/// Numbers are below this, so that [`SLOT`](crate::range::SLOT) can mark those of slabs.
const MAX_RECORDS: usize = 1 << 30;

/// A border at the record's start: it never merges downwards.
pub(crate) const CUT_BEFORE: u8 = 1;
/// A border at the record's end: it never merges upwards.
pub(crate) const CUT_AFTER: u8 = 2;

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
    pub(crate) up: u32,
    /// For a free extent that is a node of its bin's tree: the children.
    pub(crate) child: [u32; 2],
    /// For a free extent: the previous one of equal size, `NIL` for the one in the tree.
    pub(crate) before: u32,
    /// For a free extent: the next one of equal size.
    pub(crate) after: u32,
    /// Incremented each time a block of this number is freed.
    pub(crate) generation: u32,
    /// The number of the slab.
    pub(crate) slab: u32,
    /// The kind.
    pub(crate) state: State,
    /// [`CUT_BEFORE`] and [`CUT_AFTER`].
    pub(crate) cuts: u8,
}

impl Record {
    pub(crate) const fn new(start: u64, len: u64, stamp: u64, cuts: u8) -> Self {
        Self {
            start,
            len,
            stamp,
            prev: NIL,
            next: NIL,
            up: NIL,
            child: [NIL; 2],
            before: NIL,
            after: NIL,
            generation: 0,
            slab: NIL,
            state: State::Free,
            cuts,
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
    all: Vec<Record>,
    /// The lowest record.
    first: u32,
    /// The head of the list of vacant records, linked by `next`.
    vacant: u32,
    /// The number of vacant records.
    vacancies: usize,
}

impl Records {
    pub(crate) const fn new() -> Self {
        Self { all: Vec::new(), first: NIL, vacant: NIL, vacancies: 0 }
    }

    /// Returns whether `more` records can be created.
    pub(crate) const fn room(&self, more: usize) -> bool {
        self.all.len() - self.vacancies + more <= MAX_RECORDS
    }

    pub(crate) const fn first(&self) -> u32 {
        self.first
    }

    /// Looks up a number that may come from a caller.
    pub(crate) fn get(&self, id: u32) -> Option<&Record> {
        self.all.get(id as usize)
    }

    /// Returns how many numbers exist.
    pub(crate) const fn numbered(&self) -> usize {
        self.all.len()
    }

    /// Returns how many of them are vacant.
    pub(crate) const fn vacancies(&self) -> usize {
        self.vacancies
    }

    /// Like [`vacancies`](Self::vacancies), but counts the list. For the self-check.
    pub(crate) fn count_vacant(&self) -> usize {
        let (mut at, mut count) = (self.vacant, 0);
        while at != NIL && count <= self.all.len() {
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
        let id = self.vacant;
        let id = if id == NIL {
            let id = self.all.len() as u32;
            self.all.push(record);
            id
        } else {
            let place = &mut self.all[id as usize];
            self.vacant = place.next;
            self.vacancies -= 1;
            // The generation of a number persists, or a stale key could match.
            record.generation = place.generation;
            *place = record;
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
    pub(crate) fn retire(&mut self, id: u32) {
        let (prev, next) = (self[id].prev, self[id].next);
        if prev == NIL {
            self.first = next;
        } else {
            self[prev].next = next;
        }
        if next != NIL {
            self[next].prev = prev;
        }
        let vacant = self.vacant;
        let record = &mut self[id];
        record.state = State::Vacant;
        record.next = vacant;
        self.vacant = id;
        self.vacancies += 1;
    }

    /// Returns whether `upper`, the neighbour of `lower`, is adjacent to it with no border between.
    pub(crate) fn joined(&self, lower: u32, upper: u32) -> bool {
        let (lower, upper) = (&self[lower], &self[upper]);
        lower.end() == upper.start && lower.cuts & CUT_AFTER == 0 && upper.cuts & CUT_BEFORE == 0
    }
}

impl Index<u32> for Records {
    type Output = Record;

    #[inline]
    fn index(&self, id: u32) -> &Record {
        &self.all[id as usize]
    }
}

impl IndexMut<u32> for Records {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Record {
        &mut self.all[id as usize]
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
    fn numbers_are_used_again_and_keep_their_generation() {
        let mut records = Records::new();
        let a = records.insert_after(NIL, Record::new(0, 16, 0, 0));
        let b = records.insert_after(a, Record::new(16, 16, 0, 0));
        records[a].generation = 7;
        records.retire(a);
        assert_eq!(records.first(), b);
        let c = records.insert_after(b, Record::new(64, 16, 0, 0));
        assert_eq!((c, records[c].generation, records.numbered()), (a, 7, 2));
        assert!(!records.joined(b, c));
    }
}
