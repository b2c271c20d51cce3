//! What somebody has asked to be called, by the one who calls it.

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

/// A list that is read without allocating: a charge may be made by the allocator that an allocation
/// here would call.
pub(super) struct Hooks<H> {
    /// Whole lists take each other's place.
    list: Mutex<All<H>>,
    /// Held by whoever makes the next list.
    changing: Mutex<u64>,
    panics: AtomicU64,
}

impl<H: Clone> Hooks<H> {
    pub(super) fn new() -> Self {
        Self { list: Mutex::new(None), changing: Mutex::new(0), panics: AtomicU64::new(0) }
    }

    /// The hooks of this moment.
    pub(super) fn now(&self) -> All<H> {
        lock(&self.list).clone()
    }

    /// Adds one; answers with its number, which is given once.
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
        // What a hook has captured may call back when it goes.
        drop(gone);
    }

    pub(super) fn clear(&self) {
        let gone = self.put(None);
        drop(gone);
    }

    fn put(&self, next: All<H>) -> All<H> {
        std::mem::replace(&mut *lock(&self.list), next)
    }

    /// Calls a hook. One that panics is counted, and the caller goes on.
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
