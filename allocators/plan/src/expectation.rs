//! What a plan says about its blocks, arranged for a cursor.

use crate::{
    block::{PlanEdge, PlannedBlock},
    reuse,
};
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

/// The blocks of a plan by size and stream, by the three last allocations, and with their
/// predecessors.
#[derive(Debug)]
pub(crate) struct Expectation {
    keys: HashMap<(u64, u32), Key>,
    /// The key of each block.
    key_of: Vec<Key>,
    /// The blocks of each key, in order.
    blocks_of: Lists,
    /// The last users of the addresses of each block.
    before: Lists,
    /// If some of its addresses had no user: their last users at the end of the plan, which are
    /// those before the block in the next pass.
    before_in_loop: Lists,
    /// The blocks whose uses no stream orders before those of a block, when the plan is followed
    /// in a loop.
    unordered: Lists,
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
        let mut unordered = Lists::default();
        let mut list = Vec::new();
        for (number, block) in (0..).zip(blocks) {
            list.clear();
            let earlier = before.get(number).iter().chain(before_in_loop.get(number));
            list.extend(earlier.copied().filter(|&earlier| {
                let earlier = &blocks[earlier as usize];
                earlier.stream != block.stream || earlier.shared
            }));
            unordered.push(&list);
        }
        let gram = |(keys, block): (&[Key], u32)| ([keys[0], keys[1], keys[2]], block);
        let mut grams: Vec<_> = key_of.windows(3).zip(2..).map(gram).collect();
        grams.sort_unstable();
        Self { keys, key_of, blocks_of, before, before_in_loop, unordered, grams }
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

    /// Returns the last blocks before one that had any of its addresses.
    #[inline]
    pub(crate) fn predecessors(&self, block: u32) -> &[u32] {
        self.before.get(block)
    }

    /// Returns the last blocks of the pass before that had those of its addresses that no block
    /// before it in the pass had.
    #[inline]
    pub(crate) fn predecessors_in_loop(&self, block: u32) -> &[u32] {
        self.before_in_loop.get(block)
    }

    /// Returns those of all its predecessors that no stream orders before it.
    #[inline]
    pub(crate) fn unordered(&self, block: u32) -> &[u32] {
        self.unordered.get(block)
    }

    /// Removes an edge from what [`Expectation::unordered`] returns.
    pub(crate) fn remove_edge(&mut self, edge: PlanEdge) -> bool {
        let before = self.unordered.all.len();
        let mut rest = Lists::default();
        for after in 0..self.key_of.len() as u32 {
            let list = self.unordered.get(after).iter().copied();
            let kept: Vec<_> = list.filter(|&before| PlanEdge { before, after } != edge).collect();
            rest.push(&kept);
        }
        self.unordered = rest;
        self.unordered.all.len() < before
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
