//! Tests that count the retired and stranded memory of the process, or look at released
//! addresses and recycled cores.
//!
//! They form a separate process, in which they run one at a time.

mod driver;
mod recycled;
mod region;
#[path = "../suite/support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other test runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
