//! Tests that every wrapper over every other one keeps the allocator contract, with and without
//! enough upstream memory, and returns all that it took. A deferral reaches through each of them.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test that fails is a failed test"
)]

use crate::support::{Gated, Latch, Owned};
use allocator_api2::alloc::Allocator;
use aquifer_adapters::conformance::{ContractFault, Suite};
use aquifer_adapters::{
    Arena, ArenaSettings, CountingAllocator, Fallback, Limit, Owns, Segregate, Tagged,
};
use aquifer_core::{Budget, DeferReuse, Gate, Tag};
use std::{alloc::Layout, ptr::NonNull};

const THRESHOLD: usize = if cfg!(miri) { 20 } else { 300 };
/// Less than the suite holds at a time.
const SHORT: usize = if cfg!(miri) { 800 } else { 20_000 };

/// Adds one layer over an allocator. Layers that take a second allocator get one with its own
/// capacity.
macro_rules! layer {
    (Limit, $below:expr) => {
        Limit::new($below, Budget::new("compose", 10 * SHORT as u64))
    };
    (Counted, $below:expr) => {
        CountingAllocator::new($below)
    };
    (Tagged, $below:expr) => {
        Tagged::new($below, Tag::named("compose"))
    };
    (Fallback, $below:expr) => {
        Fallback::new($below, Owned::with_room(SHORT))
    };
    (Segregate, $below:expr) => {
        Segregate::new(THRESHOLD, $below, Owned::with_room(SHORT))
    };
    (SegregateLarge, $below:expr) => {
        Segregate::new(THRESHOLD, Owned::with_room(SHORT), $below)
    };
}

fn suite() -> Suite {
    if cfg!(miri) {
        Suite { operations: 8, alignment: 2, largest: 40, ..Suite::default() }
    } else {
        Suite { operations: 600, ..Suite::default() }
    }
}

fn passes<A: Allocator + Clone>(allocator: &A, what: &str) {
    for seed in 0..if cfg!(miri) { 1 } else { 2 } {
        let found = Suite { seed, ..suite() }.check(allocator);
        // Without room nothing was served. Other combinations of the same layers test more.
        assert!(
            found.is_ok()
                || found.map_err(|found| found.fault) == Err(ContractFault::NothingServed),
            "{what}: {found:?}"
        );
    }
}

/// Tests the contract, and that memory is available again at the end.
fn conforms<A: Allocator + Owns + Clone>(allocator: &A, what: &str) {
    passes(allocator, what);
    let block = allocator.allocate(Layout::new::<[u64; 4]>());
    let block = block.unwrap_or_else(|_| panic!("{what}: all is free and nothing can be had"));
    assert!(allocator.owns(block.cast()), "{what}");
    release(allocator, block.cast(), Layout::new::<[u64; 4]>());
}

macro_rules! over_all {
    ($($name:ident: $outer:ident,)*) => {$(
        #[test]
        fn $name() {
            over_all!(@each $outer: Limit Counted Tagged Fallback Segregate SegregateLarge);
        }
    )*};
    (@each $outer:ident: $($inner:ident)*) => {$(
        // Miri checks accesses, which are the same with too little memory.
        for room in [usize::MAX, SHORT].into_iter().take(if cfg!(miri) { 1 } else { 2 }) {
            let below = Owned::with_room(room);
            let stack = layer!($outer, layer!($inner, below.clone()));
            conforms(&stack, concat!(stringify!($outer), " over ", stringify!($inner)));
            drop(stack);
            assert_eq!(below.live(), 0, concat!(stringify!($outer), " over ", stringify!($inner)));
        }
    )*};
}

over_all! {
    a_limit_over_every_wrapper: Limit,
    statistics_over_every_wrapper: Counted,
    a_tag_over_every_wrapper: Tagged,
    a_fallback_over_every_wrapper: Fallback,
    small_blocks_from_every_wrapper: Segregate,
    large_blocks_from_every_wrapper: SegregateLarge,
}

macro_rules! with_arenas {
    ($($layer:ident)*) => {$({
        let below = Owned::with_room(usize::MAX);
        let arena = Arena::with_settings_in(ArenaSettings::new().first_chunk(100).max_chunk(4000), layer!($layer, below.clone()));
        passes(&layer!($layer, &arena), concat!("an arena between two of ", stringify!($layer)));
        drop(arena);
        assert_eq!(below.live(), 0);
    })*};
}

#[test]
fn an_arena_between_any_two() {
    with_arenas!(Limit Counted Tagged Fallback Segregate SegregateLarge);
}

const LAYOUT: Layout = Layout::new::<[u64; 8]>();

/// A block freed while a device may read it keeps its bytes and is not reused.
fn holds_back<A: DeferReuse>(allocator: &A, below: &Gated, what: &str) {
    let block = allocator.allocate(LAYOUT).unwrap().cast::<u8>();
    fill(block, 0x5A);
    let inside = NonNull::new(block.as_ptr().wrapping_add(40)).unwrap();
    let (first, second) = (Latch::closed(), Latch::closed());
    allocator.defer(block, first.clone()).unwrap();
    allocator.defer(inside, second.clone()).unwrap();
    release(allocator, block, LAYOUT);
    assert_eq!(below.reap().1, 1, "{what}: held below");
    first.open();
    for _ in 0..3 {
        let other = allocator.allocate_zeroed(LAYOUT).unwrap().cast::<u8>();
        assert_ne!(other, block, "{what}: handed out again");
        release(allocator, other, LAYOUT);
    }
    assert!(filled(block, 0x5A), "{what}: written");
    second.open();
    assert_eq!(below.reap().1, 0, "{what}: not held any more");
    let stray = NonNull::from(&mut [0u8; 8]).cast();
    assert!(allocator.defer(stray, Latch::closed()).is_err(), "{what}: a foreign address");
    assert!(second.is_open());
}

macro_rules! gated {
    (Fallback, $below:expr) => {
        Fallback::new($below, Gated::default())
    };
    (Segregate, $below:expr) => {
        Segregate::new(THRESHOLD + 100, $below, Gated::default())
    };
    (SegregateLarge, $below:expr) => {
        Segregate::new(10, Gated::default(), $below)
    };
    ($layer:ident, $below:expr) => {
        layer!($layer, $below)
    };
}

macro_rules! hold_back {
    ($($layer:ident)*) => {$({
        let below = Gated::default();
        let what = stringify!($layer);
        holds_back(&gated!($layer, below.clone()), &below, what);
        assert_eq!(below.reap(), (0, 0), "{what}");
    })*};
}

#[test]
fn a_deferral_reaches_through_each() {
    hold_back!(Limit Counted Tagged Fallback Segregate SegregateLarge);
}

#[test]
fn bumpalo_is_an_upstream_of_each() {
    macro_rules! over_bumpalo {
        ($($layer:ident)*) => {$({
            let bump = bumpalo::Bump::new();
            let suite = suite();
            assert_eq!(suite.check(&layer!($layer, &bump)), Ok(()), stringify!($layer));
        })*};
    }
    over_bumpalo!(Limit Counted Tagged Segregate SegregateLarge);
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn release<A: Allocator>(allocator: &A, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the tests pass a live block of this layout and forget it.
    unsafe { allocator.deallocate(block, layout) };
}

#[expect(unsafe_code, reason = "writes a block")]
fn fill(block: NonNull<u8>, with: u8) {
    // SAFETY: a live block of `LAYOUT`.
    unsafe { block.write_bytes(with, LAYOUT.size()) };
}

#[expect(unsafe_code, reason = "reads a block")]
fn filled(block: NonNull<u8>, with: u8) -> bool {
    // SAFETY: a block of `LAYOUT` that is held by its gate, so it still exists.
    unsafe { NonNull::slice_from_raw_parts(block, LAYOUT.size()).as_ref() }
        .iter()
        .all(|&byte| byte == with)
}
