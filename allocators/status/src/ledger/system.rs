//! What a ledger needs of the system: the mapped file, locks on its parts, which end with their
//! process, futex waits and wake-ups across processes, and the clock of wishes.
#![expect(unsafe_code, reason = "maps a file, and refers to it")]

use crate::ledger::{
    layout::{FILE_BYTES, HEADER_BYTES, HEADER_WORDS, SLOT_BYTES, SLOT_WORDS, SLOTS, WORD},
    protocol::Table,
};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
    sys::mman::{MapFlags, ProtFlags, mmap, munmap},
    time::{ClockId, clock_gettime},
};
use std::{
    ffi::c_void,
    fs::File,
    io,
    num::NonZeroUsize,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize},
    time::Duration,
};

/// A mapping of [`FILE_BYTES`] bytes of a file.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<c_void>,
}

// SAFETY: 1. The pointer is never changed. 2. What it points to is accessed by atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        const BYTES: NonZeroUsize = NonZeroUsize::new(FILE_BYTES).unwrap();
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE;
        // SAFETY: 1. No address is given, so that no mapping is replaced.
        let start = unsafe { mmap(None, BYTES, access, flags, file, 0) }?;
        Ok(Self { start })
    }

    fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        debug_assert!(at.is_multiple_of(WORD) && at + count * WORD <= FILE_BYTES);
        // SAFETY: 1. The range lies within the mapping, which lives as long as `self`. 2. Pages are
        // aligned to more than words. 3. It is only accessed by atomics, and all bit patterns are
        // valid. 4. Futex words are accessed as four bytes only.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().byte_add(at).cast(), count) }
    }

    pub(crate) fn table<'a>(&'a self, seen: &'a AtomicUsize) -> Table<'a, AtomicU64> {
        Table {
            header: self.words(0, HEADER_WORDS),
            slots: self.words(HEADER_BYTES, SLOTS * SLOT_WORDS),
            stride: SLOT_WORDS,
            seen,
        }
    }

    /// Returns the futex at a word of the header.
    pub(crate) fn futex(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at < HEADER_WORDS);
        // SAFETY: 1. The word lies within the mapping, which lives as long as `self`. 2. It is
        // aligned to eight bytes. 3. It is only accessed as four bytes, by atomics.
        unsafe { &*self.start.as_ptr().byte_add(at * WORD).cast() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: 1. The range is that of `new`. 2. All references to it borrow `self`. If the
        // kernel refuses, the mapping stays.
        let _refused = unsafe { munmap(self.start, FILE_BYTES) };
    }
}

/// A range of a ledger that is locked as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockRange {
    /// The right to join, and to change what belongs to no member.
    Membership,
    /// A slot, locked by its member.
    Slot(usize),
}

impl LockRange {
    fn lock(self, kind: i32) -> libc::flock {
        let (start, len) = match self {
            Self::Membership => (0, HEADER_BYTES),
            Self::Slot(number) => (HEADER_BYTES + number * SLOT_BYTES, SLOT_BYTES),
        };
        libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: start as libc::off_t,
            l_len: len as libc::off_t,
            // Required of locks by open file description.
            l_pid: 0,
        }
    }

    /// Locks the range unless another description has it. Returns whether it did.
    pub(crate) fn try_lock(self, file: &File) -> io::Result<bool> {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&self.lock(libc::F_WRLCK))) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn unlock(self, file: &File) {
        // Unlocking may need memory to split a range. The lock then ends with the description.
        let _refused = fcntl(file, FcntlArg::F_OFD_SETLK(&self.lock(libc::F_UNLCK)));
    }

    /// Returns whether another description has the range locked.
    pub(crate) fn is_locked(self, file: &File) -> io::Result<bool> {
        let mut found = self.lock(libc::F_WRLCK);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }
}

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

/// Returns the nanoseconds of the real-time clock, which alone is the same in all time namespaces:
/// each has its own offset of the monotonic clocks.
///
/// Where it is set, a wish that is waited for counts again once it is renewed, within 500 µs, and
/// one that is not may count for another 100 ms.
pub(crate) fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map_or(0, |now| now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
}
