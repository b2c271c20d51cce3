//! Which blocks used the addresses of a plan last.

use crate::plan::block::PlannedBlock;
use std::collections::BTreeMap;

/// The last users of all addresses, brought up to date only when they are asked for.
///
/// A placement is one entry in a list. A question paints the blocks of the list, in their order,
/// onto the addresses.
#[derive(Debug, Default)]
pub(crate) struct LastUsers {
    /// Ranges that do not overlap, by their start: the end, and the block.
    painted: BTreeMap<u64, (u64, u32)>,
    /// Blocks that were placed and are not painted yet, unless there were too many.
    waiting: Vec<u32>,
    /// The number of each block's last placement; 0 for none.
    placed: Vec<u64>,
    placements: u64,
    /// Whether the list was full, so that all is painted again.
    is_incomplete: bool,
}

impl LastUsers {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { waiting: Vec::with_capacity(blocks), placed: vec![0; blocks], ..Self::default() }
    }

    /// Records that a block is placed.
    #[inline]
    pub(crate) fn record(&mut self, block: u32) {
        self.placements += 1;
        self.placed[block as usize] = self.placements;
        if self.waiting.len() < self.placed.len() {
            self.waiting.push(block);
        } else {
            self.is_incomplete = true;
        }
    }

    /// Adds the last users of a block's addresses to `users`, in ascending order.
    pub(crate) fn of(&mut self, block: u32, blocks: &[PlannedBlock], users: &mut Vec<u32>) {
        self.paint_waiting(blocks);
        let (from, to) = range(&blocks[block as usize]);
        let reaches = self.painted.range(..from).next_back().filter(|(_, range)| range.0 > from);
        let first = reaches.map_or(from, |(&start, _)| start);
        users.extend(self.painted.range(first..to).map(|(_, &(_, user))| user));
        users.sort_unstable();
        users.dedup();
    }

    fn paint_waiting(&mut self, blocks: &[PlannedBlock]) {
        if std::mem::take(&mut self.is_incomplete) {
            self.painted.clear();
            self.waiting.clear();
            let placed = (0..self.placed.len() as u32).filter(|&b| self.placed[b as usize] > 0);
            self.waiting.extend(placed);
            self.waiting.sort_unstable_by_key(|&block| self.placed[block as usize]);
        }
        for at in 0..self.waiting.len() {
            let block = self.waiting[at];
            self.paint(block, range(&blocks[block as usize]));
        }
        self.waiting.clear();
    }

    fn paint(&mut self, block: u32, (from, to): (u64, u64)) {
        if let Some((&start, &(end, user))) = self.painted.range(..from).next_back()
            && end > from
        {
            self.painted.insert(start, (from, user));
            if end > to {
                self.painted.insert(to, (end, user));
            }
        }
        while let Some((&start, &(end, user))) = self.painted.range(from..to).next() {
            self.painted.remove(&start);
            if end > to {
                self.painted.insert(to, (end, user));
            }
        }
        self.painted.insert(from, (to, block));
    }
}

fn range(block: &PlannedBlock) -> (u64, u64) {
    (block.offset, block.offset + block.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(offset: u64, bytes: u64) -> PlannedBlock {
        PlannedBlock { bytes, offset, first: 0, end: 1, stream: 0, shared: false }
    }

    fn users(last: &mut LastUsers, block: u32, blocks: &[PlannedBlock]) -> Vec<u32> {
        let mut users = Vec::new();
        last.of(block, blocks, &mut users);
        users
    }

    #[test]
    fn a_block_hides_what_lies_under_it_and_leaves_the_rest() {
        let blocks = [block(0, 10), block(2, 4), block(8, 8), block(0, 16), block(4, 3)];
        let mut last = LastUsers::new(blocks.len());
        assert_eq!(users(&mut last, 3, &blocks), []);
        last.record(0);
        assert_eq!(users(&mut last, 3, &blocks), [0]);
        last.record(1);
        last.record(2);
        assert_eq!(users(&mut last, 3, &blocks), [0, 1, 2]);
        assert_eq!(users(&mut last, 4, &blocks), [0, 1]);
        last.record(3);
        assert_eq!(users(&mut last, 1, &blocks), [3]);
    }

    #[test]
    fn more_placements_than_blocks_are_painted_in_their_order() {
        let blocks = [block(0, 8), block(4, 8)];
        let mut last = LastUsers::new(2);
        for round in 0..10 {
            last.record(round % 2);
        }
        assert_eq!(users(&mut last, 0, &blocks), [0, 1]);
        last.record(0);
        assert_eq!(users(&mut last, 0, &blocks), [0]);
        assert_eq!(users(&mut last, 1, &blocks), [0, 1]);
    }
}
