//! The address range of all region mappings.
//!
//! The free path of every routed allocation checks, on any thread, whether an address belongs to a
//! region. So the check must be one comparison without a lock.
//!
//! - The first region reserves the window, a range of addresses for the process. The reservation
//!   takes no memory.
//! - Regions are mapped inside the window, with a gap between any two, so they are never adjacent.
//! - Released ranges stay reserved, so no foreign mapping ever lies in the window. The exception is
//!   a forked child process, which inherits neither regions nor pools.
//! - Memory that the driver allocated lies outside the window. Such regions are few and are
//!   recorded in a separate table.

use crate::kernel::{Kernel, Span};
use aquifer_core::SystemError;
use nix::libc;
use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// The alignment of regions, and the minimum gap between two: the size of a huge page in bytes.
pub const GRANULE: usize = 2 << 20;

/// The maximum size of the reservation. It is halved repeatedly where the address space is limited.
const LARGEST: usize = 1 << 42;
const SMALLEST: usize = 1 << 30;

/// The reserved window. `LEN` is written last and read first.
static START: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);

/// The free parts of the window. `None` before the reservation.
static FREE: Mutex<Option<FreeRanges>> = Mutex::new(None);

/// Free address ranges: start to length. No two are adjacent.
#[derive(Default)]
struct FreeRanges(BTreeMap<usize, usize>);

impl FreeRanges {
    /// Removes `bytes` bytes that begin at a multiple of `align`. Skipped addresses stay free.
    fn allocate(&mut self, bytes: usize, align: usize) -> Option<usize> {
        // First fit: addresses are plentiful, and low ones keep page tables dense.
        let fits = |(&start, &len): (&usize, &usize)| {
            let skipped = start.checked_next_multiple_of(align)? - start;
            (len >= bytes && len - bytes >= skipped).then_some((start, skipped, len))
        };
        let (first, skipped, len) = self.0.iter().find_map(fits)?;
        self.0.remove(&first);
        let start = first + skipped;
        if skipped > 0 {
            self.0.insert(first, skipped);
        }
        if len - skipped > bytes {
            self.0.insert(start + bytes, len - skipped - bytes);
        }
        debug_assert!(start.is_multiple_of(align), "{start:#x} is not aligned to {align}");
        Some(start)
    }

    /// Inserts `len` free bytes at `start`, coalesced with free neighbours.
    fn insert(&mut self, mut start: usize, mut len: usize) {
        debug_assert!(
            self.0.range(..start + len).next_back().is_none_or(|(&at, &of)| at + of <= start),
            "{len} bytes at {start:#x} are free already"
        );
        if let Some((&before, &bytes)) = self.0.range(..start).next_back()
            && before + bytes == start
        {
            self.0.remove(&before);
            (start, len) = (before, bytes + len);
        }
        if let Some(bytes) = self.0.remove(&(start + len)) {
            len += bytes;
        }
        self.0.insert(start, len);
    }
}

/// Memory that the driver allocated. Each entry holds the number of the first page in the upper 36
/// bits and the number of pages in the lower 28, so that one load reads both. Zero is an empty
/// entry.
static DRIVER_MEMORY: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
/// Number of used entries.
static DRIVER_MEMORY_USED: AtomicUsize = AtomicUsize::new(0);

const PAGE: u64 = 4096;

/// Returns whether an address lies in a region of this process, or in a gap between regions.
///
/// Never blocks. This is one comparison, unless the driver itself has allocated a region. Always
/// `true` for an address of a live region, and always `false` for any other mapping of the process.
#[must_use]
pub fn contains(address: usize) -> bool {
    let len = LEN.load(Ordering::Acquire);
    // Wraps around for lower addresses, which then exceed any length.
    address.wrapping_sub(START.load(Ordering::Relaxed)) < len
        || (DRIVER_MEMORY_USED.load(Ordering::Acquire) > 0 && is_driver_memory(address))
}

/// Returns the bounds of the window, once a region has been created.
///
/// They never change. Memory that the driver allocated lies outside.
///
/// See [`contains`] for an example.
#[must_use]
pub fn bounds() -> Option<Range<usize>> {
    let len = LEN.load(Ordering::Acquire);
    let start = START.load(Ordering::Relaxed);
    (len > 0).then(|| start..start + len)
}

#[cold]
fn is_driver_memory(address: usize) -> bool {
    let page = address as u64 / PAGE;
    DRIVER_MEMORY.iter().any(|entry| {
        let entry = entry.load(Ordering::Acquire);
        page.wrapping_sub(entry >> 28) < entry & ((1 << 28) - 1)
    })
}

fn lock() -> MutexGuard<'static, Option<FreeRanges>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

const fn out_of_addresses() -> SystemError {
    SystemError { call: "mmap", errno: libc::ENOMEM }
}

/// Allocates addresses for a region of `bytes` bytes. They begin at a multiple of `align`, which
/// must be a power of two and a multiple of [`GRANULE`]. The first call reserves the window.
pub(super) fn carve(kernel: &Kernel, bytes: usize, align: usize) -> Result<Span, SystemError> {
    let padded = bytes.checked_next_multiple_of(GRANULE).and_then(|n| n.checked_add(GRANULE));
    let padded = padded.ok_or(out_of_addresses())?;
    let mut free = lock();
    if free.is_none() {
        // Under the lock, so that it happens only once. It takes microseconds.
        let whole = reserve(kernel)?;
        START.store(whole.start, Ordering::Relaxed);
        LEN.store(whole.len, Ordering::Release);
        let mut all = FreeRanges::default();
        all.insert(whole.start, whole.len);
        *free = Some(all);
    }
    let start =
        free.as_mut().and_then(|free| free.allocate(padded, align)).ok_or(out_of_addresses())?;
    Ok(Span { start, len: bytes })
}

fn reserve(kernel: &Kernel) -> Result<Span, SystemError> {
    let mut len = LARGEST;
    loop {
        let wanted = NonZeroUsize::MIN.saturating_add(len - 1);
        match kernel.reserve(wanted) {
            Ok(span) => {
                let start = span.start.next_multiple_of(GRANULE);
                let skipped = start - span.start;
                return Ok(Span { start, len: (span.len - skipped) / GRANULE * GRANULE });
            }
            Err(error) if len <= SMALLEST => return Err(error),
            Err(_) => len /= 2,
        }
    }
}

/// Frees the addresses of a region. Only the reservation may be mapped there.
pub(super) fn release(span: Span) {
    let padded = span.len.next_multiple_of(GRANULE) + GRANULE;
    if let Some(free) = lock().as_mut() {
        free.insert(span.start, padded);
    }
}

/// Records memory that the driver allocated. Returns `false` if it does not begin at a page, or the
/// table is full.
pub(super) fn record_driver_memory(span: Span) -> bool {
    let (start, pages) = (span.start as u64, (span.len as u64).div_ceil(PAGE));
    if !start.is_multiple_of(PAGE) || start / PAGE >= 1 << 36 || pages >= 1 << 28 {
        return false;
    }
    let entry = ((start / PAGE) << 28) | pages;
    let recorded = DRIVER_MEMORY
        .iter()
        .any(|slot| slot.compare_exchange(0, entry, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    if recorded {
        DRIVER_MEMORY_USED.fetch_add(1, Ordering::AcqRel);
    }
    recorded
}

/// Removes the record of memory that the driver allocated.
pub(super) fn remove_driver_memory(span: Span) {
    let entry = ((span.start as u64 / PAGE) << 28) | (span.len as u64).div_ceil(PAGE);
    if DRIVER_MEMORY
        .iter()
        .any(|slot| slot.compare_exchange(entry, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    {
        DRIVER_MEMORY_USED.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_get_distinct_addresses_with_gaps_and_release_them() {
        let kernel = Kernel::new();
        let spans: Vec<Span> =
            [1, GRANULE, GRANULE + 1].map(|n| carve(&kernel, n, GRANULE).unwrap()).into();
        for (i, a) in spans.iter().enumerate() {
            assert!(contains(a.start) && contains(a.end() - 1));
            assert!(a.start.is_multiple_of(GRANULE));
            for b in &spans[i + 1..] {
                assert!(a.end() + GRANULE <= b.start || b.end() + GRANULE <= a.start);
            }
        }
        let stack = 0u8;
        assert!(!contains(&raw const stack as usize) && !contains(0) && !contains(usize::MAX));
        spans.into_iter().for_each(release);
    }

    #[test]
    fn addresses_skipped_for_alignment_stay_available() {
        let mut free = FreeRanges::default();
        let (start, wide) = (5 * GRANULE, 16 * GRANULE);
        free.insert(start, 64 * GRANULE);
        assert_eq!(free.allocate(2 * GRANULE, wide), Some(wide));
        assert_eq!(free.allocate(GRANULE, GRANULE), Some(start), "the part that was skipped");
        assert_eq!(
            free.allocate(40 * GRANULE, wide),
            None,
            "from 32 on there are 37, from 48 on 21"
        );
        free.insert(start, GRANULE);
        free.insert(wide, 2 * GRANULE);
        assert_eq!(free.0, BTreeMap::from([(start, 64 * GRANULE)]), "whole again");
    }

    #[test]
    fn too_large_an_address_range_is_an_error() {
        let kernel = Kernel::new();
        for bytes in [usize::MAX, usize::MAX / 2, LARGEST + 1] {
            assert_eq!(carve(&kernel, bytes, GRANULE).unwrap_err().errno, libc::ENOMEM);
        }
    }

    #[test]
    fn driver_memory_is_contained_while_it_is_recorded() {
        let page = Box::leak(vec![0u8; 8 * 4096].into_boxed_slice()).as_ptr() as usize;
        let span = Span { start: page.next_multiple_of(4096), len: 2 * 4096 };
        assert!(!contains(span.start));
        assert!(record_driver_memory(span));
        assert!(contains(span.start) && contains(span.end() - 1) && !contains(span.end()));
        assert!(!contains(span.start - 1));
        remove_driver_memory(span);
        assert!(!contains(span.start));
        assert!(!record_driver_memory(Span { start: span.start + 1, len: 1 }), "not at a page");
    }
}
