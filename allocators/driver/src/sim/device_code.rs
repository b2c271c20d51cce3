//! Whether this thread is running code of the simulated GPU: a kernel's closure.
//! It runs on any thread, and must not call the driver.

use std::cell::Cell;

thread_local! {
    static IN_DEVICE_CODE: Cell<bool> = const { Cell::new(false) };
}

/// A guard that marks this thread as running device code.
#[derive(Debug)]
pub(crate) struct DeviceCodeGuard;

/// Marks this thread as running device code. Guards never nest, since device code cannot enter.
pub(crate) fn enter() -> DeviceCodeGuard {
    IN_DEVICE_CODE.set(true);
    DeviceCodeGuard
}

impl Drop for DeviceCodeGuard {
    fn drop(&mut self) {
        IN_DEVICE_CODE.set(false);
    }
}

/// Returns whether this thread is in a kernel.
pub(crate) fn is_running() -> bool {
    IN_DEVICE_CODE.get()
}
