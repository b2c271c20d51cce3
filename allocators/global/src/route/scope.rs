//! Which allocations are routed.

use super::{Route, RouteId};
use crate::here::HERE;
use std::ptr;

/// A routing scope of one thread, on its stack.
pub(crate) struct Scope {
    pub(super) route: &'static dyn Route,
    /// Bytes from which on an allocation is routed.
    pub(super) at_least: usize,
}

/// Puts the scope before back, also on unwind.
struct Restore(*const Scope);

impl Drop for Restore {
    fn drop(&mut self) {
        HERE.with(|here| here.scope.set(self.0));
    }
}

fn within<R>(scope: *const Scope, work: impl FnOnce() -> R) -> R {
    let _restore = Restore(HERE.with(|here| here.scope.replace(scope)));
    work()
}

/// Runs `work`; what it allocates on this thread, of `at_least` bytes or more, the route serves. So is what grows there to
/// that size.
///
/// The innermost scope counts. Where the route refuses, the wrapped allocator serves. Blocks may outlive the scope.
/// Without a [`Global`](crate::Global) as the program's global allocator nothing is routed. [`Route`] has an example.
pub fn route<R>(to: RouteId, at_least: usize, work: impl FnOnce() -> R) -> R {
    let Some(route) = to.get() else { return work() };
    let scope = Scope { route, at_least };
    // It outlives `within`, which takes its address out of the thread's state before it returns or unwinds.
    within(&raw const scope, work)
}

/// Runs `work` outside of all scopes: what it allocates on this thread the wrapped allocator serves.
///
/// For bookkeeping that must not lie in the memory it keeps book of.
pub fn unrouted<R>(work: impl FnOnce() -> R) -> R {
    within(ptr::null(), work)
}
