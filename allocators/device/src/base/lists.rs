//! Lists that only grow, lists that keep nothing alive, and sorted sequences.

use std::{
    iter,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

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

/// A list of values that does not keep them alive.
pub(crate) struct WeakList<T: ?Sized>(Mutex<Vec<Weak<T>>>);

impl<T: ?Sized> Default for WeakList<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: ?Sized> WeakList<T> {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a value.
    pub(crate) fn add(&self, new: &Arc<T>) {
        let mut list = self.list();
        list.retain(|value| value.strong_count() > 0);
        list.push(Arc::downgrade(new));
    }

    /// Returns all values that are alive, with no lock held.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.list().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns the value for which `is_same`, or else adds `new` and returns it.
    pub(crate) fn find_or_add(&self, new: Arc<T>, is_same: impl Fn(&T) -> bool) -> Arc<T> {
        let mut list = self.list();
        let alive: Vec<_> = list.iter().filter_map(Weak::upgrade).collect();
        let found = alive.iter().find(|value| is_same(value)).cloned();
        if found.is_none() {
            list.retain(|value| value.strong_count() > 0);
            list.push(Arc::downgrade(&new));
        }
        // Values whose last reference is dropped here are dropped after the lock is released.
        drop(list);
        found.unwrap_or(new)
    }
}

/// Returns the items of two sequences, each of which is in the order of `key`, in that order. Of
/// equal items, those of the first sequence come first.
pub(crate) fn merged<T, K: Ord>(
    first: impl IntoIterator<Item = T>,
    second: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> impl Iterator<Item = T> {
    let (mut first, mut second) = (first.into_iter().peekable(), second.into_iter().peekable());
    iter::from_fn(move || match (first.peek(), second.peek()) {
        (Some(one), Some(other)) if key(other) < key(one) => second.next(),
        (Some(_), _) => first.next(),
        (None, _) => second.next(),
    })
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

    #[test]
    fn merged_items_are_in_order_and_equal_ones_in_that_of_the_sequences() {
        let of = |first: &[(u32, char)], second: &[(u32, char)]| -> String {
            merged(first.to_vec(), second.to_vec(), |item| item.0).map(|item| item.1).collect()
        };
        let (low, high) = ([(1, 'a'), (3, 'b'), (3, 'c')], [(2, 'x'), (3, 'y'), (9, 'z')]);
        assert_eq!((of(&low, &high), of(&high, &low)), ("axbcyz".into(), "axybcz".into()));
        assert_eq!(
            (of(&low, &[]), of(&[], &low), of(&[], &[])),
            ("abc".into(), "abc".into(), "".into())
        );
    }
}
