//! Out of memory is answered only when giving back all that lies idle would not have made room.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use aquifer_core::{Budget, Tag};
use aquifer_device::{Adoption, DevicePool, PoolConfig, Request, Reserved};
use aquifer_driver::{
    DeviceId,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::Stream;
use std::time::Duration;
use support::{MIB, Rig};

fn plain() -> Sim {
    let mut config = SimConfig::h200(1);
    config.devices = vec![DeviceConfig::without_virtual_memory()];
    Sim::new(config)
}

/// Pools of one device, each under the budget beside it, that never wait on the host.
fn pools<const N: usize>(sim: &Sim, budgets: [&Budget; N]) -> [DevicePool; N] {
    budgets.map(|budget| {
        let mut config = PoolConfig::with_budget(budget.clone());
        config.wait = Duration::ZERO;
        DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
    })
}

/// Leaves a free block in the cache of `pool` whose last use was on another stream than its own. Returns the two streams.
fn leave_a_block_that_another_stream_used(pool: &DevicePool, bytes: u64) -> [Stream; 2] {
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let mut block = pool.buffer::<u8>(&s, bytes as usize).unwrap();
    u.fill(&mut block, 1).unwrap();
    drop(block);
    assert_eq!(pool.stats().pending, bytes);
    [s, u]
}

#[test]
fn a_neighbour_gives_idle_memory_whose_last_use_was_on_another_stream() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 64 * MIB);
    let [first, second] = pools(&sim, [&budget, &budget]);
    let _streams = leave_a_block_that_another_stream_used(&second, 30 * MIB);
    assert!(first.alloc(&first.stream().unwrap(), Request::bytes(60 * MIB)).is_ok());
    assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
}

#[test]
fn one_trim_gives_back_memory_whose_last_use_was_on_another_stream() {
    for sim in [Sim::h200(1), plain()] {
        let rig = Rig::on(sim, 64, |_| ());
        let _streams = leave_a_block_that_another_stream_used(&rig.pool, 30 * MIB);
        rig.pool.trim(0).unwrap();
        assert_eq!((rig.budget.used(), rig.pool.stats().physical), (0, 0));
        rig.assert_silent();
    }
}

#[test]
fn one_trim_gives_back_segments_that_a_stream_inherited() {
    let rig = Rig::on(plain(), 160, |_| ());
    let s = rig.stream();
    {
        let gone = rig.stream();
        drop(rig.pool.alloc(&gone, Request::bytes(40 * MIB)).unwrap());
        gone.synchronize().unwrap();
    }
    let kept = rig.pool.alloc(&s, Request::bytes(30 * MIB)).unwrap();
    drop(rig.pool.alloc(&s, Request::bytes(60 * MIB)).unwrap());
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), rig.pool.stats().physical);
    drop(kept);
    rig.pool.trim(0).unwrap();
    assert_eq!((rig.budget.used(), rig.pool.stats().physical), (0, 0));
    rig.assert_silent();
}

/// A pool with 40 MiB idle under a limit that was lowered to 24 MiB meanwhile.
fn over_its_limit(sim: Sim) -> Rig {
    let rig = Rig::on(sim, 64, |config| config.wait = Duration::ZERO);
    drop(rig.pool.alloc(&rig.stream(), Request::bytes(40 * MIB)).unwrap());
    assert!(rig.budget.set_limit(24 * MIB) >= 16 * MIB);
    rig
}

#[test]
fn a_limit_that_was_lowered_below_idle_memory_refuses_no_stable_block() {
    for sim in [Sim::h200(1), plain()] {
        let rig = over_its_limit(sim);
        let s = rig.stream();
        let _block = rig.pool.alloc_stable(&s, Request::bytes(2 * MIB)).unwrap();
        assert!(rig.budget.used() <= 24 * MIB);
        rig.assert_silent();
    }
}

#[test]
fn a_limit_that_was_lowered_below_idle_memory_refuses_no_reserved_memory() {
    let rig = over_its_limit(Sim::h200(1));
    let s = rig.stream();
    let mut memory: Reserved<u8> = rig.pool.reserve(&s, 8 << 20).unwrap();
    memory.commit_to(2 << 20).unwrap();
    assert!(rig.budget.used() <= 24 * MIB);
    rig.assert_silent();
}

#[test]
fn a_limit_that_was_lowered_below_idle_memory_refuses_no_parkable_block() {
    let rig = over_its_limit(Sim::h200(1));
    let s = rig.stream();
    let parkable = rig.pool.parkable(Tag::named("weights")).unwrap();
    let _block = parkable.alloc(&s, Request::bytes(2 * MIB)).unwrap();
    assert!(rig.budget.used() <= 24 * MIB);
    rig.assert_silent();
}

#[test]
#[expect(unsafe_code, reason = "captures a graph")]
fn a_limit_that_was_lowered_below_idle_memory_refuses_no_memory_of_graphs() {
    for sim in [Sim::h200(1), plain()] {
        let rig = over_its_limit(sim);
        let s = rig.stream();
        let graphs = rig.pool.graph_pool().unwrap();
        // SAFETY: 1. and 2. the captured work touches nothing.
        let made = unsafe { graphs.capture(&s, |s| rig.pool.alloc(s, Request::bytes(2 * MIB))) };
        assert!(made.is_ok(), "{}", made.err().unwrap());
        assert!(rig.budget.used() <= 24 * MIB);
        rig.assert_silent();
    }
}

#[test]
fn a_limit_that_was_lowered_below_idle_memory_refuses_no_block_of_the_caches() {
    for adoption in [Adoption::Never, Adoption::DoneOnly, Adoption::Wait] {
        let rig = Rig::on(Sim::h200(1), 64, |config| {
            (config.wait, config.adoption) = (Duration::ZERO, adoption);
        });
        drop(rig.pool.alloc(&rig.stream(), Request::bytes(40 * MIB)).unwrap());
        rig.budget.set_limit(24 * MIB);
        let _block = rig.pool.alloc(&rig.stream(), Request::bytes(20 * MIB)).unwrap();
        rig.assert_silent();
    }
}

/// Both budgets lack something: what only this pool can give, and what only its neighbour can.
#[test]
fn a_pool_gives_its_own_idle_memory_where_its_own_limit_refuses_and_its_neighbours_give_the_rest() {
    let sim = Sim::h200(1);
    let device = Budget::new("device 0", 20 * MIB);
    let own = device.child("its own", 20 * MIB);
    let [pool, neighbour] = pools(&sim, [&own, &device]);
    let (s, u) = (pool.stream().unwrap(), neighbour.stream().unwrap());
    // Ten MiB idle, in handles that cannot serve a block of sixteen alone.
    drop(pool.alloc(&s, Request::bytes(10 * MIB)).unwrap());
    drop(neighbour.alloc(&u, Request::bytes(10 * MIB)).unwrap());
    assert_eq!(device.used(), 20 * MIB);
    assert!(pool.alloc_stable(&s, Request::bytes(16 * MIB)).is_ok());
    let [pool, neighbour] = pools(&sim, [&own, &device]);
    drop(pool.alloc(&s, Request::bytes(10 * MIB)).unwrap());
    drop(neighbour.alloc(&u, Request::bytes(10 * MIB)).unwrap());
    assert!(pool.alloc(&pool.stream().unwrap(), Request::bytes(16 * MIB)).is_ok());
    assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
}
