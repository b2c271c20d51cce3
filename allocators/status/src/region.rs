//! The memory that holds the slots and lines of this process, and which lines caches have claimed.
//!
//! It is reserved once and never released, so that references to it stay valid. While the process
//! publishes, its file is mapped over it. Otherwise it is private memory.
#![expect(unsafe_code, reason = "maps memory, and refers to it")]

use crate::layout::{
    FILE_BYTES, LINE_BYTES, LINES, LINES_AT, SLOT_BYTES, SLOT_WORDS, SLOTS, SLOTS_AT, WORD, header,
};
use crate::line::CacheLine;
use nix::libc;
use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

/// Memory of [`FILE_BYTES`] bytes that exists until the process ends.
pub(crate) struct Region {
    start: *mut u8,
}

// SAFETY: 1. The pointer is never changed. 2. What it points to is accessed by atomics only.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Returns the memory, reserved at the first call. Returns `None` if the system has none.
    pub(crate) fn get() -> Option<&'static Self> {
        static REGION: OnceLock<Option<Region>> = OnceLock::new();
        // Miri maps no files, and finds more faults in memory of the heap.
        if cfg!(miri) {
            return None;
        }
        REGION
            .get_or_init(|| {
                let start = map(ptr::null_mut(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
                start.ok().map(|start| Self { start })
            })
            .as_ref()
    }

    /// Returns the words at a place of the layout.
    fn words(&self, at: usize, count: usize) -> &'static [AtomicU64] {
        debug_assert!(at.is_multiple_of(WORD) && at + count * WORD <= FILE_BYTES);
        // SAFETY: 1. The range lies within the memory, which is mapped until the process ends; a
        // new mapping replaces an old one in one step. 2. Pages are aligned to more than words.
        // 3. It is only accessed by atomics, and all bit patterns are valid.
        unsafe { std::slice::from_raw_parts(self.start.add(at).cast(), count) }
    }

    pub(crate) fn header(&self) -> &'static [AtomicU64] {
        self.words(0, SLOTS_AT / WORD)
    }

    pub(crate) fn slot(&self, number: usize) -> Option<&'static [AtomicU64]> {
        (number < SLOTS).then(|| self.words(SLOTS_AT + number * SLOT_BYTES, SLOT_WORDS))
    }

    pub(crate) fn line(&self, number: usize) -> Option<&'static CacheLine> {
        (number < LINES).then(|| {
            debug_assert!(LINES_AT + (number + 1) * LINE_BYTES <= FILE_BYTES);
            // SAFETY: 1. The range lies within the memory, which is mapped until the process ends.
            // 2. A line has `LINE_BYTES` bytes, and its place is a multiple of its alignment.
            // 3. It consists of atomics, for which all bit patterns are valid.
            unsafe { &*self.start.add(LINES_AT + number * LINE_BYTES).cast() }
        })
    }

    pub(crate) fn contains(&self, line: &CacheLine) -> bool {
        let start = self.start.addr();
        (start..start + FILE_BYTES).contains(&ptr::from_ref(line).addr())
    }

    /// Maps the file over the memory. Stores of other threads before that are lost.
    pub(crate) fn attach(&self, file: &File) -> io::Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
        map(self.start, flags, file.as_raw_fd()).map(drop)
    }

    /// Replaces the file by private memory of zeros. Safe in the child of a fork: it makes one
    /// system call.
    pub(crate) fn detach(&self) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        map(self.start, flags, -1).map(drop)
    }
}

/// Maps [`FILE_BYTES`] bytes.
fn map(at: *mut u8, flags: i32, file: i32) -> io::Result<*mut u8> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: 1. Without `MAP_FIXED` no mapping is replaced. With it, `at` is the region, which
    // consists of atomics that any bytes are valid for.
    let found = unsafe { libc::mmap(at.cast(), FILE_BYTES, access, flags, file, 0) };
    if found == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(found.cast()) }
}

/// The number of lines that caches have claimed.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of lines of the file that are in use.
pub(crate) fn lines_used() -> usize {
    CLAIMED.load(Relaxed).min(LINES)
}

/// Returns a line that no other cache has. Makes no system call after the first one.
///
/// ```
/// use aquifer_status::{claim_line, is_shown};
/// let line = claim_line();
/// if !is_shown(line) {
///     // All lines of the file are claimed: the cache's figures go to its pool's slot.
/// }
/// ```
#[must_use]
pub fn claim_line() -> &'static CacheLine {
    let found = Region::get().and_then(|region| {
        // Lines are never returned, so a number that is too large stays too large.
        let number = CLAIMED.fetch_add(1, Relaxed).min(LINES);
        CLAIMED.fetch_min(LINES, Relaxed);
        let line = region.line(number)?;
        debug_assert!(region.contains(line));
        region.header()[header::LINES_USED].store(lines_used() as u64, Relaxed);
        Some(line)
    });
    found.unwrap_or_else(|| Box::leak(Box::default()))
}

/// Returns whether the line is in the file, where readers see it. A cache whose line is not counts
/// in its pool's slot. [`claim_line`] has an example.
#[must_use]
pub fn is_shown(line: &CacheLine) -> bool {
    Region::get().is_some_and(|region| region.contains(line))
}
