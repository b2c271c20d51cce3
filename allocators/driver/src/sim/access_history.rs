//! Records of the last accesses to memory.
//!
//! One history belongs to one piece of memory: a physical handle, an allocation, or a registration
//! of host memory. It divides the piece into intervals. For each interval it keeps the last write,
//! and the reads since that write that no later read comes after. That is sufficient: an action
//! after the last write also comes after all earlier writes.

use super::{
    agents::ClockComponents,
    clock::Clock,
    violation::{Finding, Party},
};
use crate::site::Site;
use std::collections::BTreeMap;

/// An action on some bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ActionKind {
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
pub(crate) struct Action {
    pub(crate) count: u64,
    pub(crate) component: u32,
    pub(crate) kind: ActionKind,
    pub(crate) work: &'static str,
    pub(crate) site: Site,
    /// The line that launched the graph of the action.
    pub(crate) launch: Option<Site>,
}

impl Action {
    /// Creates an action that is of no graph.
    pub(crate) fn new(
        (component, count): (u32, u64),
        kind: ActionKind,
        work: &'static str,
        site: Site,
    ) -> Self {
        Self { count, component, kind, work, site, launch: None }
    }

    /// Returns whether the action comes before this clock.
    pub(crate) fn precedes(&self, clock: &Clock) -> bool {
        clock.covers(self.component, self.count)
    }

    pub(crate) fn party(&self, components: &ClockComponents) -> Party {
        let agent = components.owner(self.component, self.count);
        Party { agent, work: self.work, site: self.site, launch: self.launch }
    }
}

/// The record of one interval.
#[derive(Clone, Default, Debug)]
struct IntervalRecord {
    write: Option<Action>,
    /// Reads since the last write, none of which comes before another.
    reads: Vec<Action>,
}

impl IntervalRecord {
    /// Records an action, and reports the earlier actions that it is not ordered after.
    fn record(&mut self, action: &Action, clock: &Clock, mut racing: impl FnMut(Action)) {
        if let Some(write) = self.write.filter(|write| !write.precedes(clock)) {
            racing(write);
        }
        if action.kind == ActionKind::Read {
            self.reads.retain(|read| !read.precedes(clock));
            self.reads.push(*action);
        } else {
            self.reads.iter().filter(|read| !read.precedes(clock)).for_each(|read| racing(*read));
            self.reads.clear();
            self.write = Some(*action);
        }
    }
}

/// The record of one piece of memory, by offset.
#[derive(Debug)]
pub(crate) struct AccessHistory {
    bytes: u64,
    /// Intervals by first byte, without gaps.
    intervals: BTreeMap<u64, IntervalRecord>,
}

impl AccessHistory {
    /// Creates the record of `bytes` without any access.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, intervals: BTreeMap::from([(0, IntervalRecord::default())]) }
    }

    /// Records an access by `action`, whose agent has `clock`, to `bytes` from `offset` on. Adds
    /// the actions it races with to `findings`. `base` is the address of offset 0.
    pub(crate) fn record(
        &mut self,
        base: u64,
        offset: u64,
        bytes: u64,
        action: &Action,
        clock: &Clock,
        findings: &mut Vec<Finding>,
    ) {
        let end = (offset + bytes).min(self.bytes);
        if offset >= end {
            return;
        }
        let parts = &mut self.intervals;
        split(parts, offset);
        if end < self.bytes {
            split(parts, end);
        }
        let mut starts_after_first = Vec::new();
        for (&start, interval) in parts.range_mut(offset..end) {
            interval.record(action, clock, |earlier| {
                findings.push(Finding::race(earlier, action.kind, base + start, end - start));
            });
            if action.kind != ActionKind::Read && start != offset {
                starts_after_first.push(start);
            }
        }
        // A write leaves the same record everywhere, so the intervals are merged.
        for start in starts_after_first {
            parts.remove(&start);
        }
    }
}

/// Splits the interval at `offset`.
fn split(parts: &mut BTreeMap<u64, IntervalRecord>, offset: u64) {
    if let Some((&start, interval)) = parts.range(..=offset).next_back()
        && start != offset
    {
        let copy = interval.clone();
        parts.insert(offset, copy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::Location;

    fn action(component: u32, count: u64, kind: ActionKind) -> Action {
        Action::new((component, count), kind, "test", Location::caller())
    }

    fn clock(counts: &[(u32, u64)]) -> Clock {
        let mut clock = Clock::default();
        counts.iter().for_each(|&(component, count)| clock.raise(component, count));
        clock
    }

    #[test]
    fn only_overlapping_accesses_race() {
        let mut history = AccessHistory::new(100);
        let mut findings = Vec::new();
        history.record(
            0,
            0,
            50,
            &action(0, 1, ActionKind::Write),
            &clock(&[(0, 1)]),
            &mut findings,
        );
        history.record(
            0,
            50,
            50,
            &action(1, 1, ActionKind::Write),
            &clock(&[(1, 1)]),
            &mut findings,
        );
        assert!(findings.is_empty());
        history.record(0, 49, 1, &action(1, 2, ActionKind::Read), &clock(&[(1, 2)]), &mut findings);
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn write_races_with_every_unordered_read() {
        let mut history = AccessHistory::new(100);
        let mut findings = Vec::new();
        for component in 0..3 {
            history.record(
                0,
                0,
                100,
                &action(component, 1, ActionKind::Read),
                &clock(&[(component, 1)]),
                &mut findings,
            );
        }
        history.record(
            0,
            10,
            20,
            &action(0, 2, ActionKind::Write),
            &clock(&[(0, 2), (2, 1)]),
            &mut findings,
        );
        assert_eq!(findings.len(), 1, "the read of component 1 alone is not known: {findings:?}");
    }

    #[test]
    fn whole_write_merges_the_intervals() {
        let mut history = AccessHistory::new(100);
        let mut findings = Vec::new();
        for offset in 0..10 {
            let count = offset + 1;
            history.record(
                0,
                offset * 10,
                10,
                &action(0, count, ActionKind::Write),
                &clock(&[(0, count)]),
                &mut findings,
            );
        }
        history.record(
            0,
            0,
            100,
            &action(0, 11, ActionKind::Write),
            &clock(&[(0, 11)]),
            &mut findings,
        );
        assert_eq!(history.intervals.len(), 1);
        assert!(findings.is_empty());
    }
}
