//! Whether this thread runs code of the simulated GPU right now: a kernel's closure or a host
//! callback, which run on whatever thread gets there. Neither may call the driver.

use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, this thread is inside.
#[derive(Debug)]
pub(crate) struct Inside;

/// Enters; there is never more than one to leave, since nothing that runs inside can enter.
pub(crate) fn enter() -> Inside {
    INSIDE.set(true);
    Inside
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Whether this thread is in a kernel or a callback.
pub(crate) fn any() -> bool {
    INSIDE.get()
}
