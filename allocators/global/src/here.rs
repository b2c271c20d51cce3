//! Thread-local state.
#![expect(unsafe_code, reason = "points to slots, which are never freed")]

use crate::{
    account::{SHARED, Slot},
    route::Scope,
};
use aquifer_core::{__tag, Tag};
use std::{cell::Cell, ptr};

/// The state of one thread. It is const-initialised and has no destructor, so it is available for
/// the whole life of the thread, and reading it neither allocates nor fails.
pub(crate) struct Here {
    slot: Cell<Counts>,
    unrouted: Cell<Counts>,
    plain: Cell<Counts>,
    /// Whether the thread is ending. It has released its slot and gets no other.
    pub(crate) ending: Cell<bool>,
    /// The innermost routing scope, on this thread's stack. Null outside of all scopes.
    scope: Cell<*const Scope>,
    /// Whether a route is being called.
    pub(crate) inside: Cell<bool>,
    /// Whether sampling is paused, while a call stack is walked or reported.
    pub(crate) sampling: Cell<bool>,
}

thread_local! {
    pub(crate) static HERE: Here = const {
        Here {
            slot: Cell::new(Counts::SHARED),
            unrouted: Cell::new(Counts::SHARED),
            plain: Cell::new(Counts::SHARED),
            ending: Cell::new(false),
            scope: Cell::new(ptr::null()),
            inside: Cell::new(false),
            sampling: Cell::new(false),
        }
    };
}

/// A pointer to a slot. A constant cannot hold a reference to interior-mutable data before Rust
/// 1.90.
#[derive(Clone, Copy)]
struct Counts(*const Slot);

impl Counts {
    const SHARED: Self = Self(&raw const SHARED);

    #[inline]
    fn get(self) -> &'static Slot {
        // SAFETY: 1. it points to the shared slot or was created from a `&'static` reference, so it
        // is valid for the life of the program.
        unsafe { &*self.0 }
    }
}

impl Here {
    /// Returns the slot in which this thread counts: its own, or the shared one.
    #[inline]
    pub(crate) fn slot(&self) -> &'static Slot {
        self.slot.get().get()
    }

    /// Returns [`Here::slot`] outside of routing scopes, and the shared slot inside.
    #[inline]
    pub(crate) fn unrouted(&self) -> &'static Slot {
        self.unrouted.get().get()
    }

    /// Returns [`Here::slot`] outside of all scopes, and the shared slot inside a scope of either
    /// kind.
    #[inline]
    pub(crate) fn plain(&self) -> &'static Slot {
        self.plain.get().get()
    }

    /// Returns the thread's own slot, if it has one.
    #[inline]
    pub(crate) fn own(&self) -> Option<&'static Slot> {
        let slot = self.slot();
        (!ptr::eq(slot, &SHARED)).then_some(slot)
    }

    /// Sets the slot of the thread.
    pub(crate) fn count_in(&self, slot: &'static Slot) {
        self.slot.set(Counts(slot));
        self.settle();
    }

    /// Removes the thread's own slot, and returns it.
    pub(crate) fn leave(&self) -> Option<&'static Slot> {
        let slot = self.own();
        self.count_in(&SHARED);
        slot
    }

    /// Returns the innermost routing scope.
    #[inline]
    pub(crate) fn scope(&self) -> *const Scope {
        self.scope.get()
    }

    /// Sets the innermost routing scope, and returns the previous one.
    pub(crate) fn enter(&self, scope: *const Scope) -> *const Scope {
        let before = self.scope.replace(scope);
        self.settle();
        before
    }

    /// Recomputes the cached slots. Must be called when the slot or a scope of either kind has
    /// changed, so that allocations need not check them.
    fn settle(&self) {
        self.unrouted.set(if self.scope.get().is_null() {
            self.slot.get()
        } else {
            Counts::SHARED
        });
        self.plain.set(if Tag::current() == Tag::NONE {
            self.unrouted.get()
        } else {
            Counts::SHARED
        });
    }

    /// Registers the thread for changes of its tag scopes.
    pub(crate) fn follow_tags() {
        __tag::follow(|| HERE.with(Self::settle));
    }
}
