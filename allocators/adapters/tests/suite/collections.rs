//! Tests of collections, trait objects and another library's arena over the allocators of this
//! crate.

use allocator_api2::{
    alloc::{Allocator, Global},
    boxed::Box,
    unsize_box,
    vec::Vec,
};
use aquifer_adapters::conformance::Suite;
use aquifer_adapters::{
    Arena, ArenaSettings, CountingAllocator, Fallback, Limit, Segregate, Tagged,
};
use aquifer_core::{Budget, Tag};
use bump_scope::{Bump, alloc::compat::AllocatorApi2V02Compat};
use hashbrown::{HashMap, HashSet};
use std::{cell::Cell, fmt::Debug};

/// Fewer under Miri, which is slow.
const SOME: u32 = if cfg!(miri) { 10 } else { 100 };

/// Uses one collection of each kind, and drops them at the end.
fn collections<A: Allocator + Clone>(allocator: &A) {
    let mut list = Vec::new_in(allocator.clone());
    list.extend(0..5 * SOME);
    list.drain(SOME as usize..4 * SOME as usize);
    list.shrink_to_fit();
    assert_eq!(list.iter().sum::<u32>(), (0..SOME).chain(4 * SOME..5 * SOME).sum());

    let mut index: HashMap<u64, Vec<u8, A>, _, _> = HashMap::new_in(allocator.clone());
    for key in 0..u64::from(SOME) {
        let mut value = Vec::with_capacity_in(key as usize, allocator.clone());
        value.resize(key as usize, key as u8);
        index.insert(key, value);
    }
    index.retain(|key, _| key % 3 == 0);
    index.shrink_to_fit();
    assert!(
        index.iter().all(|(key, value)| value.len() as u64 == *key
            && value.iter().all(|&b| u64::from(b) == *key))
    );

    let mut seen = HashSet::new_in(allocator.clone());
    assert!(seen.insert([1u8; 32]) && !seen.insert([1u8; 32]));

    struct Bell<'b>(&'b Cell<u32>, #[expect(dead_code, reason = "makes it large")] [u64; 5]);
    trait Ring {
        fn ring(&self);
    }
    impl Ring for Bell<'_> {
        fn ring(&self) {
            self.0.set(self.0.get() + 1);
        }
    }
    impl Drop for Bell<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 10);
        }
    }
    let rung = Cell::new(0);
    let bell: Box<dyn Ring + '_, A> =
        unsize_box!(Box::new_in(Bell(&rung, [0; 5]), allocator.clone()));
    bell.ring();
    drop(bell);
    assert_eq!(rung.get(), 11);
    let shown: Box<dyn Debug, A> = unsize_box!(Box::new_in((), allocator.clone()));
    assert_eq!(format!("{shown:?}"), "()");
}

#[test]
fn over_every_wrapper() {
    let below = CountingAllocator::new(Global);
    let base = &below;
    collections(&Limit::new(base, Budget::new("collections", 1 << 20)));
    collections(&Tagged::new(base, Tag::named("collections")));
    collections(&CountingAllocator::new(base));
    collections(&Segregate::new(128, base, base));
    let arena = Arena::with_settings_in(ArenaSettings::new().limit(2000), base);
    collections(&Fallback::new(&arena, base));
    drop(arena);
    assert_eq!(below.stats().live, 0);
}

#[test]
fn over_an_arena_a_scope_and_bumpalo() {
    let mut arena = Arena::new();
    collections(&&arena);
    arena.scope(|scope| {
        collections(&&*scope);
        scope.scope(|inner| collections(&CountingAllocator::new(&*inner)));
    });
    let bump = bumpalo::Bump::new();
    collections(&&bump);
    let over = Arena::new_in(&bump);
    collections(&&over);
}

/// bump-scope takes its chunks from these allocators. This tests alignment, sizes beyond the
/// requested one, and chunks returned one by one.
#[test]
fn bump_scope_takes_its_chunks_from_here() {
    let below = CountingAllocator::new(Global);
    let limit = Limit::new(&below, Budget::new("bump-scope", 1 << 20));
    {
        let mut bump: Bump<_> = Bump::new_in(AllocatorApi2V02Compat(limit.clone()));
        for round in 0..3u32 {
            bump.scoped(|scope| {
                let first = scope.alloc_slice_fill(200, round);
                let text = scope.alloc_str("in a scope");
                assert!(first.iter().all(|&n| n == round) && &*text == "in a scope");
            });
        }
        bump.alloc_slice_copy(&[1u64; 1000]);
        assert!(limit.live() > 0, "its chunks are ours");
    }
    assert_eq!((limit.live(), below.stats().live), (0, 0));

    let arena = Arena::new();
    let bump: Bump<_> = Bump::new_in(AllocatorApi2V02Compat(&arena));
    assert_eq!(bump.alloc_slice_copy(&[1, 2, 3]).iter().sum::<i32>(), 6);
    assert!(arena.stats().allocated > 0);
}

/// The other direction: its arena keeps the allocator contract under the wrappers of this crate.
#[test]
fn bump_scope_is_an_upstream() {
    let bump: Bump = Bump::new();
    let below = AllocatorApi2V02Compat(&bump);
    let suite = Suite { operations: if cfg!(miri) { 30 } else { 600 }, ..Suite::default() };
    assert_eq!(suite.check(&&below), Ok(()));
    assert_eq!(suite.check(&CountingAllocator::new(&below)), Ok(()));
    collections(&&below);
}
