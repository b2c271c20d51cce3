//! What a thread knows of itself.
#![expect(unsafe_code, reason = "points to slots, which are never freed")]

use crate::{
    account::{SHARED, Slot},
    route::Scope,
};
use aquifer_core::{__tag, Tag};
use std::{cell::Cell, ptr};

/// A thread's own state. Const and without a destructor, so that it is there from the thread's
/// first instruction to its last, and reading it neither allocates nor fails.
pub(crate) struct Here {
    slot: Cell<Counts>,
    unrouted: Cell<Counts>,
    plain: Cell<Counts>,
    /// Whether the thread is ending: it has given its slot back and gets no other.
    pub(crate) ending: Cell<bool>,
    /// The innermost routing scope, on this thread's stack; null outside of all.
    scope: Cell<*const Scope>,
    /// Whether a route is being called.
    pub(crate) inside: Cell<bool>,
    /// Whether a call stack is being walked or told: nothing is sampled meanwhile.
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

/// A slot. By its address, since a constant holds no reference to what changes before Rust 1.90.
#[derive(Clone, Copy)]
struct Counts(*const Slot);

impl Counts {
    const SHARED: Self = Self(&raw const SHARED);

    #[inline]
    fn get(self) -> &'static Slot {
        // SAFETY: 1. it is made of the shared slot or of a reference, both of which last as long as
        // the program.
        unsafe { &*self.0 }
    }
}

impl Here {
    /// The slot that this thread counts in; the shared one while it has none.
    #[inline]
    pub(crate) fn slot(&self) -> &'static Slot {
        self.slot.get().get()
    }

    /// The same for an allocation that has nobody else to ask: the shared one in a routing scope.
    #[inline]
    pub(crate) fn unrouted(&self) -> &'static Slot {
        self.unrouted.get().get()
    }

    /// The same for one that nobody has tagged either: the shared one in a scope of either kind.
    #[inline]
    pub(crate) fn plain(&self) -> &'static Slot {
        self.plain.get().get()
    }

    /// The thread's own slot, if it has one.
    #[inline]
    pub(crate) fn own(&self) -> Option<&'static Slot> {
        let slot = self.slot();
        (!ptr::eq(slot, &SHARED)).then_some(slot)
    }

    /// Gives the thread a slot.
    pub(crate) fn count_in(&self, slot: &'static Slot) {
        self.slot.set(Counts(slot));
        self.settle();
    }

    /// Takes the thread's slot from it.
    pub(crate) fn leave(&self) -> Option<&'static Slot> {
        let slot = self.own();
        self.count_in(&SHARED);
        slot
    }

    /// The innermost routing scope.
    #[inline]
    pub(crate) fn scope(&self) -> *const Scope {
        self.scope.get()
    }

    /// Puts this routing scope in the other's place.
    pub(crate) fn enter(&self, scope: *const Scope) -> *const Scope {
        let before = self.scope.replace(scope);
        self.settle();
        before
    }

    /// To be called when the slot, or a scope of either kind, has changed: allocations then need
    /// not ask for any of them.
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

    /// Has the thread hear of its scopes of tags.
    pub(crate) fn follow_tags() {
        __tag::follow(|| HERE.with(Self::settle));
    }
}
