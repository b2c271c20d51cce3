//! Has the C library hold budgets' locks while the process forks.
#![expect(unsafe_code, reason = "has the C library tell of forks")]

use aquifer_core::budget::forks;
use nix::libc;
use std::sync::OnceLock;

/// Lets children of this process go on charging and releasing, whatever other threads do to budgets
/// at the moment of a fork (`pthread_atfork`). Opening a driver and making host memory do it; a
/// program that has neither calls it once, before it forks. Where the C library refuses, forks are
/// as they would be without.
///
/// What waits in line for bytes at the moment of a fork waits in the parent alone.
///
/// ```
/// aquifer_driver::forks::hold_budgets();
/// ```
pub fn hold_budgets() {
    static TOLD: OnceLock<()> = OnceLock::new();
    TOLD.get_or_init(|| {
        // SAFETY: 1. both are there as long as the program is. `after` may run in a child of a
        // process with threads: it stores to atomics, and allocates nothing.
        let _told = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

unsafe extern "C" fn before() {
    forks::before();
}

unsafe extern "C" fn after() {
    forks::after();
}
