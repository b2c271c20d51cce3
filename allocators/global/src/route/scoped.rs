//! Entering and leaving routing scopes, and carrying them to other threads.
//!
//! Scopes belong to one thread, so a task on another thread is not counted under the tag of its
//! creator. Work that should be counted there carries a [`Context`].
#![expect(unsafe_code, reason = "reads the scope on the stack")]

use super::table::RouteId;
use crate::{
    scope::Scope,
    thread_state::{THREAD_STATE, ThreadState},
};
use aquifer_core::{Tag, tagged};
use std::ptr;

impl Scope {
    /// Returns the innermost scope of a thread.
    #[inline]
    pub(super) fn innermost(state: &ThreadState) -> Option<&Self> {
        // SAFETY: 1. The pointer is null or points to a `Scope` on this thread's stack, whose
        // function has not returned: it removes the pointer before it returns. 2. A scope is never
        // written.
        unsafe { state.scope().as_ref() }
    }

    /// Returns the innermost scope of this thread.
    pub(crate) fn current() -> Option<Self> {
        THREAD_STATE.with(|state| Self::innermost(state).copied())
    }
}

/// Restores the previous scope, also on unwind.
struct Restore(*const Scope);

impl Drop for Restore {
    fn drop(&mut self) {
        THREAD_STATE.with(|state| state.replace_scope(self.0));
    }
}

fn with_scope<R>(scope: *const Scope, work: impl FnOnce() -> R) -> R {
    let _restore = Restore(THREAD_STATE.with(|state| state.replace_scope(scope)));
    work()
}

/// Runs `work` in a scope in which the route `to` serves this thread's allocations of `at_least`
/// bytes or more.
///
/// A block that grows to that size in the scope moves to the route. The innermost scope applies. If
/// the route refuses, the wrapped allocator serves the request. Blocks may outlive the scope.
/// Unless a [`Global`](crate::Global) is the program's global allocator, nothing is routed. See
/// [`Route`](crate::Route) for an example.
pub fn route<R>(to: RouteId, at_least: usize, work: impl FnOnce() -> R) -> R {
    let Some(route) = to.get() else { return work() };
    scoped(Some(Scope { route, at_least }), work)
}

/// Runs `work` in this scope, or in none.
pub(crate) fn scoped<R>(scope: Option<Scope>, work: impl FnOnce() -> R) -> R {
    // The scope outlives the call of `with_scope`, which removes its address from the thread's
    // state before it returns or unwinds.
    with_scope(scope.as_ref().map_or(ptr::null(), ptr::from_ref), work)
}

/// Runs `work` outside of all routing scopes: the wrapped allocator serves its allocations on this
/// thread.
///
/// Use this for bookkeeping that must not lie in the memory that it describes.
///
/// See [`route`](fn@route) for an example of a scope in which this can be called.
pub fn unrouted<R>(work: impl FnOnce() -> R) -> R {
    scoped(None, work)
}

/// The captured tag and routing scope of a thread.
///
/// It is `Copy` and keeps nothing alive, since routes exist for the life of the process.
///
/// ```
/// use aquifer::{Tag, tagged};
/// use aquifer_global as global;
/// use std::thread;
/// #[global_allocator]
/// static GLOBAL: global::Global = global::Global::new();
///
/// let parse = Tag::named("parse");
/// let job = tagged(parse, || global::capture().bind(|| vec![0u8; 1000]));
/// let made = thread::spawn(job).join().unwrap();
/// assert_eq!(global::allocated_under(parse).bytes, 1000);
/// # drop(made);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Context {
    tag: Tag,
    scope: Option<Scope>,
}

/// Captures the innermost tag and the innermost routing scope of this thread. Allocates nothing.
#[must_use]
pub fn capture() -> Context {
    Context { tag: Tag::current(), scope: Scope::current() }
}

impl Context {
    /// Runs `work` in this context. The previous context is restored at the end, also on unwind.
    pub fn run<R>(self, work: impl FnOnce() -> R) -> R {
        tagged(self.tag, || scoped(self.scope, work))
    }

    /// Returns a closure that runs `work` in this context, on any thread.
    pub fn bind<R>(self, work: impl FnOnce() -> R) -> impl FnOnce() -> R {
        move || self.run(work)
    }

    /// Returns the tag.
    #[must_use]
    pub const fn tag(&self) -> Tag {
        self.tag
    }
}
