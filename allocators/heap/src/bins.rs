//! Free extents by size: best fit in a bounded number of steps.
//!
//! Each doubling of sizes has 32 bins, and two levels of bitmaps mark the bins that are not empty
//! (Masmano, Ripoll, Crespo and Real, "TLSF", 2004). Inside a bin the extents form a bitwise tree,
//! keyed by the bits that the bin leaves open. Equal sizes form a list at their node (as in Lea's
//! dlmalloc, "treebins").
//!
//! So best fit takes at most one walk down a tree and one down its neighbour: at most twice the
//! number of open bits. This is 6 steps for 1 MiB and 16 for 1 GiB in units of 512 bytes, for any
//! number of holes.
//!
//! ```text
//! doublings   …  [1 2 3 …|…|…]   ← bit set: some bin of it holds something
//! bins             0 1 1 0 … 0   ← bit set: the bin holds something
//!                    │
//!                    ▼
//!                  A (node) ── A' ── A''    equal sizes, a low address in front
//!                 ╱ ╲
//!                B   C                      left: next open bit 0, right: 1
//! ```

use core::ops::ControlFlow;

use crate::records::{NIL, Records, State};

/// Bins per doubling, as a power of two.
const BINS_PER_LEVEL_LOG2: u32 = 5;
/// Bins per doubling.
const BINS_PER_LEVEL: usize = 1 << BINS_PER_LEVEL_LOG2;
/// Doublings. The first holds the sizes below 32 units, one bin each.
const LEVELS: usize = u64::BITS as usize - BINS_PER_LEVEL_LOG2 as usize + 1;

/// The free extents of a heap, indexed by size.
#[derive(Debug)]
pub(crate) struct Bins {
    /// A unit is `1 << shift` bytes.
    shift: u32,
    /// Bit n: some bin of `levels[n]` is not empty.
    used_levels: u64,
    /// Bit n of `levels[l]`: `roots[l * BINS_PER_LEVEL + n]` is set.
    levels: [u32; LEVELS],
    /// The root of each bin's tree.
    roots: Box<[u32]>,
    /// The number of records visited, for tests.
    #[cfg(test)]
    pub(crate) steps: core::cell::Cell<u64>,
}

/// Returns the bin of a size, and how many bits of the size it leaves open.
const fn bin_of(units: u64) -> (usize, u32) {
    if units < BINS_PER_LEVEL as u64 {
        return (units as usize, 0);
    }
    let open = units.ilog2() - BINS_PER_LEVEL_LOG2;
    let level = open as usize + 1;
    let sub = (units >> open) as usize & (BINS_PER_LEVEL - 1);
    (level * BINS_PER_LEVEL + sub, open)
}

impl Bins {
    pub(crate) fn new(shift: u32) -> Self {
        Self {
            shift,
            used_levels: 0,
            levels: [0; LEVELS],
            roots: vec![NIL; LEVELS * BINS_PER_LEVEL].into_boxed_slice(),
            #[cfg(test)]
            steps: core::cell::Cell::new(0),
        }
    }

    #[inline]
    fn step(&self) {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
    }

    /// Inserts the free extent `id` by its size.
    pub(crate) fn insert(&mut self, records: &mut Records, id: u32) {
        let record = &mut records[id];
        debug_assert_eq!(record.state, State::Free, "only free extents have a bin");
        debug_assert!(record.len >> self.shift > 0, "an extent of less than a unit");
        record.parent = NIL;
        record.children = [NIL; 2];
        record.prev_equal = NIL;
        record.next_equal = NIL;
        let (start, len) = (record.start, record.len);
        let units = len >> self.shift;
        let (bin, mut open) = bin_of(units);
        let mut at = self.roots[bin];
        if at == NIL {
            self.roots[bin] = id;
            self.levels[bin / BINS_PER_LEVEL] |= 1 << (bin % BINS_PER_LEVEL);
            self.used_levels |= 1 << (bin / BINS_PER_LEVEL);
            return;
        }
        loop {
            self.step();
            let node = &mut records[at];
            if node.len == len {
                return self.insert_equal(records, bin, at, id, start);
            }
            // Two sizes of one bin differ in an open bit, so `open` does not reach zero before the
            // walk ends.
            open -= 1;
            let side = (units >> open) as usize & 1;
            let child = node.children[side];
            if child == NIL {
                node.children[side] = id;
                records[id].parent = at;
                return;
            }
            at = child;
        }
    }

    /// Inserts into the list of equal sizes at `node`: before the node if its address is lower,
    /// otherwise directly after it. So low addresses are found first, at no extra cost.
    fn insert_equal(&mut self, records: &mut Records, bin: usize, node: u32, id: u32, start: u64) {
        if start < records[node].start {
            self.replace(records, bin, node, id);
            records[id].next_equal = node;
            records[node].prev_equal = id;
        } else {
            let next = records[node].next_equal;
            records[id].prev_equal = node;
            records[id].next_equal = next;
            records[node].next_equal = id;
            if next != NIL {
                records[next].prev_equal = id;
            }
        }
    }

    /// Removes the free extent `id`.
    pub(crate) fn remove(&mut self, records: &mut Records, id: u32) {
        let record = &records[id];
        let (prev, next, children, parent) =
            (record.prev_equal, record.next_equal, record.children, record.parent);
        debug_assert_eq!(record.state, State::Free, "only free extents have a bin");
        if prev != NIL {
            debug_assert_eq!(records[prev].next_equal, id, "the list of equal sizes is broken");
            debug_assert_eq!(records[prev].len, records[id].len, "a list of unequal sizes");
            records[prev].next_equal = next;
            if next != NIL {
                records[next].prev_equal = prev;
            }
            return;
        }
        let (bin, _) = bin_of(record.len >> self.shift);
        debug_assert!(parent != NIL || self.roots[bin] == id, "a node without a parent");
        if next != NIL {
            records[next].prev_equal = NIL;
            self.replace(records, bin, id, next);
            return;
        }
        if children == [NIL; 2] {
            if parent == NIL {
                self.roots[bin] = NIL;
                let level = &mut self.levels[bin / BINS_PER_LEVEL];
                *level &= !(1 << (bin % BINS_PER_LEVEL));
                if *level == 0 {
                    self.used_levels &= !(1 << (bin / BINS_PER_LEVEL));
                }
            } else {
                self.set_child(records, parent, id, NIL);
            }
            return;
        }
        // Any leaf below can replace the node, since it shares all bits that lead there.
        let mut leaf = id;
        loop {
            self.step();
            let [low, high] = records[leaf].children;
            let child = if high == NIL { low } else { high };
            if child == NIL {
                break;
            }
            leaf = child;
        }
        let leaf_parent = records[leaf].parent;
        self.set_child(records, leaf_parent, leaf, NIL);
        self.replace(records, bin, id, leaf);
    }

    /// Replaces `old` by `id` in the tree.
    fn replace(&mut self, records: &mut Records, bin: usize, old: u32, id: u32) {
        let (parent, children) = (records[old].parent, records[old].children);
        records[old].parent = NIL;
        records[old].children = [NIL; 2];
        records[id].parent = parent;
        records[id].children = children;
        for child in children {
            if child != NIL {
                records[child].parent = id;
            }
        }
        if parent == NIL {
            self.roots[bin] = id;
        } else {
            self.set_child(records, parent, old, id);
        }
    }

    #[expect(clippy::unused_self, reason = "reads as one of the tree's operations")]
    fn set_child(&self, records: &mut Records, parent: u32, old: u32, id: u32) {
        debug_assert!(records[parent].children.contains(&old), "not a child of its parent");
        let side = usize::from(records[parent].children[1] == old);
        records[parent].children[side] = id;
    }

    /// Returns the smallest extent of at least `units`. Among equal ones, it prefers a low address.
    pub(crate) fn best_fit(&self, records: &Records, units: u64) -> Option<u32> {
        let (bin, open) = bin_of(units);
        let root = self.roots[bin];
        if root != NIL
            && let Some(fit) = self.fit_in_tree(records, root, units, open)
        {
            debug_assert!(records[fit].len >= units << self.shift, "the extent is too short");
            return Some(fit);
        }
        let next = self.next_used(bin + 1)?;
        let fit = self.smallest(records, self.roots[next]);
        debug_assert!(records[fit].len >= units << self.shift, "the extent is too short");
        Some(fit)
    }

    /// Returns the smallest extent below `root` of at least `units`.
    fn fit_in_tree(&self, records: &Records, root: u32, units: u64, mut open: u32) -> Option<u32> {
        let wanted = units << self.shift;
        let (mut best, mut best_len) = (NIL, u64::MAX);
        // The last right branch that the walk passed: all of it is larger than wanted, and smaller
        // than the right branches further up.
        let mut larger = NIL;
        let mut at = root;
        while at != NIL {
            self.step();
            let node = &records[at];
            if node.len == wanted {
                return Some(at);
            }
            if node.len > wanted && node.len < best_len {
                (best, best_len) = (at, node.len);
            }
            if open == 0 {
                break;
            }
            open -= 1;
            let side = (units >> open) as usize & 1;
            if side == 0 && node.children[1] != NIL {
                larger = node.children[1];
            }
            at = node.children[side];
        }
        if larger != NIL {
            let candidate = self.smallest(records, larger);
            if records[candidate].len < best_len {
                best = candidate;
            }
        }
        (best != NIL).then_some(best)
    }

    /// Returns the smallest extent below `root`, by walking left where possible.
    fn smallest(&self, records: &Records, root: u32) -> u32 {
        let mut best = root;
        let mut at = root;
        loop {
            self.step();
            let node = &records[at];
            if node.len < records[best].len {
                best = at;
            }
            let [low, high] = node.children;
            at = if low == NIL { high } else { low };
            if at == NIL {
                return best;
            }
        }
    }

    /// Returns the longest extent.
    pub(crate) fn longest(&self, records: &Records) -> Option<u32> {
        let level = self.used_levels.checked_ilog2()? as usize;
        let sub = self.levels[level].ilog2() as usize;
        let mut at = self.roots[level * BINS_PER_LEVEL + sub];
        let mut best = at;
        while at != NIL {
            let node = &records[at];
            if node.len > records[best].len {
                best = at;
            }
            let [low, high] = node.children;
            at = if high == NIL { low } else { high };
        }
        Some(best)
    }

    /// Calls `visit` with each extent of at least `units`, until it breaks: smaller bins first, in
    /// no order within one.
    pub(crate) fn visit_from(
        &self,
        records: &Records,
        units: u64,
        visit: &mut impl FnMut(u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let least = units << self.shift;
        let mut next = self.next_used(bin_of(units).0);
        while let Some(bin) = next {
            Self::visit_tree(records, self.roots[bin], least, visit)?;
            next = self.next_used(bin + 1);
        }
        ControlFlow::Continue(())
    }

    /// As [`Bins::visit_from`], below the node `at`. A tree is at most as deep as a size has bits.
    fn visit_tree(
        records: &Records,
        at: u32,
        least: u64,
        visit: &mut impl FnMut(u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let node = &records[at];
        let mut equal = if node.len >= least { at } else { NIL };
        while equal != NIL {
            visit(equal)?;
            equal = records[equal].next_equal;
        }
        let children = node.children.into_iter().filter(|&child| child != NIL);
        children.into_iter().try_for_each(|child| Self::visit_tree(records, child, least, visit))
    }

    /// Returns the first bin from `bin` on that is not empty.
    fn next_used(&self, bin: usize) -> Option<usize> {
        let level = bin / BINS_PER_LEVEL;
        if level >= LEVELS {
            return None;
        }
        let at_or_above = self.levels[level] & (u32::MAX << (bin % BINS_PER_LEVEL));
        if at_or_above != 0 {
            return Some(level * BINS_PER_LEVEL + at_or_above.trailing_zeros() as usize);
        }
        let above = self.used_levels & u64::MAX.checked_shl(level as u32 + 1).unwrap_or(0);
        if above == 0 {
            return None;
        }
        let level = above.trailing_zeros() as usize;
        Some(level * BINS_PER_LEVEL + self.levels[level].trailing_zeros() as usize)
    }

    /// Calls `visit` with each record in the bins and whether its position and links are valid. For
    /// the self-check.
    pub(crate) fn audit(&self, records: &Records, mut visit: impl FnMut(u32, bool)) {
        for bin in 0..self.roots.len() {
            let root = self.roots[bin];
            let flagged = self.levels[bin / BINS_PER_LEVEL] >> (bin % BINS_PER_LEVEL) & 1 == 1;
            let level_flagged = self.used_levels >> (bin / BINS_PER_LEVEL) & 1 == 1;
            if root == NIL {
                if flagged {
                    visit(NIL, false);
                }
                continue;
            }
            let mut stack = vec![(root, NIL, 0u32, 0u64)];
            while let Some((at, parent, depth, path)) = stack.pop() {
                let node = &records[at];
                let units = node.len >> self.shift;
                let (own_bin, open) = bin_of(units);
                let on_path = depth <= open
                    && (units & ((1u64 << open) - 1)) >> (open - depth.min(open)) == path;
                let valid = own_bin == bin
                    && flagged
                    && level_flagged
                    && node.parent == parent
                    && node.prev_equal == NIL
                    && on_path;
                visit(at, valid);
                let (mut prev, mut equal) = (at, node.next_equal);
                while equal != NIL {
                    let record = &records[equal];
                    let in_no_tree = record.parent == NIL && record.children == [NIL; 2];
                    let listed = record.prev_equal == prev && record.len == node.len;
                    visit(equal, listed && in_no_tree);
                    (prev, equal) = (equal, record.next_equal);
                }
                for (side, &child) in node.children.iter().enumerate() {
                    if child != NIL {
                        stack.push((child, at, depth + 1, path << 1 | side as u64));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::Record;

    /// A fixed pseudo-random sequence.
    struct Sequence(u64);

    impl Sequence {
        fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % n
        }
    }

    fn with_extents(sizes: impl IntoIterator<Item = u64>) -> (Records, Bins) {
        let (mut records, mut bins) = (Records::new(), Bins::new(0));
        let (mut last, mut start) = (NIL, 0);
        for len in sizes {
            last = records.insert_after(last, Record::new(start, len, 0, 0));
            start += len + 1;
            bins.insert(&mut records, last);
        }
        (records, bins)
    }

    #[test]
    fn bins_are_ordered_by_size() {
        let mut last = 0;
        for units in 1..if cfg!(miri) { 2000 } else { 100_000u64 } {
            let (bin, open) = bin_of(units);
            assert!(bin == last || bin == last + 1, "{units}");
            assert_eq!(bin_of(units >> open << open).0, bin);
            last = bin;
        }
        assert!(bin_of(u64::MAX).0 < LEVELS * BINS_PER_LEVEL);
    }

    #[test]
    fn best_fit_returns_the_smallest_sufficient_extent() {
        let (rounds, count) = if cfg!(miri) { (1, 16) } else { (200, 60) };
        let mut next = Sequence(88_172_645_463_325_252);
        for round in 0..rounds {
            let sizes: Vec<u64> =
                (0..count).map(|_| 1 + next.below(1 << (1 + round % 20))).collect();
            let (mut records, mut bins) = with_extents(sizes.iter().copied());
            let mut remaining: Vec<(u64, u32)> = sizes.iter().copied().zip(0..).collect();
            while !remaining.is_empty() {
                let wanted = 1 + next.below(1 << (1 + round % 20));
                let best = remaining.iter().map(|&(len, _)| len).filter(|&len| len >= wanted).min();
                let found = bins.best_fit(&records, wanted);
                assert_eq!(found.map(|id| records[id].len), best);
                assert_eq!(
                    bins.longest(&records).map(|id| records[id].len),
                    remaining.iter().map(|l| l.0).max()
                );
                let mut count = 0;
                bins.audit(&records, |id, valid| {
                    assert!(valid, "{id}");
                    count += 1;
                });
                assert_eq!(count, remaining.len());
                let removed = found.unwrap_or(remaining[0].1);
                bins.remove(&mut records, removed);
                remaining.retain(|&(_, id)| id != removed);
            }
            assert_eq!(bins.used_levels, 0);
        }
    }

    #[test]
    fn equal_sizes_are_found_lowest_first() {
        let (mut records, mut bins) = with_extents([100; 3]);
        for id in [1, 0, 2] {
            bins.remove(&mut records, id);
        }
        for id in [1, 2, 0] {
            bins.insert(&mut records, id);
        }
        assert_eq!(bins.best_fit(&records, 90), Some(0));
    }

    #[test]
    fn a_search_takes_few_steps_among_a_hundred_thousand_holes() {
        let holes = if cfg!(miri) { 300 } else { 100_000 };
        let mut next = Sequence(1_234_567);
        let (mut records, mut bins) = with_extents((0..holes).map(|_| 1 + next.below(1 << 21)));
        for _ in 0..holes / 100 {
            let wanted = 1 + next.below(1 << 21);
            bins.steps.set(0);
            let Some(id) = bins.best_fit(&records, wanted) else { continue };
            // 2²¹ units leave at most 16 bits open: 17 nodes down, and as many down a neighbour.
            assert!(bins.steps.get() <= 34, "{} steps", bins.steps.get());
            bins.steps.set(0);
            bins.remove(&mut records, id);
            bins.insert(&mut records, id);
            assert!(bins.steps.get() <= 34, "{} steps", bins.steps.get());
        }
    }

    #[test]
    fn a_bin_full_of_too_small_holes_does_not_slow_the_search() {
        let holes = if cfg!(miri) { 300 } else { 100_000 };
        // All in the bin of 2²⁰ units, none large enough, and one beyond it.
        let (records, bins) =
            with_extents((0..holes).map(|n| (1 << 20) + n % 1000).chain([1 << 24]));
        bins.steps.set(0);
        let fit = bins.best_fit(&records, (1 << 20) + 1000);
        assert_eq!(fit.map(|id| records[id].len), Some(1 << 24));
        assert!(bins.steps.get() <= 34, "{} steps", bins.steps.get());
    }
}
