//! Size classes: the size that a small or medium request is rounded up to. They are those of
//! [`aquifer_heap::size_class`], with more steps than the heap's own slabs have.
//!
//! Sizes count in units of a cache line. Threads that write to blocks of one line slow each other
//! down: with units of 16 bytes cache-scratch took 4.6 times as long as in mimalloc, and with these
//! 1.0. Up to 32 units every size is its own class. Above, each doubling is divided into sixteen
//! steps, so that a slot is at most a sixteenth larger than the request, 2.1 % on average. The heap
//! engine's eight steps would waste twice as much pinned memory.
//!
//! ```text
//! units   1  2  3 … 32 | 34 36 38 … 64 | 68 72 76 … 128 | …
//! class   0  1  2 … 31 | 32 33 34 … 47 | 48 49 50 … 63  | …
//! ```
//!
//! From 64 KiB to 1 MiB each doubling is divided into 32 steps, and a request gets a single
//! block, 1.05 % larger on average. The rounding lets a thread reuse a freed block for a
//! request of similar size. Random sizes would never be equal without it.
//!
//! A request that is a multiple of a power of two falls into a class whose size is such a multiple
//! too: below sixteen times that power every multiple is a class, and above it every class is a
//! multiple. So alignment needs no classes of its own.

use aquifer_heap::{size_class, units_of_class};
use std::alloc::Layout;

/// Bytes of a unit: a cache line.
const UNIT: usize = LINE as usize;
/// Maximum bytes of a request that gets a slot of a slab.
pub(super) const SMALL_MAX: usize = 64 << 10;
/// Maximum bytes of a request that has a class.
pub(super) const MEDIUM_MAX: usize = 1 << 20;
/// Alignment of slabs, and the largest alignment of a request with a class.
pub(super) const SLAB_ALIGN: u64 = 4096;
/// Alignment and size granularity of single blocks in bytes: a cache line.
pub(super) const LINE: u64 = 64;
/// Up to [`SMALL_MAX`] each doubling has `1 << SMALL_BITS` classes.
const SMALL_BITS: u32 = 4;
/// Above it `1 << MEDIUM_BITS`, counted in bytes.
const MEDIUM_BITS: u32 = 5;
/// Number of classes in bytes up to [`SMALL_MAX`], which are not used.
const BELOW_MEDIUM: usize = size_class::<MEDIUM_BITS>(SMALL_MAX as u64) + 1;
/// Number of classes whose blocks are slots of slabs. These classes come first.
pub(super) const SLOTTED: usize = small(SMALL_MAX) + 1;
/// Number of all classes.
pub(super) const CLASSES: usize = medium(MEDIUM_MAX) + 1;
/// The classes of single blocks, whose free blocks go to the shared depot.
pub(super) const SHARED: std::ops::Range<usize> = SLOTTED..CLASSES;

/// The classes of all slotted sizes, indexed by units minus one. The lookup is faster than the
/// computation, which takes more than ten instructions.
static SLOTTED_BY_UNITS: [u8; SMALL_MAX / UNIT] = {
    let mut classes = [0; SMALL_MAX / UNIT];
    let mut units = 0;
    while units < classes.len() {
        classes[units] = small((units + 1) * UNIT) as u8;
        units += 1;
    }
    classes
};

/// Returns the class for `bytes`, at least one and at most [`SMALL_MAX`].
const fn small(bytes: usize) -> usize {
    size_class::<SMALL_BITS>(bytes.div_ceil(UNIT) as u64)
}

/// Returns the class for `bytes`, above [`SMALL_MAX`] and at most [`MEDIUM_MAX`].
const fn medium(bytes: usize) -> usize {
    size_class::<MEDIUM_BITS>(bytes as u64) - BELOW_MEDIUM + SLOTTED
}

/// Returns the bytes of a block of `class`.
pub(super) const fn bytes_of(class: usize) -> usize {
    if class >= SLOTTED {
        units_of_class::<MEDIUM_BITS>(class - SLOTTED + BELOW_MEDIUM) as usize
    } else {
        units_of_class::<SMALL_BITS>(class) as usize * UNIT
    }
}

/// Returns the class of a request, or `None` if it is empty, too large, or needs a larger alignment
/// than blocks of its class have.
pub(super) fn of(layout: Layout) -> Option<usize> {
    let medium_sized = (SMALL_MAX + 1..=MEDIUM_MAX).contains(&layout.size());
    if medium_sized && layout.align() as u64 <= LINE {
        Some(medium(layout.size()))
    } else {
        slotted(layout)
    }
}

/// Returns the class of a request that gets a slot, or `None` if it is empty, too large, or needs a
/// larger alignment than slabs have.
#[inline(always)]
pub(super) fn slotted(layout: Layout) -> Option<usize> {
    let (size, align) = (layout.size(), layout.align());
    if size.wrapping_sub(1) >= SMALL_MAX || align > SLAB_ALIGN as usize {
        return None;
    }
    // The offset of the last byte, with the size rounded up to a multiple of the alignment.
    let last = (size - 1) | (align - 1);
    Some(usize::from(SLOTTED_BY_UNITS[last / UNIT % SLOTTED_BY_UNITS.len()]))
}

/// Returns the bytes of a single block for a request of `bytes`: a class's size, or whole cache
/// lines.
pub(super) fn single(bytes: u64) -> Option<u64> {
    if (SMALL_MAX as u64 + 1..=MEDIUM_MAX as u64).contains(&bytes) {
        return Some(bytes_of(medium(bytes as usize)) as u64);
    }
    bytes.checked_next_multiple_of(LINE)
}

/// Returns the class of single blocks of exactly `bytes`, if there is one.
pub(super) fn of_single(bytes: u64) -> Option<usize> {
    let in_range = (SMALL_MAX as u64 + 1..=MEDIUM_MAX as u64).contains(&bytes);
    in_range.then(|| medium(bytes as usize)).filter(|&class| bytes_of(class) as u64 == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_falls_into_the_smallest_class_that_holds_it() {
        assert_eq!((bytes_of(SLOTTED - 1), SLOTTED), (SMALL_MAX, 112));
        assert_eq!((bytes_of(CLASSES - 1), CLASSES), (MEDIUM_MAX, 240));
        for size in (1..=MEDIUM_MAX).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let class = of(Layout::from_size_align(size, 1).unwrap()).unwrap();
            assert!(bytes_of(class) >= size, "{size}");
            assert!(class == 0 || bytes_of(class - 1) < size, "{size}");
            let parts = if size > SMALL_MAX { 32 } else { 16 };
            assert!((bytes_of(class) - size) * parts <= size.max(1024), "{size}");
            assert_eq!(
                class < SLOTTED,
                slotted(Layout::from_size_align(size, 1).unwrap()).is_some()
            );
        }
    }

    #[test]
    fn single_blocks_have_the_size_of_their_class_or_whole_cache_lines() {
        for (bytes, long, class) in [
            (100, 128, None),
            ((64 << 10) + 1, 66 << 10, Some(SLOTTED)),
            (66 << 10, 66 << 10, Some(SLOTTED)),
            (1 << 20, 1 << 20, Some(CLASSES - 1)),
            ((1 << 20) + 1, (1 << 20) + 64, None),
        ] {
            assert_eq!((single(bytes), of_single(long)), (Some(long), class), "{bytes}");
        }
        assert_eq!((of_single((66 << 10) + 64), single(u64::MAX)), (None, None));
    }

    #[test]
    fn an_aligned_request_gets_a_slot_whose_length_is_a_multiple_of_the_alignment() {
        for power in 0..=12 {
            for size in (1..=SMALL_MAX).step_by(if cfg!(miri) { 4001 } else { 37 }) {
                let class = of(Layout::from_size_align(size, 1 << power).unwrap()).unwrap();
                assert!(bytes_of(class).is_multiple_of(1 << power), "{size} at {}", 1 << power);
            }
        }
        for (size, align) in [(0, 16), (SMALL_MAX + 1, 128), (MEDIUM_MAX + 1, 1), (64, 8192)] {
            assert_eq!(of(Layout::from_size_align(size, align).unwrap()), None);
        }
    }
}
