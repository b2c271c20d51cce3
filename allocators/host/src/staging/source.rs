//! Sources and sinks of transfers that are not memory.

use std::{fs::File, io, os::unix::fs::FileExt};

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
