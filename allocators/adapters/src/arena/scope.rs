//! Part of an arena's life, after which the arena is where it was.
#![expect(unsafe_code, reason = "rewinds when the borrow checker has shown that nobody is left")]

use super::{bump::Bump, typed};
use allocator_api2::alloc::{AllocError, Allocator, Global, handle_alloc_error};
use std::{alloc::Layout, fmt, marker::PhantomData, ptr::NonNull};

/// Part of an arena's life: what it hands out lives until the scope ends, and then the arena is
/// where it was.
///
/// Made by [`Arena::scope`](super::Arena::scope) and [`Scope::scope`]. What an outer scope handed
/// out stays usable in an inner one, while the outer scope itself does not: it is borrowed for as
/// long as the inner one lasts. So a value can never be put into the wrong one, and a vector of the
/// outer scope cannot grow into the inner one's memory.
///
/// `&Scope` is an allocator.
///
/// ```
/// use aquifer_adapters::Arena;
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
/// Nothing leaves a scope:
///
/// ```compile_fail
/// let mut arena = aquifer_adapters::Arena::new();
/// let escaped = arena.scope(|scope| scope.alloc(1));
/// ```
///
/// and an outer scope hands out nothing while an inner one is open:
///
/// ```compile_fail
/// let mut arena = aquifer_adapters::Arena::new();
/// arena.scope(|outer| {
///     outer.scope(|_inner| { outer.alloc(1); });
/// });
/// ```
pub struct Scope<'s, A: Allocator = Global> {
    bump: &'s Bump<A>,
    /// Invariant: a scope is never taken for one that ends at another time.
    life: PhantomData<fn(&'s ()) -> &'s ()>,
}

impl<'s, A: Allocator> Scope<'s, A> {
    pub(super) fn bump(&self) -> &'s Bump<A> {
        self.bump
    }

    allocating_methods!('s, []);

    /// Runs `work` with a scope inside this one. At its end, also on unwind, the arena is where it
    /// was.
    #[inline]
    pub fn scope<R>(&mut self, work: impl FnOnce(&mut Scope<'_, A>) -> R) -> R {
        run(self.bump, work)
    }
}

use typed::allocating_methods;

/// Runs `work` in a scope that begins where the arena stands.
#[inline]
pub(super) fn run<A: Allocator, R>(bump: &Bump<A>, work: impl FnOnce(&mut Scope<'_, A>) -> R) -> R {
    struct Rewind<'b, A: Allocator> {
        bump: &'b Bump<A>,
        mark: super::Mark,
    }
    impl<A: Allocator> Drop for Rewind<'_, A> {
        fn drop(&mut self) {
            // SAFETY: 1. Whatever was handed out since the mark came from the scope below or from
            // one inside it, and carries a lifetime that the closure could not name, so nothing of
            // it is left. 2. Inner scopes have gone back to marks of their own, all later than this
            // one, and `&mut` of the outer handle kept everybody else away meanwhile.
            unsafe { self.bump.rewind(self.mark) };
        }
    }
    let end = Rewind { bump, mark: bump.mark() };
    work(&mut Scope { bump: end.bump, life: PhantomData })
}

impl<A: Allocator> fmt::Debug for Scope<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("stats", &self.bump.stats()).finish_non_exhaustive()
    }
}
