//! Which allocations are routed.
#![expect(unsafe_code, reason = "reads the scope on the stack")]

use super::{Route, RouteId};
use crate::here::{HERE, Here};
use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
    ptr,
};

/// A routing scope of one thread, on its stack.
#[derive(Clone, Copy)]
pub(crate) struct Scope {
    pub(super) route: &'static dyn Route,
    /// Bytes from which on an allocation is routed.
    pub(super) at_least: usize,
}

impl Scope {
    /// The innermost one of a thread.
    #[inline]
    pub(super) fn innermost(here: &Here) -> Option<&Self> {
        // SAFETY: 1. The pointer is null or that of a `Scope` on this thread's stack, whose
        // function has not returned: it takes the pointer out before. 2. Nobody writes a scope.
        unsafe { here.scope().as_ref() }
    }

    /// The innermost one of this thread.
    pub(crate) fn current() -> Option<Self> {
        HERE.with(|here| Self::innermost(here).copied())
    }
}

// A route does not unwind, so nobody sees one that has half done something.
impl UnwindSafe for Scope {}
impl RefUnwindSafe for Scope {}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("at_least", &self.at_least).finish_non_exhaustive()
    }
}

/// Puts the scope before back, also on unwind.
struct Restore(*const Scope);

impl Drop for Restore {
    fn drop(&mut self) {
        HERE.with(|here| here.enter(self.0));
    }
}

fn within<R>(scope: *const Scope, work: impl FnOnce() -> R) -> R {
    let _restore = Restore(HERE.with(|here| here.enter(scope)));
    work()
}

/// Runs `work`; what it allocates on this thread, of `at_least` bytes or more, the route serves. So
/// is what grows there to that size.
///
/// The innermost scope counts. Where the route refuses, the wrapped allocator serves. Blocks may
/// outlive the scope. Without a [`Global`](crate::Global) as the program's global allocator nothing
/// is routed. [`Route`] has an example.
pub fn route<R>(to: RouteId, at_least: usize, work: impl FnOnce() -> R) -> R {
    let Some(route) = to.get() else { return work() };
    scoped(Some(Scope { route, at_least }), work)
}

/// Runs `work` in this scope, or in none.
pub(crate) fn scoped<R>(scope: Option<Scope>, work: impl FnOnce() -> R) -> R {
    // It outlives `within`, which takes its address out of the thread's state before it returns or
    // unwinds.
    within(scope.as_ref().map_or(ptr::null(), ptr::from_ref), work)
}

/// Runs `work` outside of all scopes: what it allocates on this thread the wrapped allocator
/// serves.
///
/// For bookkeeping that must not lie in the memory it keeps book of.
///
/// Its example is that of [`route`](fn@route), in whose scope it can be called.
pub fn unrouted<R>(work: impl FnOnce() -> R) -> R {
    scoped(None, work)
}
