//! Lists of registered hooks, and their calls.

use crate::{
    panics::contain,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
        lock,
    },
};
use std::sync::Arc;

/// All hooks, with their numbers.
type All<H> = Option<Arc<[(u64, H)]>>;

/// A list of hooks that is read without allocating, since the allocator itself may charge a budget.
pub(super) struct Hooks<H> {
    /// Immutable lists, replaced as a whole.
    list: Mutex<All<H>>,
    /// Serialises `add` and `remove`. Holds the last number issued.
    changing: Mutex<u64>,
    panics: AtomicU64,
}

impl<H: Clone> Hooks<H> {
    pub(super) fn new() -> Self {
        Self { list: Mutex::new(None), changing: Mutex::new(0), panics: AtomicU64::new(0) }
    }

    /// Returns the current hooks.
    pub(super) fn now(&self) -> All<H> {
        lock(&self.list).clone()
    }

    /// Adds a hook and returns its unique number.
    pub(super) fn add(&self, hook: H) -> u64 {
        let mut number = lock(&self.changing);
        *number += 1;
        let all = self.now();
        let next =
            all.iter().flat_map(|all| all.iter().cloned()).chain([(*number, hook)]).collect();
        self.put(Some(next));
        *number
    }

    pub(super) fn remove(&self, number: u64) {
        let gone = {
            let _changing = lock(&self.changing);
            let all = self.now();
            let next = all
                .iter()
                .flat_map(|all| all.iter())
                .filter(|(n, _)| *n != number)
                .cloned()
                .collect();
            (self.put(Some(next)), all)
        };
        // Dropping a hook may run foreign code, so it happens outside the lock.
        drop(gone);
    }

    pub(super) fn clear(&self) {
        let gone = self.put(None);
        drop(gone);
    }

    fn put(&self, next: All<H>) -> All<H> {
        std::mem::replace(&mut *lock(&self.list), next)
    }

    /// Calls a hook. A panic is caught and counted.
    pub(super) fn call<R>(&self, hook: impl FnOnce() -> R) -> Option<R> {
        let answer = contain(hook);
        if answer.is_none() {
            self.panics.fetch_add(1, Relaxed);
        }
        answer
    }

    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Relaxed)
    }
}
