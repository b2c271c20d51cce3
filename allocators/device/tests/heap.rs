//! What takes nothing from the host's heap, once as much has been done at once before: a block that
//! other streams use, and a pass that looks for memory and gives it back.
//!
//! A process of its own: installs a global allocator, which counts.
#![expect(unsafe_code, reason = "counts what an allocator is asked for")]

#[path = "../../../tests/support/counting.rs"]
mod counting;
#[path = "suite/support/mod.rs"]
mod support;

use aquifer_device::Request;
use aquifer_driver::{
    Access, Call,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::Stream;
use counting::{asked, uncounted};
use support::{MIB, Rig};

#[test]
fn in_a_steady_state_blocks_that_other_streams_use_take_nothing_from_the_heap() {
    // Nobody watches who has which block.
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let rig = Rig::on(sim, 64, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let alloc = || rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
    let alone = asked(|| drop(alloc()));
    // Each block is held back until the end of the round, and all go home together.
    let used = asked(|| {
        for _ in 0..8 {
            alloc().record_use(&u, Access::Read).unwrap();
        }
        // The driver's calls are its own affair.
        uncounted(|| {
            u.synchronize().unwrap();
            rig.pool.trim(u64::MAX).unwrap();
            assert_eq!(rig.pool.stats().pending, 0);
        });
    });
    assert_eq!((alone, used), (0, 0));
}

/// A pool of two streams under 64 MiB, on a device that can map or one that cannot.
fn pool(maps: bool) -> (Rig, [Stream; 2]) {
    let mut config = SimConfig::h200(1);
    if !maps {
        config.devices = vec![DeviceConfig::without_virtual_memory()];
    }
    let sim = Sim::new(config).symbolic();
    // Nobody watches who has which block.
    sim.oracle(false);
    let rig = Rig::on(sim, 64, |_| ());
    let streams = [rig.stream(), rig.stream()];
    (rig, streams)
}

#[test]
fn in_a_steady_state_a_pass_that_looks_for_memory_takes_nothing_from_the_heap() {
    for maps in [true, false] {
        let (rig, streams) = pool(maps);
        // Pairs of blocks that go and pairs that stay: nothing between them can be given back.
        let block = |n: usize| rig.pool.alloc(&streams[n % 2], Request::bytes(64 << 10)).unwrap();
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
        assert_eq!((looked, told), (0, 0), "maps {maps}");
    }
}

#[test]
fn in_a_steady_state_a_pass_that_gives_memory_back_takes_nothing_from_the_heap() {
    for maps in [true, false] {
        let (rig, [s, u]) = pool(maps);
        drop([&s, &u, &s].map(|on| rig.pool.alloc(on, Request::bytes(4 * MIB)).unwrap()));
        [&s, &u].iter().for_each(|stream| stream.synchronize().unwrap());
        // Up to the driver's call, which is its own affair, and back.
        let call = if maps { Call::Unmap } else { Call::MemFree };
        rig.sim.fail_every(call, 1, 999);
        let tried = asked(|| assert!(rig.pool.trim(0).is_err()));
        rig.sim.clear_failures();
        assert!(rig.pool.trim(0).unwrap() >= 12 * MIB);
        assert_eq!(tried, 0, "maps {maps}");
    }
}

#[test]
fn in_a_steady_state_a_block_that_has_to_be_looked_for_takes_nothing_from_the_heap() {
    let (rig, streams) = pool(true);
    // All that there may be: each stream has to take over what the other has left.
    let taken = asked(|| {
        for stream in &streams {
            let block = rig.pool.alloc(stream, Request::bytes(64 * MIB)).unwrap();
            uncounted(|| {
                drop(block);
                stream.synchronize().unwrap();
            });
        }
    });
    assert!(rig.pool.stats().adoptions >= 200);
    assert_eq!(taken, 0);
}
