//! A value per process, so that a child of a fork does not use its parent's locks.
//!
//! A child of a fork has one thread. A lock that another thread of the parent held at the fork
//! stays locked in the child for ever, and a file that both processes write is corrupted. So a
//! child creates its own value at its first call.

use std::{
    cell::Cell,
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// A value, and its replacement in a child process.
#[derive(Debug)]
pub(super) struct PerProcess<T> {
    process: u32,
    value: T,
    child: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    /// Creates the value of this process.
    pub(super) fn new(value: T) -> Self {
        Self { process: process::id(), value, child: OnceLock::new() }
    }

    /// Returns the value of this process. In a child of a fork, the first call creates it from the
    /// parent's.
    pub(super) fn get(&self, make: impl FnOnce(&T) -> T) -> &T {
        let current = process::id();
        let mut entry = self;
        loop {
            if entry.process == current {
                return &entry.value;
            }
            match entry.child.get() {
                Some(child) => entry = child,
                None => {
                    return &entry
                        .child
                        .get_or_init(|| Box::new(Self::new(make(&entry.value))))
                        .value;
                }
            }
        }
    }
}

/// Returns the number of the calling thread.
#[inline]
pub(super) fn thread_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        // `const` and without a destructor, so that a thread that is exiting can record events.
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    NUMBER.with(|number| match number.get() {
        0 => {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
            number.get()
        }
        number => number,
    })
}
