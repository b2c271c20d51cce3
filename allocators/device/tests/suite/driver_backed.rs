//! Tests of resources whose blocks come from the driver's own allocators.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::{
    advice::limits,
    support::{MIB, Rig, assert_silent},
};
use aquifer_core::{Budget, DeviceId, MemoryError, Opaque, Tag};
use aquifer_device::{Direct, Request, StreamOrdered};
use aquifer_driver::{
    Access, Call, Operand, leftovers,
    sim::{Sim, SimKernel},
};
use aquifer_stream::StreamPool;

fn open(sim: &Sim, limit: u64) -> (StreamPool, Budget, StreamOrdered) {
    let (streams, budget) =
        (StreamPool::new(sim.driver(), DeviceId(0), 4), Budget::new("ordered", limit));
    let pool = StreamOrdered::new(sim.driver(), streams.clone(), budget.clone()).unwrap();
    (streams, budget, pool)
}

#[test]
fn a_stream_ordered_pool_serves_what_a_raised_limit_admits() {
    let sim = Sim::h200(1);
    let (streams, budget, pool) = open(&sim, 8 * MIB);
    let s = streams.lease().unwrap();
    let held = pool.allocate(&s, Request::bytes(5 * MIB)).unwrap();
    for asked in [5 * MIB, 11 * MIB + 1] {
        let Err(MemoryError::OutOfMemory(refused)) = pool.allocate(&s, Request::bytes(asked))
        else {
            panic!("{asked} bytes are served under {} bytes", budget.limit());
        };
        let raise = limits(&refused.remedy());
        assert!(budget.used() <= budget.limit());
        budget.set_limit(raise.to);
        drop(pool.allocate(&s, Request::bytes(asked)).unwrap());
        pool.trim(0).unwrap();
    }
    drop((held, pool));
    assert_eq!(budget.used(), 0);
    assert_silent(&sim);
}

/// The driver releases a refused allocation only when its stream reaches the free.
#[test]
fn refused_requests_on_a_busy_stream_reserve_one_allocation_beyond_the_budget_at_most() {
    let sim = Sim::h200(1).stepped();
    let (streams, budget, pool) = open(&sim, 8 * MIB);
    let s = streams.lease().unwrap();
    let block = pool.allocate(&s, Request::bytes(4 * MIB)).unwrap();
    sim.launch(s.raw(), SimKernel::new("busy").writes(block.range(), None)).unwrap();
    for asked in [8, 16, 32, 64] {
        assert!(pool.allocate(&s, Request::bytes(asked * MIB)).is_err());
        assert!(pool.stats().physical <= 12 * MIB, "{}", pool.stats().physical);
    }
    s.synchronize().unwrap();
    drop(pool.allocate(&s, Request::bytes(4 * MIB)).unwrap());
    assert_eq!(budget.used(), 8 * MIB);
}

#[test]
fn memory_that_the_driver_refuses_to_free_at_the_end_is_freed_by_a_sweep() {
    let sim = Sim::h200(1);
    let streams = StreamPool::new(sim.driver(), DeviceId(0), 4);
    let budget = Budget::new("the device", 64 * MIB);
    let direct = Direct::new(sim.driver(), streams.clone(), Some(budget.clone()));
    let s = streams.lease().unwrap();
    let block = direct.allocate(&s, Request::bytes(MIB)).unwrap();
    // At the drop of the block, at the end of its allocator, and by the first sweep.
    (1..=4).for_each(|nth| sim.fail(Call::MemFree, nth, 999));
    drop((direct, block));
    for _ in 0..2 {
        assert_eq!(leftovers::count(&sim.driver()), 1);
        assert_eq!((budget.used(), budget.stranded()), (MIB, MIB));
        assert!(!sim.outstanding().is_empty());
        let _refused = leftovers::sweep(&sim.driver());
    }
    assert_eq!((leftovers::count(&sim.driver()), budget.used(), budget.stranded()), (0, 0, 0));
    drop((s, streams));
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_silent(&sim);
}

#[test]
fn allocations_are_attributed_to_the_callers_line() {
    let sim = Sim::h200(1);
    let (streams, _, pool) = open(&sim, 64 * MIB);
    let s = streams.lease().unwrap();
    let (block, line) = (pool.allocate(&s, Request::bytes(MIB)).unwrap(), line!());
    let other = sim.driver().stream_create(DeviceId(0), 0).unwrap();
    sim.access(other, block.range(), Access::Write, None).unwrap();
    let at = block.range();
    // A plain drop has no line of its own.
    drop(block);
    sim.access(other, at, Access::Write, None).unwrap();
    let found = sim.take_violations();
    assert_eq!(found.len(), 2, "{found:?}");
    for violation in &found {
        for party in violation.earlier.iter().chain([&violation.later]) {
            assert_eq!(party.site.file(), file!(), "{violation}");
        }
    }
    assert!(found[0].earlier.is_some_and(|earlier| earlier.site.line() == line), "{}", found[0]);
    let dropped = found[1].earlier.unwrap();
    assert!(dropped.work.contains("drop") && dropped.site.line() == line, "{}", found[1]);
}

#[test]
fn live_bytes_by_tag_are_counted_in_every_mode() {
    let tag = Tag::named("by tag");
    for mode in 0..4 {
        let rig = Rig::on(Sim::h200(1), 64, |config| {
            config.bypass = mode % 2 == 1;
            config.debug.leaks = mode >= 2;
        });
        let s = rig.stream();
        let request = Request::bytes(MIB).tag(tag);
        let blocks = [rig.pool.alloc(&s, request).unwrap(), rig.pool.alloc(&s, request).unwrap()];
        let _other = rig.alloc(&s, MIB);
        assert_eq!(rig.pool.held_by(tag), 2 * MIB, "mode {mode}");
        let [first, _second] = blocks;
        drop(first);
        assert_eq!(rig.pool.held_by(tag), MIB, "mode {mode}");
    }
}
