//! Tests of the guarantees of an arena.

use allocator_api2::{
    alloc::{Allocator, Global},
    boxed::Box,
    vec::Vec,
};
use aquifer_adapters::{Arena, ArenaSettings, CountingAllocator, Frames, Limit, OnReset, Owns};
use aquifer_core::Budget;
use hashbrown::HashMap;
use std::{
    alloc::Layout,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
};

#[test]
fn an_arena_takes_no_memory_before_its_first_nonempty_allocation() {
    let below = CountingAllocator::new(Global);
    let arena = Arena::new_in(&below);
    arena.alloc(());
    let nothing = arena.alloc_slice_copy::<u64>(&[]);
    assert!(nothing.as_ptr().is_aligned());
    arena.alloc_str("");
    assert_eq!(below.stats().allocations, 0);
    arena.alloc(1u8);
    assert_eq!(below.stats().allocations, 1);
}

#[test]
fn values_stay_where_and_what_they_are() {
    let arena =
        Arena::with_settings_in(ArenaSettings::new().first_chunk(64).max_chunk(256), Global);
    let numbers: std::vec::Vec<&mut u64> = (0..100).map(|i| arena.alloc(i)).collect();
    let slice = arena.alloc_slice_fill_with(50, |i| i as u32 * 3);
    let text = arena.alloc_str("héllo");
    let copy = arena.alloc_slice_copy(&[1.5f64, 2.5]);
    assert!(numbers.iter().enumerate().all(|(i, n)| **n == i as u64));
    assert!(slice.iter().enumerate().all(|(i, n)| *n == i as u32 * 3));
    assert_eq!((&*text, &*copy), ("héllo", &[1.5, 2.5][..]));
}

#[test]
fn chunks_double_up_to_the_maximum_and_a_large_request_gets_its_own() {
    let below = CountingAllocator::new(Global);
    let arena =
        Arena::with_settings_in(ArenaSettings::new().first_chunk(128).max_chunk(512), &below);
    let mut sizes = std::vec::Vec::new();
    let mut before = 0;
    for _ in 0..200 {
        arena.alloc([0u8; 16]);
        let live = below.stats().live;
        if live != before {
            sizes.push(live - before);
            before = live;
        }
    }
    assert_eq!(sizes, [128, 256, 512, 512, 512, 512, 512, 512]);
    arena.alloc([0u8; 4000]);
    assert_eq!(below.stats().live - before, 4000);
}

#[test]
fn the_limit_holds_to_the_byte() {
    let budget = Budget::new("below", u64::MAX);
    let settings = ArenaSettings::new().first_chunk(64).max_chunk(1 << 20).limit(1000);
    let arena = Arena::with_settings_in(settings, Limit::new(Global, budget.clone()));
    let mut taken = 0;
    while arena.try_alloc([0u8; 8]).is_ok() {
        taken += 8;
    }
    assert_eq!(taken, 1000, "chunks shrink to fit the limit");
    assert_eq!(budget.peak(), 1000);
    assert!(arena.try_alloc(()).is_ok());
    drop(arena);
    assert_eq!(budget.used(), 0);
}

#[test]
fn when_the_allocator_below_is_short_chunks_get_smaller() {
    let budget = Budget::new("below", 1000);
    let settings = ArenaSettings::new().first_chunk(800).max_chunk(1 << 20);
    let mut arena = Arena::with_settings_in(settings, Limit::new(Global, budget));
    assert!(arena.try_alloc([0u8; 800]).is_ok());
    assert!(arena.try_alloc([0u8; 100]).is_ok());
    assert!(arena.try_alloc([0u8; 101]).is_err());
    // Spare chunks are returned for a request that none of them fits.
    assert!(arena.reset().is_ok());
    assert!(arena.try_alloc([0u8; 900]).is_ok());
}

#[test]
fn a_spare_that_is_too_small_makes_room_under_the_limit() {
    let settings = ArenaSettings::new().first_chunk(64).max_chunk(64).limit(1024);
    let mut arena = Arena::with_settings_in(settings, Global);
    arena.scope(|scope| {
        for _ in 0..16 {
            scope.alloc([0u8; 64]);
        }
        assert!(scope.try_alloc(0u8).is_err());
    });
    assert_eq!(arena.stats().chunks, 16);
    assert!(arena.try_alloc([0u8; 1024]).is_ok());
    assert_eq!(arena.stats().chunks, 1);
}

#[test]
fn the_last_block_grows_shrinks_and_comes_back_in_place() {
    let below = CountingAllocator::new(Global);
    let arena = Arena::with_settings_in(ArenaSettings::new().first_chunk(1 << 12), &below);
    let mut list: Vec<u32, _> = Vec::new_in(&arena);
    list.push(0);
    let start = list.as_ptr();
    for i in 1..1000 {
        list.push(i);
    }
    assert_eq!(list.as_ptr(), start, "no copy while it is the last block");
    list.shrink_to_fit();
    assert_eq!(arena.stats().allocated, 4000);
    drop(list);
    assert_eq!(arena.stats().allocated, 0);
    assert_eq!(arena.stats().high_water, 4096);
    assert_eq!(below.stats().allocations, 1);
}

#[test]
fn a_block_at_the_end_of_a_chunk_does_not_grow_into_the_next_one() {
    // Chunks taken from another arena are adjacent, and each block fills one exactly.
    let below = Arena::with_settings_in(ArenaSettings::new().first_chunk(1 << 12), Global);
    let arena = Arena::with_settings_in(ArenaSettings::new().first_chunk(64).max_chunk(64), &below);
    let full = Layout::from_size_align(64, 16).unwrap();
    let (first, second) = (arena.alloc_layout(full), arena.alloc_layout(full));
    assert_eq!(first.addr().get() + 64, second.addr().get());
    release(&&arena, second, full);
    // The next free byte now follows the first block, but it belongs to another chunk.
    let grown = grow(&&arena, first, full, Layout::from_size_align(65, 16).unwrap()).unwrap();
    assert_ne!(grown, first);
    assert!(arena.stats().chunks == 3 && arena.owns(grown));
}

#[test]
fn alignment_is_kept_up_to_a_page_and_beyond() {
    let arena = Arena::with_settings_in(ArenaSettings::new().first_chunk(64), Global);
    for shift in 0..if cfg!(miri) { 8 } else { 17 } {
        let layout = Layout::from_size_align(3, 1 << shift).unwrap();
        assert!(arena.alloc_layout(layout).addr().get().is_multiple_of(1 << shift));
        assert!(
            arena.alloc_layout(Layout::from_size_align(0, 1 << shift).unwrap()).addr().get() >= 1
        );
    }
}

#[test]
fn absurd_requests_are_refused() {
    let arena = Arena::with_settings_in(ArenaSettings::new().limit(1 << 20), Global);
    assert!(
        arena.try_alloc_layout(Layout::from_size_align(isize::MAX as usize, 1).unwrap()).is_err()
    );
    // Miri does not support such alignments.
    let align = if cfg!(miri) { 1 } else { 1 << 40 };
    assert!(arena.try_alloc_layout(Layout::from_size_align(2 << 20, align).unwrap()).is_err());
    assert!(arena.try_alloc_slice_fill_with(usize::MAX, |_| 0u64).is_err());
    assert!(arena.try_alloc(0u8).is_ok());
}

#[test]
fn scopes_nest_and_each_ends_where_it_began() {
    let mut arena =
        Arena::with_settings_in(ArenaSettings::new().first_chunk(64).max_chunk(64), Global);
    arena.alloc(7u64);
    let before = arena.stats().allocated;
    arena.scope(|outer| {
        let kept = outer.alloc_slice_copy(&[1u8; 100]);
        for round in 0..3u8 {
            let sum: u32 = outer.scope(|inner| {
                let more = inner.alloc_slice_fill_with(200, |_| round);
                inner.scope(|innermost| innermost.alloc_str("deep").len());
                kept[0] += 1;
                more.iter().map(|&n| u32::from(n)).sum()
            });
            assert_eq!(sum, 200 * u32::from(round));
        }
        assert_eq!((kept[0], kept[99]), (4, 1));
    });
    assert_eq!(arena.stats().allocated, before);
}

#[test]
fn a_loop_of_scopes_settles() {
    let below = CountingAllocator::new(Global);
    let mut arena =
        Arena::with_settings_in(ArenaSettings::new().first_chunk(64).max_chunk(256), &below);
    for _ in 0..20 {
        arena.scope(|scope| {
            for size in [10, 300, 20, 900, 30] {
                scope.alloc_slice_copy(&[1u8; 900][..size]);
            }
        });
    }
    let settled = below.stats().allocations;
    for _ in 0..20 {
        arena.scope(|scope| {
            for size in [10, 300, 20, 900, 30] {
                scope.alloc_slice_copy(&[1u8; 900][..size]);
            }
        });
    }
    assert_eq!(below.stats().allocations, settled, "spares serve it");
}

#[test]
fn a_scope_that_unwinds_ends_too() {
    let mut arena = Arena::new();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        arena.scope(|scope| {
            scope.alloc([0u8; 1000]);
            scope.scope(|inner| {
                inner.alloc([0u8; 100_000]);
                panic!("on purpose");
            });
        });
    }));
    assert!(outcome.is_err());
    assert_eq!(arena.stats().allocated, 0);
}

#[test]
fn a_vector_of_a_scope_is_a_vector() {
    let most = if cfg!(miri) { 50 } else { 500u64 };
    let mut arena = Arena::new();
    let total = arena.scope(|scope| {
        let mut map = HashMap::new_in(&*scope);
        for i in 0..most {
            map.insert(i, i * i);
        }
        map.retain(|key, _| key % 2 == 0);
        map.values().sum::<u64>()
    });
    assert_eq!(total, (0..most).filter(|i| i % 2 == 0).map(|i| i * i).sum());
}

#[test]
fn reset_keeps_the_largest_chunk_and_returns_the_others() {
    let below = CountingAllocator::new(Global);
    let mut arena =
        Arena::with_settings_in(ArenaSettings::new().first_chunk(64).max_chunk(1024), &below);
    for _ in 0..100 {
        arena.alloc([0u8; 40]);
    }
    assert!(arena.stats().chunks > 3);
    assert_eq!(arena.reset(), Ok(()));
    assert_eq!(
        (arena.stats().chunks, arena.stats().capacity, arena.stats().allocated),
        (1, 1024, 0)
    );
    assert_eq!(below.stats().live, 1024);
    assert!(arena.stats().high_water >= 4000);
    let taken = below.stats().allocations;
    arena.alloc([0u8; 1024]);
    assert_eq!(below.stats().allocations, taken, "the chunk that was kept serves");
}

#[test]
fn a_reset_that_keeps_all_takes_nothing_for_the_same_again() {
    let below = CountingAllocator::new(Global);
    let settings = ArenaSettings::new().first_chunk(64).max_chunk(1024).on_reset(OnReset::KeepAll);
    let mut arena = Arena::with_settings_in(settings, &below);
    let mut settled = None;
    for _ in 0..5 {
        (0..100).for_each(|_| assert_eq!(arena.alloc([1u8; 40]).len(), 40));
        let chunks = arena.stats().chunks;
        assert_eq!(arena.reset(), Ok(()));
        assert_eq!((arena.stats().chunks, arena.stats().allocated), (chunks, 0));
        let taken = below.stats().allocations;
        assert_eq!((*settled.get_or_insert(taken), below.stats().frees), (taken, 0));
    }
}

#[test]
fn a_reset_that_merges_settles_in_one_chunk_however_small_chunks_are() {
    let below = CountingAllocator::new(Global);
    let settings = ArenaSettings::new().first_chunk(64).max_chunk(256).on_reset(OnReset::Merge);
    let mut arena = Arena::with_settings_in(settings, &below);
    let fill =
        |arena: &Arena<_>| (0..100).for_each(|_| assert_eq!(arena.alloc([1u8; 40]).len(), 40));
    fill(&arena);
    let capacity = arena.stats().capacity;
    assert!(arena.stats().chunks > 10);
    assert_eq!(arena.reset(), Ok(()));
    assert_eq!(
        below.stats().live,
        0,
        "returned before as much is taken again: a limit never sees both"
    );
    fill(&arena);
    assert_eq!((arena.stats().chunks, arena.stats().capacity), (1, capacity));
    for _ in 0..3 {
        assert_eq!(arena.reset(), Ok(()));
        fill(&arena);
    }
    assert_eq!(below.stats().live, capacity as u64);
    let taken = below.stats().allocations;
    assert_eq!(arena.reset(), Ok(()));
    fill(&arena);
    assert_eq!(below.stats().allocations, taken);
}

#[test]
fn a_merged_chunk_that_cannot_be_had_in_one_piece_comes_in_several() {
    let settings = ArenaSettings::new().first_chunk(256).max_chunk(256).on_reset(OnReset::Merge);
    let budget = Budget::new("below", 1 << 20);
    let mut arena = Arena::with_settings_in(settings, Limit::new(Global, budget.clone()));
    (0..8).for_each(|_| assert_eq!(arena.alloc([0u8; 256]).len(), 256));
    assert_eq!(arena.reset(), Ok(()));
    let elsewhere = budget.charge((1 << 20) - 1000);
    assert!(arena.try_alloc([0u8; 256]).is_ok());
    assert_eq!((elsewhere.is_ok(), arena.stats().capacity), (true, 512), "half of the half");
}

#[test]
fn the_high_water_mark_is_the_most_at_once_whatever_came_back() {
    let mut arena = Arena::with_settings_in(
        ArenaSettings::new().first_chunk(1 << 10).max_chunk(1 << 10),
        Global,
    );
    drop(Box::new_in([0u8; 900], &arena));
    arena.alloc([0u8; 500]);
    assert_eq!((arena.stats().allocated, arena.stats().high_water), (500, 900));
    drop(Box::new_in([0u8; 300], &arena));
    arena.alloc([0u8; 1000]);
    assert_eq!((arena.stats().allocated, arena.stats().high_water), (1500, 1500));
    arena.scope(|scope| drop(Box::new_in([0u8; 24], &*scope)));
    assert_eq!(arena.stats().high_water, 1524);
    assert_eq!(arena.reset(), Ok(()));
    arena.alloc(1u8);
    assert_eq!((arena.stats().allocated, arena.stats().high_water), (1, 1524));
}

#[test]
fn nothing_in_it_is_dropped_but_collections_over_it_drop_what_they_hold() {
    struct Bell<'b>(&'b Cell<u32>);
    impl Drop for Bell<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let rung = Cell::new(0);
    let arena = Arena::new();
    arena.alloc(Bell(&rung));
    drop(Box::new_in(Bell(&rung), &arena));
    drop(arena);
    assert_eq!(rung.get(), 1);
}

#[test]
fn a_fill_that_unwinds_or_uses_the_arena_harms_nothing() {
    let arena = Arena::new();
    let nested = arena.alloc_slice_fill_with(10, |i| arena.alloc(i));
    assert!(nested.iter().enumerate().all(|(i, n)| **n == i));
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        arena.alloc_slice_fill_with(10, |i| if i == 5 { panic!("on purpose") } else { i });
    }));
    assert!(outcome.is_err());
    assert_eq!(*arena.alloc(3), 3);
}

#[test]
fn it_moves_between_threads_and_between_places() {
    let arena = Arena::new();
    let text = arena.alloc_str("before").as_ptr();
    let moved = std::thread::spawn(move || {
        arena.alloc(1);
        arena
    });
    let arena = std::boxed::Box::new(moved.join().unwrap());
    assert_eq!(arena.alloc_str("after"), "after");
    assert!(arena.owns(NonNull::new(text.cast_mut()).unwrap()));
}

#[test]
fn it_owns_its_blocks_and_no_other() {
    let (ours, theirs) = (Arena::new(), Arena::new());
    let block = ours.alloc_layout(Layout::new::<u64>());
    assert!(ours.owns(block) && !theirs.owns(block));
    theirs.alloc(0u64);
    assert!(!theirs.owns(block));
}

#[test]
fn frames_come_round_empty() {
    let below = CountingAllocator::new(Global);
    let mut frames = Frames::new_in(3, &below);
    let mut places = std::vec::Vec::new();
    for step in 0..9u8 {
        let frame = frames.next().unwrap();
        assert_eq!(frame.arena().stats().allocated, 0);
        let mut batch = Vec::new_in(frame.arena());
        batch.resize(100, step);
        places.push(batch.as_ptr().addr());
    }
    assert_eq!(places[..3], places[3..6]);
    assert_eq!(below.stats().allocations, 3);
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn grow<A: Allocator>(
    allocator: &A,
    block: NonNull<u8>,
    old: Layout,
    new: Layout,
) -> Option<NonNull<u8>> {
    // SAFETY: the tests pass blocks of this allocator with their layouts, and larger new ones.
    unsafe { allocator.grow(block, old, new) }.ok().map(NonNull::cast)
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn release<A: Allocator>(allocator: &A, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the tests pass blocks of this allocator with their layouts, and forget them.
    unsafe { allocator.deallocate(block, layout) };
}

#[test]
fn chunks_kept_by_a_reset_are_returned_for_a_block_that_needs_the_whole_limit() {
    let below = CountingAllocator::new(Global);
    let settings = ArenaSettings::new().first_chunk(1024).limit(2048);
    let mut arena = Arena::with_settings_in(settings, &below);
    arena.alloc([1u8; 1000]);
    assert_eq!(arena.reset(), Ok(()));
    assert_eq!((arena.stats().chunks, below.stats().live), (1, 1024));
    let start = arena.mark();
    // This allocates a block and frees it, which must not be lost either.
    drop(Box::new_in([1u8; 1010], &arena));
    arena.alloc([2u8; 2048]);
    assert_eq!(
        (arena.stats().chunks, below.stats().live, arena.stats().high_water),
        (1, 2048, 2048)
    );
    assert!(arena.try_alloc(0u8).is_err());
    #[expect(unsafe_code, reason = "rewinds")]
    // SAFETY: the mark is this arena's, nothing was reset since, and no block allocated since is
    // used any more.
    unsafe {
        arena.rewind(start);
    }
    assert_eq!((arena.stats().allocated, arena.try_alloc([3u8; 2048]).is_ok()), (0, true));
}

#[test]
fn an_arena_that_is_reset_after_each_few_blocks_settles_in_one_chunk() {
    for on_reset in [OnReset::KeepLargest, OnReset::KeepAll, OnReset::Merge] {
        let below = CountingAllocator::new(Global);
        let settings = ArenaSettings::new().first_chunk(256).on_reset(on_reset);
        let mut arena = Arena::with_settings_in(settings, &below);
        let mut places = std::vec::Vec::new();
        for _ in 0..5 {
            let first = arena.alloc([0u64; 4]);
            places.push(std::ptr::from_ref(first).addr());
            arena.alloc([0u64; 4]);
            assert_eq!(
                (arena.reset(), arena.stats().allocated, arena.stats().high_water),
                (Ok(()), 0, 64)
            );
        }
        assert!(places.iter().all(|place| *place == places[0]));
        assert_eq!((below.stats().allocations, below.stats().frees), (1, 0));
    }
}

#[test]
fn a_scope_whose_first_chunk_was_replaced_rewinds_to_nothing() {
    let settings = ArenaSettings::new().first_chunk(128).max_chunk(128);
    let mut arena = Arena::with_settings_in(settings, Global);
    arena.alloc(0u8);
    assert_eq!(arena.reset(), Ok(()));
    for _ in 0..3 {
        arena.scope(|scope| {
            scope.alloc([1u8; 300]); // more than the chunk that the reset kept
            scope.alloc([2u8; 100]); // and now that one again
        });
        assert_eq!(arena.stats().allocated, 0);
    }
}

#[test]
fn chunks_that_cannot_be_allocated_are_requested_smaller() {
    for bytes in [usize::MAX, usize::MAX / 2, isize::MAX as usize - 3] {
        let settings = ArenaSettings::new().first_chunk(bytes).max_chunk(bytes);
        let arena =
            Arena::with_settings_in(settings, Limit::new(Global, Budget::new("arena", 1 << 16)));
        assert_eq!(arena.try_alloc(7u64).map(|seven| *seven).ok(), Some(7));
        assert!(arena.try_alloc_slice_copy(&[0u8; 1 << 12]).is_ok());
    }
}
