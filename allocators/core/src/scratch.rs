//! Temporary memory for maintenance passes. Internal to this workspace.
//!
//! A pass lists free ranges of many places, sorts them, takes some and drops the lists. It runs
//! when memory is short, possibly inside another allocator's slow path, and partly under the lock
//! of a cache. Allocations from the process's allocator would be a risk there: it may be our own
//! `Global`, at its limit or with a route to another pool. So a pass takes its lists from a
//! [`Bump`] that exists already. The bump arena is created with the pool, grows with the largest
//! pass, is reset after each pass, and is kept.
//!
//! ```text
//!   Scratch   ┌ idle ──────┐   begin    ┌ Pass ───────────────┐  end: reset, keeps its
//!             │ Bump, Bump │ ─────────► │ list, list, list …  │  largest chunk ──► idle
//!             └────────────┘            └─────────────────────┘
//! ```
//!
//! Nested passes, and passes on several threads at once, have a `Bump` each.

use crate::sync::{Mutex, lock};
use allocator_api2::vec::Vec as AllocVec;
pub use bumpalo::Bump;
use std::{fmt, mem, ops::Deref};

/// Bytes allocated from the start.
const INITIAL_BYTES: usize = 4 << 10;
/// The number of arenas kept, for nested or concurrent passes.
const MAX_IDLE: usize = 4;

/// A list of a pass.
pub type List<'s, T> = AllocVec<T, &'s Bump>;

/// Collects items into a list.
pub fn list<'s, T>(bump: &'s Bump, all: impl IntoIterator<Item = T>) -> List<'s, T> {
    let mut list = List::new_in(bump);
    list.extend(all);
    list
}

/// The arenas of one owner's passes.
///
/// ```
/// use aquifer_core::scratch::{Scratch, list};
/// let scratch = Scratch::new();
/// let pass = scratch.begin();
/// let mut largest = list(&pass, [3, 9, 4]);
/// largest.sort_unstable();
/// assert_eq!(largest.last(), Some(&9));
/// ```
pub struct Scratch {
    /// Never grows beyond its capacity, so returning an arena does not allocate.
    idle: Mutex<Vec<Bump>>,
}

impl Scratch {
    /// Creates it with one arena of 4 KiB.
    #[must_use]
    pub fn new() -> Self {
        let mut idle = Vec::with_capacity(MAX_IDLE);
        // If this allocation fails, the first pass allocates instead.
        idle.extend(Bump::try_with_capacity(INITIAL_BYTES));
        Self { idle: Mutex::new(idle) }
    }

    /// Begins a pass. Never blocks on another pass.
    #[must_use]
    pub fn begin(&self) -> Pass<'_> {
        let idle = lock(&self.idle).pop();
        Pass { bump: idle.unwrap_or_default(), scratch: self }
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}

/// A pass, in whose arena lists are created.
///
/// See the example of [`Scratch`].
#[derive(Debug)]
pub struct Pass<'a> {
    bump: Bump,
    scratch: &'a Scratch,
}

impl Deref for Pass<'_> {
    type Target = Bump;

    fn deref(&self) -> &Bump {
        &self.bump
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.bump.reset();
        let bump = mem::take(&mut self.bump);
        let mut idle = lock(&self.scratch.idle);
        if idle.len() < idle.capacity() {
            idle.push(bump);
        } else {
            drop(idle);
            drop(bump);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pass_reuses_the_memory_of_the_previous_pass() {
        let scratch = Scratch::new();
        let pass = scratch.begin();
        assert!(pass.allocated_bytes() >= INITIAL_BYTES);
        let many: u64 = if cfg!(miri) { 8_000 } else { 100_000 };
        let all = list(&pass, 0..many);
        assert_eq!(all.len() as u64, many);
        drop(all);
        drop(pass);
        let kept = scratch.begin().allocated_bytes();
        assert!(kept as u64 >= many * 8 / 2, "{kept}");
        // The arena was reset: the same amount fits again without growth.
        let pass = scratch.begin();
        drop(list(&pass, 0..many / 10));
        assert_eq!(pass.allocated_bytes(), kept);
    }

    #[test]
    fn nested_passes_have_separate_arenas_of_which_a_few_are_kept() {
        let scratch = Scratch::new();
        let outer = scratch.begin();
        let ours = list(&outer, [1; 100]);
        let others: Vec<_> = (0..2 * MAX_IDLE).map(|_| scratch.begin()).collect();
        others.iter().for_each(|pass| assert_eq!(list(pass, [2; 100]).len(), 100));
        drop(others);
        assert_eq!(lock(&scratch.idle).len(), MAX_IDLE);
        assert!(ours.iter().all(|one| *one == 1));
    }
}
