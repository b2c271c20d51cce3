//! Files as a source.
#![expect(unsafe_code, reason = "asks the kernel how direct reads are to be aligned")]

use super::Source;
use nix::{
    errno::Errno,
    fcntl::{PosixFadviseAdvice, posix_fadvise},
    libc,
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// How a file is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum ReadMode {
    /// Through the page cache, which keeps what is read.
    #[default]
    Cached,
    /// Past it (`O_DIRECT`), from the disk into pinned memory.
    Direct,
}

/// What a file system asks of direct reads, where it does not say.
const USUAL_ALIGNMENT: usize = 4096;

/// A file that a stager reads, through the page cache or past it.
///
/// Direct reads begin and end on multiples of what the file system asks for (`statx`, or 4096);
/// what lies before and behind goes through the page cache. A file system that refuses direct reads
/// is read through the page cache, and [`FileSource::mode`] says so.
///
/// ```
/// use aquifer_host::{FileSource, ReadMode, Source};
/// # let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
/// let file = FileSource::open(path, ReadMode::Direct)?;
/// let mut bytes = vec![0; 9];
/// assert_eq!(file.read_at(0, &mut bytes)?, 9);
/// assert_eq!(bytes, b"[package]");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct FileSource {
    cached: File,
    direct: Option<Direct>,
}

#[derive(Debug)]
struct Direct {
    file: File,
    /// Of addresses, offsets and lengths.
    align: usize,
    /// A read has been refused, though the file could be opened.
    refused: AtomicBool,
}

impl FileSource {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// Those of `open`. That direct reads are refused is none.
    pub fn open(path: impl AsRef<Path>, mode: ReadMode) -> io::Result<Self> {
        let path = path.as_ref();
        let cached = File::open(path)?;
        let direct = match mode {
            ReadMode::Cached => {
                // Chunks are read side by side, from the front to the back. The kernel takes that
                // for random reads, and fetches little ahead, unless it is told: of a cold file
                // eight threads read four times as much then.
                let _advised =
                    posix_fadvise(&cached, 0, 0, PosixFadviseAdvice::POSIX_FADV_SEQUENTIAL);
                None
            }
            ReadMode::Direct => {
                // What little is read through the cache then is the ends of reads.
                let _advised = posix_fadvise(&cached, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
                direct(path, &cached)
            }
        };
        Ok(Self { cached, direct })
    }

    /// A file that is open, read through the page cache.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { cached: file, direct: None }
    }

    /// How it is read: directly only while nothing has refused that.
    #[must_use]
    pub fn mode(&self) -> ReadMode {
        if self.usable().is_some() { ReadMode::Direct } else { ReadMode::Cached }
    }

    /// Its length, in bytes.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn len(&self) -> io::Result<u64> {
        self.cached.metadata().map(|file| file.len())
    }

    /// Whether it has no bytes.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Asks the kernel to forget what it has of the file (`posix_fadvise`, `POSIX_FADV_DONTNEED`),
    /// so that the next read comes from the disk. Pages that are dirty or that somebody has mapped
    /// stay.
    ///
    /// # Errors
    /// Those of `fsync` and of `posix_fadvise`.
    pub fn drop_cache(&self) -> io::Result<()> {
        self.cached.sync_data()?;
        posix_fadvise(&self.cached, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
            .map_err(io::Error::from)
    }

    fn usable(&self) -> Option<&Direct> {
        self.direct.as_ref().filter(|direct| !direct.refused.load(Ordering::Relaxed))
    }
}

impl Source for FileSource {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let Some(direct) = self.usable() else { return self.cached.read_at(into, offset) };
        // Up to where a direct read may begin, and no further: what comes after is asked for next.
        let before = (direct.align - (offset % direct.align as u64) as usize) % direct.align;
        let whole = into.len() / direct.align * direct.align;
        if before > 0 {
            let end = before.min(into.len());
            return self.cached.read_at(&mut into[..end], offset);
        }
        if whole == 0 || !into.as_ptr().addr().is_multiple_of(direct.align) {
            return self.cached.read_at(into, offset);
        }
        match direct.file.read_at(&mut into[..whole], offset) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                direct.refused.store(true, Ordering::Relaxed);
                self.cached.read_at(into, offset)
            }
            read => read,
        }
    }

    fn alignment(&self) -> usize {
        self.usable().map_or(1, |direct| direct.align)
    }
}

/// The file opened once more, past the page cache; `None` where that is refused.
fn direct(path: &Path, cached: &File) -> Option<Direct> {
    let align = direct_alignment(cached)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
    Some(Direct { file, align, refused: AtomicBool::new(false) })
}

/// What direct reads of a file must be aligned to, in bytes; `None` where the file system says that
/// there are none.
fn direct_alignment(file: &File) -> Option<usize> {
    // SAFETY: 1. all zeros are a `statx`, which is plain numbers.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: 1. the descriptor is open, the path an empty C string, and `found` a `statx` to be
    // written.
    let answer = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &mut found,
        )
    };
    if Errno::result(answer).is_err() || found.stx_mask & libc::STATX_DIOALIGN == 0 {
        // Before Linux 6.1, or a file system that does not say: to be tried.
        return Some(USUAL_ALIGNMENT);
    }
    let align = found.stx_dio_mem_align.max(found.stx_dio_offset_align) as usize;
    // Slots are aligned to pages and no more.
    (align.is_power_of_two() && align <= USUAL_ALIGNMENT).then_some(align)
}
