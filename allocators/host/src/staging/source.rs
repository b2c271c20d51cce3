//! Where bytes come from, and go to, that are not in memory.

use std::{fs::File, io, os::unix::fs::FileExt};

/// Something that bytes can be read from at any place, by several threads at once: a file, an
/// object store, a decoder.
///
/// Reads land in pinned memory straight away, on threads of the stager. One that blocks holds up
/// the worker that makes it; one that fails or panics ends its transfer and nothing else. A source
/// must not use the stager that reads it.
///
/// ```
/// use aquifer_host::Source;
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
    /// Reads bytes from `offset` on into `into`, as `pread` does: some of them, and none only at
    /// the end.
    ///
    /// # Errors
    /// Its own. One that was [interrupted](io::ErrorKind::Interrupted) is asked again.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// What offsets, lengths and addresses should be multiples of, in bytes: a power of two of at
    /// most 4096. Reads begin and end anywhere all the same, but the byte at a multiple of this
    /// lies at an address that is one too.
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

/// Something that bytes can be written to at any place, by several threads at once: a file, an
/// object store.
///
/// What is written lies in pinned memory. As with a [`Source`], one that fails or panics ends its
/// transfer alone, and it must not use the stager that writes to it.
///
/// ```
/// use aquifer_host::Sink;
/// let file = std::fs::File::create(std::env::temp_dir().join("aquifer-sink"))?;
/// assert_eq!(file.write_at(100, b"bytes")?, 5);
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait Sink: Send + Sync {
    /// Writes bytes from `offset` on, as `pwrite` does: all or some of them.
    ///
    /// # Errors
    /// Its own. One that was [interrupted](io::ErrorKind::Interrupted) is asked again.
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<usize>;
}

/// Through the page cache.
impl Sink for File {
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<usize> {
        FileExt::write_at(self, from, offset)
    }
}
