//! The mapped file.
#![expect(unsafe_code, reason = "maps a file, and refers to it")]

use crate::{
    layout::{FILE_BYTES, HEADER_BYTES, HEADER_WORDS, SLOT_WORDS, SLOTS, WORD},
    protocol::Table,
};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    ffi::c_void,
    fs::File,
    io,
    num::NonZeroUsize,
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize},
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
