//! What a library needs that is a guest in another program: lines on standard error, locks that
//! outlive a panic, and threads that take none of the program's signals.
#![expect(unsafe_code, reason = "sets the mask of signals")]

use nix::libc;
use std::{
    io::{self, Write},
    ptr::null_mut,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Writes a line to standard error.
pub(crate) fn report(text: &str) {
    // Where it cannot be written, nothing else can be done.
    let _written = writeln!(io::stderr(), "aquifer run: {text}");
}

/// Locks a mutex, also after a panic of a thread that held it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As long as it lives, threads that this one starts take no signal: those are the program's.
pub(crate) struct NoSignals(libc::sigset_t);

impl NoSignals {
    pub(crate) fn new() -> Self {
        // SAFETY: 1. Both sets are locals that the calls fill.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for NoSignals {
    fn drop(&mut self) {
        // SAFETY: 1. A set that the call in `new` has filled.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, null_mut()) };
    }
}
