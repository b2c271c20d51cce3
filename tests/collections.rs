//! Other people's collections in pinned memory.

mod support;

use aquifer::{PinnedAllocator, Vec as PinnedVec, host::pool, sim::Sim};
use hashbrown::HashMap;
use std::{collections::hash_map::RandomState, thread};
use support::{assert_silent, runtime};

type Map<V> = HashMap<u64, V, RandomState, PinnedAllocator>;

#[test]
fn a_map_lives_grows_shrinks_and_goes_in_pinned_memory() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pinned = rt.pinned_near(0);
    let mut index: Map<[f32; 16]> = Map::with_hasher_in(RandomState::new(), pinned.allocator());
    for key in 0..10_000 {
        index.insert(key, [key as f32; 16]);
    }
    assert!(pinned.stats().memory.requested >= 10_000 * 72, "the map's table is the pool's");
    assert_eq!(pinned.is_pinned(std::ptr::NonNull::from(&index[&7]).cast()), Some(true));
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
                        let list =
                            lists.entry(i % 50).or_insert_with(|| PinnedVec::new_in(pinned.allocator()));
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
                lists.iter().all(|(key, list)| list.iter().all(|i| i / 4 % 50 == *key && i % 4 == thread))
            );
        }
    });
    let stats = pinned.stats();
    assert_eq!((stats.memory.live, stats.refused_frees), (0, 0));
    assert!(pinned.is_consistent());
}

#[test]
fn a_map_outlives_its_pool_and_its_runtime() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let mut index: Map<u64> = Map::with_hasher_in(RandomState::new(), rt.pinned_near(0).allocator());
    index.extend((0..1000).map(|key| (key, key * key)));
    drop(rt);
    assert_eq!(index[&999], 999 * 999);
    assert!(index.try_reserve(1 << 20).is_err(), "the pool is closed");
    assert_eq!(index.len(), 1000, "a refusal changes nothing");
    drop(index);
    // The last free may come while kernels are launched, so the registration ends at a moment of the program's choice.
    pool::sweep();
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_silent(&sim);
}
