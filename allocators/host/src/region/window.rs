//! The address range of all region mappings.
//!
//! A route of the program's allocator has to tell by one comparison whether an address belongs to a
//! region.
//!
//! - The first region reserves the window, a range of addresses for the process. The reservation
//!   takes no memory.
//! - Regions are mapped inside the window, with a gap between any two, so they are never adjacent.
//! - Released ranges stay reserved, so no foreign mapping ever lies in the window. The exception is
//!   a forked child process, which inherits neither regions nor pools.
//! - Memory that the driver allocated lies outside the window.

use crate::kernel::{Kernel, Span};
use aquifer_core::SystemError;
use aquifer_heap::{Config, Heap, Range};
use nix::libc;
use std::{
    num::NonZeroUsize,
    ops,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
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

/// The window's addresses, of which blocks with a gap behind each are allocated. `None` before the
/// reservation.
static ADDRESSES: Mutex<Option<Heap>> = Mutex::new(None);

/// The settings of [`ADDRESSES`].
const HEAP: Config = Config { unit: UNIT, page: UNIT, grain: UNIT, small_max: 0 };
const UNIT: u64 = GRANULE as u64;

/// Returns the bounds of the window, once a region has been created.
///
/// They never change. Memory that the driver allocated lies outside.
#[must_use]
pub fn bounds() -> Option<ops::Range<usize>> {
    let len = LEN.load(Ordering::Acquire);
    let start = START.load(Ordering::Relaxed);
    (len > 0).then(|| start..start + len)
}

fn lock() -> MutexGuard<'static, Option<Heap>> {
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

const fn out_of_addresses() -> SystemError {
    SystemError { call: "mmap", errno: libc::ENOMEM }
}

/// Allocates addresses for a region of `bytes` bytes. They begin at a multiple of [`GRANULE`]. The
/// first call reserves the window.
pub(super) fn carve(kernel: &Kernel, bytes: usize) -> Result<Span, SystemError> {
    let padded = bytes.checked_next_multiple_of(GRANULE).and_then(|n| n.checked_add(GRANULE));
    let padded = padded.ok_or(out_of_addresses())?;
    let mut addresses = lock();
    if addresses.is_none() {
        // Under the lock, so that it happens only once. It takes microseconds.
        let whole = reserve(kernel)?;
        START.store(whole.start, Ordering::Relaxed);
        LEN.store(whole.len, Ordering::Release);
        let mut heap = Heap::new(HEAP);
        let added = heap.add(Range::new(whole.start as u64, whole.len as u64), 0);
        debug_assert!(added.is_ok(), "{added:?}");
        *addresses = Some(heap);
    }
    let block = addresses.as_mut().and_then(|heap| heap.alloc(padded as u64, UNIT));
    Ok(Span { start: block.ok_or(out_of_addresses())?.address as usize, len: bytes })
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
    if let Some(heap) = lock().as_mut() {
        let freed = heap.block_at(span.start as u64).and_then(|block| heap.free_block(&block, 0));
        debug_assert!(freed.is_ok(), "{freed:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_get_distinct_addresses_with_gaps_and_release_them() {
        let kernel = Kernel::new();
        let spans: Vec<Span> = [1, GRANULE, GRANULE + 1].map(|n| carve(&kernel, n).unwrap()).into();
        for (i, a) in spans.iter().enumerate() {
            let window = bounds().unwrap();
            assert!(window.contains(&a.start) && window.contains(&(a.end() - 1)));
            assert!(a.start.is_multiple_of(GRANULE));
            for b in &spans[i + 1..] {
                assert!(a.end() + GRANULE <= b.start || b.end() + GRANULE <= a.start);
            }
        }
        spans.into_iter().for_each(release);
    }

    #[test]
    fn too_large_an_address_range_is_an_error() {
        let kernel = Kernel::new();
        for bytes in [usize::MAX, usize::MAX / 2, LARGEST + 1] {
            assert_eq!(carve(&kernel, bytes).unwrap_err().errno, libc::ENOMEM);
        }
    }
}
