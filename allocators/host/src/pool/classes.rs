//! Which size a small request is rounded to.
//!
//! Sizes count in units of 16 bytes. Up to 32 units every size is a class of its own; above, each doubling is cut into
//! sixteen steps, so that a slot is at most a sixteenth longer than what was asked for, and a thirty-second in the mean:
//! pinned memory is dear, and the heap engine's eight steps would waste twice that.
//!
//! ```text
//! units   1  2  3 … 32 | 34 36 38 … 64 | 68 72 76 … 128 | …
//! class   0  1  2 … 31 | 32 33 34 … 47 | 48 49 50 … 63  | …
//! ```
//!
//! A request that is a multiple of a power of two falls into a class that is one as well: below sixteen times that power
//! every multiple is a class, above it every class is a multiple. So alignment needs no classes of its own.

use std::alloc::Layout;

/// Bytes of a unit: what `malloc` aligns to.
const UNIT: usize = 16;
/// Requests of at most so many bytes have a class.
pub(super) const SMALL_MAX: usize = 64 << 10;
/// What slabs begin at a multiple of, and so the largest alignment of a request with a class.
pub(super) const SLAB_ALIGN: u64 = 4096;
/// How many classes there are.
pub(super) const CLASSES: usize = class_of(SMALL_MAX / UNIT) + 1;

const fn class_of(units: usize) -> usize {
    let below = units - 1;
    if below < 16 {
        return below;
    }
    let step = below.ilog2() as usize - 4;
    step * 16 + (below >> step)
}

/// Bytes of a slot of `class`.
pub(super) const fn bytes_of(class: usize) -> usize {
    if class < 16 {
        return (class + 1) * UNIT;
    }
    let step = class / 16 - 1;
    ((class % 16 + 17) << step) * UNIT
}

/// The class of a request; `None` if it is empty, too large, or aligned beyond what slabs are.
#[inline(always)]
pub(super) fn of(layout: Layout) -> Option<usize> {
    let (size, align) = (layout.size(), layout.align());
    if size.wrapping_sub(1) >= SMALL_MAX || align > SLAB_ALIGN as usize {
        return None;
    }
    // A layout is no longer than `isize::MAX` when rounded up to its alignment.
    let rounded = (size + align - 1) & !(align - 1);
    Some(class_of(rounded.div_ceil(UNIT)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_falls_into_the_smallest_class_that_holds_it() {
        assert_eq!((bytes_of(CLASSES - 1), CLASSES), (SMALL_MAX, 144));
        for size in (1..=SMALL_MAX).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let class = of(Layout::from_size_align(size, 1).unwrap()).unwrap();
            assert!(bytes_of(class) >= size, "{size}");
            assert!(class == 0 || bytes_of(class - 1) < size, "{size}");
            assert!((bytes_of(class) - size) * 16 <= size.max(256), "{size}");
        }
    }

    #[test]
    fn an_aligned_request_gets_a_slot_whose_length_is_a_multiple_of_the_alignment() {
        for power in 0..=12 {
            for size in (1..=SMALL_MAX).step_by(if cfg!(miri) { 4001 } else { 37 }) {
                let class = of(Layout::from_size_align(size, 1 << power).unwrap()).unwrap();
                assert!(bytes_of(class).is_multiple_of(1 << power), "{size} at {}", 1 << power);
            }
        }
        for (size, align) in [(0, 16), (SMALL_MAX + 1, 1), (64, 8192)] {
            assert_eq!(of(Layout::from_size_align(size, align).unwrap()), None);
        }
    }
}
