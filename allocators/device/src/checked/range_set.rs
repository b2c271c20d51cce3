//! A map of held address ranges that finds overlaps.

use std::collections::BTreeMap;

/// Ranges that do not overlap, each with a value.
#[derive(Debug)]
pub(super) struct RangeSet<T> {
    /// Start address to end address and value.
    by_start: BTreeMap<u64, (u64, T)>,
}

impl<T> RangeSet<T> {
    pub(super) fn new() -> Self {
        Self { by_start: BTreeMap::new() }
    }

    /// Inserts a range, or returns the value of the lowest range that it overlaps.
    pub(super) fn insert(&mut self, start: u64, end: u64, what: T) -> Result<(), &T> {
        // One look-up at the end of the new range would detect an overlap, but the lowest
        // overlapping range is the more useful report.
        let first = self.by_start.range(..=start).next_back().filter(|(_, held)| held.0 > start);
        let lowest =
            first.or_else(|| self.by_start.range(start..end).next()).map(|(&held, _)| held);
        match lowest {
            Some(held) => Err(&self.by_start[&held].1),
            None => {
                self.by_start.insert(start, (end, what));
                Ok(())
            }
        }
    }

    /// Removes the range that begins at `start`.
    pub(super) fn remove(&mut self, start: u64) {
        self.by_start.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_range_is_refused_but_neighbours_are_not() {
        let mut ranges = RangeSet::new();
        assert_eq!(ranges.insert(100, 200, 'a'), Ok(()));
        assert_eq!(ranges.insert(200, 300, 'b'), Ok(()));
        assert_eq!(ranges.insert(50, 100, 'c'), Ok(()));
        for (start, end, held) in [
            (100, 200, 'a'),
            (199, 201, 'a'),
            (150, 160, 'a'),
            (0, 51, 'c'),
            (0, 1000, 'c'),
            (299, 300, 'b'),
        ] {
            assert_eq!(ranges.insert(start, end, 'x'), Err(&held), "{start}..{end}");
        }
        assert_eq!(ranges.insert(300, 301, 'd'), Ok(()), "a refusal leaves nothing behind");
        ranges.remove(100);
        assert_eq!(ranges.insert(100, 200, 'e'), Ok(()));
    }
}
