//! The self-check of a heap's invariants.

use core::fmt;

use super::Heap;
use crate::records::{NIL, State};

/// A violated invariant of the heap's metadata.
///
/// [`Heap::check`] returns the first one that it finds. Only a defect of this crate can cause one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct InvariantViolation {
    /// What is wrong.
    pub what: &'static str,
    /// The start of the record, or the count that is wrong.
    pub at: u64,
}

impl fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:#x}", self.what, self.at)
    }
}

impl core::error::Error for InvariantViolation {}

fn require(holds: bool, what: &'static str, at: u64) -> Result<(), InvariantViolation> {
    if holds { Ok(()) } else { Err(InvariantViolation { what, at }) }
}

impl Heap {
    /// Checks all invariants of the metadata, in time proportional to the number of records. For
    /// tests and fuzzing.
    ///
    /// # Errors
    ///
    /// The first violated invariant, which is a defect of this crate.
    pub fn check(&self) -> Result<(), InvariantViolation> {
        self.check_records()?;
        self.check_bins()?;
        self.check_slabs()
    }

    /// Checks shape, order, merging, the page map and the counters.
    fn check_records(&self) -> Result<(), InvariantViolation> {
        let (mut prev, mut at) = (NIL, self.records.first());
        let (mut records, mut pages) = (0, 0);
        let (mut managed, mut live, mut blocks, mut free) = (0, 0, 0, 0);
        while at != NIL {
            let record = &self.records[at];
            let start = record.start;
            require(self.validate(record.range()).is_ok(), "a record is misshapen", start)?;
            require(
                record.prev == prev && (prev == NIL || self.records[prev].end() <= start),
                "a record is out of order",
                start,
            )?;
            let both_free = prev != NIL
                && record.state == State::Free
                && self.records[prev].state == State::Free;
            require(
                !both_free || !self.records.mergeable(prev, at),
                "two free extents touch and are not merged",
                start,
            )?;
            if prev == NIL || self.page_of(self.records[prev].start) != self.page_of(start) {
                pages += 1;
                let mapped = self.page_map.get(self.page_of(start));
                require(mapped == Some(at), "the page map does not lead to a record", start)?;
            }
            managed += record.len;
            match record.state {
                State::Free => free += record.len,
                State::Live => {
                    live += record.len;
                    blocks += 1;
                }
                State::Slab => {
                    let slab = self.slabs.get(record.slab);
                    require(slab.is_some(), "a record is of no slab", start)?;
                    let (slot, used) = slab.map_or((0, 0), |slab| (slab.slot, slab.used));
                    live += slot * u64::from(used);
                    blocks += u64::from(used);
                }
                State::Vacant => require(false, "a vacant record is in the list", start)?,
            }
            records += 1;
            (prev, at) = (at, record.next);
        }
        let mapped = self.page_map.count();
        require(mapped == pages, "the page map has another number of pages", mapped as u64)?;
        let (vacant, expected) = (self.records.count_vacant(), self.records.id_count() - records);
        require(
            vacant == expected && self.records.vacant_count() == expected,
            "another number of records is vacant",
            vacant as u64,
        )?;
        require(self.managed_bytes == managed, "managed_bytes is wrong", self.managed_bytes)?;
        require(self.live_bytes == live, "live_bytes is wrong", self.live_bytes)?;
        require(self.live_blocks == blocks, "live_blocks is wrong", self.live_blocks)?;
        require(self.free_bytes == free, "free_bytes is wrong", self.free_bytes)
    }

    /// Checks that the bins contain exactly the free extents, each once and in its place.
    fn check_bins(&self) -> Result<(), InvariantViolation> {
        let (mut bytes, mut result) = (0, Ok(()));
        self.bins.audit(&self.records, |id, valid| {
            let record = self.records.get(id);
            let (start, len) = record.map_or((0, 0), |record| (record.start, record.len));
            bytes += len;
            let free = record.is_some_and(|record| record.state == State::Free);
            result =
                result.and(require(valid && free, "the bins are wrong about an extent", start));
        });
        result?;
        require(bytes == self.free_bytes, "the bins hold another number of bytes", bytes)
    }

    /// Checks that each slab agrees with its record, and that the lists contain exactly the slabs
    /// with room.
    fn check_slabs(&self) -> Result<(), InvariantViolation> {
        let mut with_room = 0;
        let mut slots: Vec<u64> = self.slabs.capacities().map(|_| 0).collect();
        let mut at = self.records.first();
        while at != NIL {
            let record = &self.records[at];
            if record.state == State::Slab {
                let slab = self.slabs.slab(record.slab);
                let agrees =
                    slab.record == at && slab.start == record.start && slab.bytes() == record.len;
                require(
                    agrees && slab.free_slots() == slab.slots - slab.used,
                    "a slab disagrees with its record",
                    record.start,
                )?;
                with_room += usize::from(slab.used < slab.slots);
                slots[slab.class as usize] += u64::from(slab.slots);
            }
            at = record.next;
        }
        for (counted, capacity) in slots.into_iter().zip(self.slabs.capacities()) {
            require(counted == capacity, "a class has another number of slots", capacity)?;
        }
        let (mut listed, mut result) = (0, Ok(()));
        self.slabs.audit(|id, valid| {
            listed += 1;
            let slab = self.slabs.get(id);
            let in_use = slab.is_some_and(|slab| !slab.is_vacant());
            let start = slab.map_or(0, |slab| slab.start);
            result = result.and(require(valid && in_use, "a slab disagrees with its lists", start));
        });
        result?;
        require(listed == with_room, "another number of slabs has room", listed as u64)
    }
}
