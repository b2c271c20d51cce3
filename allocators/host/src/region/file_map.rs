//! Read-only mappings of a file's pages in the page cache.
#![expect(unsafe_code, reason = "maps a file, and views it")]

use super::Pinnable;
use crate::kernel::{Kernel, Span, pointer};
use aquifer_core::SystemError;
use std::{fs::File, os::fd::AsFd, slice};

/// A whole file, mapped shared and read-only.
///
/// This kind of file mapping can be registered in place, so that a device reads directly from the
/// page cache. Pages are read in when they are touched or registered. If the driver refuses to
/// register the mapping, a stager has to copy it.
///
/// ```
/// use aquifer_host::{kernel::Kernel, region::FileMap};
/// let path = std::env::current_exe()?;
/// // SAFETY: the file of a running program is neither written nor truncated.
/// let map = unsafe { FileMap::new(&Kernel::new(), &std::fs::File::open(&path)?) }?;
/// assert_eq!(map.bytes()[..4], *b"\x7fELF");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileMap {
    /// Mapped for reading until the drop. Its length is that of the file.
    span: Span,
    kernel: Kernel,
}

impl FileMap {
    /// Maps a file (`mmap`, `PROT_READ`, `MAP_SHARED`).
    ///
    /// # Safety
    /// 1. While it is mapped the file is neither written nor truncated. Otherwise the bytes would
    ///    change under a reference, or a signal would end the process.
    ///
    /// # Errors
    /// Those of the kernel, including `EINVAL` for an empty file.
    pub unsafe fn new(kernel: &Kernel, file: &File) -> Result<Self, SystemError> {
        let size = file
            .metadata()
            .map_err(|e| SystemError {
                call: "fstat",
                errno: e.raw_os_error().unwrap_or(nix::libc::EIO),
            })?
            .len();
        let bytes = usize::try_from(size)
            .map_err(|_| SystemError { call: "mmap", errno: nix::libc::EOVERFLOW })?;
        Ok(Self { span: kernel.map_to_read(file.as_fd(), bytes)?, kernel: kernel.clone() })
    }

    /// Returns the bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let Some(start) = pointer(self.span.start) else { return &[] };
        // SAFETY: 1. mapped for reading while `self` is alive. 2. the file is not written, as the
        // caller of `new` guarantees.
        unsafe { slice::from_raw_parts(start.as_ptr(), self.span.len) }
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: 1. this drop is the last use of the mapping. If the kernel cannot unmap it, only
        // pages of the page cache stay mapped, which the kernel may evict.
        let _ = unsafe { self.kernel.unmap_file(self.span) };
    }
}

// SAFETY: 1. and 2. a mapping has a stable address until it is dropped, and the file is not
// written.
unsafe impl Pinnable for FileMap {
    type Item = u8;

    fn items(&self) -> &[u8] {
        self.bytes()
    }
}
