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
const BITS: u32 = 6;
const PLACES: usize = 1 << BITS;

/// 64 entries, and which of them are used.
#[derive(Debug)]
struct Node {
    /// Bit n: `places[n]` is valid.
    taken: u64,
    /// Node numbers one level down, or record numbers in a leaf.
    places: [u32; PLACES],
}

/// The map from pages to records.
#[derive(Debug)]
pub(crate) struct PageMap {
    nodes: Vec<Node>,
    /// Empty nodes, for reuse.
    spare: Vec<u32>,
    /// The key (the high bits of its pages) and the node of each trunk, in order.
    trunks: Vec<(u64, u32)>,
    /// The index of the trunk that was used last.
    hint: usize,
}

const fn place(page: u64, level: u32) -> usize {
    (page >> (BITS * level)) as usize & (PLACES - 1)
}

const fn trunk_key(page: u64) -> u64 {
    page >> (3 * BITS)
}

impl PageMap {
    pub(crate) const fn new() -> Self {
        Self { nodes: Vec::new(), spare: Vec::new(), trunks: Vec::new(), hint: 0 }
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

    fn down(&self, node: u32, place: usize) -> Option<u32> {
        let node = &self.nodes[node as usize];
        (node.taken >> place & 1 == 1).then(|| node.places[place])
    }

    fn new_node(&mut self) -> u32 {
        if let Some(id) = self.spare.pop() {
            return id;
        }
        self.nodes.push(Node { taken: 0, places: [NIL; PLACES] });
        (self.nodes.len() - 1) as u32
    }

    fn down_or_new(&mut self, node: u32, place: usize) -> u32 {
        if let Some(down) = self.down(node, place) {
            return down;
        }
        let down = self.new_node();
        self.put(node, place, down);
        down
    }

    fn put(&mut self, node: u32, place: usize, value: u32) {
        let node = &mut self.nodes[node as usize];
        node.taken |= 1 << place;
        node.places[place] = value;
    }

    /// Removes `place` from `node`. Returns whether the node is empty then.
    fn clear(&mut self, node: u32, place: usize) -> bool {
        let node = &mut self.nodes[node as usize];
        node.taken &= !(1 << place);
        node.taken == 0
    }

    /// Returns the record of `page`.
    pub(crate) fn get(&self, page: u64) -> Option<u32> {
        let trunk = self.trunk(trunk_key(page))?;
        let branch = self.down(trunk, place(page, 2))?;
        let leaf = self.down(branch, place(page, 1))?;
        self.down(leaf, place(page, 0))
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
        let branch = self.down_or_new(trunk, place(page, 2));
        let leaf = self.down_or_new(branch, place(page, 1));
        self.put(leaf, place(page, 0), record);
    }

    /// Removes `page`, and every node that becomes empty.
    pub(crate) fn remove(&mut self, page: u64) {
        let key = trunk_key(page);
        let Some(trunk) = self.trunk(key) else { return };
        let Some(branch) = self.down(trunk, place(page, 2)) else { return };
        let Some(leaf) = self.down(branch, place(page, 1)) else { return };
        if !self.clear(leaf, place(page, 0)) {
            return;
        }
        self.spare.push(leaf);
        if !self.clear(branch, place(page, 1)) {
            return;
        }
        self.spare.push(branch);
        if !self.clear(trunk, place(page, 2)) {
            return;
        }
        self.spare.push(trunk);
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
            && let Some(record) = self.last_below(trunk, 2, page)
        {
            return Some(record);
        }
        let (_, trunk) = *self.trunks.get(at.checked_sub(1)?)?;
        self.last(trunk, 2)
    }

    /// Returns the last record under `node`, of level `level`, before `page`.
    fn last_below(&self, node: u32, level: u32, page: u64) -> Option<u32> {
        let here = place(page, level);
        if level > 0
            && let Some(down) = self.down(node, here)
            && let Some(record) = self.last_below(down, level - 1, page)
        {
            return Some(record);
        }
        let Node { taken, places } = &self.nodes[node as usize];
        let last = (taken & ((1 << here) - 1)).checked_ilog2()?;
        let value = places[last as usize];
        if level == 0 { Some(value) } else { self.last(value, level - 1) }
    }

    /// Returns the last record under `node`, of level `level`.
    fn last(&self, mut node: u32, level: u32) -> Option<u32> {
        for _ in 0..=level {
            let Node { taken, places } = &self.nodes[node as usize];
            node = places[taken.checked_ilog2()? as usize];
        }
        Some(node)
    }

    /// Returns how many pages have a record. Visits every node, for the self-check.
    pub(crate) fn count(&self) -> usize {
        let mut pages = 0;
        let mut todo: Vec<(u32, u32)> = self.trunks.iter().map(|&(_, node)| (node, 2)).collect();
        while let Some((node, level)) = todo.pop() {
            let Node { taken, places } = &self.nodes[node as usize];
            if level == 0 {
                pages += taken.count_ones() as usize;
            } else {
                let down = (0..PLACES).filter(|place| taken >> place & 1 == 1);
                todo.extend(down.map(|place| (places[place], level - 1)));
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
    fn answers_as_an_ordered_map_does() {
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
        assert_eq!(map.spare.len(), map.nodes.len());
    }

    #[test]
    fn the_top_of_the_address_space_is_a_page_like_any_other() {
        let mut map = PageMap::new();
        map.set(u64::MAX, 1);
        map.set(0, 2);
        assert_eq!(
            (map.get(u64::MAX), map.last_before(u64::MAX), map.last_before(0)),
            (Some(1), Some(2), None)
        );
    }
}
