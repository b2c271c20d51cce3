//! What a thread's allocations count under and go to, for other threads to take over.
//!
//! Scopes are a thread's own: a task that runs elsewhere counts under nobody. Work that shall count
//! where it was asked for carries a [`Context`] along.

use crate::route::{Scope, scoped};
use aquifer_core::{Tag, tagged};

/// The tag and the routing scope of a thread, captured.
///
/// Copied freely; holds nothing alive, since routes are there for the life of the process.
///
/// ```
/// use aquifer_core::{Tag, tagged};
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

/// The innermost scopes of this thread, of tags and of routes. Allocates nothing.
#[must_use]
pub fn capture() -> Context {
    Context { tag: Tag::current(), scope: Scope::current() }
}

impl Context {
    /// Runs `work` under it; what was there before comes back at the end, also on unwind.
    pub fn run<R>(self, work: impl FnOnce() -> R) -> R {
        tagged(self.tag, || scoped(self.scope, work))
    }

    /// `work`, to be run under it on whichever thread calls.
    pub fn bind<R>(self, work: impl FnOnce() -> R) -> impl FnOnce() -> R {
        move || self.run(work)
    }

    /// The tag.
    #[must_use]
    pub const fn tag(&self) -> Tag {
        self.tag
    }
}
