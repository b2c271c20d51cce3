//! Which slot of a pool's address range has which handle, and which is nobody's.
//!
//! A slot is as large as a handle. It is *owned* by some stream's cache and mapped, or nobody's and not mapped. All of
//! this is bookkeeping: nothing here calls the driver.

use super::handle::Handle;
use aquifer_stream::Timeline;
use std::{collections::BTreeMap, sync::Arc};

/// The table of one address range. Slots are counted from its start.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Runs of slots that are nobody's: first slot and count. Neighbours are merged.
    free: BTreeMap<u64, u64>,
    /// The handle that is mapped at a slot.
    mapped: BTreeMap<u64, Arc<Handle>>,
    /// Handles that are mapped nowhere.
    pub(crate) spare: Vec<Arc<Handle>>,
    /// Mappings that are to go when their stream is done with them.
    pub(crate) zombies: Vec<Zombie>,
}

/// A slot whose handle has been mapped elsewhere while work queued before may still use it here.
#[derive(Debug)]
pub(crate) struct Zombie {
    pub(crate) slot: u64,
    #[expect(dead_code, reason = "keeps the memory charged while this mapping holds it")]
    pub(crate) handle: Arc<Handle>,
    /// Unmapped when this epoch of this stream is done.
    pub(crate) until: (Arc<Timeline>, u64),
}

impl Slots {
    /// `count` slots, all nobody's.
    pub(crate) fn new(count: u64) -> Self {
        let mut slots = Self::default();
        slots.free.insert(0, count);
        slots
    }

    /// Runs that are nobody's, by address.
    pub(crate) fn free_runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.free.iter().map(|(&first, &count)| (first, count))
    }

    /// Takes `count` slots from `first` on, all of which are nobody's.
    pub(crate) fn claim(&mut self, first: u64, count: u64) {
        let Some((&start, &len)) = self.free.range(..=first).next_back() else { return };
        debug_assert!(first + count <= start + len, "claims slots that are somebody's");
        self.free.remove(&start);
        if start < first {
            self.free.insert(start, first - start);
        }
        let (end, run_end) = (first + count, start + len);
        if end < run_end {
            self.free.insert(end, run_end - end);
        }
    }

    /// Gives `count` slots from `first` on back. Nothing is mapped there.
    pub(crate) fn release(&mut self, first: u64, count: u64) {
        let (mut start, mut len) = (first, count);
        if let Some((&before, &n)) = self.free.range(..first).next_back()
            && before + n == first
        {
            self.free.remove(&before);
            (start, len) = (before, len + n);
        }
        if let Some(n) = self.free.remove(&(first + count)) {
            len += n;
        }
        self.free.insert(start, len);
    }

    /// Notes that `handle` is mapped at `slot`.
    pub(crate) fn map(&mut self, slot: u64, handle: Arc<Handle>) {
        let before = self.mapped.insert(slot, handle);
        debug_assert!(before.is_none(), "two handles at one slot");
    }

    /// Takes the handle off a slot.
    pub(crate) fn unmap(&mut self, slot: u64) -> Option<Arc<Handle>> {
        self.mapped.remove(&slot)
    }

    /// The handle at a slot.
    pub(crate) fn at(&self, slot: u64) -> Option<&Arc<Handle>> {
        self.mapped.get(&slot)
    }

    /// Slots that are mapped.
    pub(crate) fn mapped(&self) -> impl Iterator<Item = u64> + '_ {
        self.mapped.keys().copied()
    }

    /// How many slots are mapped.
    pub(crate) fn mapped_count(&self) -> u64 {
        self.mapped.len() as u64
    }
}

/// Merges slots, sorted, into runs of first slot and count.
pub(crate) fn runs(slots: &[u64]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &slot in slots {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == slot => *count += 1,
            _ => runs.push((slot, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_slots_merge_with_both_neighbours() {
        let mut slots = Slots::new(10);
        slots.claim(0, 10);
        slots.release(2, 2);
        slots.release(6, 2);
        slots.release(4, 2);
        assert_eq!(slots.free_runs().collect::<Vec<_>>(), [(2, 6)]);
    }

    #[test]
    fn a_claim_in_the_middle_leaves_both_ends() {
        let mut slots = Slots::new(10);
        slots.claim(3, 4);
        assert_eq!(slots.free_runs().collect::<Vec<_>>(), [(0, 3), (7, 3)]);
    }

    #[test]
    fn runs_of_neighbouring_slots_are_merged() {
        assert_eq!(runs(&[1, 2, 3, 7, 9, 10]), [(1, 3), (7, 1), (9, 2)]);
        assert_eq!(runs(&[]), []);
    }
}
