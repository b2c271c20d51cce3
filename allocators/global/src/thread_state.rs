//! Thread-local state.
#![expect(unsafe_code, reason = "points to slots, which are never freed")]

use crate::{
    scope::Scope,
    slots::{SHARED, Slot},
};
use aquifer_core::{__tag, Tag};
use std::{cell::Cell, ptr};

/// The state of one thread. It is const-initialised and has no destructor, so it is available for
/// the whole life of the thread, and reading it neither allocates nor fails.
pub(crate) struct ThreadState {
    slot: Cell<SlotPtr>,
    unrouted_slot: Cell<SlotPtr>,
    unscoped_slot: Cell<SlotPtr>,
    /// Whether the thread is ending. It has released its slot and gets no other.
    pub(crate) ending: Cell<bool>,
    /// The innermost routing scope, on this thread's stack. Null outside of all scopes.
    scope: Cell<*const Scope>,
    /// Whether a route is being called.
    pub(crate) in_route: Cell<bool>,
}

thread_local! {
    pub(crate) static THREAD_STATE: ThreadState = const {
        ThreadState {
            slot: Cell::new(SlotPtr::SHARED),
            unrouted_slot: Cell::new(SlotPtr::SHARED),
            unscoped_slot: Cell::new(SlotPtr::SHARED),
            ending: Cell::new(false),
            scope: Cell::new(ptr::null()),
            in_route: Cell::new(false),
        }
    };
}

/// A pointer to a slot. A constant cannot hold a reference to interior-mutable data before Rust
/// 1.90.
#[derive(Clone, Copy)]
struct SlotPtr(*const Slot);

impl SlotPtr {
    const SHARED: Self = Self(&raw const SHARED);

    #[inline]
    fn get(self) -> &'static Slot {
        // SAFETY: 1. it points to the shared slot or was created from a `&'static` reference, so it
        // is valid for the life of the program.
        unsafe { &*self.0 }
    }
}

impl ThreadState {
    /// Returns the slot in which this thread counts: its own, or the shared one.
    #[inline]
    pub(crate) fn slot(&self) -> &'static Slot {
        self.slot.get().get()
    }

    /// Returns [`ThreadState::slot`] outside of routing scopes, and the shared slot inside.
    #[inline]
    pub(crate) fn unrouted_slot(&self) -> &'static Slot {
        self.unrouted_slot.get().get()
    }

    /// Returns [`ThreadState::slot`] outside of all scopes, and the shared slot inside a scope of
    /// either kind.
    #[inline]
    pub(crate) fn unscoped_slot(&self) -> &'static Slot {
        self.unscoped_slot.get().get()
    }

    /// Returns the thread's own slot, if it has one.
    #[inline]
    pub(crate) fn own_slot(&self) -> Option<&'static Slot> {
        let slot = self.slot();
        (!ptr::eq(slot, &SHARED)).then_some(slot)
    }

    /// Sets the slot of the thread.
    pub(crate) fn set_slot(&self, slot: &'static Slot) {
        self.slot.set(SlotPtr(slot));
        self.refresh_cached_slots();
    }

    /// Removes the thread's own slot, and returns it.
    pub(crate) fn clear_slot(&self) -> Option<&'static Slot> {
        let slot = self.own_slot();
        self.set_slot(&SHARED);
        slot
    }

    /// Returns the innermost routing scope.
    #[inline]
    pub(crate) fn scope(&self) -> *const Scope {
        self.scope.get()
    }

    /// Sets the innermost routing scope, and returns the previous one.
    pub(crate) fn replace_scope(&self, scope: *const Scope) -> *const Scope {
        let before = self.scope.replace(scope);
        self.refresh_cached_slots();
        before
    }

    /// Recomputes the cached slots. Must be called when the slot or a scope of either kind has
    /// changed, so that allocations need not check them.
    fn refresh_cached_slots(&self) {
        self.unrouted_slot.set(if self.scope.get().is_null() {
            self.slot.get()
        } else {
            SlotPtr::SHARED
        });
        self.unscoped_slot.set(if Tag::current() == Tag::NONE {
            self.unrouted_slot.get()
        } else {
            SlotPtr::SHARED
        });
    }

    /// Registers the thread for changes of its tag scopes.
    pub(crate) fn observe_tags() {
        __tag::follow(|| THREAD_STATE.with(Self::refresh_cached_slots));
    }
}
