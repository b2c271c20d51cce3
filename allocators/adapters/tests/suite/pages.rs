//! Tests of the guarantees of an arena of pages.

use crate::support::{Gated, Latch};
use allocator_api2::alloc::Global;
use aquifer_adapters::{CountingAllocator, Limit, PageArena, Pages, pages::PageError};
use aquifer_core::{Budget, MemoryError};
use proptest::prelude::*;
use std::thread;

#[test]
fn an_arena_fills_frees_and_returns_the_same_offset() {
    let arena = PageArena::new(8, 4096).unwrap();
    let mut held: Vec<Pages> = (0..4).map(|_| arena.take(5000).unwrap()).collect();
    assert_eq!(held.iter().map(Pages::offset).collect::<Vec<_>>(), [0, 8192, 16384, 24576]);
    assert_eq!(arena.take(1), Err(PageError::Full { pages: 1, free: 0, waiting: 0 }));
    arena.free(held.remove(1)).unwrap();
    arena.free(held.remove(1)).unwrap();
    assert_eq!(arena.free_pages(), 4);
    assert_eq!(arena.take(4 * 4096).unwrap().offset(), 8192, "freed neighbours are one run");
}

#[test]
fn a_request_too_large_for_any_run_says_what_is_free() {
    let arena = PageArena::new(4, 512).unwrap();
    let held: Vec<Pages> = (0..4).map(|_| arena.take(1).unwrap()).collect();
    for (at, pages) in held.into_iter().enumerate() {
        if at % 2 == 0 {
            arena.free(pages).unwrap();
        }
    }
    assert_eq!(arena.take(600), Err(PageError::Full { pages: 2, free: 2, waiting: 0 }));
    assert!(arena.take(usize::MAX).is_err());
    assert_eq!(arena.free_pages(), 2);
}

#[test]
fn a_view_never_reaches_beyond_its_pages() {
    let arena = PageArena::new(4, 256).unwrap();
    let mut pages = arena.take(300).unwrap();
    assert_eq!(arena.view(&pages, 0..512).unwrap(), [0; 512], "fresh pages are zero");
    assert!(arena.view(&pages, 512..512).unwrap().is_empty());
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = 3..2;
    for range in [0..513, 512..513, reversed, 0..usize::MAX, usize::MAX..usize::MAX] {
        let refused = PageError::OutOfBounds { range: range.clone(), bytes: 512 };
        assert_eq!(arena.view(&pages, range.clone()), Err(refused.clone()));
        assert_eq!(arena.view_mut(&mut pages, range), Err(refused));
    }
}

#[test]
fn pages_of_another_arena_are_refused_and_come_back() {
    let (ours, theirs) = (PageArena::new(4, 256).unwrap(), PageArena::new(4, 256).unwrap());
    let pages = theirs.take(1).unwrap();
    assert_eq!(ours.view(&pages, 0..1), Err(PageError::Foreign));
    let refused = ours.free(pages).unwrap_err();
    assert_eq!(refused.why, PageError::Foreign);
    assert_eq!((ours.free_pages(), theirs.free_pages()), (4, 3));
    theirs.free(refused.pages).unwrap();
    assert_eq!(theirs.free_pages(), 4);
}

#[test]
fn a_page_arena_takes_one_block_returns_it_and_refuses_impossible_sizes() {
    let below = CountingAllocator::new(Global);
    let arena = PageArena::new_in(3, 1 << 12, &below).unwrap();
    assert_eq!((below.stats().live, below.stats().blocks), (3 << 12, 1));
    assert!(arena.base().addr().get().is_multiple_of(1 << 12));
    drop(arena);
    assert_eq!(below.stats().live, 0);
    for (pages, page) in [(0, 256), (3, 0), (3, 100), (usize::MAX, 256), (1 << 50, 1 << 20)] {
        let refused = PageArena::new_in(pages, page, &below).unwrap_err();
        assert_eq!(refused, PageError::NoMemory { pages, page });
    }
    let limit = Limit::new(Global, Budget::new("pages", 1000));
    assert!(PageArena::new_in(4, 256, &limit).is_err());
    assert_eq!((limit.live(), below.stats().allocations), (0, 1));
}

#[test]
fn pages_read_by_a_device_are_reused_when_its_gate_is_open() {
    let below = Gated::default();
    let arena = PageArena::new_in(2, 256, below.clone()).unwrap();
    let (mut first, second) = (arena.take(1).unwrap(), arena.take(1).unwrap());
    arena.view_mut(&mut first, 0..256).unwrap().fill(7);
    let (one, two) = (Latch::closed(), Latch::closed());
    arena.free_after(first, one.clone()).unwrap();
    arena.free_after(second, two.clone()).unwrap();
    assert_eq!(arena.take(1), Err(PageError::Full { pages: 1, free: 0, waiting: 2 }));
    one.open();
    let again = arena.take(1).unwrap();
    assert_eq!(
        (again.offset(), arena.view(&again, 0..1).unwrap()[0]),
        (0, 7),
        "nobody wrote meanwhile"
    );
    assert_eq!(arena.take(1), Err(PageError::Full { pages: 1, free: 0, waiting: 1 }));
    // The arena is dropped, and the block stays until the device is done.
    drop(arena);
    assert_eq!(below.reap(), (0, 1));
    two.open();
    assert_eq!(below.reap(), (0, 0));
}

#[test]
fn pages_whose_upstream_supports_no_gates_are_returned() {
    let arena = PageArena::new_in(2, 256, Gated::default()).unwrap();
    let theirs = PageArena::new(2, 256).unwrap().take(1).unwrap();
    let refused = arena.free_after(theirs, Latch::closed()).unwrap_err();
    assert_eq!(refused.why, PageError::Foreign);
    let shown = PageError::Memory(MemoryError::TimedOut).to_string();
    assert!(shown.contains("hold"), "{shown}");
}

#[test]
fn errors_of_pages_read_the_same_in_debug_so_that_main_may_return_them() {
    for error in [PageError::Foreign, PageError::Full { pages: 3, free: 2, waiting: 1 }] {
        assert_eq!(format!("{error:?}"), error.to_string());
    }
}

#[test]
fn threads_take_write_and_free_at_a_time() {
    let arena = PageArena::new(16, 64).unwrap();
    thread::scope(|threads| {
        for mark in 1..5u8 {
            let arena = &arena;
            threads.spawn(move || {
                for round in 0..if cfg!(miri) { 10 } else { 500 } {
                    let Ok(mut pages) = arena.take(64 * (1 + round % 3)) else { continue };
                    let all = 0..pages.bytes();
                    arena.view_mut(&mut pages, all.clone()).unwrap().fill(mark);
                    thread::yield_now();
                    assert!(arena.view(&pages, all).unwrap().iter().all(|&byte| byte == mark));
                    arena.free(pages).unwrap();
                }
            });
        }
    });
    assert_eq!(arena.free_pages(), 16);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 500 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Compares with a list of booleans: the lowest run that is long enough is taken, no page is
    /// taken twice, and every free page is counted.
    #[test]
    fn it_behaves_as_a_row_of_flags(
        count in 1..200usize,
        steps in prop::collection::vec((any::<bool>(), 0..70usize), 1..if cfg!(miri) { 30 } else { 120 }),
    ) {
        let arena = PageArena::new(count, 8).unwrap();
        let mut taken = vec![false; count];
        let mut held: Vec<Pages> = Vec::new();
        for (take, number) in steps {
            if take {
                let pages = number.max(1);
                let fits = |at: &usize| taken[*at..at + pages].iter().all(|taken| !taken);
                let lowest = (0..=count.saturating_sub(pages)).filter(|_| pages <= count).find(fits);
                let answer = arena.take(number * 8);
                prop_assert_eq!(answer.as_ref().ok().map(|pages| pages.offset() / 8), lowest);
                if let Ok(answer) = answer {
                    taken[answer.offset() / 8..][..pages].fill(true);
                    held.push(answer);
                }
            } else if !held.is_empty() {
                let pages = held.swap_remove(number % held.len());
                taken[pages.offset() / 8..][..pages.bytes() / 8].fill(false);
                arena.free(pages).unwrap();
            }
            prop_assert_eq!(arena.free_pages(), taken.iter().filter(|taken| !**taken).count());
        }
    }
}
