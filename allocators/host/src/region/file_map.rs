//! A file's pages in the page cache, to be read.
#![expect(unsafe_code, reason = "maps a file, and views it")]

use super::Pinnable;
use crate::kernel::{Kernel, Span, pointer};
use aquifer_core::SystemError;
use std::{fs::File, os::fd::AsFd, slice};

/// A whole file, mapped shared and read-only: the kind of file mapping that can be registered in
/// place, so that a device reads weights from the page cache itself.
///
/// Its pages are read in when they are touched, or registered. Where the driver refuses to register
/// it, a stager moves it.
///
/// ```
/// use aquifer_host::{kernel::Kernel, region::FileMap};
/// let path = std::env::current_exe()?;
/// // SAFETY: nobody writes or shortens a program that runs.
/// let map = unsafe { FileMap::new(&Kernel::new(), &std::fs::File::open(&path)?) }?;
/// assert_eq!(map.bytes()[..4], *b"\x7fELF");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileMap {
    /// Mapped for reading until this is dropped; its length is the file's.
    span: Span,
    kernel: Kernel,
}

impl FileMap {
    /// Maps a file (`mmap`, `PROT_READ`, `MAP_SHARED`).
    ///
    /// # Safety
    /// 1. While it is mapped nobody writes the file or makes it shorter: what is read here would
    ///    change under a reference, or end the process by a signal.
    ///
    /// # Errors
    /// The kernel's: `EINVAL` for an empty file.
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

    /// The file's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let Some(start) = pointer(self.span.start) else { return &[] };
        // SAFETY: 1. mapped for reading while `self` lives. 2. nobody writes the file, by the
        // maker's word.
        unsafe { slice::from_raw_parts(start.as_ptr(), self.span.len) }
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: 1. the last one to use it is being dropped.
        // A kernel that cannot end it keeps pages of the page cache, which it may drop when it
        // likes.
        let _ = unsafe { self.kernel.unmap_file(self.span) };
    }
}

// SAFETY: 1. and 2. a mapping stays where it is until it is dropped, and nobody writes the file.
unsafe impl Pinnable for FileMap {
    type Item = u8;

    fn items(&self) -> &[u8] {
        self.bytes()
    }
}
