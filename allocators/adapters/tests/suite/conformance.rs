//! Tests that every allocator of this crate, and those it is built on, keeps the allocator
//! contract.
//!
//! Here the suite runs on correct allocators. Its own tests run it on incorrect ones.

use allocator_api2::alloc::{Allocator, Global};
use aquifer_adapters::conformance::{ContractFault, Suite};
use aquifer_adapters::{Arena, ArenaSettings, CountingAllocator, Fallback, Limit, Tagged};
use aquifer_core::{Budget, Tag};
use bumpalo::Bump;

const SEEDS: u64 = if cfg!(miri) { 1 } else { 6 };

/// Returns a suite that is short under Miri, except where something must fill up.
fn suite() -> Suite {
    if cfg!(miri) {
        Suite { operations: 30, alignment: 4, ..Suite::default() }
    } else {
        Suite::default()
    }
}

#[track_caller]
fn conforms<A: Allocator + Clone>(allocator: &A) {
    for seed in 0..SEEDS {
        assert_eq!(Suite { seed, ..suite() }.check(allocator), Ok(()));
    }
}

fn small() -> ArenaSettings {
    ArenaSettings::new().first_chunk(100).max_chunk(1 << 12)
}

#[test]
fn the_global_allocator() {
    conforms(&Global);
}

#[test]
fn bumpalo() {
    conforms(&&Bump::new());
}

#[test]
fn an_arena_over_the_global_allocator() {
    conforms(&&Arena::new());
    conforms(&&Arena::with_settings_in(small(), Global));
}

#[test]
fn a_full_arena_refuses_and_stays_right() {
    let limit = if cfg!(miri) { 1000 } else { 100_000 };
    let arena = Arena::with_settings_in(small().limit(limit), Global);
    for seed in 0..SEEDS {
        assert_eq!(Suite { seed, ..Suite::default() }.check(&&arena), Ok(()));
    }
    assert!(arena.try_alloc([0u8; 256]).is_err(), "a run of this length fills it");
}

#[test]
fn an_arena_over_bumpalo_and_over_an_arena() {
    let bump = Bump::new();
    conforms(&&Arena::with_settings_in(small(), &bump));
    let below = Arena::new();
    conforms(&&Arena::with_settings_in(small(), &below));
}

#[test]
fn a_scope() {
    let mut arena = Arena::new();
    arena.scope(|outer| {
        conforms(&&*outer);
        outer.scope(|inner| conforms(&&*inner));
        conforms(&&*outer);
    });
}

#[test]
fn a_limit_that_the_suite_reaches() {
    let budget = Budget::new("suite", if cfg!(miri) { 500 } else { 40_000 });
    conforms(&Limit::new(Global, budget.clone()));
    assert_eq!(budget.used(), 0, "all blocks went back, so all bytes did");
}

#[test]
fn counted_and_tagged() {
    let counted = CountingAllocator::new(Tagged::new(Global, Tag::named("suite")));
    conforms(&counted);
    let stats = counted.stats();
    assert_eq!((stats.live, stats.blocks), (0, 0));
    assert_eq!(stats.allocations, stats.frees);
}

#[test]
fn a_fallback_whose_first_fills_up() {
    let arena =
        Arena::with_settings_in(small().limit(if cfg!(miri) { 100 } else { 20_000 }), Global);
    let second = CountingAllocator::new(Global);
    conforms(&Fallback::new(&arena, &second));
    assert!(second.stats().allocations > 0, "the second one had something to do");
    assert_eq!(second.stats().live, 0);
}

#[test]
fn a_stack_of_everything() {
    let budget = Budget::new("suite", 1 << 20);
    let pool = Limit::new(CountingAllocator::new(Global), budget.clone());
    let arena = Arena::with_settings_in(small().limit(50_000), &pool);
    let stack = Tagged::new(Fallback::new(&arena, &pool), Tag::named("suite"));
    conforms(&stack);
    let held = arena.stats().capacity as u64;
    assert_eq!(budget.used(), held, "only the arena's chunks are left");
    drop(arena);
    assert_eq!(budget.used(), 0);
}

#[test]
fn an_allocator_that_serves_nothing_does_not_pass() {
    let nothing = Limit::new(Global, Budget::new("nothing", 0));
    let found = Suite::default().check(&nothing);
    assert_eq!(found.map_err(|violation| violation.fault), Err(ContractFault::NothingServed));
}
