//! What a plan says about its blocks, arranged for a cursor.

use crate::plan::{block::PlannedBlock, reuse};
use std::collections::HashMap;

/// The number of a size and stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Key(u32);

/// Lists of numbers, one after another.
#[derive(Debug)]
struct Lists {
    /// The start of each list, and the end of the last.
    bounds: Vec<usize>,
    all: Vec<u32>,
}

impl Default for Lists {
    fn default() -> Self {
        Self { bounds: vec![0], all: Vec::new() }
    }
}

impl Lists {
    fn push(&mut self, list: &[u32]) {
        self.all.extend_from_slice(list);
        self.bounds.push(self.all.len());
    }

    #[inline]
    fn get(&self, number: u32) -> &[u32] {
        match self.bounds[number as usize..] {
            [from, to, ..] => &self.all[from..to],
            _ => &[],
        }
    }
}

/// What it takes to place a block, in one place.
#[derive(Debug)]
pub(crate) struct ExpectedBlock {
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
    pub(crate) stream: u32,
    /// Where its lists start in [`Expectation::predecessors`], one after another, and the end of
    /// the last.
    lists: [usize; 4],
}

/// The last users of the addresses of a block.
const BEFORE: usize = 0;
/// If some of its addresses had no user: their last users at the end of the plan, which are those
/// before the block in the next pass.
const BEFORE_IN_LOOP: usize = 1;
/// The blocks of both lists whose uses no stream orders before those of the block.
const UNORDERED: usize = 2;

/// The blocks of a plan by size and stream, by the three last allocations, and with their
/// predecessors.
#[derive(Debug)]
pub(crate) struct Expectation {
    blocks: Vec<ExpectedBlock>,
    /// The lists of all blocks.
    predecessors: Vec<u32>,
    keys: HashMap<(u64, u32), Key>,
    /// The blocks of each key, in order.
    blocks_of: Lists,
    /// Each block with its key and those of the two before it, sorted.
    grams: Vec<([Key; 3], u32)>,
}

impl Expectation {
    /// Arranges the blocks of a plan.
    pub(crate) fn of(blocks: &[PlannedBlock]) -> Self {
        let (mut keys, mut lists) = (HashMap::new(), Vec::<Vec<u32>>::new());
        let mut key_of = Vec::with_capacity(blocks.len());
        for (number, block) in (0..).zip(blocks) {
            // There are fewer keys than blocks.
            let key = *keys.entry((block.bytes, block.stream)).or_insert(Key(lists.len() as u32));
            if key.0 as usize == lists.len() {
                lists.push(Vec::new());
            }
            lists[key.0 as usize].push(number);
            key_of.push(key);
        }
        let mut blocks_of = Lists::default();
        lists.iter().for_each(|list| blocks_of.push(list));
        let (mut before, mut unused) = (Lists::default(), Vec::with_capacity(blocks.len()));
        let owners = reuse::each_reuse(blocks, |_, earlier, has_unused| {
            before.push(earlier);
            unused.push(has_unused);
        });
        debug_assert!(owners.is_ok(), "a plan is checked when it is made");
        let before_in_loop = before_in_loop(blocks, &unused, &owners.unwrap_or_default());
        let (mut expected, mut predecessors) = (Vec::with_capacity(blocks.len()), Vec::new());
        for (number, block) in (0..).zip(blocks) {
            let start = predecessors.len();
            predecessors.extend_from_slice(before.get(number));
            let in_loop = predecessors.len();
            predecessors.extend_from_slice(before_in_loop.get(number));
            let unordered = predecessors.len();
            for at in start..unordered {
                let earlier = &blocks[predecessors[at] as usize];
                if earlier.stream != block.stream || earlier.shared {
                    predecessors.push(predecessors[at]);
                }
            }
            let PlannedBlock { bytes, offset, stream, .. } = *block;
            let lists = [start, in_loop, unordered, predecessors.len()];
            expected.push(ExpectedBlock { bytes, offset, stream, lists });
        }
        let gram = |(keys, block): (&[Key], u32)| ([keys[0], keys[1], keys[2]], block);
        let mut grams: Vec<_> = key_of.windows(3).zip(2..).map(gram).collect();
        grams.sort_unstable();
        Self { blocks: expected, predecessors, keys, blocks_of, grams }
    }

    /// Returns the key of a size and stream, if the plan has it.
    pub(crate) fn key(&self, bytes: u64, stream: u32) -> Option<Key> {
        self.keys.get(&(bytes, stream)).copied()
    }

    /// Returns the blocks of a key from `block` on.
    pub(crate) fn blocks_from(&self, key: Key, block: u32) -> &[u32] {
        let all = self.blocks_of.get(key.0);
        &all[all.partition_point(|&other| other < block)..]
    }

    /// Returns a block, if the plan has it.
    #[inline]
    pub(crate) fn block(&self, number: u32) -> Option<&ExpectedBlock> {
        self.blocks.get(number as usize)
    }

    #[inline]
    fn list(&self, block: &ExpectedBlock, list: usize) -> &[u32] {
        &self.predecessors[block.lists[list]..block.lists[list + 1]]
    }

    /// Returns the last blocks before one that had any of its addresses.
    #[inline]
    pub(crate) fn predecessors(&self, block: &ExpectedBlock) -> &[u32] {
        self.list(block, BEFORE)
    }

    /// Returns the last blocks of the pass before that had those of its addresses that no block
    /// before it in the pass had.
    #[inline]
    pub(crate) fn predecessors_in_loop(&self, block: &ExpectedBlock) -> &[u32] {
        self.list(block, BEFORE_IN_LOOP)
    }

    /// Returns those of all its predecessors that no stream orders before it.
    #[inline]
    pub(crate) fn unordered(&self, block: u32) -> &[u32] {
        self.block(block).map_or(&[], |block| self.list(block, UNORDERED))
    }

    /// Returns the block that ends three allocations of these keys: the next one from `block` on,
    /// or else the first.
    pub(crate) fn after(&self, keys: [Key; 3], block: u32) -> Option<u32> {
        let next = self.grams.partition_point(|gram| *gram < (keys, block));
        let first = self.grams.partition_point(|gram| *gram < (keys, 0));
        let found = |at: usize| self.grams.get(at).filter(|gram| gram.0 == keys).map(|gram| gram.1);
        found(next).or_else(|| found(first))
    }
}

/// Returns, for each block with `unused` addresses, the last users of all its addresses at the end
/// of the plan: the block itself, or later ones.
fn before_in_loop(blocks: &[PlannedBlock], unused: &[bool], owners: &reuse::Owners) -> Lists {
    let mut lists = Lists::default();
    let mut list = Vec::new();
    for (block, has_unused) in blocks.iter().zip(unused) {
        list.clear();
        if *has_unused {
            let (start, end) = (block.offset, block.offset + block.bytes);
            let reaches = owners.range(..start).next_back().filter(|(_, owner)| owner.0 > start);
            let from = reaches.map_or(start, |(&from, _)| from);
            list.extend(owners.range(from..end).map(|(_, &(_, owner))| owner));
            list.sort_unstable();
            list.dedup();
        }
        lists.push(&list);
    }
    lists
}
