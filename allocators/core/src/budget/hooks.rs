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
type HookList<H> = Option<Arc<[(u64, H)]>>;

/// A list of hooks that is read without allocating, since the allocator itself may charge a budget.
pub(super) struct Hooks<H> {
    /// Immutable lists, replaced as a whole.
    list: Mutex<HookList<H>>,
    /// Serialises `add` and `remove`. Holds the last number issued.
    last_number: Mutex<u64>,
    panics: AtomicU64,
}

impl<H: Clone> Hooks<H> {
    pub(super) fn new() -> Self {
        Self { list: Mutex::new(None), last_number: Mutex::new(0), panics: AtomicU64::new(0) }
    }

    /// Returns the current hooks.
    pub(super) fn snapshot(&self) -> HookList<H> {
        lock(&self.list).clone()
    }

    /// Adds a hook and returns its unique number.
    pub(super) fn add(&self, hook: H) -> u64 {
        let mut number = lock(&self.last_number);
        *number += 1;
        let all = self.snapshot();
        let next =
            all.iter().flat_map(|all| all.iter().cloned()).chain([(*number, hook)]).collect();
        self.replace(Some(next));
        *number
    }

    pub(super) fn remove(&self, number: u64) {
        let removed = {
            let _last_number = lock(&self.last_number);
            let all = self.snapshot();
            let next = all
                .iter()
                .flat_map(|all| all.iter())
                .filter(|(n, _)| *n != number)
                .cloned()
                .collect();
            (self.replace(Some(next)), all)
        };
        // Dropping a hook may run foreign code, so it happens outside the lock.
        drop(removed);
    }

    pub(super) fn clear(&self) {
        let removed = self.replace(None);
        drop(removed);
    }

    fn replace(&self, next: HookList<H>) -> HookList<H> {
        std::mem::replace(&mut *lock(&self.list), next)
    }

    /// Calls a hook. A panic is caught and counted.
    pub(super) fn call<R>(&self, hook: impl FnOnce() -> R) -> Option<R> {
        let result = contain(hook);
        if result.is_none() {
            self.panics.fetch_add(1, Relaxed);
        }
        result
    }

    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Relaxed)
    }
}
