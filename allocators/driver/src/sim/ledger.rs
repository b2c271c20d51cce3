//! Records of the last accesses to memory.
//!
//! One ledger belongs to one piece of memory: a physical handle, an allocation, or a registration
//! of host memory. It divides the piece into intervals. For each interval it keeps the last write,
//! and the reads since that write that no later read comes after. That is sufficient: an action
//! after the last write also comes after all earlier writes.
//!
//! Most pieces are accessed as a whole or not at all, so a ledger is one interval until a part is
//! accessed.

use super::{
    agents::Components,
    clock::Clock,
    violation::{Finding, Party},
};
use std::{collections::BTreeMap, panic::Location};

/// An action on some bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Act {
    /// A read.
    Read,
    /// A write, or a read and a write.
    Write,
    /// The allocation of a block. Counts as a write, since its user may write all bytes.
    Allocate,
    /// A free. Counts as a write, since the next user is unknown.
    Free,
}

/// An action, with its stamp and its source line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) count: u64,
    pub(crate) slot: u32,
    pub(crate) act: Act,
    pub(crate) work: &'static str,
    pub(crate) site: &'static Location<'static>,
    /// The line that launched the graph of the action.
    pub(crate) launch: Option<&'static Location<'static>>,
}

impl Mark {
    /// Returns whether the action comes before this clock.
    pub(crate) fn before(&self, clock: &Clock) -> bool {
        clock.knows(self.slot, self.count)
    }

    pub(crate) fn party(&self, components: &Components) -> Party {
        let agent = components.owner(self.slot, self.count);
        Party { agent, work: self.work, site: self.site, launch: self.launch }
    }
}

/// The record of one interval.
#[derive(Clone, Default, Debug)]
struct Cell {
    write: Option<Mark>,
    /// Reads since the last write, none of which comes before another.
    reads: Vec<Mark>,
}

impl Cell {
    /// Records an action, and reports the earlier actions that it is not ordered after.
    fn act(&mut self, mark: &Mark, clock: &Clock, mut racing: impl FnMut(Mark)) {
        if let Some(write) = self.write.filter(|write| !write.before(clock)) {
            racing(write);
        }
        if mark.act == Act::Read {
            self.reads.retain(|read| !read.before(clock));
            self.reads.push(*mark);
        } else {
            self.reads.iter().filter(|read| !read.before(clock)).for_each(|read| racing(*read));
            self.reads.clear();
            self.write = Some(*mark);
        }
    }
}

#[derive(Debug)]
enum Cells {
    Whole(Cell),
    /// Intervals by first byte, without gaps.
    Parts(BTreeMap<u64, Cell>),
}

/// The record of one piece of memory, by offset.
#[derive(Debug)]
pub(crate) struct Ledger {
    bytes: u64,
    cells: Cells,
}

impl Ledger {
    /// Creates the record of `bytes` without any access.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, cells: Cells::Whole(Cell::default()) }
    }

    /// Records an access by `mark`, whose agent has `clock`, to `bytes` from `offset` on. Adds the
    /// actions it races with to `found`. `base` is the address of offset 0.
    pub(crate) fn act(
        &mut self,
        base: u64,
        offset: u64,
        bytes: u64,
        mark: &Mark,
        clock: &Clock,
        found: &mut Vec<Finding>,
    ) {
        let end = (offset + bytes).min(self.bytes);
        if offset >= end {
            return;
        }
        let whole = offset == 0 && end == self.bytes;
        match &mut self.cells {
            Cells::Whole(cell) if whole => {
                cell.act(mark, clock, |earlier| {
                    found.push(Finding::race(earlier, mark.act, base, bytes));
                });
                return;
            }
            Cells::Whole(cell) => {
                self.cells = Cells::Parts(BTreeMap::from([(0, std::mem::take(cell))]));
            }
            Cells::Parts(_) => {}
        }
        let Cells::Parts(parts) = &mut self.cells else { return };
        split(parts, offset);
        if end < self.bytes {
            split(parts, end);
        }
        let mut starts_after_first = Vec::new();
        for (&start, cell) in parts.range_mut(offset..end) {
            cell.act(mark, clock, |earlier| {
                found.push(Finding::race(earlier, mark.act, base + start, end - start));
            });
            if mark.act != Act::Read && start != offset {
                starts_after_first.push(start);
            }
        }
        // A write leaves the same record everywhere, so the intervals are merged.
        for start in starts_after_first {
            parts.remove(&start);
        }
        if whole && mark.act != Act::Read {
            let cell = parts.remove(&0).unwrap_or_default();
            self.cells = Cells::Whole(cell);
        }
    }
}

/// Splits the interval at `offset`.
fn split(parts: &mut BTreeMap<u64, Cell>, offset: u64) {
    if let Some((&start, cell)) = parts.range(..=offset).next_back()
        && start != offset
    {
        let copy = cell.clone();
        parts.insert(offset, copy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(slot: u32, count: u64, act: Act) -> Mark {
        Mark { count, slot, act, work: "test", site: Location::caller(), launch: None }
    }

    fn clock(counts: &[(u32, u64)]) -> Clock {
        let mut clock = Clock::default();
        counts.iter().for_each(|&(slot, count)| clock.raise(slot, count));
        clock
    }

    #[test]
    fn only_overlapping_bytes_race() {
        let mut ledger = Ledger::new(100);
        let mut found = Vec::new();
        ledger.act(0, 0, 50, &mark(0, 1, Act::Write), &clock(&[(0, 1)]), &mut found);
        ledger.act(0, 50, 50, &mark(1, 1, Act::Write), &clock(&[(1, 1)]), &mut found);
        assert!(found.is_empty());
        ledger.act(0, 49, 1, &mark(1, 2, Act::Read), &clock(&[(1, 2)]), &mut found);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn a_write_must_come_after_every_read() {
        let mut ledger = Ledger::new(100);
        let mut found = Vec::new();
        for slot in 0..3 {
            ledger.act(0, 0, 100, &mark(slot, 1, Act::Read), &clock(&[(slot, 1)]), &mut found);
        }
        ledger.act(0, 10, 20, &mark(0, 2, Act::Write), &clock(&[(0, 2), (2, 1)]), &mut found);
        assert_eq!(found.len(), 1, "the read of slot 1 alone is not known: {found:?}");
    }

    #[test]
    fn a_write_over_everything_makes_one_interval_again() {
        let mut ledger = Ledger::new(100);
        let mut found = Vec::new();
        for offset in 0..10 {
            let count = offset + 1;
            ledger.act(
                0,
                offset * 10,
                10,
                &mark(0, count, Act::Write),
                &clock(&[(0, count)]),
                &mut found,
            );
        }
        ledger.act(0, 0, 100, &mark(0, 11, Act::Write), &clock(&[(0, 11)]), &mut found);
        assert!(matches!(ledger.cells, Cells::Whole(_)));
        assert!(found.is_empty());
    }
}
