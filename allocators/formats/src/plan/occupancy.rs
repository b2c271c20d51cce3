//! Which addresses are occupied during which part of time.
//!
//! A segment tree over time. The life of a block is cut into the largest nodes that it covers, at
//! most two of each level. Each node has two sets of addresses:
//!
//! - `own`: those of blocks that cover the node and not its parent;
//! - `below`: those of `own`, of the node and of all nodes under it.
//!
//! The addresses that are occupied at some time of a life are the union of `below` of the nodes
//! that the life is cut into, and of `own` of all nodes above them. So an insertion and a search
//! touch a number of sets that grows with the logarithm of the length of time, and never the
//! blocks one by one. Sets of a dense plan have few ranges.

use crate::plan::range_set::RangeSet;
use std::ops::Range;

/// The occupied addresses over time.
#[derive(Debug)]
pub(crate) struct Occupancy {
    /// The number of leaves: a power of two.
    leaves: usize,
    own: Vec<RangeSet>,
    below: Vec<RangeSet>,
    /// The nodes of the life at hand: those that it is cut into, and those above them.
    covered: Vec<usize>,
    above: Vec<usize>,
    /// How far the search has come in the set of each of them.
    cursors: Vec<usize>,
}

impl Occupancy {
    /// Creates an empty one for times below `times`.
    pub(crate) fn new(times: usize) -> Self {
        let leaves = times.max(1).next_power_of_two();
        let sets = || vec![RangeSet::default(); leaves * 2];
        Self {
            leaves,
            own: sets(),
            below: sets(),
            covered: Vec::new(),
            above: Vec::new(),
            cursors: Vec::new(),
        }
    }

    /// Removes everything and keeps the capacity.
    pub(crate) fn clear(&mut self) {
        self.own.iter_mut().chain(&mut self.below).for_each(RangeSet::clear);
    }

    /// Occupies the lowest `units` addresses that are free during all of `life`, which is not
    /// empty, and returns the first. Saturates.
    pub(crate) fn place(&mut self, life: Range<u32>, units: u32) -> u32 {
        self.cut(life);
        let at = self.lowest(units);
        let end = at.saturating_add(units);
        for &node in &self.covered {
            self.own[node].insert(at, end);
            self.below[node].insert(at, end);
        }
        for &node in &self.above {
            self.below[node].insert(at, end);
        }
        at
    }

    /// Cuts a life into nodes.
    fn cut(&mut self, life: Range<u32>) {
        self.covered.clear();
        self.above.clear();
        let (mut low, mut high) =
            (life.start as usize + self.leaves, life.end as usize + self.leaves);
        let (mut left, mut right) = (None, None);
        while low < high {
            if low & 1 == 1 {
                self.covered.push(low);
                left = left.or(Some(low / 2));
                low += 1;
            }
            if high & 1 == 1 {
                high -= 1;
                self.covered.push(high);
                right = right.or(Some(high / 2));
            }
            low /= 2;
            high /= 2;
        }
        // Every node above a covered one is above the lowest covered node of the same side. The two
        // paths upward meet at the root or before it. There is one side at least.
        let mut left_up = left.or(right).unwrap_or(0);
        let mut right_up = right.or(left).unwrap_or(0);
        while left_up != right_up {
            let lower = if left_up > right_up { &mut left_up } else { &mut right_up };
            self.above.push(*lower);
            *lower /= 2;
        }
        while left_up > 0 {
            self.above.push(left_up);
            left_up /= 2;
        }
    }

    /// Returns the lowest address with `units` free units behind it during all of the life at hand.
    fn lowest(&mut self, units: u32) -> u32 {
        let sets = self.covered.len() + self.above.len();
        self.cursors.clear();
        self.cursors.resize(sets, 0);
        let (mut at, mut agreed) = (0, 0);
        // Ends when all sets in turn have agreed to the same address.
        while agreed < sets {
            let below = self.covered.iter().map(|&node| &self.below[node]);
            let own = self.above.iter().map(|&node| &self.own[node]);
            for (set, cursor) in below.chain(own).zip(&mut self.cursors) {
                let next = set.lowest_gap(cursor, at, units);
                agreed = if next == at { agreed + 1 } else { 1 };
                at = next;
            }
        }
        at
    }
}
