//! Sources and sinks of transfers that are not memory, such as files.

use nix::{
    fcntl::{PosixFadviseAdvice, posix_fadvise},
    libc,
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// A source of bytes with random access from several threads, such as a file, an object store or a
/// decoder.
///
/// Reads write directly into pinned memory, on threads of the stager. A read that blocks delays its
/// worker. A source that fails or panics ends only its own transfer. A source must not use the
/// stager that reads it.
///
/// ```
/// use aquifer::staging::Source;
/// use std::io;
///
/// /// A thousand times the same byte.
/// #[derive(Debug)]
/// struct Same(u8);
///
/// impl Source for Same {
///     fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
///         let left = 1000u64.saturating_sub(offset).min(into.len() as u64) as usize;
///         into[..left].fill(self.0);
///         Ok(left)
///     }
/// }
/// # let mut bytes = [0; 4];
/// # assert_eq!(Same(7).read_at(998, &mut bytes)?, 2);
/// # Ok::<(), io::Error>(())
/// ```
pub trait Source: Send + Sync {
    /// Reads bytes from `offset` on into `into`, as `pread` does. It may read fewer bytes than
    /// requested, and reads none only at the end.
    ///
    /// # Errors
    /// Those of the source. An [interrupted](io::ErrorKind::Interrupted) read is retried.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// Returns the preferred alignment of offsets, lengths and addresses in bytes, a power of two
    /// of at most 4096.
    ///
    /// Reads may still begin and end anywhere, but a byte at a multiple of this value in the source
    /// is at a multiple of it in memory.
    fn alignment(&self) -> usize {
        1
    }
}

impl Source for [u8] {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len());
        let bytes = into.len().min(self.len() - from);
        into[..bytes].copy_from_slice(&self[from..from + bytes]);
        Ok(bytes)
    }
}

impl Source for Vec<u8> {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self[..].read_at(offset, into)
    }
}

/// A destination of bytes with random access from several threads, such as a file or an object
/// store.
///
/// The written bytes lie in pinned memory. As with a [`Source`], a sink that fails or panics ends
/// only its own transfer, and it must not use the stager that writes to it.
///
/// ```
/// use aquifer::staging::Sink;
/// let file = std::fs::File::create(std::env::temp_dir().join("aquifer-sink"))?;
/// assert_eq!(file.write_at(100, b"bytes")?, 5);
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait Sink: Send + Sync {
    /// Writes bytes from `offset` on, as `pwrite` does. It may write fewer bytes than given.
    ///
    /// # Errors
    /// Those of the sink. An [interrupted](io::ErrorKind::Interrupted) write is retried.
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<usize>;
}

/// Writes go through the page cache.
impl Sink for File {
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<usize> {
        FileExt::write_at(self, from, offset)
    }
}

/// How a file is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum ReadMode {
    /// Through the page cache.
    #[default]
    Cached,
    /// Direct I/O (`O_DIRECT`), from the disk into pinned memory.
    Direct,
}

/// The alignment of addresses, offsets and lengths of direct reads, in bytes. Direct reads of a file
/// system that requires more are refused.
const ALIGNMENT: usize = 4096;

/// A file that a stager reads, through the page cache or with direct I/O.
///
/// Direct reads begin and end at multiples of 4096. The bytes before and after are read through the
/// page cache. If the file system refuses
/// direct reads, the page cache is used, and [`FileSource::mode`] reports that.
///
/// ```
/// use aquifer::{FileSource, staging::{ReadMode, Source}};
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
    direct: Option<DirectFile>,
}

#[derive(Debug)]
struct DirectFile {
    file: File,
    /// A read has been refused, although the file could be opened.
    refused: AtomicBool,
}

impl FileSource {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// Those of `open`. Refused direct reads are not an error.
    pub fn open(path: impl AsRef<Path>, mode: ReadMode) -> io::Result<Self> {
        let path = path.as_ref();
        let cached = File::open(path)?;
        let direct = match mode {
            ReadMode::Cached => {
                // Workers read chunks in parallel, from front to back. Without this advice, the
                // kernel treats that as random access and reads ahead little, which is several
                // times slower for a cold file.
                let _advised =
                    posix_fadvise(&cached, 0, 0, PosixFadviseAdvice::POSIX_FADV_SEQUENTIAL);
                None
            }
            ReadMode::Direct => {
                // Only the unaligned ends of reads go through the cache.
                let _advised = posix_fadvise(&cached, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
                direct(path)
            }
        };
        Ok(Self { cached, direct })
    }

    /// Creates a source from an open file, which is read through the page cache.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { cached: file, direct: None }
    }

    /// Returns how the file is read: [`ReadMode::Direct`] only as long as no direct read has been
    /// refused.
    #[must_use]
    pub fn mode(&self) -> ReadMode {
        if self.usable().is_some() { ReadMode::Direct } else { ReadMode::Cached }
    }

    /// Returns the length of the file in bytes.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn len(&self) -> io::Result<u64> {
        self.cached.metadata().map(|file| file.len())
    }

    /// Returns whether the file is empty.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Drops the file's pages from the page cache (`posix_fadvise`, `POSIX_FADV_DONTNEED`), so that
    /// the next read comes from the disk. Pages that are dirty or mapped stay.
    ///
    /// # Errors
    /// Those of `fsync` and of `posix_fadvise`.
    pub fn drop_cache(&self) -> io::Result<()> {
        self.cached.sync_data()?;
        posix_fadvise(&self.cached, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
            .map_err(io::Error::from)
    }

    fn usable(&self) -> Option<&DirectFile> {
        self.direct.as_ref().filter(|direct| !direct.refused.load(Ordering::Relaxed))
    }
}

impl Source for FileSource {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let Some(direct) = self.usable() else { return self.cached.read_at(into, offset) };
        // Read only up to where a direct read may begin. The next call continues there.
        let before = (offset.wrapping_neg() % ALIGNMENT as u64) as usize;
        let whole = into.len() / ALIGNMENT * ALIGNMENT;
        if before > 0 {
            let end = before.min(into.len());
            return self.cached.read_at(&mut into[..end], offset);
        }
        if whole == 0 || !into.as_ptr().addr().is_multiple_of(ALIGNMENT) {
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
        self.usable().map_or(1, |_| ALIGNMENT)
    }
}

/// Opens the file again for direct I/O. Returns `None` if that is refused.
fn direct(path: &Path) -> Option<DirectFile> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
    Some(DirectFile { file, refused: AtomicBool::new(false) })
}
