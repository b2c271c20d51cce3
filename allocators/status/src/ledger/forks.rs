//! Descriptors that a forked child must not keep: a lock by open file description lives as long as
//! any process has the description open. A child that is stopped within `fork` closes them when it
//! goes on; until then its parent's lock outlives the parent.
#![expect(unsafe_code, reason = "installs a fork handler, which closes descriptors")]

use nix::libc;
use std::{
    fs::File,
    io,
    mem::ManuallyDrop,
    ops::Deref,
    os::fd::AsRawFd,
    sync::{
        OnceLock,
        atomic::{
            AtomicI32, AtomicU32,
            Ordering::{AcqRel, Relaxed},
        },
    },
};

/// The most ledgers that a process has open.
const MOST: usize = 512;
const EMPTY: i32 = -1;

/// The descriptors to close in a child.
static OPEN: [AtomicI32; MOST] = [const { AtomicI32::new(EMPTY) }; MOST];
/// Counts the forks on the way to this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A file that is closed in every child that this process forks.
#[derive(Debug)]
pub(crate) struct OwnFile {
    file: ManuallyDrop<File>,
    entry: &'static AtomicI32,
    generation: u32,
}

impl OwnFile {
    /// Registers the file.
    ///
    /// # Errors
    /// `EMFILE` if too many are registered, or the C library's error.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        install_handler()?;
        let descriptor = file.as_raw_fd();
        let claim =
            |entry: &&AtomicI32| entry.compare_exchange(EMPTY, descriptor, AcqRel, Relaxed).is_ok();
        let entry = OPEN.iter().find(claim);
        let entry = entry.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        let generation = GENERATION.load(Relaxed);
        Ok(Self { file: ManuallyDrop::new(file), entry, generation })
    }

    /// Returns whether this is the process that has opened the file.
    #[inline]
    pub(crate) fn is_of_this_process(&self) -> bool {
        GENERATION.load(Relaxed) == self.generation
    }
}

impl Deref for OwnFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            self.entry.store(EMPTY, Relaxed);
            // SAFETY: 1. It is dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<i32> = OnceLock::new();
    // SAFETY: 1. The handler exists as long as the program. It may run in a child of a process with
    // threads: it touches atomics and makes a system call that is safe there.
    let install = || unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    match *INSTALLED.get_or_init(install) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

unsafe extern "C" fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
    for entry in &OPEN {
        let descriptor = entry.swap(EMPTY, Relaxed);
        if descriptor != EMPTY {
            // SAFETY: 1. The parent's `OwnFile` has opened it, and does not close it in this
            // process, whose generation is another one.
            unsafe { libc::close(descriptor) };
        }
    }
}
