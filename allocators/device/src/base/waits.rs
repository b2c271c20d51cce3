//! Deadlines, and waits that may not be possible.

use aquifer_core::{MemoryError, Result};
use aquifer_stream::Timeline;
use std::{
    cell::Cell,
    time::{Duration, Instant},
};

/// How long requests of a thread may wait.
#[derive(Clone, Copy)]
enum WaitLimit {
    /// Each phase as long as its pool allows. No request is in progress.
    EachPhase,
    /// As long as the pool of the first phase that waits allows. A request is in progress.
    Request,
    /// Until then, or without end. Set by the first phase of a request that waits.
    Until(Option<Instant>),
    /// Not at all.
    Never,
}

thread_local! {
    static LIMIT: Cell<WaitLimit> = const { Cell::new(WaitLimit::EachPhase) };
}

/// Sets a limit, and restores the one before when it is dropped.
pub(crate) struct LimitGuard(WaitLimit);

impl LimitGuard {
    fn set(limit: WaitLimit) -> Self {
        Self(LIMIT.replace(limit))
    }
}

impl Drop for LimitGuard {
    fn drop(&mut self) {
        LIMIT.set(self.0);
    }
}

/// Runs `work`. Allocations of this thread within it never wait, whatever the pool's settings.
pub(crate) fn without_waiting<T>(work: impl FnOnce() -> T) -> T {
    let _never = LimitGuard::set(WaitLimit::Never);
    work()
}

/// Begins a request of this thread, which ends when the guard is dropped. All of its phases get the
/// same [`deadline`], which is that of the first phase. A request within a request gets the
/// deadline of the outer one.
#[must_use = "the request ends when the guard is dropped"]
pub(crate) fn begin_request() -> Option<LimitGuard> {
    match LIMIT.get() {
        WaitLimit::EachPhase => Some(LimitGuard::set(WaitLimit::Request)),
        WaitLimit::Request | WaitLimit::Until(_) | WaitLimit::Never => None,
    }
}

/// Returns when a phase of an allocation stops waiting, or `None` for never.
pub(crate) fn deadline(wait: Duration) -> Option<Instant> {
    let now = Instant::now();
    match LIMIT.get() {
        WaitLimit::EachPhase => now.checked_add(wait),
        WaitLimit::Request => {
            let until = now.checked_add(wait);
            LIMIT.set(WaitLimit::Until(until));
            until
        }
        WaitLimit::Until(until) => until,
        WaitLimit::Never => Some(now),
    }
}

pub(crate) fn has_passed(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// Waits for an epoch until `until`, as [`Timeline::wait`]. Blocks. Returns an error at once, and
/// never waits for the whole device, if no event can prove the epoch: the device must not be waited
/// for while a capture is announced.
pub(crate) fn wait_for_epoch(
    timeline: &Timeline,
    epoch: u64,
    until: Option<Instant>,
) -> Result<bool> {
    if timeline.is_out_of_reach(epoch) {
        return Err(MemoryError::OtherThread { stream: timeline.raw().handle() });
    }
    timeline.wait(epoch, until)
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
