//! The backing of addresses: bytes, or nothing.
//!
//! With bytes, physical memory consists of extents of one memfd, and a mapping is a shared `mmap`
//! of its extent over an inaccessible reservation. So a handle that is mapped twice refers to the
//! same bytes, a device address is an address of this process, and a copy is a `memmove`. Without
//! bytes, addresses come from a counter and have no memory.
//!
//! Another process can map an extent too: it opens the memfd by the number of its descriptor in
//! this process, see [`Extent::elsewhere`].
#![expect(unsafe_code, reason = "maps memory, and copies between the addresses of queued work")]

use super::codes::{self, ErrorCode};
use crate::Pattern;
use nix::{
    fcntl::{FallocateFlags, fallocate},
    sys::{
        memfd::{MFdFlags, memfd_create},
        mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap},
    },
    unistd::ftruncate,
};
use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    num::NonZeroUsize,
    os::fd::{AsRawFd, OwnedFd},
    ptr::{self, NonNull},
};

/// The page size of the host, the minimum mapping.
pub(crate) const PAGE: u64 = 4096;

/// Symbolic addresses lie between those that Linux uses for programs and for their mappings, so
/// that they differ from both.
const FIRST_ADDRESS: u64 = 0x0100_0000_0000;
const LAST_ADDRESS: u64 = 0x5000_0000_0000;

#[derive(Debug)]
pub(crate) enum Store {
    Symbolic(SymbolicAddresses),
    Bytes(FileExtents),
}

/// Addresses without memory.
#[derive(Debug)]
pub(crate) struct SymbolicAddresses {
    next: u64,
    /// Freed ranges, by first address, with their bytes. They are reused only when all other
    /// addresses have been allocated.
    free: BTreeMap<u64, u64>,
}

/// Extents of a memory file. Offsets are never reused, so a new extent is always zero.
#[derive(Debug)]
pub(crate) struct FileExtents {
    file: OwnedFd,
    end: u64,
}

/// Physical memory.
#[derive(Debug)]
pub(crate) struct Extent {
    /// The file of another process's store, or `None` for the store's own.
    file: Option<OwnedFd>,
    offset: u64,
}

/// Where another process finds an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ExtentName {
    pub(crate) process: u32,
    /// The descriptor of the store's file in that process.
    pub(crate) descriptor: u32,
    pub(crate) offset: u64,
}

/// The name of the files of stores, as `/proc` shows it.
const FILE_LINK: &str = "/memfd:aquifer-sim (deleted)";

impl Extent {
    /// Opens an extent of another process of this user.
    pub(crate) fn elsewhere(name: &ExtentName, bytes: u64) -> Result<Self, ErrorCode> {
        let ExtentName { process, descriptor, offset } = *name;
        let path = format!("/proc/{process}/fd/{descriptor}");
        if fs::read_link(&path).map_err(|_| codes::INVALID_VALUE)?.as_os_str() != FILE_LINK {
            return Err(codes::INVALID_VALUE);
        }
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let file = opened.map_err(|_| codes::INVALID_VALUE)?;
        let length = file.metadata().map_err(|_| codes::OPERATING_SYSTEM)?.len();
        let is_whole = bytes > 0 && offset.is_multiple_of(PAGE);
        let end = offset.checked_add(pages(bytes)).filter(|end| is_whole && *end <= length);
        end.ok_or(codes::INVALID_VALUE)?;
        Ok(Self { file: Some(file.into()), offset })
    }
}

impl Store {
    pub(crate) fn symbolic() -> Self {
        Self::Symbolic(SymbolicAddresses { next: FIRST_ADDRESS, free: BTreeMap::new() })
    }

    /// Creates a store with bytes. Returns the driver code if the system refuses.
    pub(crate) fn bytes() -> Result<Self, ErrorCode> {
        let file = memfd_create("aquifer-sim", MFdFlags::MFD_CLOEXEC)
            .map_err(|_| codes::OPERATING_SYSTEM)?;
        Ok(Self::Bytes(FileExtents { file, end: 0 }))
    }

    pub(crate) fn has_bytes(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }

    /// Reserves inaccessible addresses for `bytes`. `align` is a power of two.
    pub(crate) fn reserve(&mut self, bytes: u64, align: u64) -> Result<u64, ErrorCode> {
        match self {
            Self::Symbolic(addresses) => {
                addresses.reserve(bytes, align).ok_or(codes::OUT_OF_MEMORY)
            }
            Self::Bytes(_) => reserve_pages(bytes, align.max(PAGE)).ok_or(codes::OUT_OF_MEMORY),
        }
    }

    /// Frees addresses, with any mappings there.
    ///
    /// # Safety
    /// 1. The range is a whole range that [`Store::reserve`] returned, and it is no longer in use.
    pub(crate) unsafe fn release(&mut self, address: u64, bytes: u64) {
        match self {
            Self::Symbolic(addresses) => {
                addresses.free.insert(address, bytes);
            }
            // SAFETY: 1. is promised by the caller.
            Self::Bytes(_) => unsafe { unmap_pages(address, pages(bytes)) },
        }
    }

    /// Allocates physical memory, for [`Store::map`].
    pub(crate) fn allocate_extent(&mut self, bytes: u64) -> Result<Extent, ErrorCode> {
        let Self::Bytes(extents) = self else { return Ok(Extent { file: None, offset: 0 }) };
        let offset = extents.end;
        let end = offset.checked_add(pages(bytes)).ok_or(codes::OUT_OF_MEMORY)?;
        let length = i64::try_from(end).map_err(|_| codes::OUT_OF_MEMORY)?;
        ftruncate(&extents.file, length).map_err(|_| codes::OUT_OF_MEMORY)?;
        extents.end = end;
        Ok(Extent { file: None, offset })
    }

    /// Returns where another process of this user finds an extent of this store, if it has bytes.
    pub(crate) fn name(&self, extent: &Extent) -> Option<ExtentName> {
        let (Self::Bytes(extents), None) = (self, &extent.file) else { return None };
        let descriptor = u32::try_from(extents.file.as_raw_fd()).ok()?;
        Some(ExtentName { process: std::process::id(), descriptor, offset: extent.offset })
    }

    /// Frees physical memory to the system, unless it is another process's.
    pub(crate) fn free_extent(&mut self, extent: &Extent, bytes: u64) {
        let (Self::Bytes(extents), None) = (self, &extent.file) else { return };
        let offset = extent.offset;
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // If the system refuses, the memory is held until the store is dropped, since the offset is
        // never reused.
        let _ = fallocate(&extents.file, flags, offset as i64, pages(bytes) as i64);
    }

    /// Maps an extent at reserved addresses, which stay inaccessible.
    ///
    /// # Safety
    /// 1. The range lies in one that [`Store::reserve`] returned, and nothing is mapped there.
    pub(crate) unsafe fn map(
        &mut self,
        address: u64,
        bytes: u64,
        extent: &Extent,
    ) -> Result<(), ErrorCode> {
        let Self::Bytes(extents) = self else { return Ok(()) };
        let (file, offset) = (extent.file.as_ref().unwrap_or(&extents.file), extent.offset);
        let (Some(address), Some(length)) =
            (NonZeroUsize::new(address as usize), NonZeroUsize::new(pages(bytes) as usize))
        else {
            return Err(codes::INVALID_VALUE);
        };
        // SAFETY: 1. The caller promised that the range lies in a reservation of this store, so
        // MAP_FIXED replaces nothing else. 2. Nothing refers to the bytes there, since they were
        // inaccessible.
        let mapped = unsafe {
            mmap(
                Some(address),
                length,
                ProtFlags::PROT_NONE,
                MapFlags::MAP_SHARED | MapFlags::MAP_FIXED | MapFlags::MAP_NORESERVE,
                file,
                offset as i64,
            )
        };
        mapped.map(drop).map_err(|_| codes::OUT_OF_MEMORY)
    }

    /// Makes mapped addresses accessible.
    ///
    /// # Safety
    /// 1. The range has been mapped by [`Store::map`].
    pub(crate) unsafe fn make_accessible(
        &mut self,
        address: u64,
        bytes: u64,
    ) -> Result<(), ErrorCode> {
        if !self.has_bytes() {
            return Ok(());
        }
        let Some(start) = NonNull::new(address as *mut _) else { return Err(codes::INVALID_VALUE) };
        // SAFETY: 1. The caller promised that the pages are mappings of this store. Adding rights
        // affects no other user.
        let opened = unsafe {
            mprotect(start, pages(bytes) as usize, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
        };
        opened.map_err(|_| codes::OUT_OF_MEMORY)
    }

    /// Removes the mappings of a range, if there are any. The addresses stay reserved.
    ///
    /// # Safety
    /// 1. The range lies in one that [`Store::reserve`] returned, and no work of the simulated GPU
    ///    holds a reference into it.
    pub(crate) unsafe fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), ErrorCode> {
        if !self.has_bytes() {
            return Ok(());
        }
        let (Some(address), Some(length)) =
            (NonZeroUsize::new(address as usize), NonZeroUsize::new(pages(bytes) as usize))
        else {
            return Err(codes::INVALID_VALUE);
        };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED | MapFlags::MAP_NORESERVE;
        // SAFETY: 1. The caller promised that the range lies inside a reservation of this store, so
        // MAP_FIXED replaces only that. 2. The caller promised that there is no reference into it.
        let covered = unsafe { mmap_anonymous(Some(address), length, ProtFlags::PROT_NONE, flags) };
        covered.map(drop).map_err(|_| codes::OUT_OF_MEMORY)
    }

    /// Copies bytes. Does nothing without bytes. The ranges may overlap.
    ///
    /// # Safety
    /// 1. With bytes, `from` is readable and `to` writable for `bytes`.
    /// 2. There is no other access to `to`, and no other write to `from`, during the call.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: u64) {
        if self.has_bytes() && bytes > 0 {
            // SAFETY: 1. and 2. are promised by the caller. `ptr::copy` allows overlap and the
            // alignment is 1.
            unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes as usize) }
        }
    }

    /// Returns a copy of the bytes, or an empty vector without bytes.
    ///
    /// # Safety
    /// 1. With bytes, the range is readable, and not written during the call.
    pub(crate) unsafe fn read(&self, from: u64, bytes: u64) -> Vec<u8> {
        if !self.has_bytes() || bytes == 0 {
            return Vec::new();
        }
        // SAFETY: 1. is promised by the caller.
        unsafe { std::slice::from_raw_parts(from as *const u8, bytes as usize) }.to_vec()
    }

    /// Fills whole elements. Does nothing without bytes.
    ///
    /// # Safety
    /// 1. With bytes, `to` is writable for `bytes` and aligned for the element, and there is no
    ///    other access to it during the call.
    pub(crate) unsafe fn fill(&self, to: u64, pattern: Pattern, bytes: u64) {
        if !self.has_bytes() || bytes == 0 {
            return;
        }
        let count = (bytes / pattern.bytes()) as usize;
        // SAFETY: 1. is promised by the caller: that many elements fit in the range.
        unsafe {
            match pattern {
                Pattern::Byte(byte) => ptr::write_bytes(to as *mut u8, byte, count),
                Pattern::Half(half) => {
                    std::slice::from_raw_parts_mut(to as *mut u16, count).fill(half);
                }
                Pattern::Word(word) => {
                    std::slice::from_raw_parts_mut(to as *mut u32, count).fill(word);
                }
            }
        }
    }
}

impl SymbolicAddresses {
    fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let new = self.next.checked_next_multiple_of(align)?;
        if let Some(end) = new.checked_add(bytes).filter(|&end| end <= LAST_ADDRESS) {
            self.next = end;
            return Some(new);
        }
        let fits = |(&start, &length): (&u64, &u64)| {
            let aligned = start.next_multiple_of(align);
            let end = aligned.checked_add(bytes)?;
            (end <= start + length).then_some((start, length, aligned))
        };
        let (start, length, aligned) = self.free.iter().find_map(fits)?;
        self.free.remove(&start);
        if aligned > start {
            self.free.insert(start, aligned - start);
        }
        if aligned + bytes < start + length {
            self.free.insert(aligned + bytes, start + length - aligned - bytes);
        }
        Some(aligned)
    }
}

fn pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE)
}

/// Reserves inaccessible address space of this process.
fn reserve_pages(bytes: u64, align: u64) -> Option<u64> {
    let bytes = pages(bytes);
    let length = NonZeroUsize::new(usize::try_from(bytes.checked_add(align)?).ok()?)?;
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: 1. No address is requested, so nothing is replaced.
    let start = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }.ok()?;
    let start = start.as_ptr() as u64;
    let aligned = start.next_multiple_of(align);
    // SAFETY: 1. Both are ends of the new mapping, which has no other user yet.
    unsafe {
        unmap_pages(start, aligned - start);
        unmap_pages(aligned + bytes, start + align - aligned);
    }
    Some(aligned)
}

/// Unmaps a mapping or a part of it.
///
/// # Safety
/// 1. The range consists of pages of a mapping of this module, and it is no longer in use.
unsafe fn unmap_pages(address: u64, bytes: u64) {
    if let Some(start) = NonNull::new(address as *mut _).filter(|_| bytes > 0) {
        // SAFETY: 1. is promised by the caller. If it is refused, the range stays mapped, which is
        // harmless.
        let _ = unsafe { munmap(start, bytes as usize) };
    }
}

/// Allocates zeroed host pages for [`host_alloc`](crate::HostMemory::host_alloc).
pub(crate) fn host_pages(bytes: u64) -> Option<u64> {
    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    let length = NonZeroUsize::new(usize::try_from(bytes).ok()?)?;
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: 1. No address is requested, so nothing is replaced.
    let start = unsafe {
        mmap_anonymous(None, length, prot, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE)
    };
    start.ok().map(|start| start.as_ptr() as u64)
}

/// Frees host pages.
///
/// # Safety
/// 1. The range came from [`host_pages`] with the same `bytes`, and it is no longer in use.
pub(crate) unsafe fn free_host_pages(address: u64, bytes: u64) {
    // SAFETY: 1. is promised by the caller.
    unsafe { unmap_pages(address, pages(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_an_extent_share_its_bytes() {
        let mut store = Store::bytes().unwrap();
        let (size, align) = (2 << 20, 2 << 20);
        let (a, b) = (store.reserve(size, align).unwrap(), store.reserve(size, align).unwrap());
        assert!(a.is_multiple_of(align) && b.is_multiple_of(align));
        let extent = store.allocate_extent(size).unwrap();
        for address in [a, b] {
            // SAFETY: 1. The range is reserved and empty, and then mapped.
            unsafe {
                store.map(address, size, &extent).unwrap();
                store.make_accessible(address, size).unwrap();
            }
        }
        let mut back = [0_u8; 8];
        // SAFETY: 1. Both ranges are mapped and accessible, and `back` is 8 bytes. 2. There is no
        // other user.
        unsafe {
            store.fill(a, Pattern::Byte(0x5a), size);
            store.copy(back.as_mut_ptr() as u64, b + size - 8, 8);
        }
        assert_eq!(back, [0x5a; 8]);
        // SAFETY: 1. Both came from `reserve` and are no longer used.
        unsafe {
            store.release(a, size);
            store.release(b, size);
        }
    }

    #[test]
    fn freed_symbolic_addresses_are_reused_last() {
        let mut store = Store::symbolic();
        let half = (LAST_ADDRESS - FIRST_ADDRESS) / 2;
        let first = store.reserve(half, 1 << 21).unwrap();
        // SAFETY: 1. It came from `reserve` and has no memory.
        unsafe { store.release(first, half) };
        let second = store.reserve(half, 1 << 21).unwrap();
        assert_ne!(first, second);
        assert_eq!(store.reserve(1 << 21, 1 << 21), Ok(first));
        assert_eq!(store.reserve(half, 1 << 21), Err(codes::OUT_OF_MEMORY));
    }
}
