//! The bump engine.

use aquifer_heap::{Bump, Range, StaleMark};
use proptest::prelude::*;

#[test]
fn it_fills_to_the_last_byte_and_returns_the_same_addresses_after_a_reset() {
    let mut bump = Bump::new(Range::new(0x1000, 64));
    let first: Vec<_> = std::iter::from_fn(|| bump.alloc(16, 16)).collect();
    assert_eq!(first, [0x1000, 0x1010, 0x1020, 0x1030]);
    assert_eq!((bump.used(), bump.remaining(), bump.alloc(1, 1)), (64, 0, None));
    bump.reset();
    assert_eq!(std::iter::from_fn(|| bump.alloc(16, 16)).collect::<Vec<_>>(), first);
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let mut bump = Bump::new(Range::new(0x1010, 100));
    let first = bump.alloc(10, 1);
    let before = bump.clone();
    for (bytes, align) in [(0, 1), (91, 1), (1, 3), (1, 0), (u64::MAX, 1), (1, 1 << 63), (60, 64)] {
        assert_eq!(bump.alloc(bytes, align), None, "{bytes} aligned to {align}");
        assert_eq!(bump, before);
    }
    assert_eq!((first, bump.alloc(1, 64)), (Some(0x1010), Some(0x1040)));
}

#[test]
fn a_mark_above_what_is_in_use_or_of_another_range_is_refused() {
    let mut bump = Bump::new(Range::new(0, 100));
    let low = bump.mark();
    assert!(bump.alloc(50, 1).is_some());
    let high = bump.mark();
    assert_eq!(bump.rewind(low), Ok(()));
    assert_eq!(bump.rewind(high), Err(StaleMark { mark: 50, used: 0 }));
    assert!(Bump::new(Range::new(100, 100)).rewind(low).is_err());
    assert_eq!((bump.used(), bump.high_water()), (0, 50));
}

#[test]
fn the_end_of_the_address_space_is_an_end_like_any_other() {
    let mut bump = Bump::new(Range::new(u64::MAX - 15, 100));
    assert_eq!(bump.range().len, 15);
    assert_eq!((bump.alloc(15, 1), bump.alloc(1, 1)), (Some(u64::MAX - 15), None));
    assert!(bump.contains(u64::MAX - 1) && !bump.contains(u64::MAX));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Blocks never overlap, scopes nest, and a rewind is exact.
    #[test]
    fn it_does_as_a_stack_of_blocks_does(
        start in 0..1000u64,
        ops in prop::collection::vec((0..10u8, 1..200u64, 0..8u32), 1..60),
    ) {
        let mut bump = Bump::new(Range::new(start, 2048));
        let mut marks = vec![(bump.mark(), bump.clone())];
        let mut end = start;
        for (op, bytes, shift) in ops {
            match op {
                0..=5 => {
                    let wanted = end.next_multiple_of(1 << shift);
                    let fits = wanted + bytes <= start + 2048;
                    prop_assert_eq!(bump.alloc(bytes, 1 << shift), fits.then_some(wanted));
                    end = if fits { wanted + bytes } else { end };
                }
                6..=7 => marks.push((bump.mark(), bump.clone())),
                _ => {
                    let Some((mark, then)) = marks.pop() else { continue };
                    prop_assert_eq!(bump.rewind(mark), Ok(()));
                    prop_assert_eq!((bump.used(), bump.remaining()), (then.used(), then.remaining()));
                    end = start + bump.used();
                }
            }
            prop_assert_eq!(start + bump.used(), end);
            prop_assert!(bump.high_water() >= bump.used());
        }
    }
}
