//! Frees that wait until their thread has left a route.
#![expect(unsafe_code, reason = "keeps a list in memory of the system")]

use super::Route;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, Ordering},
};

/// A free that was put off. Beside the block and not in it: a device may still write there.
struct Free {
    route: &'static dyn Route,
    block: NonNull<u8>,
    layout: Layout,
    next: *mut Free,
}

/// The latest first. Pushed one at a time and taken all at once, so that no node is ever compared
/// that somebody else could have freed.
static WAITING: AtomicPtr<Free> = AtomicPtr::new(ptr::null_mut());

/// Notes a free for later. If the system has no memory for the note the block is leaked.
#[cold]
pub(super) fn put_off(route: &'static dyn Route, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the layout has a size.
    let node = unsafe { System.alloc(Layout::new::<Free>()) }.cast::<Free>();
    if node.is_null() {
        return;
    }
    let mut first = WAITING.load(Ordering::Relaxed);
    loop {
        // SAFETY: the node is a block of this layout, and is nobody else's until it is published.
        unsafe { node.write(Free { route, block, layout, next: first }) };
        // Release: whoever takes the list sees the node.
        match WAITING.compare_exchange_weak(first, node, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

/// Does what was put off, by any thread. The calling thread has left its route but still counts as
/// inside, so that frees in here are put off in their turn.
#[inline]
pub(super) fn settle() {
    if !WAITING.load(Ordering::Relaxed).is_null() {
        settle_all();
    }
}

#[cold]
fn settle_all() {
    loop {
        // Acquire: the nodes of whoever pushed them.
        let mut next = WAITING.swap(ptr::null_mut(), Ordering::Acquire);
        if next.is_null() {
            return;
        }
        while !next.is_null() {
            // SAFETY: the list was taken whole, so its nodes are this thread's alone; each was
            // written by `put_off`.
            let free = unsafe { next.read() };
            // SAFETY: the node came from the system with this layout, and is not read again.
            unsafe { System.dealloc(next.cast(), Layout::new::<Free>()) };
            // SAFETY: the block was handed over by whoever freed it, with its layout, and was the
            // route's.
            unsafe { free.route.deallocate(free.block, free.layout) };
            next = free.next;
        }
    }
}
