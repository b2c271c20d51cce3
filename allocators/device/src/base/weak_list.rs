//! Values that are found as long as their owners keep them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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
