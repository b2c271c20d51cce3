//! Makes the C library hold the locks of budgets while the process forks.
#![expect(unsafe_code, reason = "registers fork handlers with the C library")]

use aquifer_core::budget::forks;
use nix::libc;
use std::sync::OnceLock;

/// Registers `pthread_atfork` handlers, so that child processes can charge and release budgets.
/// Other threads may hold the locks of budgets at the moment of a fork. Opening a driver and
/// creating host memory call this function. A program that does neither calls it once, before it
/// forks. If the C library refuses, forks are not protected.
///
/// Requests that wait for bytes at the moment of a fork wait only in the parent.
///
/// ```
/// aquifer_driver::forks::hold_budgets();
/// ```
pub fn hold_budgets() {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(|| {
        // SAFETY: 1. Both functions exist as long as the program. `after_fork` may run in a child
        // of a process with threads: it stores to atomics and allocates nothing.
        let _registered =
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

unsafe extern "C" fn before_fork() {
    forks::before();
}

unsafe extern "C" fn after_fork() {
    forks::after();
}
