//! Tests of what each wrapper adds, to the byte.

use allocator_api2::{
    alloc::{Allocator, Global},
    boxed::Box,
    vec::Vec,
};
use aquifer_adapters::{Arena, ArenaSettings, CountingAllocator, Fallback, Limit, Tagged};
use aquifer_core::{Budget, Tag, impl_allocator};
use std::{alloc::Layout, cell::Cell, ptr::NonNull, thread};

/// An allocator that returns more than requested, records the current tag, and refuses on request.
#[derive(Default)]
struct Generous {
    refuse: Cell<bool>,
    tag: Cell<Option<Tag>>,
}

const EXTRA: usize = 24;

fn with_extra(layout: Layout) -> Option<Layout> {
    Layout::from_size_align(layout.size() + EXTRA, layout.align()).ok()
}

#[expect(unsafe_code, reason = "implements the allocator traits")]
mod generous {
    use super::*;
    // The bodies below are also expanded for other `Allocator` traits, and `Global` implements this
    // one.
    use allocator_api2::alloc::Allocator as Below;

    impl_allocator! {
        // SAFETY: blocks are the global allocator's, with `EXTRA` bytes more. The requested layout
        // follows from any that fits, since callers here use no size in between.
        unsafe impl [] for Generous {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                self.tag.set(Some(Tag::current()));
                if self.refuse.get() {
                    return Err(AllocError);
                }
                let larger = with_extra(layout).ok_or(AllocError)?;
                Below::allocate(&Global, larger).map_err(|_| AllocError)
            }

            unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                if let Some(larger) = with_extra(layout) {
                    // SAFETY: the block was requested with this layout.
                    unsafe { Below::deallocate(&Global, block, larger) };
                }
            }
        }
    }
}

const KIB: Layout = match Layout::from_size_align(1024, 8) {
    Ok(layout) => layout,
    Err(_) => Layout::new::<u64>(),
};
const TWO_KIB: Layout = match Layout::from_size_align(2048, 8) {
    Ok(layout) => layout,
    Err(_) => Layout::new::<u64>(),
};

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn grow<A: Allocator>(allocator: &A, block: NonNull<u8>) -> Option<NonNull<[u8]>> {
    // SAFETY: the tests pass a live block of `KIB`.
    unsafe { allocator.grow(block, KIB, TWO_KIB) }.ok()
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn shrink<A: Allocator>(allocator: &A, block: NonNull<u8>) -> Option<NonNull<[u8]>> {
    // SAFETY: the tests pass a live block of `TWO_KIB`.
    unsafe { allocator.shrink(block, TWO_KIB, KIB) }.ok()
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn free<A: Allocator>(allocator: &A, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the tests pass a live block of this layout and forget it.
    unsafe { allocator.deallocate(block, layout) };
}

#[test]
fn a_limit_charges_exactly_the_requested_size() {
    let budget = Budget::new("test", 3072);
    let limit = Limit::new(Generous::default(), budget.clone());
    let first = limit.allocate(KIB).unwrap();
    assert_eq!((first.len(), budget.used(), limit.live()), (1024, 1024, 1024));
    let grown = grow(&limit, first.cast()).unwrap();
    assert_eq!((grown.len(), budget.used()), (2048, 2048));
    assert!(limit.allocate(TWO_KIB).is_err(), "one KiB is left");
    let second = limit.allocate_zeroed(KIB).unwrap();
    assert_eq!((budget.used(), budget.remaining()), (3072, 0));
    assert!(limit.allocate(Layout::new::<u8>()).is_err());
    let nothing = limit.allocate(Layout::new::<()>()).unwrap();
    free(&limit, nothing.cast(), Layout::new::<()>());
    let shrunk = shrink(&limit, grown.cast()).unwrap();
    assert_eq!(budget.used(), 2048);
    free(&limit, shrunk.cast(), KIB);
    free(&limit, second.cast(), KIB);
    assert_eq!((budget.used(), budget.peak()), (0, 3072));
}

#[test]
fn a_failure_below_gives_the_charge_back_and_leaves_the_block() {
    let budget = Budget::new("test", 1 << 20);
    let limit = Limit::new(Generous::default(), budget.clone());
    let block = limit.allocate(KIB).unwrap();
    limit.inner().refuse.set(true);
    assert!(limit.allocate(KIB).is_err());
    assert!(grow(&limit, block.cast()).is_none());
    assert_eq!(budget.used(), 1024);
    free(&limit, block.cast(), KIB);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_request_beyond_the_limit_never_reaches_the_allocator_below() {
    let below = CountingAllocator::new(Global);
    let limit = Limit::new(&below, Budget::new("test", 100));
    assert!(limit.allocate(KIB).is_err());
    assert_eq!((below.stats().allocations, below.stats().failures), (0, 0));
}

#[test]
fn a_leaked_block_stays_charged_when_its_limit_is_gone() {
    let budget = Budget::new("test", 1 << 20);
    let limit = Limit::new(Generous::default(), budget.clone());
    let leaked = limit.allocate(KIB).unwrap();
    drop(limit);
    assert_eq!(budget.used(), 1024);
    free(&Generous::default(), leaked.cast(), KIB);
}

#[test]
fn limits_share_a_budget_and_lose_no_byte_over_threads() {
    let budget = Budget::new("test", 64 << 10);
    let limit = Limit::new(Global, budget.clone());
    thread::scope(|threads| {
        for seed in 0..4usize {
            let limit =
                if seed % 2 == 0 { limit.clone() } else { Limit::new(Global, budget.clone()) };
            let budget = &budget;
            threads.spawn(move || {
                let mut kept = std::vec::Vec::new();
                for round in 0..if cfg!(miri) { 20 } else { 2000 } {
                    let mut vector: Vec<u8, _> = Vec::new_in(&limit);
                    if vector.try_reserve_exact((seed * 37 + round * 13) % 4000 + 1).is_ok() {
                        kept.push(vector);
                    }
                    assert!(budget.used() <= 64 << 10);
                    if round % 3 == 0 {
                        kept.clear();
                    }
                }
            });
        }
    });
    assert_eq!((budget.used(), limit.live()), (0, 0));
    assert!(budget.peak() <= 64 << 10);
}

#[test]
fn counted_counts_what_was_asked_for_and_what_failed() {
    let counted = CountingAllocator::new(Generous::default());
    let block = counted.allocate(KIB).unwrap();
    let grown = grow(&counted, block.cast()).unwrap();
    counted.inner().refuse.set(true);
    assert!(counted.allocate(KIB).is_err() && counted.allocate_zeroed(KIB).is_err());
    counted.inner().refuse.set(false);
    let stats = counted.stats();
    assert_eq!(
        (stats.live, stats.requested, stats.blocks, stats.allocations, stats.failures),
        (2048, 2048, 1, 1, 2)
    );
    let shrunk = shrink(&counted, grown.cast()).unwrap();
    free(&counted, shrunk.cast(), KIB);
    let stats = counted.stats();
    assert_eq!((stats.live, stats.peak_live, stats.blocks, stats.frees), (0, 2048, 0, 1));
}

#[test]
fn clones_count_together_over_threads() {
    let counted = CountingAllocator::new(Global);
    let rounds = if cfg!(miri) { 10 } else { 1000 };
    thread::scope(|threads| {
        for _ in 0..4 {
            let counted = counted.clone();
            threads.spawn(move || {
                for _ in 0..rounds {
                    drop(Box::new_in([0u8; 100], &counted));
                }
            });
        }
    });
    let stats = counted.stats();
    assert_eq!((stats.live, stats.allocations, stats.frees), (0, 4 * rounds, 4 * rounds));
    assert!((100..=400).contains(&stats.peak_live));
}

#[test]
fn a_tagged_allocator_shows_its_tag_below_and_restores_the_scope() {
    let (ours, theirs) = (Tag::named("wrappers-ours"), Tag::named("wrappers-theirs"));
    let tagged = Tagged::new(Generous::default(), ours);
    aquifer_core::tagged(theirs, || {
        let block = tagged.allocate(KIB).unwrap();
        assert_eq!(tagged.inner().tag.get(), Some(ours));
        assert_eq!(Tag::current(), theirs);
        free(&tagged, block.cast(), KIB);
    });
}

#[test]
fn a_fallback_returns_each_block_to_its_owner_and_moves_what_the_first_cannot_grow() {
    let arena = Arena::with_settings_in(ArenaSettings::new().limit(1500), Global);
    let second = CountingAllocator::new(Global);
    let both = Fallback::new(&arena, &second);
    let first = both.allocate(KIB).unwrap();
    fill(first.cast());
    assert_eq!((arena.stats().allocated, second.stats().live), (1024, 0));
    let moved = grow(&both, first.cast()).unwrap();
    assert_eq!(
        (arena.stats().allocated, second.stats().live),
        (0, 2048),
        "moved, and the first has it back"
    );
    assert!(filled(moved.cast()));
    let small = both.allocate(KIB).unwrap();
    assert_eq!(arena.stats().allocated, 1024, "the first is still asked first");
    let shrunk = shrink(&both, moved.cast()).unwrap();
    assert!(filled(shrunk.cast()));
    assert_eq!(second.stats().live, 1024, "it stays with its owner");
    free(&both, shrunk.cast(), KIB);
    free(&both, small.cast(), KIB);
    assert_eq!((arena.stats().allocated, second.stats().live), (0, 0));
}

#[test]
fn a_fallback_that_both_refuse_leaves_the_block() {
    let arena = Arena::with_settings_in(ArenaSettings::new().limit(1500), Global);
    let both = Fallback::new(&arena, Limit::new(Global, Budget::new("test", 100)));
    let block = both.allocate(KIB).unwrap();
    fill(block.cast());
    assert!(grow(&both, block.cast()).is_none());
    assert!(filled(block.cast()));
    free(&both, block.cast(), KIB);
    assert_eq!(arena.stats().allocated, 0);
}

#[test]
fn blocks_of_no_bytes_go_to_neither_side_of_a_fallback() {
    let (first, second) = (CountingAllocator::new(Global), CountingAllocator::new(Global));
    let arena = Arena::new_in(&first);
    let both = Fallback::new(&arena, &second);
    let empty: Box<[u8], _> = Vec::new_in(&both).into_boxed_slice();
    let mut vector: Vec<u8, _> = Vec::new_in(&both);
    vector.push(1);
    vector.clear();
    vector.shrink_to_fit();
    drop((empty, vector));
    assert_eq!((second.stats().allocations, second.stats().frees), (0, 0));
}

#[expect(unsafe_code, reason = "writes a block")]
fn fill(block: NonNull<u8>) {
    // SAFETY: a live block of at least 1024 bytes.
    unsafe { block.write_bytes(0x5A, 1024) };
}

#[expect(unsafe_code, reason = "reads a block")]
fn filled(block: NonNull<u8>) -> bool {
    // SAFETY: a live block of at least 1024 bytes, which `fill` has written.
    unsafe { NonNull::slice_from_raw_parts(block, 1024).as_ref() }.iter().all(|&byte| byte == 0x5A)
}
