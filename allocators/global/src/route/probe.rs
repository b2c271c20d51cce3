//! Detects whether the program's allocator uses routes.
#![expect(unsafe_code, reason = "implements an unsafe trait; probes the global allocator")]

use super::{Route, scoped, serve};
use crate::{scope::Scope, thread_state::THREAD_STATE};
use std::{alloc::Layout, cell::Cell, hint::black_box, ops::Range, ptr::NonNull};

/// A route that records calls and serves nothing.
struct Probe;

thread_local! {
    static CALLED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: it has no blocks, nothing in it unwinds, and its thread-local has no destructor.
unsafe impl Route for Probe {
    fn allocate(&self, _layout: Layout) -> Option<NonNull<u8>> {
        CALLED.set(true);
        None
    }

    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.allocate(layout)
    }

    unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}

    unsafe fn resize(
        &self,
        _block: NonNull<u8>,
        _old: Layout,
        _new: Layout,
    ) -> Option<NonNull<u8>> {
        None
    }

    fn owns(&self, _block: NonNull<u8>) -> bool {
        false
    }

    fn window(&self) -> Range<usize> {
        0..0
    }
}

/// Returns whether a [`Global`](crate::Global) is the program's global allocator. Tests this by
/// allocating one byte.
#[must_use]
pub fn is_installed() -> bool {
    CALLED.set(false);
    let in_route = THREAD_STATE.with(|state| state.in_route.replace(false));
    scoped(Some(Scope { route: &Probe, at_least: 1 }), || {
        let layout = black_box(Layout::new::<u8>());
        // SAFETY: the layout is that of a byte, so its size is not zero.
        let block = unsafe { std::alloc::alloc(layout) };
        if !black_box(block).is_null() {
            // SAFETY: the block has just been allocated with this layout.
            unsafe { std::alloc::dealloc(block, layout) };
        }
    });
    THREAD_STATE.with(|state| state.in_route.set(in_route));
    let called = CALLED.get();
    if called {
        serve::discount_refusal();
    }
    called
}

#[cfg(test)]
mod tests {
    #[test]
    fn is_installed_is_false_without_this_global_allocator() {
        assert!(!super::is_installed());
    }
}
