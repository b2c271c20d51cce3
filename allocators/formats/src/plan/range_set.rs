//! A set of addresses as sorted ranges.

/// Addresses in units, as ranges that neither overlap nor touch, in ascending order.
#[derive(Clone, Default, Debug)]
pub(crate) struct RangeSet {
    ranges: Vec<(u32, u32)>,
}

impl RangeSet {
    /// Removes all ranges and keeps the capacity.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds the range from `start` to `end`, which is not empty, and merges it with its
    /// neighbours.
    pub(crate) fn insert(&mut self, start: u32, end: u32) {
        let from = self.ranges.partition_point(|range| range.1 < start);
        let reached = self.ranges[from..].partition_point(|range| range.0 <= end);
        if reached == 0 {
            self.ranges.insert(from, (start, end));
            return;
        }
        let last = from + reached - 1;
        let merged = (start.min(self.ranges[from].0), end.max(self.ranges[last].1));
        self.ranges[from] = merged;
        self.ranges.drain(from + 1..=last);
    }

    /// Returns the lowest address of at least `from` that has `units` free units behind it.
    /// Saturates. `cursor` is 0 in the first search of a series, whose `from` never falls, and
    /// remembers how far the series has come.
    pub(crate) fn lowest_gap(&self, cursor: &mut usize, from: u32, units: u32) -> u32 {
        /// Ranges that are passed one by one before the rest is bisected.
        const NEAR: usize = 4;
        let mut next = *cursor;
        let near = self.ranges.len().min(next + NEAR);
        while next < near && self.ranges[next].1 <= from {
            next += 1;
        }
        if next == near && next < self.ranges.len() {
            next += self.ranges[next..].partition_point(|range| range.1 <= from);
        }
        let mut at = from;
        while let Some(&(start, end)) = self.ranges.get(next) {
            if start >= at.saturating_add(units) {
                break;
            }
            at = end;
            next += 1;
        }
        *cursor = next;
        at
    }
}
