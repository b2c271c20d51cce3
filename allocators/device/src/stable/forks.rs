//! Descriptors that a forked child must not keep: a socket accepts connections, and a file stays
//! locked, as long as any process has the descriptor open.
//!
//! Forks wait while such a descriptor is opened or closed here. So the table has all of them at
//! each fork, and the child closes nothing else.
#![expect(unsafe_code, reason = "installs fork handlers, which close descriptors")]

use nix::libc;
use std::{
    io,
    mem::ManuallyDrop,
    os::fd::AsRawFd,
    sync::{
        OnceLock,
        atomic::{
            AtomicBool, AtomicI32, AtomicU32,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    thread,
};

/// The most descriptors in the table: the usual limit of a process.
const MOST: usize = 1024;
const EMPTY: i32 = -1;

/// The descriptors that a child closes. Only changed with the [`Gate`].
static OPEN: [AtomicI32; MOST] = [const { AtomicI32::new(EMPTY) }; MOST];
static GATE: AtomicBool = AtomicBool::new(false);
/// Counts the forks on the way to this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The right to change the table. Its holder makes a few system calls that do not wait, and neither
/// allocates nor frees: the fork handler of an allocator may hold its locks already.
struct Gate;

impl Gate {
    fn enter() -> Self {
        while GATE.swap(true, Acquire) {
            thread::yield_now();
        }
        Self
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        GATE.store(false, Release);
    }
}

/// Owns a descriptor that is closed in every child that this process forks.
#[derive(Debug)]
pub(super) struct Unforked<T: AsRawFd> {
    inner: ManuallyDrop<T>,
    entry: &'static AtomicI32,
    generation: u32,
}

impl<T: AsRawFd> Unforked<T> {
    /// Opens a descriptor by `open`, which neither waits nor allocates.
    ///
    /// # Errors
    /// Those of `open`; `EMFILE` if the table is full; the C library's if it handles no forks.
    pub(super) fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        install_handlers()?;
        let _gate = Gate::enter();
        let entry = OPEN.iter().find(|entry| entry.load(Relaxed) == EMPTY);
        let entry = entry.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        let inner = ManuallyDrop::new(open()?);
        entry.store(inner.as_raw_fd(), Relaxed);
        Ok(Self { inner, entry, generation: GENERATION.load(Relaxed) })
    }

    /// Returns whether this is the process that has opened the descriptor.
    pub(super) fn is_of_this_process(&self) -> bool {
        GENERATION.load(Relaxed) == self.generation
    }

    /// Returns what has the descriptor, unless this is a forked child.
    pub(super) fn get(&self) -> Option<&T> {
        self.is_of_this_process().then_some(&*self.inner)
    }
}

impl<T: AsRawFd> Drop for Unforked<T> {
    fn drop(&mut self) {
        // In a child the number may be that of another file by now.
        if self.is_of_this_process() {
            let _gate = Gate::enter();
            self.entry.store(EMPTY, Relaxed);
            // SAFETY: 1. It is dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

fn install_handlers() -> io::Result<()> {
    static INSTALLED: OnceLock<i32> = OnceLock::new();
    // SAFETY: 1. All three exist as long as the program. `in_child` may run in a child of a process
    // with threads: it touches atomics and makes a system call that is safe there.
    let install =
        || unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    match *INSTALLED.get_or_init(install) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

unsafe extern "C" fn before_fork() {
    let _until_the_other_handlers = ManuallyDrop::new(Gate::enter());
}

unsafe extern "C" fn in_parent() {
    drop(Gate);
}

unsafe extern "C" fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
    for entry in &OPEN {
        let descriptor = entry.swap(EMPTY, Relaxed);
        if descriptor != EMPTY {
            // SAFETY: 1. The parent's `Unforked` has opened it, and does not close it in this
            // process, whose generation is another one.
            unsafe { libc::close(descriptor) };
        }
    }
    drop(Gate);
}
