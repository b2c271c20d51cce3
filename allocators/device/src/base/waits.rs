//! Deadlines, and waits that may not be possible.

use aquifer_core::{MemoryError, Result};
use std::{
    cell::Cell,
    time::{Duration, Instant},
};

thread_local! {
    /// Whether this thread is in a call that must not wait.
    static NO_WAIT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`. Allocations of this thread within it never wait, whatever the pool's settings.
pub(crate) fn without_waiting<T>(work: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            NO_WAIT.set(self.0);
        }
    }
    let _restore = Restore(NO_WAIT.replace(true));
    work()
}

/// Returns when an allocation stops waiting, or `None` for never.
pub(crate) fn deadline(wait: Duration) -> Option<Instant> {
    let now = Instant::now();
    if NO_WAIT.get() { Some(now) } else { now.checked_add(wait) }
}

pub(crate) fn has_passed(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// Runs `wait`, and returns whether there was something to wait for. A stream that captures cannot
/// be waited for, one of another thread cannot be fenced, and one may have been destroyed: what
/// those hold is not available, and is no error.
pub(crate) fn try_wait(wait: impl FnOnce() -> Result<bool>) -> Result<bool> {
    match wait() {
        Err(
            MemoryError::Capturing { .. }
            | MemoryError::OtherThread { .. }
            | MemoryError::UnknownId,
        ) => Ok(false),
        waited => waited,
    }
}
