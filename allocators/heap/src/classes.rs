//! Size classes: the sizes that small requests are rounded up to.
//!
//! Sizes are in units. Up to `2 << BITS` units every size is a class. Above, each doubling has
//! `1 << BITS` steps, so that a slot is at most that fraction larger than the request. The slabs of
//! this crate have eight steps, a request at most an eighth too large:
//!
//! ```text
//! units   1  2  3 … 16 | 18 20 22 24 26 28 30 32 | 36 40 44 … 64 | 72 …
//! class   0  1  2 … 15 | 16 17 18 19 20 21 22 23 | 24 25 26 … 31 | 32 …
//! ```
//!
//! A request that is a multiple of a power of two gets a class that is also a multiple of it: below
//! `1 << BITS` times that power every multiple is a class, and above it every class is a multiple.
//! So aligned requests need no classes of their own.
//!
//! The slabs are those of device memory. Pinned pools have classes of their own, with more steps:
//! `allocators/host/src/pool/classes.rs`.

/// The slabs of this crate have `1 << SLAB_BITS` classes in each doubling.
const SLAB_BITS: u32 = 3;

/// Returns the size class of `units` units, which is at least one, with `1 << BITS` classes in each
/// doubling.
///
/// ```
/// use aquifer_heap::{size_class, units_of_class};
/// // Eight steps: 17 units are rounded up to 18.
/// assert_eq!(units_of_class::<3>(size_class::<3>(17)), 18);
/// // Sixteen: they are not.
/// assert_eq!(units_of_class::<4>(size_class::<4>(17)), 17);
/// ```
#[inline]
pub const fn size_class<const BITS: u32>(units: u64) -> usize {
    let below = units - 1;
    if below < 1 << BITS {
        return below as usize;
    }
    let step = below.ilog2() - BITS;
    (((step as u64) << BITS) + (below >> step)) as usize
}

/// Returns the units of a size class. See [`size_class`].
///
/// ```
/// use aquifer_heap::units_of_class;
/// assert_eq!([15, 16, 17].map(units_of_class::<3>), [16, 18, 20]);
/// ```
#[inline]
pub const fn units_of_class<const BITS: u32>(class: usize) -> u64 {
    let steps = 1 << BITS;
    if class < steps {
        return class as u64 + 1;
    }
    let step = class / steps - 1;
    ((class % steps + steps + 1) as u64) << step
}

/// Returns the class of a request for a slot of a slab.
pub(crate) const fn class_of(units: u64) -> usize {
    size_class::<SLAB_BITS>(units)
}

/// Returns the units of a slot of `class`.
pub(crate) const fn units_of(class: usize) -> u64 {
    units_of_class::<SLAB_BITS>(class)
}

/// The right shift of a product with [`reciprocal`].
const SHIFT: u32 = 40;

/// Returns the factor that replaces a division by `units`.
pub(crate) const fn reciprocal(units: u64) -> u64 {
    (1 << SHIFT) / units + 1
}

/// Returns `offset / units`, for the `reciprocal` of `units`.
///
/// Exact while `offset * units` is below 2⁴⁰, since the product of offset and reciprocal is too
/// large by at most one `offset`. A slab is at most 2¹⁷ units long, and its slots at most 2¹⁵.
pub(crate) const fn divide(offset: u64, reciprocal: u64) -> u64 {
    (offset * reciprocal) >> SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: u64 = if cfg!(miri) { 1 << 8 } else { 1 << 12 };

    #[test]
    fn every_size_falls_into_the_smallest_class_that_holds_it() {
        for units in 1..=LARGEST {
            let class = class_of(units);
            assert!(units_of(class) >= units, "{units}");
            assert!(class == 0 || units_of(class - 1) < units, "{units}");
        }
    }

    #[test]
    fn slots_exceed_the_request_by_at_most_an_eighth_and_by_nothing_up_to_sixteen_units() {
        for units in 1..=LARGEST {
            let slot = units_of(class_of(units));
            assert!((slot - units) * 8 <= units, "{units} got {slot}");
            assert!(units > 16 || slot == units);
        }
    }

    #[test]
    fn a_multiple_of_a_power_of_two_gets_a_class_with_the_same_factor() {
        for power in 0..10 {
            for times in 1..=200 {
                let units = times << power;
                assert_eq!(units_of(class_of(units)) % (1 << power), 0, "{units}");
            }
        }
    }

    #[test]
    fn multiplying_by_the_reciprocal_divides() {
        let step = if cfg!(miri) { 997 } else { 1 };
        for class in 0..=class_of(1 << 15) {
            let units = units_of(class);
            for slot in (0..(1u64 << 17) / units).step_by(step) {
                for offset in [slot * units, slot * units + units - 1] {
                    assert_eq!(divide(offset, reciprocal(units)), offset / units);
                }
            }
        }
    }
}
