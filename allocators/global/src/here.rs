//! What a thread knows of itself.

use crate::{account::Slot, route::Scope};
use std::{cell::Cell, ptr};

/// A thread's own state. Const and without a destructor, so that it is there from the thread's first instruction to its
/// last, and reading it neither allocates nor fails.
pub(crate) struct Here {
    /// The slot that this thread counts in, once it has one.
    pub(crate) slot: Cell<Option<&'static Slot>>,
    /// Whether the thread is ending: it has given its slot back and gets no other.
    pub(crate) ending: Cell<bool>,
    /// The innermost routing scope, on this thread's stack; null outside of all.
    pub(crate) scope: Cell<*const Scope>,
    /// Whether a route is being called.
    pub(crate) inside: Cell<bool>,
    /// Whether a call stack is being walked or told: nothing is sampled meanwhile.
    pub(crate) sampling: Cell<bool>,
}

thread_local! {
    pub(crate) static HERE: Here = const {
        Here {
            slot: Cell::new(None),
            ending: Cell::new(false),
            scope: Cell::new(ptr::null()),
            inside: Cell::new(false),
            sampling: Cell::new(false),
        }
    };
}
