//! The address ranges of the segments.

use std::{collections::BTreeMap, ops::Range};

/// The granularity of segments, which is that of mapped memory.
const GRANULARITY: u64 = 2 << 20;

/// Disjoint ranges that do not touch each other, by start.
#[derive(Clone, Default, Debug)]
pub(super) struct SegmentRanges(BTreeMap<u64, u64>);

impl SegmentRanges {
    /// Adds the aligned units that contain this range. Returns the newly covered ranges.
    pub(super) fn add(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut start, mut end) = (
            range.start / GRANULARITY * GRANULARITY,
            range.end.div_ceil(GRANULARITY).saturating_mul(GRANULARITY),
        );
        let mut gaps = Vec::new();
        let mut at = start;
        // Ranges that end at `start` or later. The last one that begins before it may be among
        // them.
        let first = self
            .0
            .range(..=start)
            .next_back()
            .filter(|(_, to)| **to >= start)
            .map(|(from, _)| *from);
        let touching: Vec<_> =
            self.0.range(first.unwrap_or(start)..=end).map(|(from, to)| (*from, *to)).collect();
        for (from, to) in touching {
            if at < from {
                gaps.push(at..from);
            }
            at = at.max(to);
            (start, end) = (start.min(from), end.max(to));
            self.0.remove(&from);
        }
        if at < end {
            gaps.push(at..end);
        }
        self.0.insert(start, end);
        gaps
    }

    /// An iterator over the ranges, lowest first.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(&start, &end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_new_range_is_returned_once_and_neighbours_are_merged() {
        let mut state = 1_u64;
        let mut below = |most: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for _ in 0..200 {
            let (mut segments, mut grains) = (SegmentRanges::default(), BTreeSet::new());
            for _ in 0..20 {
                let start = below(40) * (GRANULARITY / 2) + below(GRANULARITY / 2);
                let range = start..start + 1 + below(5 * GRANULARITY);
                let added: Vec<_> = segments
                    .add(&range)
                    .into_iter()
                    .flat_map(|gap| gap.step_by(GRANULARITY as usize))
                    .collect();
                let new: Vec<_> = (range.start / GRANULARITY..range.end.div_ceil(GRANULARITY))
                    .map(|grain| grain * GRANULARITY)
                    .filter(|grain| grains.insert(*grain))
                    .collect();
                assert_eq!(added, new);
            }
            let ranges: Vec<_> = segments.ranges().collect();
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
            let all: Vec<_> =
                ranges.into_iter().flat_map(|range| range.step_by(GRANULARITY as usize)).collect();
            assert_eq!(all, grains.into_iter().collect::<Vec<_>>());
        }
    }
}
