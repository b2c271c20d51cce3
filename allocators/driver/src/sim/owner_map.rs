//! The owners of addresses, as reported by their pools.
//!
//! Order only guarantees that two accesses do not overlap in time. It does not guarantee that each
//! was valid: a kernel for a block that has been freed may run long after all other work, and still
//! corrupt the block that is there now. So pools report the owner of a range, and work names its
//! block.

use super::{
    access_history::Action,
    violation::{Finding, ViolationKind},
};
use std::collections::{BTreeMap, VecDeque};

/// The state of an interval of addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// Owned by a block. The driver's own allocations have no generation until a pool sets one.
    Live { generation: Option<u64> },
    /// Freed, while uses by these streams (indices) may be open.
    Pending { users: Box<[usize]> },
    /// A guard beside a block, which these streams (indices) may read.
    Guard { users: Box<[usize]> },
    /// Free.
    Free,
}

#[derive(Clone, Debug)]
struct OwnedInterval {
    end: u64,
    owner: Owner,
    /// The action that set this owner.
    cause: Action,
}

/// Ranges that are retained for graphs, by first address: the end of each, and its keeper. They do
/// not overlap.
#[derive(Default, Debug)]
pub(crate) struct RetainedRanges {
    ranges: BTreeMap<u64, (u64, u64)>,
}

impl RetainedRanges {
    /// Retains `bytes` from `address` on for `keeper`.
    pub(crate) fn retain(&mut self, address: u64, bytes: u64, keeper: u64) {
        self.release(address, bytes);
        self.ranges.insert(address, (address.saturating_add(bytes), keeper));
    }

    /// Returns whether all of a range is retained for any of these keepers.
    pub(crate) fn is_retained_for(&self, address: u64, bytes: u64, keepers: &[u64]) -> bool {
        let end = address.saturating_add(bytes);
        let mut cursor = address;
        while cursor < end {
            match self.ranges.range(..=cursor).next_back() {
                Some((_, &(last, keeper))) if last > cursor && keepers.contains(&keeper) => {
                    cursor = last;
                }
                _ => return false,
            }
        }
        bytes > 0
    }

    /// Adds the keepers of any part of a range.
    pub(crate) fn add_keepers(&self, address: u64, bytes: u64, keepers: &mut Vec<u64>) {
        let end = address.saturating_add(bytes);
        let retained = self.ranges.range(..end).rev().take_while(|&(_, &(last, _))| last > address);
        for (_, &(_, keeper)) in retained {
            if !keepers.contains(&keeper) {
                keepers.push(keeper);
            }
        }
    }

    /// Releases all parts of this range.
    pub(crate) fn release(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        while let Some((&start, &(last, keeper))) =
            self.ranges.range(..end).next_back().filter(|&(_, &(last, _))| last > address)
        {
            self.ranges.remove(&start);
            if start < address {
                self.ranges.insert(start, (address, keeper));
            }
            if last > end {
                self.ranges.insert(end, (last, keeper));
            }
        }
    }
}

/// Owners by address. Addresses that no pool has reported are not checked.
#[derive(Default, Debug)]
pub(crate) struct OwnerMap {
    /// Indexed by first address, without overlaps.
    intervals: BTreeMap<u64, OwnedInterval>,
    /// Ranges that the driver has freed, oldest first. For a limited time, violations on them can
    /// name the free.
    freed: VecDeque<(u64, u64)>,
}

/// The maximum number of freed allocations that are remembered.
const MAX_FREED_RANGES: usize = 1 << 16;

impl OwnerMap {
    /// Sets the owner of `bytes` from `address` on.
    pub(crate) fn set(&mut self, address: u64, bytes: u64, owner: Owner, cause: Action) {
        let end = address.saturating_add(bytes);
        // Fast path: usually the same range changes its owner repeatedly.
        if let Some(interval) = self.intervals.get_mut(&address)
            && interval.end == end
        {
            *interval = OwnedInterval { end, owner, cause };
            return;
        }
        self.clear(address, bytes);
        self.intervals.insert(address, OwnedInterval { end, owner, cause });
    }

    /// Removes the owner of a range.
    pub(crate) fn clear(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        if let Some((_, before)) = self.intervals.range_mut(..address).next_back()
            && before.end > address
        {
            let after = OwnedInterval { end: before.end, ..before.clone() };
            before.end = address;
            if after.end > end {
                self.intervals.insert(end, after);
                return;
            }
        }
        while let Some((&start, interval)) = self.intervals.range(address..end).next() {
            let rest = (interval.end > end).then(|| interval.clone());
            self.intervals.remove(&start);
            if let Some(rest) = rest {
                self.intervals.insert(end, rest);
            }
        }
    }

    /// Marks a range as freed by the driver. It is free until the addresses are allocated again.
    pub(crate) fn record_free(&mut self, address: u64, bytes: u64, cause: Action) {
        self.set(address, bytes, Owner::Free, cause);
        self.freed.push_back((address, bytes));
        if self.freed.len() > MAX_FREED_RANGES
            && let Some((address, bytes)) = self.freed.pop_front()
            && self.intervals.get(&address).is_some_and(|interval| {
                interval.end == address + bytes && interval.owner == Owner::Free
            })
        {
            self.intervals.remove(&address);
        }
    }

    /// Returns the cause of the last owner record of an address.
    pub(crate) fn cause_at(&self, address: u64) -> Option<&Action> {
        let (_, interval) = self.intervals.range(..=address).next_back()?;
        (interval.end > address).then_some(&interval.cause)
    }

    /// Calls `each` with the parts of a range that do not belong to this block yet.
    pub(crate) fn for_each_part_outside(
        &self,
        address: u64,
        bytes: u64,
        generation: u64,
        mut each: impl FnMut(u64, u64),
    ) {
        let end = address.saturating_add(bytes);
        let mut cursor = address;
        for (start, interval) in self.overlapping(address, end) {
            if (interval.owner == Owner::Live { generation: Some(generation) }) {
                if start > cursor {
                    each(cursor, start - cursor);
                }
                cursor = interval.end.min(end);
            }
        }
        if cursor < end {
            each(cursor, end - cursor);
        }
    }

    /// Calls `each` with the parts of a range, split by block.
    pub(crate) fn for_each_block(
        &self,
        address: u64,
        bytes: u64,
        mut each: impl FnMut(u64, u64, Option<u64>),
    ) {
        let end = address.saturating_add(bytes);
        let mut cursor = address;
        for (start, interval) in self.overlapping(address, end) {
            let Owner::Live { generation: Some(generation) } = interval.owner else { continue };
            if start > cursor {
                each(cursor, start - cursor, None);
            }
            let from = start.max(address);
            cursor = interval.end.min(end);
            each(from, cursor - from, Some(generation));
        }
        if cursor < end {
            each(cursor, end - cursor, None);
        }
    }

    fn overlapping(&self, address: u64, end: u64) -> impl Iterator<Item = (u64, &OwnedInterval)> {
        let first = match self.intervals.range(..=address).next_back() {
            Some((&start, interval)) if interval.end > address => start,
            _ => address,
        };
        self.intervals.range(first..end.max(first)).map(|(&start, interval)| (start, interval))
    }

    /// Checks a use by a stream (an index) of a range that refers to block `generation`.
    pub(crate) fn check(
        &self,
        address: u64,
        bytes: u64,
        generation: Option<u64>,
        stream: usize,
        findings: &mut Vec<Finding>,
    ) {
        let end = address.saturating_add(bytes);
        for (start, interval) in self.overlapping(address, end) {
            let kind = match (&interval.owner, generation) {
                (Owner::Live { generation: Some(live) }, Some(declared)) if *live != declared => {
                    ViolationKind::StaleBlock { declared, live: *live }
                }
                (Owner::Live { .. }, _) => continue,
                (Owner::Pending { users } | Owner::Guard { users }, _)
                    if users.contains(&stream) =>
                {
                    continue;
                }
                (Owner::Guard { .. }, _) => ViolationKind::OutsideBlock,
                (Owner::Pending { .. } | Owner::Free, _) => ViolationKind::UseAfterFree,
            };
            let from = start.max(address);
            findings.push(Finding {
                kind,
                earlier: Some(interval.cause),
                address: from,
                bytes: interval.end.min(end) - from,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::access_history::ActionKind, *};
    use std::panic::Location;

    fn cause() -> Action {
        Action::new((0, 1), ActionKind::Allocate, "test", Location::caller())
    }

    fn count_findings(
        owners: &OwnerMap,
        address: u64,
        bytes: u64,
        generation: Option<u64>,
    ) -> usize {
        let mut findings = Vec::new();
        owners.check(address, bytes, generation, 0, &mut findings);
        findings.len()
    }

    #[test]
    fn new_owner_splits_the_intervals_it_overlaps() {
        let mut owners = OwnerMap::default();
        owners.set(0, 100, Owner::Free, cause());
        owners.set(40, 20, Owner::Live { generation: Some(7) }, cause());
        assert_eq!(count_findings(&owners, 40, 20, Some(7)), 0);
        assert_eq!(count_findings(&owners, 40, 20, Some(8)), 1);
        assert_eq!(count_findings(&owners, 0, 100, Some(7)), 2);
        owners.set(30, 40, Owner::Live { generation: Some(9) }, cause());
        assert_eq!(count_findings(&owners, 30, 40, Some(9)), 0);
        assert_eq!(
            (count_findings(&owners, 29, 1, None), count_findings(&owners, 70, 1, None)),
            (1, 1)
        );
        assert_eq!(count_findings(&owners, 100, 50, None), 0, "no pool has reported these");
    }

    #[test]
    fn only_parts_outside_the_block_are_visited() {
        let mut owners = OwnerMap::default();
        owners.set(10, 10, Owner::Live { generation: Some(1) }, cause());
        let parts = |address, bytes, generation| {
            let mut parts = Vec::new();
            owners.for_each_part_outside(address, bytes, generation, |address, bytes| {
                parts.push((address, bytes));
            });
            parts
        };
        assert_eq!(parts(10, 20, 1), [(20, 10)]);
        assert_eq!(parts(0, 30, 1), [(0, 10), (20, 10)]);
        assert_eq!(parts(10, 10, 2), [(10, 10)]);
    }

    #[test]
    fn number_of_freed_ranges_is_limited() {
        let mut owners = OwnerMap::default();
        for n in 0..MAX_FREED_RANGES as u64 + 10 {
            owners.record_free(n * 100, 50, cause());
        }
        assert_eq!(owners.intervals.len(), MAX_FREED_RANGES);
    }
}
