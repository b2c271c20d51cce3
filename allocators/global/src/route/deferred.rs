//! Frees that are deferred until their thread has left a route.
#![expect(unsafe_code, reason = "keeps a list in memory of the system")]

use super::Route;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, Ordering},
};

/// A deferred free. It is stored outside the block, since a device may still write there.
struct DeferredFree {
    route: &'static dyn Route,
    block: NonNull<u8>,
    layout: Layout,
    next: *mut DeferredFree,
}

/// The most recent free first. Nodes are pushed one at a time and removed all at once, so there is
/// no ABA problem.
static DEFERRED: AtomicPtr<DeferredFree> = AtomicPtr::new(ptr::null_mut());

/// Defers a free. If the system has no memory for the node, the block is leaked.
#[cold]
pub(super) fn defer(route: &'static dyn Route, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the layout has a nonzero size.
    let node = unsafe { System.alloc(Layout::new::<DeferredFree>()) }.cast::<DeferredFree>();
    if node.is_null() {
        return;
    }
    let mut first = DEFERRED.load(Ordering::Relaxed);
    loop {
        // SAFETY: the node is a block of this layout, and no other thread can access it before it
        // is published.
        unsafe { node.write(DeferredFree { route, block, layout, next: first }) };
        // Release: the thread that takes the list sees the node.
        match DEFERRED.compare_exchange_weak(first, node, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

/// Runs the deferred frees of all threads. The calling thread has left its route but still counts
/// as inside, so that frees from here are deferred in turn.
#[inline]
pub(super) fn flush() {
    if !DEFERRED.load(Ordering::Relaxed).is_null() {
        flush_all();
    }
}

#[cold]
fn flush_all() {
    loop {
        // Acquire: sees the nodes of the pushing threads.
        let mut next = DEFERRED.swap(ptr::null_mut(), Ordering::Acquire);
        if next.is_null() {
            return;
        }
        while !next.is_null() {
            // SAFETY: the list was taken as a whole, so this thread has exclusive access to its
            // nodes. `defer` has written each.
            let free = unsafe { next.read() };
            // SAFETY: the node was allocated by the system with this layout, and is not read again.
            unsafe { System.dealloc(next.cast(), Layout::new::<DeferredFree>()) };
            // SAFETY: the block belongs to the route, and the caller of the free gave it up with
            // its layout.
            unsafe { free.route.deallocate(free.block, free.layout) };
            next = free.next;
        }
    }
}
