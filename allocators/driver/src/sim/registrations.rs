//! Addresses that are registered outside the pools: by network cards, other processes and graphs.
//!
//! A user outside the pools stores the addresses of a registered range and accesses them later,
//! without any order. If the memory there is remapped, it silently accesses the wrong memory. So
//! creating or removing a mapping in a registered range is a violation, even if no work is queued.

use super::{
    access_history::Action,
    violation::{Finding, ViolationKind},
};
use std::collections::BTreeMap;

/// Registered ranges, by first address and bytes, with the action of each registration.
#[derive(Default, Debug)]
pub(crate) struct Registrations {
    ranges: BTreeMap<(u64, u64), Vec<Action>>,
}

impl Registrations {
    pub(crate) fn add(&mut self, address: u64, bytes: u64, cause: Action) {
        self.ranges.entry((address, bytes)).or_default().push(cause);
    }

    /// Ends one registration of a range: the last one, since all are equal.
    pub(crate) fn remove(&mut self, address: u64, bytes: u64) {
        if let Some(actions) = self.ranges.get_mut(&(address, bytes)) {
            actions.pop();
            if actions.is_empty() {
                self.ranges.remove(&(address, bytes));
            }
        }
    }

    /// Reports the registrations that a change of a range's mappings breaks.
    pub(crate) fn check(&self, address: u64, bytes: u64, findings: &mut Vec<Finding>) {
        let end = address.saturating_add(bytes);
        for (&(start, len), actions) in self.ranges.range(..(end, 0)) {
            let from = start.max(address);
            let to = end.min(start.saturating_add(len));
            if from < to {
                let kind = ViolationKind::MovedWhileRegistered;
                let finding = |cause: &Action| Finding {
                    kind,
                    earlier: Some(*cause),
                    address: from,
                    bytes: to - from,
                };
                findings.extend(actions.iter().map(finding));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::access_history::ActionKind, *};
    use std::panic::Location;

    fn count_findings(registrations: &Registrations, address: u64, bytes: u64) -> usize {
        let mut findings = Vec::new();
        registrations.check(address, bytes, &mut findings);
        findings.len()
    }

    #[test]
    fn every_overlap_is_reported_until_the_last_registration_ends() {
        let cause = Action::new((0, 1), ActionKind::Read, "test", Location::caller());
        let mut registrations = Registrations::default();
        registrations.add(100, 50, cause);
        registrations.add(100, 50, cause);
        registrations.add(120, 10, cause);
        assert_eq!(count_findings(&registrations, 149, 10), 2);
        assert_eq!(count_findings(&registrations, 0, 101), 2);
        assert_eq!(count_findings(&registrations, 125, 1), 3);
        assert_eq!(
            (count_findings(&registrations, 0, 100), count_findings(&registrations, 150, 100)),
            (0, 0)
        );
        registrations.remove(100, 50);
        assert_eq!(count_findings(&registrations, 149, 10), 1);
        registrations.remove(100, 50);
        registrations.remove(100, 50);
        assert_eq!(count_findings(&registrations, 149, 10), 0);
    }
}
