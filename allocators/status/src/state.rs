//! Whether this process publishes now.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) const UNSET: u32 = 0;
pub(crate) const OFF: u32 = 1;
pub(crate) const PUBLISHED: u32 = 2;
/// The child of a fork, whose parent publishes.
pub(crate) const FORKED: u32 = 3;

/// One of the above.
pub(crate) static STATE: AtomicU32 = AtomicU32::new(UNSET);
/// Counts the forks on the way to this process.
pub(crate) static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns the time in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Returns a number that differs between a process and its children.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Returns whether this process publishes its figures now.
#[inline]
#[must_use]
pub fn is_published() -> bool {
    STATE.load(Ordering::Acquire) == PUBLISHED
}
