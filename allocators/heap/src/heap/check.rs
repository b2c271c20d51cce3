//! The self-check of a heap's invariants.

use super::Heap;
use crate::InvariantViolation;
use crate::records::{BORDER_ABOVE, BORDER_BELOW, NIL, Record, State};

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
        let mut found = Sums::default();
        while at != NIL {
            let record = &self.records[at];
            self.check_shape(record)?;
            if record.prev != prev || (prev != NIL && self.records[prev].end() > record.start) {
                return Err(InvariantViolation::Order { at: record.start });
            }
            if prev != NIL
                && record.state == State::Free
                && self.records[prev].state == State::Free
                && self.records.mergeable(prev, at)
            {
                return Err(InvariantViolation::Unmerged { at: record.start });
            }
            if prev == NIL || self.page_of(self.records[prev].start) != self.page_of(record.start) {
                pages += 1;
                if self.page_map.get(self.page_of(record.start)) != Some(at) {
                    return Err(InvariantViolation::PageMap { at: record.start });
                }
            }
            found.managed += record.len;
            match record.state {
                State::Free => found.free += record.len,
                State::Live => {
                    found.live += record.len;
                    found.blocks += 1;
                }
                State::Slab => {
                    let slab = self
                        .slabs
                        .get(record.slab)
                        .ok_or(InvariantViolation::Slab { at: record.start })?;
                    found.live += slab.slot * u64::from(slab.used);
                    found.blocks += u64::from(slab.used);
                }
                State::Vacant => return Err(InvariantViolation::Order { at: record.start }),
            }
            records += 1;
            (prev, at) = (at, record.next);
        }
        if self.page_map.count() != pages {
            return Err(InvariantViolation::PageCount {
                expected: pages,
                found: self.page_map.count(),
            });
        }
        let vacant = self.records.count_vacant();
        let expected = self.records.id_count() - records;
        if vacant != expected || self.records.vacant_count() != expected {
            return Err(InvariantViolation::Vacancies { expected, found: vacant });
        }
        for (name, expected, found) in [
            ("managed_bytes", found.managed, self.managed_bytes),
            ("live_bytes", found.live, self.live_bytes),
            ("live_blocks", found.blocks, self.live_blocks),
            ("free_bytes", found.free, self.free_bytes),
        ] {
            if expected != found {
                return Err(InvariantViolation::Count { name, expected, found });
            }
        }
        Ok(())
    }

    fn check_shape(&self, record: &Record) -> Result<(), InvariantViolation> {
        let broken = Err(InvariantViolation::Shape { at: record.start });
        if self.validate(record.range()).is_err() {
            return broken;
        }
        let border = self.config.border;
        if border != 0 {
            let last = record.end() - 1;
            let before = record.start.is_multiple_of(border);
            let after = record.end().is_multiple_of(border);
            if record.start / border != last / border
                || before && record.borders & BORDER_BELOW == 0
                || after && record.borders & BORDER_ABOVE == 0
            {
                return broken;
            }
        }
        Ok(())
    }

    /// Checks that the bins contain each free record once, in the right place, and nothing else.
    fn check_bins(&self) -> Result<(), InvariantViolation> {
        let mut bytes = 0;
        let mut broken = Ok(());
        self.bins.audit(&self.records, |id, valid| {
            let record = self.records.get(id);
            bytes += record.map_or(0, |record| record.len);
            if !valid || record.is_none_or(|record| record.state != State::Free) {
                broken =
                    Err(InvariantViolation::Bins { at: record.map_or(0, |record| record.start) });
            }
        });
        broken?;
        if bytes != self.free_bytes {
            return Err(InvariantViolation::Count {
                name: "bytes in bins",
                expected: self.free_bytes,
                found: bytes,
            });
        }
        Ok(())
    }

    /// Checks slabs against their records, their bitmaps and their classes' lists.
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
                if !agrees || slab.free_slots() != slab.slots - slab.used {
                    return Err(InvariantViolation::Slab { at: record.start });
                }
                with_room += usize::from(slab.used < slab.slots);
                slots[slab.class as usize] += u64::from(slab.slots);
            }
            at = record.next;
        }
        for (expected, found) in slots.into_iter().zip(self.slabs.capacities()) {
            if expected != found {
                return Err(InvariantViolation::Count {
                    name: "slots of a class",
                    expected,
                    found,
                });
            }
        }
        let mut broken = Ok(());
        let mut listed = 0;
        self.slabs.audit(|id, valid| {
            listed += 1;
            let slab = self.slabs.get(id);
            if !valid || slab.is_none_or(|slab| slab.is_vacant()) {
                broken = Err(InvariantViolation::Slab { at: slab.map_or(0, |slab| slab.start) });
            }
        });
        broken?;
        if listed != with_room {
            let (expected, found) = (with_room as u64, listed as u64);
            return Err(InvariantViolation::Count { name: "slabs with room", expected, found });
        }
        Ok(())
    }
}

/// The sums over all records.
#[derive(Default)]
struct Sums {
    managed: u64,
    live: u64,
    blocks: u64,
    free: u64,
}
