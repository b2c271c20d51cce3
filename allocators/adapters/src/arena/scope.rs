//! Arena scopes, which free everything allocated in them when they end.
#![expect(unsafe_code, reason = "rewinds when the borrow checker has shown that nobody is left")]

use super::{bump::Bump, typed};
use allocator_api2::alloc::{AllocError, Allocator, Global, handle_alloc_error};
use std::{alloc::Layout, fmt, marker::PhantomData, ptr::NonNull};

/// A scope of an arena. Its allocations live until the scope ends, and are then freed together.
///
/// Created by [`Arena::scope`](super::Arena::scope) and [`ArenaScope::scope`]. Allocations of an
/// outer scope stay usable in an inner one. The outer scope itself is mutably borrowed while the
/// inner one is open. So a value cannot be allocated in the wrong scope, and a vector of the outer
/// scope cannot grow into the memory of the inner one.
///
/// ```
/// use aquifer::Arena;
/// use allocator_api2::vec::Vec;
/// let mut arena = Arena::new();
/// let longest = arena.scope(|outer| {
///     let words = outer.alloc_slice_copy(&["a", "bump", "allocator"]);
///     outer.scope(|inner| {
///         let mut lengths = Vec::new_in(&*inner);
///         lengths.extend(words.iter().map(|word| word.len()));
///         lengths.iter().copied().max()
///     })
/// });
/// assert_eq!((longest, arena.stats().allocated), (Some(9), 0));
/// ```
///
/// Allocations cannot escape a scope:
///
/// ```compile_fail
/// let mut arena = aquifer::Arena::new();
/// let escaped = arena.scope(|scope| scope.alloc(1));
/// ```
///
/// An outer scope cannot allocate while an inner one is open:
///
/// ```compile_fail
/// let mut arena = aquifer::Arena::new();
/// arena.scope(|outer| {
///     outer.scope(|_inner| { outer.alloc(1); });
/// });
/// ```
pub struct ArenaScope<'s, A: Allocator = Global> {
    bump: &'s Bump<A>,
    /// Invariant: a scope cannot be coerced to one with another lifetime.
    lifetime: PhantomData<fn(&'s ()) -> &'s ()>,
}

impl<'s, A: Allocator> ArenaScope<'s, A> {
    pub(super) fn bump(&self) -> &'s Bump<A> {
        self.bump
    }

    allocating_methods!('s, []);

    /// Runs `work` with a scope inside this one. At the end, also on unwind, everything allocated
    /// in it is freed.
    #[inline]
    pub fn scope<R>(&mut self, work: impl FnOnce(&mut ArenaScope<'_, A>) -> R) -> R {
        run_scope(self.bump, work)
    }
}

use typed::allocating_methods;

/// Runs `work` in a scope that starts at the current position.
#[inline]
pub(super) fn run_scope<A: Allocator, R>(
    bump: &Bump<A>,
    work: impl FnOnce(&mut ArenaScope<'_, A>) -> R,
) -> R {
    struct Rewind<'b, A: Allocator> {
        bump: &'b Bump<A>,
        mark: super::ArenaMark,
    }
    impl<A: Allocator> Drop for Rewind<'_, A> {
        fn drop(&mut self) {
            // SAFETY: 1. Everything allocated since the mark came from this scope or one inside it,
            // and has a lifetime that the closure cannot name, so none of it is used any more. 2.
            // Inner scopes have rewound to their own later marks, and the `&mut` borrow of the
            // outer handle excluded all other use.
            unsafe { self.bump.rewind(self.mark) };
        }
    }
    let end = Rewind { bump, mark: bump.mark() };
    work(&mut ArenaScope { bump: end.bump, lifetime: PhantomData })
}

impl<A: Allocator> fmt::Debug for ArenaScope<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("stats", &self.bump.stats()).finish_non_exhaustive()
    }
}
