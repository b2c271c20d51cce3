//! Addresses that are registered outside the pools: by network cards, other processes and graphs.
//!
//! A user outside the pools stores the addresses of a registered range and accesses them later,
//! without any order. If the memory there is remapped, it silently accesses the wrong memory. So
//! creating or removing a mapping in a registered range is a violation, even if no work is queued.

use super::{
    ledger::Mark,
    violation::{Finding, ViolationKind},
};
use std::collections::BTreeMap;

/// Registered ranges, by first address and bytes, with a mark for each registration.
#[derive(Default, Debug)]
pub(crate) struct Registered {
    ranges: BTreeMap<(u64, u64), Vec<Mark>>,
}

impl Registered {
    pub(crate) fn add(&mut self, address: u64, bytes: u64, by: Mark) {
        self.ranges.entry((address, bytes)).or_default().push(by);
    }

    /// Ends one registration of a range: the last one, since all are equal.
    pub(crate) fn remove(&mut self, address: u64, bytes: u64) {
        if let Some(marks) = self.ranges.get_mut(&(address, bytes)) {
            marks.pop();
            if marks.is_empty() {
                self.ranges.remove(&(address, bytes));
            }
        }
    }

    /// Reports the registrations that a change of a range's mappings breaks.
    pub(crate) fn check(&self, address: u64, bytes: u64, found: &mut Vec<Finding>) {
        let end = address.saturating_add(bytes);
        for (&(start, len), marks) in self.ranges.range(..(end, 0)) {
            let from = start.max(address);
            let to = end.min(start.saturating_add(len));
            if from < to {
                let kind = ViolationKind::MovedWhileRegistered;
                let finding = |by: &Mark| Finding {
                    kind,
                    earlier: Some(*by),
                    address: from,
                    bytes: to - from,
                };
                found.extend(marks.iter().map(finding));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::ledger::Act, *};
    use std::panic::Location;

    fn faults(registered: &Registered, address: u64, bytes: u64) -> usize {
        let mut found = Vec::new();
        registered.check(address, bytes, &mut found);
        found.len()
    }

    #[test]
    fn every_overlap_is_found_until_the_last_registration_ends() {
        let by = Mark {
            count: 1,
            slot: 0,
            act: Act::Read,
            work: "test",
            site: Location::caller(),
            launch: None,
        };
        let mut registered = Registered::default();
        registered.add(100, 50, by);
        registered.add(100, 50, by);
        registered.add(120, 10, by);
        assert_eq!(faults(&registered, 149, 10), 2);
        assert_eq!(faults(&registered, 0, 101), 2);
        assert_eq!(faults(&registered, 125, 1), 3);
        assert_eq!((faults(&registered, 0, 100), faults(&registered, 150, 100)), (0, 0));
        registered.remove(100, 50);
        assert_eq!(faults(&registered, 149, 10), 1);
        registered.remove(100, 50);
        registered.remove(100, 50);
        assert_eq!(faults(&registered, 149, 10), 0);
    }
}
