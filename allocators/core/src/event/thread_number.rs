//! Numbers of threads, in the order of their first events.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU32, Ordering},
};

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
