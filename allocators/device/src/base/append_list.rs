//! Lists that only grow.

use std::{iter, sync::OnceLock};

/// A list whose entries stay for as long as it lives. Reading takes no lock.
pub(crate) struct AppendList<T>(OnceLock<Box<Entry<T>>>);

struct Entry<T> {
    value: T,
    rest: AppendList<T>,
}

impl<T> AppendList<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// An iterator over the values, in the order in which they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        iter::successors(self.0.get(), |entry| entry.rest.0.get()).map(|entry| &entry.value)
    }

    /// Returns what `find` finds in the first value where it finds anything. If there is none, adds
    /// the value that `make` makes, in which `find` must find something.
    pub(crate) fn find_or_push<'a, F>(
        &'a self,
        find: impl Fn(&'a T) -> Option<&'a F>,
        make: impl Fn() -> T,
    ) -> &'a F {
        let mut list = self;
        loop {
            // Two threads that add a value at the same time agree on the entry.
            let entry = list.0.get_or_init(|| Box::new(Entry { value: make(), rest: Self::new() }));
            if let Some(found) = find(&entry.value) {
                return found;
            }
            list = &entry.rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(list: &AppendList<i32>, wanted: i32) -> i32 {
        *list.find_or_push(|value| Some(value).filter(|value| **value == wanted), || wanted)
    }

    #[test]
    fn values_are_found_or_added_once_in_order() {
        let list = AppendList::new();
        assert_eq!([3, 5, 3, 7].map(|wanted| number(&list, wanted)), [3, 5, 3, 7]);
        assert_eq!(list.iter().copied().collect::<Vec<_>>(), [3, 5, 7]);
    }

    #[test]
    fn threads_that_add_the_same_value_share_it() {
        let list = AppendList::new();
        std::thread::scope(|s| {
            for wanted in [0, 1, 2, 0, 1, 2] {
                let list = &list;
                s.spawn(move || number(list, wanted));
            }
        });
        let mut values: Vec<_> = list.iter().copied().collect();
        values.sort_unstable();
        assert_eq!(values, [0, 1, 2]);
    }
}
