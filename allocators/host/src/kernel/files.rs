//! File-backed memory: memory files, and files mapped for reading.

use super::{Kernel, MapPages, Result, Span, SystemCall, check, last_error};
use aquifer_core::SystemError;
use nix::{
    errno::Errno,
    libc,
    sys::{
        stat::fstat,
        statfs::{HUGETLBFS_MAGIC, fstatfs},
    },
};
use std::{
    ffi::CStr,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

/// The seals of a shared region's file. Pages that a device may access must not be truncated, and
/// the seals must not be changed.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

impl Kernel {
    /// Creates a zeroed memory file of `bytes` whose size is sealed (`memfd_create`, `ftruncate`).
    /// It uses no memory yet, but reserves huge pages in their pool.
    ///
    /// # Errors
    /// `ENODEV` if there are no huge pages of that size, `ENOMEM`, `EMFILE`.
    pub fn memory_file(&self, bytes: usize, pages: MapPages) -> Result<OwnedFd> {
        const NAME: &CStr = c"aquifer-region";
        self.intercept(SystemCall::MemFile)?;
        let huge = match pages {
            MapPages::Ordinary => 0,
            MapPages::Huge2M => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
            MapPages::Huge1G => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
        };
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge;
        // SAFETY: 1. the name ends with a zero.
        let file = unsafe { libc::memfd_create(NAME.as_ptr(), flags) };
        if file < 0 {
            return Err(last_error("memfd_create"));
        }
        // SAFETY: 1. it was just opened, and has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        self.intercept(SystemCall::Resize)?;
        let size = i64::try_from(bytes)
            .map_err(|_| SystemError { call: "ftruncate", errno: libc::EFBIG })?;
        // SAFETY: 1. the file is open.
        check("ftruncate", unsafe { libc::ftruncate(file.as_raw_fd(), size) })?;
        self.intercept(SystemCall::Seal)?;
        // SAFETY: 1. the file is open, and this call takes a number.
        check("fcntl", unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
        Ok(file)
    }

    /// Returns the bytes and the page size of a memory file that was passed on.
    ///
    /// # Errors
    /// `EPERM` for a file whose size is not sealed, or that is no memory file. Such a file could be
    /// truncated while a device uses it.
    pub fn look_at(&self, file: BorrowedFd<'_>) -> Result<(usize, MapPages)> {
        self.intercept(SystemCall::Seal)?;
        // SAFETY: 1. the file is open.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        // A negative value means that it is no memory file.
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(SystemError { call: "fcntl", errno: libc::EPERM });
        }
        let refused = |call| move |e: Errno| SystemError { call, errno: e as i32 };
        let size = fstat(file).map_err(refused("fstat"))?.st_size;
        let system = fstatfs(file).map_err(refused("fstatfs"))?;
        let pages = match (system.filesystem_type() == HUGETLBFS_MAGIC, system.block_size() as i64)
        {
            (false, _) => MapPages::Ordinary,
            (true, block) if block == 1 << 30 => MapPages::Huge1G,
            (true, _) => MapPages::Huge2M,
        };
        Ok((usize::try_from(size).unwrap_or(0), pages))
    }

    /// Maps a memory file over a reserved range, shared with all processes that have the file
    /// (`mmap`, `MAP_SHARED`, `MAP_FIXED`).
    ///
    /// # Safety
    /// 1. The range is reserved or mapped by the caller, and is not in use.
    ///
    /// # Errors
    /// `ENOMEM` if the pool of huge pages, or the number of mappings, is exhausted. The range is
    /// then unchanged.
    pub unsafe fn map_shared(&self, span: Span, file: BorrowedFd<'_>) -> Result<()> {
        self.intercept(SystemCall::MapShared)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: 1. the caller's first condition.
        let address =
            unsafe { libc::mmap(span.pointer(), span.len, access, flags, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED { Err(last_error("mmap")) } else { Ok(()) }
    }

    /// Maps a file for reading at any address, shared with the page cache (`mmap`, `PROT_READ`,
    /// `MAP_SHARED`).
    ///
    /// # Errors
    /// `EINVAL` for no bytes; `EACCES` for a file that is not open for reading.
    pub fn map_to_read(&self, file: BorrowedFd<'_>, bytes: usize) -> Result<Span> {
        self.intercept(SystemCall::MapShared)?;
        // SAFETY: 1. no address is given, so no mapping is replaced.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        Ok(Span { start: address.expose_provenance(), len: bytes })
    }

    /// Removes a mapping that [`Kernel::map_to_read`] made (`munmap`).
    ///
    /// # Safety
    /// 1. The mapping is no longer in use.
    ///
    /// # Errors
    /// `ENOMEM` if the number of mappings is exhausted. The mapping then stays.
    pub unsafe fn unmap_file(&self, span: Span) -> Result<()> {
        self.intercept(SystemCall::Unmap)?;
        // SAFETY: 1. the caller's first condition.
        check("munmap", unsafe { libc::munmap(span.pointer(), span.len) })
    }
}
