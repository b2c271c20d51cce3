//! Waits for a word of shared memory, and wake-ups across processes.
#![expect(unsafe_code, reason = "makes system calls that no library has")]

use nix::libc;
use std::{ptr, sync::atomic::AtomicU32, time::Duration};

/// Waits until the word is woken, does not have the value, or `most` has passed. May return early.
pub(crate) fn wait(word: &AtomicU32, value: u32, most: Duration) {
    let most = libc::timespec {
        tv_sec: libc::time_t::try_from(most.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(most.subsec_nanos()),
    };
    // SAFETY: 1. The word is a valid aligned word of four bytes for the whole call. 2. The time is
    // valid for the whole call. 3. The other arguments of FUTEX_WAIT are ignored.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            ptr::from_ref(&most),
            ptr::null::<u32>(),
            0,
        );
    }
}

/// Wakes all waits for the word, also of other processes that map the same file.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: 1. The word is a valid aligned word of four bytes. 2. The other arguments of
    // FUTEX_WAKE are ignored.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
