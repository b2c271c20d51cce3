//! Lists of objects that are leaked and recycled.

use std::sync::OnceLock;

/// A list of leaked objects that are recycled. The list only grows.
pub(super) struct ImmortalList<T: 'static> {
    first: OnceLock<&'static Link<T>>,
}

struct Link<T: 'static> {
    item: T,
    next: OnceLock<&'static Link<T>>,
}

impl<T> ImmortalList<T> {
    pub(super) const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'static T> {
        std::iter::successors(self.first.get().copied(), |link| link.next.get().copied())
            .map(|link| &link.item)
    }

    /// Returns the first object that `claim` accepts, or appends a new one, which is claimed
    /// already.
    pub(super) fn claim(&self, claim: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &'static T {
        if let Some(item) = self.iter().find(|item| claim(item)) {
            return item;
        }
        let link: &'static Link<T> =
            Box::leak(Box::new(Link { item: make(), next: OnceLock::new() }));
        let mut end = &self.first;
        while end.set(link).is_err() {
            match end.get() {
                Some(link) => end = &link.next,
                None => break,
            }
        }
        &link.item
    }
}
