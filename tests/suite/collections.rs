//! Tests of collections of other libraries in pinned memory.

use crate::support::{assert_all_given_back, assert_silent, runtime};
use allocator_api2::{boxed::Box as PinnedBox, unsize_box};
use aquifer::{PinnedAllocator, sim::Sim, vec::Vec as PinnedVec};
use bump_scope::{Bump, alloc::compat::AllocatorApi2V02Compat};
use hashbrown::HashMap;
use std::{collections::hash_map::RandomState, fmt, ptr::NonNull, thread};

type Map<V> = HashMap<u64, V, RandomState, PinnedAllocator>;

#[test]
fn a_map_grows_shrinks_and_is_dropped_in_pinned_memory() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pinned = rt.pinned_near(0);
    let mut index: Map<[f32; 16]> = Map::with_hasher_in(RandomState::new(), pinned.allocator());
    for key in 0..10_000 {
        index.insert(key, [key as f32; 16]);
    }
    assert!(pinned.stats().memory.requested >= 10_000 * 72, "the map's table is the pool's");
    assert_eq!(pinned.is_pinned(NonNull::from(&index[&7]).cast()), Some(true));
    index.retain(|key, _| key % 100 == 0);
    index.shrink_to_fit();
    assert!(pinned.stats().memory.requested < 100_000);
    let copy = index.clone();
    assert_eq!(copy.len(), 100);
    assert!(copy.iter().all(|(&key, value)| *value == [key as f32; 16]));
    assert_eq!(copy, index);
    drop((index, copy));
    let stats = pinned.stats();
    assert_eq!((stats.memory.live, stats.memory.blocks, stats.refused_frees), (0, 0, 0));
    assert!(pinned.is_consistent());
    assert_silent(&sim);
}

#[test]
fn maps_of_vectors_are_filled_on_one_thread_and_dropped_on_another() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pinned = rt.pinned_near(0);
    thread::scope(|scope| {
        let fillers: Vec<_> = (0..4u64)
            .map(|thread| {
                scope.spawn(move || {
                    let mut lists: Map<PinnedVec<u64, PinnedAllocator>> =
                        Map::with_hasher_in(RandomState::new(), pinned.allocator());
                    for i in 0..2000 {
                        let list = lists
                            .entry(i % 50)
                            .or_insert_with(|| PinnedVec::new_in(pinned.allocator()));
                        list.push(i * 4 + thread);
                    }
                    lists
                })
            })
            .collect();
        for (thread, filler) in (0..).zip(fillers) {
            let lists = filler.join().unwrap();
            assert_eq!(lists.values().map(PinnedVec::len).sum::<usize>(), 2000);
            assert!(
                lists
                    .iter()
                    .all(|(key, list)| list.iter().all(|i| i / 4 % 50 == *key && i % 4 == thread))
            );
        }
    });
    let stats = pinned.stats();
    assert_eq!((stats.memory.live, stats.refused_frees), (0, 0));
    assert!(pinned.is_consistent());
}

/// Values of different sizes and alignments, behind one trait, each dropped by its own type.
#[test]
fn trait_objects_live_in_pinned_memory_and_drop_as_what_they_are() {
    struct Row<'r>(&'r std::cell::Cell<u32>, [f64; 9]);
    impl fmt::Display for Row<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{}", self.1[8])
        }
    }
    impl Drop for Row<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pinned = rt.pinned_near(0);
    let dropped = std::cell::Cell::new(0);
    let mut shown: PinnedVec<PinnedBox<dyn fmt::Display + '_, _>, _> =
        PinnedVec::new_in(pinned.allocator());
    shown.push(unsize_box!(PinnedBox::new_in(Row(&dropped, [7.5; 9]), pinned.allocator())));
    shown.push(unsize_box!(PinnedBox::new_in(42u8, pinned.allocator())));
    for place in [NonNull::from(&*shown[0]).cast(), NonNull::from(&*shown[1]).cast()] {
        assert_eq!(pinned.is_pinned(place), Some(true));
    }
    let said: Vec<_> = shown.iter().map(|value| format!("{value}")).collect();
    assert_eq!(said, ["7.5", "42"]);
    drop(shown);
    assert_eq!(
        (dropped.get(), pinned.stats().memory.live, pinned.stats().refused_frees),
        (1, 0, 0)
    );
    assert_silent(&sim);
}

/// Another library's arena, which takes chunks of its own sizes and returns them with different
/// ones.
#[test]
fn bump_scope_takes_its_chunks_from_pinned_memory() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pinned = rt.pinned_near(0);
    let mut bump: Bump<_> = Bump::new_in(AllocatorApi2V02Compat(pinned.allocator()));
    for round in 0..20u32 {
        bump.scoped(|scope| {
            let list = scope.alloc_slice_fill(1000, round);
            assert_eq!(pinned.is_pinned(NonNull::from(&list[0]).cast()), Some(true));
            let text = scope.alloc_str("in a scope");
            assert!(list.iter().all(|&number| number == round) && &*text == "in a scope");
        });
    }
    drop(bump);
    let stats = pinned.stats();
    assert_eq!((stats.memory.live, stats.memory.blocks, stats.refused_frees), (0, 0, 0));
    assert!(pinned.is_consistent());
    assert_silent(&sim);
}

#[test]
fn a_map_outlives_its_pool_and_its_runtime() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let mut index: Map<u64> =
        Map::with_hasher_in(RandomState::new(), rt.pinned_near(0).allocator());
    index.extend((0..1000).map(|key| (key, key * key)));
    drop(rt);
    assert_eq!(index[&999], 999 * 999);
    assert!(index.try_reserve(1 << 20).is_err(), "the pool is closed");
    assert_eq!(index.len(), 1000, "a refusal changes nothing");
    drop(index);
    // The last free may come while kernels are launched, so the program chooses when the
    // registration ends.
    assert_all_given_back(&sim);
    assert_silent(&sim);
}
