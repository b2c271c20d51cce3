//! Tests that `AddressSanitizer` stops accesses to arena memory that is not allocated. `ci/sanitize`
//! builds with it.
//!
//! Each fault runs in a separate process, which must end because of it.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::faults::{self, Fault};
use crate::support::{Gated, Latch};
use allocator_api2::alloc::{Allocator, Global};
use aquifer_adapters::{Arena, ArenaSettings, CountingAllocator};
use aquifer_core::DeferReuse;
use std::{alloc::Layout, ptr::NonNull};

fn small() -> Arena {
    Arena::with_settings_in(ArenaSettings::new().first_chunk(256).max_chunk(256), Global)
}

fn block<A: Allocator>(arena: &Arena<A>, len: usize) -> NonNull<u8> {
    arena.allocate(Layout::from_size_align(len, 1).unwrap()).unwrap().cast()
}

/// Reads a byte, whether allowed or not.
fn look(block: NonNull<u8>, at: usize) -> u8 {
    #[expect(unsafe_code, reason = "reads where nothing should be read")]
    // SAFETY: 1. the chunk is mapped while its arena lives, and a byte may have any value.
    unsafe {
        block.add(at).read_volatile()
    }
}

/// Each fault touches memory without an owner, except for the first, which touches only its own.
const FAULTS: [Fault; 9] = [
    (faults::NONE, || {
        let below = CountingAllocator::new(Global);
        let settings = ArenaSettings::new().first_chunk(256).max_chunk(256);
        let mut arena = Arena::with_settings_in(settings, &below);
        for round in 0..3 {
            let first = block(&arena, 13);
            arena.scope(|scope| {
                let text = scope.alloc_str("of a scope that enters chunks");
                let list = scope.alloc_slice_fill_with(400, |at| at as u8);
                assert_eq!((text.len(), list[399]), (29, 143));
            });
            let mut grown = allocator_api2::vec::Vec::new_in(&arena);
            (0..1000u16).for_each(|number| grown.push(number));
            grown.truncate(10);
            grown.shrink_to_fit();
            assert_eq!(grown.iter().map(|&number| usize::from(number)).sum::<usize>(), 45);
            assert_eq!(look(first, 12), look(first, 12));
            drop(grown);
            if round < 2 {
                arena.reset().unwrap();
            }
        }
        drop(arena);
        assert_eq!(below.stats().live, 0);
    }),
    ("behind_the_last_one", || {
        look(block(&small(), 24), 24);
    }),
    ("after_free", || {
        let arena = small();
        let free = block(&arena, 24);
        #[expect(unsafe_code, reason = "frees a block")]
        // SAFETY: 1. allocated by the arena with this layout.
        unsafe {
            (&arena).deallocate(free, Layout::from_size_align(24, 1).unwrap());
        }
        look(free, 0);
    }),
    ("behind_what_has_shrunk", || {
        let arena = small();
        let mut list = allocator_api2::vec::Vec::with_capacity_in(64, &arena);
        list.push(1u8);
        list.shrink_to_fit();
        look(NonNull::from(&mut list[0]), 8);
    }),
    ("after_rewind", || {
        let mut arena = small();
        let inner = arena.scope(|scope| NonNull::from(scope.alloc(7u8)));
        look(inner, 0);
    }),
    ("after_rewind_over_chunks", || {
        let mut arena = small();
        arena.alloc(0u8);
        let (first, last) = arena.scope(|scope| {
            let first = NonNull::from(scope.alloc([0u8; 100])).cast();
            (first, NonNull::from(scope.alloc([0u8; 200])).cast())
        });
        look(last, 199);
        look(first, 0);
    }),
    ("in_the_chunk_before_after_rewind_over_chunks", || {
        let mut arena = small();
        arena.alloc(0u8);
        let first = arena.scope(|scope| {
            let first = NonNull::from(scope.alloc([0u8; 100])).cast();
            scope.alloc([0u8; 200]);
            first
        });
        look(first, 0);
    }),
    ("after_reset", || {
        let mut arena = small();
        let before = NonNull::from(arena.alloc([0u8; 100])).cast();
        arena.reset().unwrap();
        look(before, 50);
    }),
    ("after_its_gate_opened", || {
        let mut arena =
            Arena::with_settings_in(ArenaSettings::new().first_chunk(256), Gated::default());
        let (held, latch) = (block(&arena, 64), Latch::closed());
        (&arena).defer(held, latch.clone()).unwrap();
        look(held, 0); // a copy may still do so
        latch.open();
        arena.reset().unwrap();
        faults::nothing_was_wrong_so_far();
        look(held, 0);
    }),
];

#[test]
#[ignore = "half of another test, which runs it in a process of its own"]
fn child() {
    faults::run_named(&FAULTS);
}

#[test]
fn only_accesses_to_memory_without_an_owner_are_reported() {
    faults::assert_each_is_found(&FAULTS, "poison::child", &["after_its_gate_opened"]);
}
