//! Whether this process is the child of a fork, known without a system call.
#![expect(unsafe_code, reason = "installs a fork handler")]

use nix::libc;
use std::sync::{
    Once,
    atomic::{AtomicBool, Ordering},
};

/// Relaxed, because it changes before a child has a second thread.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Detects forks by the C library from now on (`pthread_atfork`), which include those of Rust and
/// of other libraries. If the C library has no memory for the handler, forks are not detected.
pub(super) fn watch_forks() {
    static WATCHED: Once = Once::new();
    // SAFETY: 1. `in_child` may run in a child of a process with threads: it touches one atomic.
    WATCHED.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
}

/// Returns whether this process was forked by one that had made a [`Kernel`](super::Kernel).
///
/// Such a child has neither its parent's threads nor, unless it is shared, its pinned memory. The
/// locks of host memory may be held by threads that do not exist here. So pools, stagers and
/// workers refuse everything in a child, and it can make none of its own. Costs a load.
///
/// ```
/// use aquifer_host::kernel::{Kernel, is_forked_child};
/// let _kernel = Kernel::new();
/// assert!(!is_forked_child());
/// ```
#[inline]
#[must_use]
pub fn is_forked_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `work` in a child, and returns its result.
    fn in_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: 1. the child exits without returning, and takes no lock.
        match unsafe { libc::fork() } {
            0 => {
                let answer = i32::from(!work());
                // SAFETY: 1. ends the process.
                unsafe { libc::_exit(answer) }
            }
            child => {
                let mut status = 0;
                // SAFETY: 1. the status is written to a local.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                status == 0
            }
        }
    }

    #[test]
    fn children_and_grandchildren_know_that_they_are() {
        watch_forks();
        assert!(!is_forked_child());
        assert!(in_child(|| is_forked_child() && in_child(is_forked_child)));
        assert!(!is_forked_child(), "a fork changes nothing here");
    }
}
