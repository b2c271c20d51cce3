//! What lies behind addresses: bytes, or nothing.
//!
//! With bytes, physical memory is extents of one memfd and a mapping is a shared `mmap` of its
//! extent, placed over a reservation that cannot be touched. So a handle that is mapped twice is
//! the same bytes twice, a device address is an address of this process, and a copy is a `memmove`.
//! Without, addresses come from a counter and nothing is behind them.
#![expect(unsafe_code, reason = "maps memory, and copies what work in the queues names by address")]

use super::codes;
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
    num::NonZeroUsize,
    os::fd::OwnedFd,
    ptr::{self, NonNull},
};

/// Pages of the host, the least that can be mapped.
pub(crate) const PAGE: u64 = 4096;

/// Symbolic addresses lie between what Linux gives to programs and to their maps, so that they
/// resemble neither.
const FIRST_ADDRESS: u64 = 0x0100_0000_0000;
const LAST_ADDRESS: u64 = 0x5000_0000_0000;

/// An error code of the driver.
type Refused = u32;

#[derive(Debug)]
pub(crate) enum Store {
    Symbolic(Addresses),
    Bytes(Extents),
}

/// Addresses with nothing behind them.
#[derive(Debug)]
pub(crate) struct Addresses {
    next: u64,
    /// Those given back, by first address, with their bytes: used again when all others have been
    /// given out.
    free: BTreeMap<u64, u64>,
}

/// Extents of a file in memory. Offsets are not used twice, so a new extent is always zero.
#[derive(Debug)]
pub(crate) struct Extents {
    file: OwnedFd,
    end: u64,
}

impl Store {
    pub(crate) fn symbolic() -> Self {
        Self::Symbolic(Addresses { next: FIRST_ADDRESS, free: BTreeMap::new() })
    }

    /// A store with bytes, or the system's refusal as the driver would tell it.
    pub(crate) fn bytes() -> Result<Self, Refused> {
        let file = memfd_create("aquifer-sim", MFdFlags::MFD_CLOEXEC)
            .map_err(|_| codes::OPERATING_SYSTEM)?;
        Ok(Self::Bytes(Extents { file, end: 0 }))
    }

    pub(crate) fn has_bytes(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }

    /// Addresses for `bytes`, which cannot be touched. `align` is a power of two.
    pub(crate) fn reserve(&mut self, bytes: u64, align: u64) -> Result<u64, Refused> {
        match self {
            Self::Symbolic(addresses) => {
                addresses.reserve(bytes, align).ok_or(codes::OUT_OF_MEMORY)
            }
            Self::Bytes(_) => reserve_pages(bytes, align.max(PAGE)).ok_or(codes::OUT_OF_MEMORY),
        }
    }

    /// Gives addresses back, with whatever is mapped there.
    ///
    /// # Safety
    /// 1. The range is one that [`Store::reserve`] answered with, whole, and nobody uses it any
    ///    more.
    pub(crate) unsafe fn release(&mut self, address: u64, bytes: u64) {
        match self {
            Self::Symbolic(addresses) => {
                addresses.free.insert(address, bytes);
            }
            // SAFETY: 1. is the caller's.
            Self::Bytes(_) => unsafe { unmap_pages(address, pages(bytes)) },
        }
    }

    /// Physical memory: an offset that [`Store::map`] understands.
    pub(crate) fn extent(&mut self, bytes: u64) -> Result<u64, Refused> {
        let Self::Bytes(extents) = self else { return Ok(0) };
        let offset = extents.end;
        let end = offset.checked_add(pages(bytes)).ok_or(codes::OUT_OF_MEMORY)?;
        let length = i64::try_from(end).map_err(|_| codes::OUT_OF_MEMORY)?;
        ftruncate(&extents.file, length).map_err(|_| codes::OUT_OF_MEMORY)?;
        extents.end = end;
        Ok(offset)
    }

    /// Gives physical memory back to the system.
    pub(crate) fn drop_extent(&mut self, offset: u64, bytes: u64) {
        let Self::Bytes(extents) = self else { return };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // If the system refuses, its memory is held until the store goes: the offset is never used
        // again.
        let _ = fallocate(&extents.file, flags, offset as i64, pages(bytes) as i64);
    }

    /// Puts an extent behind reserved addresses; they still cannot be touched.
    ///
    /// # Safety
    /// 1. The range lies in one that [`Store::reserve`] answered with, and nothing is mapped there.
    pub(crate) unsafe fn map(
        &mut self,
        address: u64,
        bytes: u64,
        offset: u64,
    ) -> Result<(), Refused> {
        let Self::Bytes(extents) = self else { return Ok(()) };
        let (Some(address), Some(length)) =
            (NonZeroUsize::new(address as usize), NonZeroUsize::new(pages(bytes) as usize))
        else {
            return Err(codes::INVALID_VALUE);
        };
        // SAFETY: 1. The range lies in a reservation of this store's, by the caller's word, so
        // MAP_FIXED replaces nothing else. 2. Nothing refers to the bytes there: they could not be
        // touched.
        let mapped = unsafe {
            mmap(
                Some(address),
                length,
                ProtFlags::PROT_NONE,
                MapFlags::MAP_SHARED | MapFlags::MAP_FIXED | MapFlags::MAP_NORESERVE,
                &extents.file,
                offset as i64,
            )
        };
        mapped.map(drop).map_err(|_| codes::OUT_OF_MEMORY)
    }

    /// Lets mapped addresses be touched.
    ///
    /// # Safety
    /// 1. The range has been mapped by [`Store::map`].
    pub(crate) unsafe fn open(&mut self, address: u64, bytes: u64) -> Result<(), Refused> {
        if !self.has_bytes() {
            return Ok(());
        }
        let Some(start) = NonNull::new(address as *mut _) else { return Err(codes::INVALID_VALUE) };
        // SAFETY: 1. The pages are mappings of this store's, by the caller's word, and more rights
        // take nothing from anybody.
        let opened = unsafe {
            mprotect(start, pages(bytes) as usize, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
        };
        opened.map_err(|_| codes::OUT_OF_MEMORY)
    }

    /// Takes what lies behind addresses away, wherever something does; they stay reserved.
    ///
    /// # Safety
    /// 1. The range lies in one that [`Store::reserve`] answered with, and no work of the simulated
    ///    GPU holds a reference into it.
    pub(crate) unsafe fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), Refused> {
        if !self.has_bytes() {
            return Ok(());
        }
        let (Some(address), Some(length)) =
            (NonZeroUsize::new(address as usize), NonZeroUsize::new(pages(bytes) as usize))
        else {
            return Err(codes::INVALID_VALUE);
        };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED | MapFlags::MAP_NORESERVE;
        // SAFETY: 1. The range lies inside a reservation of this store's, by the caller's word, so
        // MAP_FIXED replaces only that. 2. Nobody holds a reference into it, likewise.
        let covered = unsafe { mmap_anonymous(Some(address), length, ProtFlags::PROT_NONE, flags) };
        covered.map(drop).map_err(|_| codes::OUT_OF_MEMORY)
    }

    /// Copies bytes; nothing without them. The ranges may overlap.
    ///
    /// # Safety
    /// 1. With bytes, `from` is readable and `to` writable for `bytes`.
    /// 2. Nobody else touches `to`, or writes `from`, meanwhile.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: u64) {
        if self.has_bytes() && bytes > 0 {
            // SAFETY: 1. and 2. are the caller's; `ptr::copy` allows overlap and alignment is 1.
            unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes as usize) }
        }
    }

    /// A copy of bytes; none without them.
    ///
    /// # Safety
    /// 1. With bytes, the range is readable, and nobody writes it meanwhile.
    pub(crate) unsafe fn read(&self, from: u64, bytes: u64) -> Vec<u8> {
        if !self.has_bytes() || bytes == 0 {
            return Vec::new();
        }
        // SAFETY: 1. is the caller's.
        unsafe { std::slice::from_raw_parts(from as *const u8, bytes as usize) }.to_vec()
    }

    /// Fills whole elements; nothing without bytes.
    ///
    /// # Safety
    /// 1. With bytes, `to` is writable for `bytes` and aligned for the element, and nobody else
    ///    touches it meanwhile.
    pub(crate) unsafe fn fill(&self, to: u64, pattern: Pattern, bytes: u64) {
        if !self.has_bytes() || bytes == 0 {
            return;
        }
        let count = (bytes / pattern.bytes()) as usize;
        // SAFETY: 1. is the caller's: so many elements lie in the range.
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

impl Addresses {
    fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let fresh = self.next.checked_next_multiple_of(align)?;
        if let Some(end) = fresh.checked_add(bytes).filter(|&end| end <= LAST_ADDRESS) {
            self.next = end;
            return Some(fresh);
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

/// Address space of this process that cannot be touched.
fn reserve_pages(bytes: u64, align: u64) -> Option<u64> {
    let bytes = pages(bytes);
    let length = NonZeroUsize::new(usize::try_from(bytes.checked_add(align)?).ok()?)?;
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: 1. No address is asked for, so nothing is replaced.
    let start = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }.ok()?;
    let start = start.as_ptr() as u64;
    let aligned = start.next_multiple_of(align);
    // SAFETY: 1. Both are ends of the map that was just made, which nobody has seen.
    unsafe {
        unmap_pages(start, aligned - start);
        unmap_pages(aligned + bytes, start + align - aligned);
    }
    Some(aligned)
}

/// Ends a map, or cuts a part of it off.
///
/// # Safety
/// 1. The range is pages of a map of this module's, and nobody uses it any more.
unsafe fn unmap_pages(address: u64, bytes: u64) {
    if let Some(start) = NonNull::new(address as *mut _).filter(|_| bytes > 0) {
        // SAFETY: 1. is the caller's. A refusal leaves the range mapped, and nothing relies on
        // more.
        let _ = unsafe { munmap(start, bytes as usize) };
    }
}

/// Zeroed memory of the host for [`host_alloc`](crate::HostMemory::host_alloc), pages of its own.
pub(crate) fn host_pages(bytes: u64) -> Option<u64> {
    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    let length = NonZeroUsize::new(usize::try_from(bytes).ok()?)?;
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: 1. No address is asked for, so nothing is replaced.
    let start = unsafe {
        mmap_anonymous(None, length, prot, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE)
    };
    start.ok().map(|start| start.as_ptr() as u64)
}

/// Gives it back.
///
/// # Safety
/// 1. The range came from [`host_pages`] with the same `bytes`, and nobody uses it any more.
pub(crate) unsafe fn free_host_pages(address: u64, bytes: u64) {
    // SAFETY: 1. is the caller's.
    unsafe { unmap_pages(address, pages(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_mapped_twice_is_the_same_bytes() {
        let mut store = Store::bytes().unwrap();
        let (size, align) = (2 << 20, 2 << 20);
        let (a, b) = (store.reserve(size, align).unwrap(), store.reserve(size, align).unwrap());
        assert!(a.is_multiple_of(align) && b.is_multiple_of(align));
        let extent = store.extent(size).unwrap();
        for address in [a, b] {
            // SAFETY: 1. The range is reserved and empty, and then mapped.
            unsafe {
                store.map(address, size, extent).unwrap();
                store.open(address, size).unwrap();
            }
        }
        let mut back = [0_u8; 8];
        // SAFETY: 1. Both ranges are mapped and open, and `back` is 8 bytes. 2. Nobody else is
        // here.
        unsafe {
            store.fill(a, Pattern::Byte(0x5a), size);
            store.copy(back.as_mut_ptr() as u64, b + size - 8, 8);
        }
        assert_eq!(back, [0x5a; 8]);
        // SAFETY: 1. Both came from `reserve` and are done with.
        unsafe {
            store.release(a, size);
            store.release(b, size);
        }
    }

    #[test]
    fn symbolic_addresses_come_back_only_when_all_others_are_gone() {
        let mut store = Store::symbolic();
        let half = (LAST_ADDRESS - FIRST_ADDRESS) / 2;
        let first = store.reserve(half, 1 << 21).unwrap();
        // SAFETY: 1. It came from `reserve` and has nothing behind it.
        unsafe { store.release(first, half) };
        let second = store.reserve(half, 1 << 21).unwrap();
        assert_ne!(first, second);
        assert_eq!(store.reserve(1 << 21, 1 << 21), Ok(first));
        assert_eq!(store.reserve(half, 1 << 21), Err(codes::OUT_OF_MEMORY));
    }
}
