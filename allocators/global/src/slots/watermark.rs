//! The thresholds of the soft cap: what a change of the charged bytes compares them with.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::Thread,
};

/// The soft cap.
pub(crate) static CAP: AtomicU64 = AtomicU64::new(u64::MAX);
/// Whether it is exceeded.
pub(crate) static EXCEEDED: AtomicBool = AtomicBool::new(false);
/// Number of upward crossings.
pub(crate) static CROSSINGS: AtomicU64 = AtomicU64::new(0);
/// The thread that runs the hooks, once it exists.
pub(crate) static HOOK_THREAD: OnceLock<Thread> = OnceLock::new();

/// Returns the lower threshold.
fn low(cap: u64) -> u64 {
    cap - cap / 8
}

/// Checks the cap after the charged bytes have risen to `charged`.
#[inline]
pub(crate) fn on_increase(charged: u64) {
    if charged > CAP.load(Ordering::Relaxed) {
        exceeded();
    }
}

/// Checks the lower threshold after the charged bytes have fallen to `charged`.
#[inline]
pub(crate) fn on_decrease(charged: u64) {
    if EXCEEDED.load(Ordering::Relaxed) && charged <= low(CAP.load(Ordering::Relaxed)) {
        no_longer_exceeded();
    }
}

#[cold]
fn exceeded() {
    if !EXCEEDED.swap(true, Ordering::Relaxed) {
        CROSSINGS.fetch_add(1, Ordering::Relaxed);
        wake();
    }
}

#[cold]
fn no_longer_exceeded() {
    if EXCEEDED.swap(false, Ordering::Relaxed) {
        wake();
    }
}

/// At most one futex call. Takes no lock and no memory.
pub(crate) fn wake() {
    if let Some(thread) = HOOK_THREAD.get() {
        thread.unpark();
    }
}
