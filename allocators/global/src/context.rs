//! The tag and the route of a thread's allocations, captured for use on other threads.
//!
//! Scopes belong to one thread, so a task on another thread is not counted under the tag of its
//! creator. Work that should be counted there carries a [`Context`].

use crate::{route::scoped, scope::Scope};
use aquifer_core::{Tag, tagged};

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
