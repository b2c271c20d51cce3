//! The table of slots: which slots of a pool's address range are mapped to which handle, and which
//! are unclaimed.
//!
//! A slot is as large as the smallest handle. A handle covers one or more consecutive slots.
//! Unclaimed slots are in no cache. Nothing here calls the driver.

use super::handle::Handle;
use crate::base::pending::{StreamDeps, is_done};
use std::{collections::BTreeMap, iter, sync::Arc};

/// The table of one address range. Slots are counted from its start.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Runs of unclaimed slots: first slot and count. Neighbours are merged.
    free: BTreeMap<u64, u64>,
    /// Mappings by their first slot.
    mapped: BTreeMap<u64, Mapping>,
    /// Handles that are held and charged, but not mapped. The next growth takes them first. A trim
    /// releases them first, and a block that finds no place in the end releases all of them.
    pub(crate) spare: Vec<Arc<Handle>>,
    /// Mappings to be removed once their streams are done with them.
    pub(crate) zombies: Vec<Zombie>,
}

/// A handle mapped at an address.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    pub(crate) first: u64,
    /// The number of slots it covers.
    pub(crate) count: u64,
    pub(crate) handle: Arc<Handle>,
}

/// An unused mapping that queued work may still access, or that the driver has refused to remove.
///
/// While the handle is also mapped elsewhere, its bytes count there. If it is not, they stay
/// charged and are in no cache until the zombie is unmapped.
#[derive(Debug)]
pub(crate) struct Zombie {
    /// Keeps the memory charged while it is mapped here.
    pub(crate) mapping: Mapping,
    /// The epochs that must be done before it is unmapped.
    pub(crate) until: StreamDeps,
}

impl Mapping {
    pub(crate) fn end(&self) -> u64 {
        self.first + self.count
    }
}

impl Zombie {
    pub(crate) fn is_over(&self) -> bool {
        is_done(&self.until)
    }
}

impl Slots {
    /// Creates a table of `count` unclaimed slots.
    pub(crate) fn new(count: u64) -> Self {
        let mut slots = Self::default();
        if count > 0 {
            slots.free.insert(0, count);
        }
        slots
    }

    /// Returns the number of handles that are mapped or spare.
    pub(crate) fn count(&self) -> u64 {
        (self.mapped.len() + self.spare.len()) as u64
    }

    /// An iterator over the runs of unclaimed slots, by address.
    pub(crate) fn free_runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.free.iter().map(|(&first, &count)| (first, count))
    }

    /// Claims `count` unclaimed slots from `first` on.
    pub(crate) fn claim(&mut self, first: u64, count: u64) {
        debug_assert!(count > 0, "claims no slot");
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

    /// Releases `count` slots from `first` on, where nothing is mapped.
    pub(crate) fn release(&mut self, first: u64, count: u64) {
        debug_assert!(count > 0, "releases no slot");
        debug_assert!(self.covering(first, count).next().is_none(), "a handle is mapped there");
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

    /// Records a mapping.
    pub(crate) fn map(&mut self, mapping: Mapping) {
        debug_assert!(mapping.count > 0, "a mapping has slots");
        debug_assert!(
            self.covering(mapping.first, mapping.count).next().is_none(),
            "two handles at one slot"
        );
        self.mapped.insert(mapping.first, mapping);
    }

    /// Removes the mapping that begins at a slot.
    pub(crate) fn unmap(&mut self, first: u64) -> Option<Mapping> {
        self.mapped.remove(&first)
    }

    /// Removes the mapping that covers exactly these slots.
    pub(crate) fn unmap_exactly(&mut self, first: u64, count: u64) -> Option<Mapping> {
        if self.mapped.get(&first)?.count == count { self.mapped.remove(&first) } else { None }
    }

    /// An iterator over the mappings that lie wholly in a run of slots, by address.
    pub(crate) fn inside(&self, first: u64, count: u64) -> impl Iterator<Item = &Mapping> + '_ {
        let end = first + count;
        self.mapped.range(first..end).map(|(_, mapping)| mapping).filter(move |m| m.end() <= end)
    }

    /// An iterator over the mappings that cover any of these slots, by address.
    pub(crate) fn covering(&self, first: u64, count: u64) -> impl Iterator<Item = &Mapping> + '_ {
        let before = self.mapped.range(..first).next_back().map(|(_, mapping)| mapping);
        let rest = self.mapped.range(first..first + count).map(|(_, mapping)| mapping);
        before.filter(|mapping| mapping.end() > first).into_iter().chain(rest)
    }

    /// Checks that the runs of unclaimed slots are apart, and that no mapping overlaps another or
    /// such a run.
    ///
    /// # Panics
    /// If this is not so.
    pub(crate) fn check(&self) {
        let mut end = None;
        for (first, count) in self.free_runs() {
            assert!(count > 0 && end.is_none_or(|end| end < first), "free runs touch at {first}");
            let mapped = self.covering(first, count).next();
            assert!(mapped.is_none(), "slots from {first} are free and mapped");
            end = Some(first + count);
        }
        let mut end = 0;
        for mapping in self.mapped() {
            assert!(mapping.count > 0 && end <= mapping.first, "mappings overlap at {end}");
            end = mapping.end();
        }
    }

    /// An iterator over all mappings, by address.
    pub(crate) fn mapped(&self) -> impl Iterator<Item = &Mapping> + '_ {
        self.mapped.values()
    }
}

/// Merges sorted pieces of slots (first and count) into runs.
pub(crate) fn runs(
    pieces: impl IntoIterator<Item = (u64, u64)>,
) -> impl Iterator<Item = (u64, u64)> {
    let mut pieces = pieces.into_iter().peekable();
    iter::from_fn(move || {
        let (first, mut count) = pieces.next()?;
        while let Some((_, more)) = pieces.next_if(|(next, _)| *next == first + count) {
            count += more;
        }
        debug_assert!(
            pieces.peek().is_none_or(|(next, _)| *next > first + count),
            "pieces are not sorted"
        );
        Some((first, count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_core::{Budget, DeviceId};
    use aquifer_driver::{Driver, ExportTypes, sim::Sim};

    fn mapping(first: u64, count: u64) -> Mapping {
        let driver: Arc<dyn Driver> = Sim::h200(1).driver();
        let budget = Budget::new("a test", 8 << 20);
        let charge = budget.charge(count << 21).expect("as much as there is");
        let export = (ExportTypes::NONE, ExportTypes::NONE);
        let handle = Handle::create(&driver, DeviceId(0), export, charge, &Arc::default())
            .expect("as much as there is");
        Mapping { first, count, handle }
    }

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
    fn claim_in_the_middle_leaves_both_ends_free() {
        let mut slots = Slots::new(10);
        slots.claim(3, 4);
        assert_eq!(slots.free_runs().collect::<Vec<_>>(), [(0, 3), (7, 3)]);
    }

    #[test]
    fn runs_of_neighbouring_slots_are_merged() {
        assert!(runs([(1, 2), (3, 1), (7, 1), (9, 1), (10, 1)]).eq([(1, 3), (7, 1), (9, 2)]));
        assert!(runs([]).eq([]));
    }

    #[test]
    fn unmap_exactly_ignores_mappings_of_another_length() {
        let mut slots = Slots::new(10);
        slots.claim(2, 2);
        slots.map(mapping(2, 2));
        for (first, count) in [(2, 1), (2, 3), (3, 1), (1, 3)] {
            assert!(slots.unmap_exactly(first, count).is_none(), "{first}, {count}");
        }
        // A mapping that only begins in a run is not inside it.
        assert_eq!(slots.inside(0, 3).count(), 0);
        assert_eq!(slots.inside(0, 4).count(), 1);
        assert!(slots.unmap_exactly(2, 2).is_some());
        assert_eq!(slots.mapped().count(), 0);
    }
}
