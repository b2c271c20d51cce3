//! The identity of a process among its forks, checked without a system call.
#![expect(unsafe_code, reason = "installs a fork handler")]

use nix::libc;
use std::{
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// Number of forks on the way to this process since the first call. Relaxed, because it changes
/// before a child has a second thread.
static FORKS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A process, as the owner of things that its children do not inherit: threads, and some memory.
///
/// Detects forks by the C library, which includes those of Rust and of other libraries.
///
/// ```
/// use aquifer_host::kernel::Process;
/// assert!(Process::current().is_current());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Process {
    forks: u32,
    /// The process number, if the C library does not report forks.
    id: Option<u32>,
}

impl Process {
    /// Returns this process. The first call installs a fork handler (`pthread_atfork`).
    #[must_use]
    pub fn current() -> Self {
        static COUNTED: OnceLock<bool> = OnceLock::new();
        // SAFETY: 1. `count` may run in a child of a process with threads: it touches one atomic.
        let counted =
            *COUNTED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(count)) } == 0);
        Self { forks: FORKS.load(Ordering::Relaxed), id: (!counted).then(process::id) }
    }

    /// Returns whether it is the running process. Costs a load, or `getpid` if forks are not
    /// reported.
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        match self.id {
            None => FORKS.load(Ordering::Relaxed) == self.forks,
            Some(id) => process::id() == id,
        }
    }
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
    fn children_and_grandchildren_are_other_processes() {
        let counted = Process::current();
        assert_eq!(counted.id, None, "the C library counts forks");
        let numbered = Process { forks: 0, id: Some(process::id()) };
        for parent in [counted, numbered] {
            assert!(parent.is_current());
            assert!(in_child(|| {
                let child = Process::current();
                !parent.is_current()
                    && child.is_current()
                    && in_child(|| !parent.is_current() && !child.is_current())
            }));
            assert!(parent.is_current(), "a fork changes nothing here");
        }
    }
}
