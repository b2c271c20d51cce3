//! A queue of values by age. A value that is taken out may return to its place.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Included, Unbounded},
};

/// Values in the order in which they were added, with a logarithmic search. `A` is a place in that
/// order.
pub(super) struct AgeQueue<T, A = u64> {
    values: BTreeMap<A, T>,
    added: u64,
}

impl<T, A: Copy + Ord + From<u64>> AgeQueue<T, A> {
    pub(super) const fn new() -> Self {
        Self { values: BTreeMap::new(), added: 0 }
    }

    /// Adds the newest value.
    pub(super) fn push(&mut self, value: T) {
        self.values.insert(self.added.into(), value);
        self.added += 1;
    }

    /// Removes the oldest value.
    pub(super) fn pop_oldest(&mut self) -> Option<(A, T)> {
        self.values.pop_first()
    }

    /// Returns the place of the newest value.
    pub(super) fn newest(&self) -> Option<A> {
        self.values.last_key_value().map(|(&age, _)| age)
    }

    /// Removes the oldest value that is newer than `after` and not newer than `last`, which is not
    /// older than `after`.
    pub(super) fn take_next(&mut self, after: Option<A>, last: A) -> Option<(A, T)> {
        let after = after.map_or(Unbounded, Excluded);
        let (&age, _) = self.values.range((after, Included(last))).next()?;
        self.values.remove_entry(&age)
    }

    /// Returns a value that was taken out to its place.
    pub(super) fn put_back(&mut self, age: A, value: T) {
        self.values.insert(age, value);
    }
}

#[cfg(test)]
mod tests {
    use super::AgeQueue;
    use std::{cell::Cell, cmp::Ordering};

    #[test]
    fn values_leave_oldest_first_also_those_that_were_put_back() {
        let mut queue: AgeQueue<char> = AgeQueue::new();
        "abcd".chars().for_each(|value| queue.push(value));
        let (first, a) = queue.pop_oldest().unwrap();
        let last = queue.newest().unwrap();
        let (second, b) = queue.take_next(None, last).unwrap();
        queue.push('e');
        queue.put_back(second, b);
        queue.put_back(first, a);
        let mut walked = String::new();
        let mut after = None;
        while let Some((age, value)) = queue.take_next(after, last) {
            walked.push(value);
            queue.put_back(age, value);
            after = Some(age);
        }
        assert_eq!(walked, "abcd", "the newest was added after the walk had begun");
        let rest: String =
            std::iter::from_fn(|| queue.pop_oldest()).map(|(_, value)| value).collect();
        assert_eq!(rest, "abcde");
    }

    thread_local! {
        static COMPARISONS: Cell<u64> = const { Cell::new(0) };
    }

    /// A place that counts its comparisons.
    #[derive(Clone, Copy, Debug)]
    struct Counted(u64);

    impl From<u64> for Counted {
        fn from(age: u64) -> Self {
            Self(age)
        }
    }

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other).is_eq()
        }
    }

    impl Eq for Counted {}

    #[test]
    fn a_walk_over_all_values_costs_little_more_for_each_when_there_are_many() {
        let comparisons_each = |values: u64| {
            let mut queue = AgeQueue::<(), Counted>::new();
            (0..values).for_each(|_| queue.push(()));
            let last = queue.newest().unwrap();
            COMPARISONS.set(0);
            let (mut walked, mut after) = (0, None);
            while let Some((age, value)) = queue.take_next(after, last) {
                queue.put_back(age, value);
                (walked, after) = (walked + 1, Some(age));
            }
            assert_eq!(walked, values);
            COMPARISONS.get() / values
        };
        let (few, many) = (comparisons_each(100), comparisons_each(10_000));
        assert!(many <= 4 * few, "{few} comparisons for each of 100, {many} for each of 10000");
    }
}
