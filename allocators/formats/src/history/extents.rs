//! Disjoint ranges of an address space, ordered by address: free memory, or mapped memory.
//!
//! A treap whose nodes know the widest range below them. So the lowest range that is wide enough,
//! insertion with merging, and removal of any part take logarithmic time, and the widest range is
//! known at any moment. Priorities are drawn per tree, so that no input can make it deep; they
//! change no result.

use aquifer_core::random::SplitMix64;
use std::{
    collections::hash_map::RandomState,
    fmt,
    hash::{BuildHasher, Hasher},
    ops::Range,
};

/// No node.
const NONE: u32 = u32::MAX;

/// Disjoint ranges that never touch: ranges that do are merged.
///
/// ```
/// use aquifer_formats::history::ExtentTree;
/// let mut free = ExtentTree::default();
/// free.insert(0..4096);
/// free.remove(1024..2048);
/// assert_eq!((free.total(), free.largest()), (3072, 2048));
/// assert_eq!(free.take_first(2000), Some(2048));
/// free.insert(1024..2048);
/// assert!(free.iter().eq([0..2048, 4048..4096]));
/// free.check();
/// ```
#[derive(Clone)]
pub struct ExtentTree {
    nodes: Vec<ExtentNode>,
    spare: Vec<u32>,
    root: u32,
    total: u64,
    random: SplitMix64,
}

#[derive(Clone, Copy)]
struct ExtentNode {
    start: u64,
    end: u64,
    /// The length of the widest range of this node and those below it.
    widest: u64,
    priority: u32,
    left: u32,
    right: u32,
}

impl Default for ExtentTree {
    fn default() -> Self {
        let random = SplitMix64::new(RandomState::new().build_hasher().finish());
        Self { nodes: Vec::new(), spare: Vec::new(), root: NONE, total: 0, random }
    }
}

impl fmt::Debug for ExtentTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl ExtentTree {
    /// Returns the bytes of all ranges.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bytes of the widest range, or 0 if there is none.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.widest(self.root)
    }

    /// Adds a range. What is in the tree already is added once.
    pub fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        let (mut low, mut high) = self.split(self.root, start);
        if let Some(last) = self.last(low)
            && self.nodes[last as usize].end >= start
        {
            let kept = self.nodes[last as usize];
            let (rest, dropped) = self.split(low, kept.start);
            self.drop_all(dropped);
            (low, start, end) = (rest, kept.start, end.max(kept.end));
        }
        while let Some(first) = self.first(high)
            && self.nodes[first as usize].start <= end
        {
            let kept = self.nodes[first as usize];
            let (dropped, rest) = self.split(high, kept.start.saturating_add(1));
            self.drop_all(dropped);
            (high, end) = (rest, end.max(kept.end));
        }
        let node = self.node(start, end);
        low = self.merge(low, node);
        self.root = self.merge(low, high);
        debug_assert!(self.largest() >= end - start, "what was added is in the tree");
        debug_assert!(self.total >= self.largest());
    }

    /// Removes a range, as far as it is in the tree. Returns the bytes removed.
    pub fn remove(&mut self, range: Range<u64>) -> u64 {
        let Range { start, end } = range;
        if start >= end {
            return 0;
        }
        let before = self.total;
        let (mut low, rest) = self.split(self.root, start);
        let (within, mut high) = self.split(rest, end);
        let mut tail = self.last(within).map_or(0, |last| self.nodes[last as usize].end);
        self.drop_all(within);
        if let Some(last) = self.last(low)
            && self.nodes[last as usize].end > start
        {
            let cut = self.nodes[last as usize];
            let (rest, dropped) = self.split(low, cut.start);
            self.drop_all(dropped);
            let head = self.node(cut.start, start);
            low = self.merge(rest, head);
            tail = tail.max(cut.end);
        }
        if tail > end {
            let node = self.node(end, tail);
            high = self.merge(node, high);
        }
        self.root = self.merge(low, high);
        debug_assert!(before - self.total <= end - start, "no more than the range is removed");
        debug_assert!(self.total >= self.largest());
        before - self.total
    }

    /// Removes the first `bytes` of the lowest range that has as many. Returns their address, or
    /// `None` if no range has.
    pub fn take_first(&mut self, bytes: u64) -> Option<u64> {
        if bytes == 0 || self.largest() < bytes {
            return None;
        }
        let (mut at, mut path) = (self.root, Vec::with_capacity(64));
        loop {
            let node = self.nodes[at as usize];
            path.push(at);
            if self.widest(node.left) >= bytes {
                at = node.left;
            } else if node.end - node.start >= bytes {
                break;
            } else {
                at = node.right;
            }
        }
        let Range { start, end } = {
            let node = self.nodes[at as usize];
            node.start..node.end
        };
        if end - start == bytes {
            self.remove(start..end);
        } else {
            debug_assert!(end - start > bytes);
            // The order of the nodes stays as it is.
            self.nodes[at as usize].start += bytes;
            self.total -= bytes;
            path.into_iter().rev().for_each(|node| self.update(node));
        }
        Some(start)
    }

    /// Checks that the ranges are disjoint and do not touch, and that every sum is right. Looks at
    /// all of them. See the example of [`ExtentTree`].
    ///
    /// # Panics
    /// If something is wrong.
    pub fn check(&self) {
        let (mut count, mut total, mut widest, mut below) = (0, 0, 0, None);
        for Range { start, end } in self.iter() {
            assert!(start < end, "an empty range at {start:#x}");
            assert!(below.is_none_or(|below| below < start), "ranges touch at {start:#x}");
            (count, total, widest) = (count + 1, total + (end - start), widest.max(end - start));
            below = Some(end);
        }
        assert_eq!((self.total, self.largest()), (total, widest), "the sums of the tree");
        assert_eq!(self.nodes.len() - self.spare.len(), count, "the nodes in use");
    }

    /// Returns the ranges, by address.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut open = Vec::new();
        let mut at = self.root;
        std::iter::from_fn(move || {
            while at != NONE {
                open.push(at);
                at = self.nodes[at as usize].left;
            }
            let node = self.nodes[open.pop()? as usize];
            at = node.right;
            Some(node.start..node.end)
        })
    }

    fn widest(&self, node: u32) -> u64 {
        self.nodes.get(node as usize).map_or(0, |node| node.widest)
    }

    fn node(&mut self, start: u64, end: u64) -> u32 {
        debug_assert!(start < end, "no range is empty");
        let priority = (self.random.next_u64() >> 32) as u32;
        let (widest, left, right) = (end - start, NONE, NONE);
        self.total += widest;
        let node = ExtentNode { start, end, widest, priority, left, right };
        if let Some(place) = self.spare.pop() {
            self.nodes[place as usize] = node;
            place
        } else {
            // Below NONE: memory for so many nodes would be needed, each for a block or a range
            // of the input, whose number is bounded below that.
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        }
    }

    fn drop_all(&mut self, root: u32) {
        let mut open = vec![root];
        while let Some(at) = open.pop() {
            if at != NONE {
                let ExtentNode { start, end, left, right, .. } = self.nodes[at as usize];
                self.total -= end - start;
                self.spare.push(at);
                open.extend([left, right]);
            }
        }
    }

    fn first(&self, mut at: u32) -> Option<u32> {
        let mut found = None;
        while at != NONE {
            (found, at) = (Some(at), self.nodes[at as usize].left);
        }
        found
    }

    fn last(&self, mut at: u32) -> Option<u32> {
        let mut found = None;
        while at != NONE {
            (found, at) = (Some(at), self.nodes[at as usize].right);
        }
        found
    }

    fn update(&mut self, at: u32) {
        let ExtentNode { start, end, left, right, .. } = self.nodes[at as usize];
        let widest = (end - start).max(self.widest(left)).max(self.widest(right));
        self.nodes[at as usize].widest = widest;
    }

    /// Splits a tree into the ranges that start below `key` and the others.
    fn split(&mut self, at: u32, key: u64) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        let ExtentNode { start, left, right, .. } = self.nodes[at as usize];
        if start < key {
            let (low, high) = self.split(right, key);
            self.nodes[at as usize].right = low;
            self.update(at);
            (at, high)
        } else {
            let (low, high) = self.split(left, key);
            self.nodes[at as usize].left = high;
            self.update(at);
            (low, at)
        }
    }

    /// Joins two trees, all of whose ranges in `low` lie below those in `high`.
    fn merge(&mut self, low: u32, high: u32) -> u32 {
        if low == NONE {
            return high;
        }
        if high == NONE {
            return low;
        }
        if self.nodes[low as usize].priority >= self.nodes[high as usize].priority {
            let right = self.nodes[low as usize].right;
            self.nodes[low as usize].right = self.merge(right, high);
            self.update(low);
            low
        } else {
            let left = self.nodes[high as usize].left;
            self.nodes[high as usize].left = self.merge(low, left);
            self.update(high);
            high
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_a_map_of_single_bytes() {
        const SPACE: usize = 200;
        let mut tree = ExtentTree::default();
        let mut bytes = [false; SPACE];
        let mut random = 7_u64;
        let mut below = |most: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % most
        };
        for _ in 0..20_000 {
            let (a, b) = (below(SPACE), below(SPACE));
            let range = a.min(b)..a.max(b).min(a.min(b) + 30);
            let wide = range.start as u64..range.end as u64;
            match below(3) {
                0 => {
                    tree.insert(wide);
                    bytes[range].fill(true);
                }
                1 => {
                    let there = bytes[range.clone()].iter().filter(|byte| **byte).count();
                    assert_eq!(tree.remove(wide), there as u64);
                    bytes[range].fill(false);
                }
                _ => {
                    let want = 1 + below(20);
                    let found = bytes.windows(want).position(|part| part.iter().all(|byte| *byte));
                    assert_eq!(tree.take_first(want as u64), found.map(|at| at as u64));
                    if let Some(at) = found {
                        bytes[at..at + want].fill(false);
                    }
                }
            }
            let mut expected: Vec<Range<u64>> = Vec::new();
            for at in (0..SPACE as u64).filter(|at| bytes[*at as usize]) {
                match expected.last_mut() {
                    Some(last) if last.end == at => last.end += 1,
                    _ => expected.push(at..at + 1),
                }
            }
            tree.check();
            assert!(tree.iter().eq(expected.iter().cloned()), "{tree:?} {expected:?}");
            let widths = expected.iter().map(|range| range.end - range.start);
            assert_eq!(tree.largest(), widths.clone().max().unwrap_or(0));
            assert_eq!(tree.total(), widths.sum::<u64>());
        }
    }
}
