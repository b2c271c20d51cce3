//! Tests that steady-state operation allocates nothing from the host's heap.
//!
//! Covered are blocks that other streams use, and a slow-path pass that finds and returns memory.

use crate::{
    counting::{asked, uncounted},
    support::{MIB, Rig},
};
use aquifer_driver::{Access, Call, sim::Sim};
use aquifer_stream::Stream;

#[test]
fn a_steady_state_of_blocks_shared_by_streams_allocates_nothing_on_the_host() {
    // The oracle does not track which block owns which bytes.
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let rig = Rig::on(sim, 64, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let alloc = || rig.alloc(&s, 4096);
    let alone = asked(|| drop(alloc()));
    // The blocks are kept until the end of the round and are returned together.
    let used = asked(|| {
        for _ in 0..8 {
            alloc().record_use(&u, Access::Read).unwrap();
        }
        // Allocations made by the driver are not counted.
        uncounted(|| {
            u.synchronize().unwrap();
            rig.pool.trim(u64::MAX).unwrap();
            assert_eq!(rig.pool.stats().pending, 0);
        });
    });
    assert_eq!((alone, used), (0, 0));
}

/// Returns a pool with two streams and a 64 MiB limit.
fn pool() -> (Rig, [Stream; 2]) {
    let sim = Sim::h200(1).symbolic();
    // The oracle does not track which block owns which bytes.
    sim.oracle(false);
    let rig = Rig::on(sim, 64, |_| ());
    let streams = [rig.stream(), rig.stream()];
    (rig, streams)
}

#[test]
fn a_steady_state_search_for_memory_allocates_nothing_on_the_host() {
    let (rig, streams) = pool();
    // Freed blocks alternate with live ones, so no memory between them can be returned.
    let block = |n: usize| rig.alloc(&streams[n % 2], 64 << 10);
    let mut blocks: Vec<_> = (0..900).map(block).collect();
    let mut n = 0;
    blocks.retain(|_| {
        n += 1;
        n % 4 < 2
    });
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    rig.pool.trim(0).unwrap();
    let held = rig.pool.physical();
    let looked = asked(|| assert_eq!(rig.pool.trim(0).unwrap(), 0));
    let told = asked(|| assert_eq!(rig.pool.stats().physical, held));
    assert_eq!((looked, told), (0, 0));
}

#[test]
fn a_steady_state_release_of_memory_allocates_nothing_on_the_host() {
    let (rig, [s, u]) = pool();
    drop([&s, &u, &s].map(|on| rig.alloc(on, 4 * MIB)));
    [&s, &u].iter().for_each(|stream| stream.synchronize().unwrap());
    // Count up to the driver's call and after it. The call itself is not counted.
    rig.sim.fail_every(Call::Unmap, 1, 999);
    let tried = asked(|| assert!(rig.pool.trim(0).is_err()));
    rig.sim.clear_failures();
    assert!(rig.pool.trim(0).unwrap() >= 12 * MIB);
    assert_eq!(tried, 0);
}

#[test]
fn a_steady_state_slow_path_allocates_nothing_on_the_host() {
    let (rig, streams) = pool();
    // All the memory that the limit allows: each stream has to take over what the other one freed.
    let taken = asked(|| {
        for stream in &streams {
            let block = rig.alloc(stream, 64 * MIB);
            uncounted(|| {
                drop(block);
                stream.synchronize().unwrap();
            });
        }
    });
    assert!(rig.pool.stats().adoptions >= 200);
    assert_eq!(taken, 0);
}
