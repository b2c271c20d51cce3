//! Which process this is, among those that forked from each other, without asking the kernel each
//! time.
#![expect(unsafe_code, reason = "has the C library count forks")]

use nix::libc;
use std::{
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// Forks that this process has come by since somebody first asked. Relaxed: it changes before a
/// child has a second thread.
static FORKS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A process, for what belongs to it and not to its children: threads, and memory that they do not
/// inherit.
///
/// Forks that go by the C library are seen, as all of Rust's and of other libraries' do.
///
/// ```
/// use aquifer_host::kernel::Process;
/// assert!(Process::current().is_current());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Process {
    forks: u32,
    /// What the kernel calls it, where the C library counts no forks.
    id: Option<u32>,
}

impl Process {
    /// This one. The first call asks the C library to count forks (`pthread_atfork`).
    #[must_use]
    pub fn current() -> Self {
        static COUNTED: OnceLock<bool> = OnceLock::new();
        // SAFETY: 1. `count` may run in a child of a process with threads: it touches one atomic.
        let counted =
            *COUNTED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(count)) } == 0);
        Self { forks: FORKS.load(Ordering::Relaxed), id: (!counted).then(process::id) }
    }

    /// Whether it is the one that runs this. A load; `getpid` where forks are not counted.
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

    /// Runs `work` in a child, and says what it answered.
    fn in_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: 1. the child leaves without returning, and takes no lock.
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
    fn a_child_and_its_child_are_other_processes_by_count_and_by_number() {
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
