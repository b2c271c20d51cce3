//! Whether this thread is running code of the simulated GPU: a kernel's closure or a host callback.
//! Both run on any thread, and neither may call the driver.

use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A guard that marks this thread as inside.
#[derive(Debug)]
pub(crate) struct Inside;

/// Marks this thread as inside. Guards never nest, since code that runs inside cannot enter.
pub(crate) fn enter() -> Inside {
    INSIDE.set(true);
    Inside
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Returns whether this thread is in a kernel or a callback.
pub(crate) fn any() -> bool {
    INSIDE.get()
}
