//! Tests of the process's staging allocator.
//!
//! The tests form a separate process because they have one staging allocator and one global
//! allocator. They run one at a time, because they count what is held in the process.

mod installed;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static GLOBAL: aquifer::Global = aquifer::Global::new();

/// Waits until no other test runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
