//! A sparse map from each page to the lowest record that starts in it. A page here is a range of
//! [`Config::grain`](crate::Config::grain) bytes.
//!
//! Device addresses are scattered over 2⁴⁷ bytes, so the map is a tree of nodes with 64 entries
//! each. Nodes are created when a record starts in them, and dropped when the last one leaves. A
//! leaf covers 64 pages, a branch 64 leaves, a trunk 64 branches (16 GiB in pages of 64 KiB). The
//! trunks are a short sorted list. A bitmap per node finds the last earlier record in a few
//! operations, which resolves an address inside a long record.
//!
//! The map stores record numbers only. The caller looks up the records and their ends.

use crate::records::NIL;

/// Entries of a node, as a power of two.
const ENTRIES_LOG2: u32 = 6;
const ENTRIES: usize = 1 << ENTRIES_LOG2;

/// 64 entries, and which of them are used.
#[derive(Debug)]
struct Node {
    /// Bit n: `entries[n]` is valid.
    used: u64,
    /// Node numbers one level down, or record numbers in a leaf.
    entries: [u32; ENTRIES],
}

/// The map from pages to records.
#[derive(Debug)]
pub(crate) struct PageMap {
    nodes: Vec<Node>,
    /// Empty nodes, for reuse.
    free_nodes: Vec<u32>,
    /// The key (the high bits of its pages) and the node of each trunk, in order.
    trunks: Vec<(u64, u32)>,
    /// The index of the trunk that was used last.
    hint: usize,
}

const fn entry_index(page: u64, level: u32) -> usize {
    (page >> (ENTRIES_LOG2 * level)) as usize & (ENTRIES - 1)
}

const fn trunk_key(page: u64) -> u64 {
    page >> (3 * ENTRIES_LOG2)
}

impl PageMap {
    pub(crate) const fn new() -> Self {
        Self { nodes: Vec::new(), free_nodes: Vec::new(), trunks: Vec::new(), hint: 0 }
    }

    fn trunk(&self, key: u64) -> Option<u32> {
        match self.trunks.get(self.hint) {
            Some(&(at, node)) if at == key => Some(node),
            _ => {
                let at = self.trunks.binary_search_by_key(&key, |&(at, _)| at).ok()?;
                Some(self.trunks[at].1)
            }
        }
    }

    fn child(&self, node: u32, index: usize) -> Option<u32> {
        let node = &self.nodes[node as usize];
        (node.used >> index & 1 == 1).then(|| node.entries[index])
    }

    fn new_node(&mut self) -> u32 {
        if let Some(id) = self.free_nodes.pop() {
            return id;
        }
        self.nodes.push(Node { used: 0, entries: [NIL; ENTRIES] });
        (self.nodes.len() - 1) as u32
    }

    fn child_or_new(&mut self, node: u32, index: usize) -> u32 {
        if let Some(child) = self.child(node, index) {
            return child;
        }
        let child = self.new_node();
        self.set_entry(node, index, child);
        child
    }

    fn set_entry(&mut self, node: u32, index: usize, value: u32) {
        let node = &mut self.nodes[node as usize];
        node.used |= 1 << index;
        node.entries[index] = value;
    }

    /// Removes `index` from `node`. Returns whether the node is empty then.
    fn clear_entry(&mut self, node: u32, index: usize) -> bool {
        let node = &mut self.nodes[node as usize];
        node.used &= !(1 << index);
        node.used == 0
    }

    /// Returns the record of `page`.
    pub(crate) fn get(&self, page: u64) -> Option<u32> {
        let trunk = self.trunk(trunk_key(page))?;
        let branch = self.child(trunk, entry_index(page, 2))?;
        let leaf = self.child(branch, entry_index(page, 1))?;
        self.child(leaf, entry_index(page, 0))
    }

    /// Sets the record of `page`.
    pub(crate) fn set(&mut self, page: u64, record: u32) {
        let key = trunk_key(page);
        let at = match self.trunks.get(self.hint) {
            Some(&(at, _)) if at == key => self.hint,
            _ => match self.trunks.binary_search_by_key(&key, |&(at, _)| at) {
                Ok(at) => at,
                Err(at) => {
                    let node = self.new_node();
                    self.trunks.insert(at, (key, node));
                    at
                }
            },
        };
        self.hint = at;
        let trunk = self.trunks[at].1;
        let branch = self.child_or_new(trunk, entry_index(page, 2));
        let leaf = self.child_or_new(branch, entry_index(page, 1));
        self.set_entry(leaf, entry_index(page, 0), record);
    }

    /// Removes `page`, and every node that becomes empty.
    pub(crate) fn remove(&mut self, page: u64) {
        let key = trunk_key(page);
        let Some(trunk) = self.trunk(key) else { return };
        let Some(branch) = self.child(trunk, entry_index(page, 2)) else { return };
        let Some(leaf) = self.child(branch, entry_index(page, 1)) else { return };
        if !self.clear_entry(leaf, entry_index(page, 0)) {
            return;
        }
        self.free_nodes.push(leaf);
        if !self.clear_entry(branch, entry_index(page, 1)) {
            return;
        }
        self.free_nodes.push(branch);
        if !self.clear_entry(trunk, entry_index(page, 2)) {
            return;
        }
        self.free_nodes.push(trunk);
        if let Ok(at) = self.trunks.binary_search_by_key(&key, |&(at, _)| at) {
            self.trunks.remove(at);
        }
    }

    /// Returns the record of the last page before `page` that has one.
    pub(crate) fn last_before(&self, page: u64) -> Option<u32> {
        let key = trunk_key(page);
        let at = self.trunks.partition_point(|&(at, _)| at < key);
        if let Some(&(found, trunk)) = self.trunks.get(at)
            && found == key
            && let Some(record) = self.last_before_in(trunk, 2, page)
        {
            return Some(record);
        }
        let (_, trunk) = *self.trunks.get(at.checked_sub(1)?)?;
        self.last_in(trunk, 2)
    }

    /// Returns the last record under `node`, of level `level`, before `page`.
    fn last_before_in(&self, node: u32, level: u32, page: u64) -> Option<u32> {
        let own_index = entry_index(page, level);
        if level > 0
            && let Some(child) = self.child(node, own_index)
            && let Some(record) = self.last_before_in(child, level - 1, page)
        {
            return Some(record);
        }
        let Node { used, entries } = &self.nodes[node as usize];
        let last = (used & ((1 << own_index) - 1)).checked_ilog2()?;
        let value = entries[last as usize];
        if level == 0 { Some(value) } else { self.last_in(value, level - 1) }
    }

    /// Returns the last record under `node`, of level `level`.
    fn last_in(&self, mut node: u32, level: u32) -> Option<u32> {
        for _ in 0..=level {
            let Node { used, entries } = &self.nodes[node as usize];
            node = entries[used.checked_ilog2()? as usize];
        }
        Some(node)
    }

    /// Returns how many pages have a record. Visits every node, for the self-check.
    pub(crate) fn count(&self) -> usize {
        let mut pages = 0;
        let mut stack: Vec<(u32, u32)> = self.trunks.iter().map(|&(_, node)| (node, 2)).collect();
        while let Some((node, level)) = stack.pop() {
            let Node { used, entries } = &self.nodes[node as usize];
            if level == 0 {
                pages += used.count_ones() as usize;
            } else {
                let children = (0..ENTRIES).filter(|index| used >> index & 1 == 1);
                stack.extend(children.map(|index| (entries[index], level - 1)));
            }
        }
        pages
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn page_map_agrees_with_an_ordered_map() {
        let (mut map, mut model) = (PageMap::new(), BTreeMap::new());
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let rounds = if cfg!(miri) { 200 } else { 20_000 };
        for round in 0..rounds {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Near and far: within a leaf, a branch, a trunk, and over several trunks.
            let spread = [6, 9, 15, 20][random as usize & 3];
            let page = 0x7f12_3440 + ((random >> 8) & ((1 << spread) - 1));
            if random >> 60 < 9 {
                map.set(page, round);
                model.insert(page, round);
            } else {
                map.remove(page);
                model.remove(&page);
            }
            assert_eq!(map.get(page), model.get(&page).copied());
            let probe = page + (random >> 40 & 0xff);
            assert_eq!(map.last_before(probe), model.range(..probe).next_back().map(|(_, &id)| id));
            if round % 64 == 0 {
                assert_eq!(map.count(), model.len());
            }
        }
        for &page in model.keys() {
            map.remove(page);
        }
        assert!(map.trunks.is_empty());
        assert_eq!(map.free_nodes.len(), map.nodes.len());
    }

    #[test]
    fn the_last_page_of_the_address_space_can_be_mapped() {
        let mut map = PageMap::new();
        map.set(u64::MAX, 1);
        map.set(0, 2);
        assert_eq!(
            (map.get(u64::MAX), map.last_before(u64::MAX), map.last_before(0)),
            (Some(1), Some(2), None)
        );
    }
}
