//! Tests that a block owns its bytes exactly until its last use on any stream is done.

use crate::support::{MIB, Rig, assert_returned, assert_silent, range};
use aquifer_core::{Budget, DeviceId, OpaqueBlock};
use aquifer_device::{DeviceBuffer, Direct, Request, Resource, StreamOrdered};
use aquifer_driver::{
    Access,
    sim::{Sim, SimKernel, ViolationKind},
};
use aquifer_stream::StreamPool;
use std::sync::Arc;

#[test]
fn a_block_with_an_open_use_is_skipped_until_the_use_is_finished() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.alloc(&s, MIB);
    let address = block.address();
    let used = block.prepare(&u, Access::Read).unwrap();
    drop(block);
    assert_eq!(rig.pool.stats().pending, MIB);
    let other = rig.alloc(&s, MIB);
    assert_ne!(other.address(), address);
    used.finish().unwrap();
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!(rig.pool.stats().pending, 0);
    assert_eq!(rig.alloc(&s, MIB).address(), address);
    rig.assert_silent();
}

#[test]
fn memory_of_a_use_that_ends_after_the_free_is_reused_after_its_work() {
    let rig = Rig::stepped(4);
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.alloc(&s, 4 * MIB);
    let (whole, generation) = (range(&block), block.generation());
    let used = block.prepare(&s, Access::Write).unwrap();
    drop(block);
    // An event recorded after the free and before the work.
    s.timeline().fence(s.timeline().open()).unwrap();
    rig.sim.access(s.raw(), whole, Access::Write, Some(generation)).unwrap();
    used.finish().unwrap();
    let next = rig.alloc(&u, 4 * MIB);
    rig.write(&u, &next);
    rig.assert_silent();
}

#[test]
fn a_buffer_keeps_its_address_and_generation_and_a_later_one_there_has_another_generation() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let place = |x: &DeviceBuffer<u8>| (x.address(), x.generation());
    let mut x = rig.bytes(&s, MIB);
    let first = place(&x);
    assert_eq!(first, (x.block().address(), x.block().generation()));
    s.fill(&mut x, 1).unwrap();
    drop(rig.bytes(&s, 4 * MIB));
    rig.pool.trim(0).unwrap();
    assert_eq!(place(&x), first, "neither uses nor a trim move a live buffer");
    let again = range(x.block());
    drop(x);
    let y = rig.bytes(&s, MIB);
    let second = place(&y);
    assert_eq!(first.0, second.0, "the same memory");
    assert_ne!(first.1, second.1);
    let block = y.into_block();
    assert_eq!((block.address(), block.generation()), second);
    rig.sim.access(s.raw(), again, Access::Write, Some(second.1)).unwrap();
    rig.assert_silent();
    // What the number is for: the observer tells a stale address by it.
    rig.sim.access(s.raw(), again, Access::Write, Some(first.1)).unwrap();
    let stale = ViolationKind::StaleBlock { declared: first.1, live: second.1 };
    assert_eq!(rig.sim.violations()[0].kind, stale);
}

/// A closed pool does not poll its pending blocks, so the end of a use must return them.
#[test]
fn a_use_that_ends_after_its_pool_has_closed_releases_the_pool() {
    for finish in [true, false] {
        let rig = Rig::stepped(8);
        let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
        let (s, u) = (rig.stream(), rig.stream());
        let block = rig.alloc(&s, 6 * MIB);
        let at = range(&block);
        let (used, other) =
            (block.prepare(&u, Access::Read).unwrap(), block.prepare(&u, Access::Read).unwrap());
        drop(block);
        drop(rig);
        drop(s);
        assert!(budget.used() >= 6 * MIB, "its bytes are its own still");
        sim.access(u.raw(), at, Access::Read, None).unwrap();
        drop(u);
        used.finish().unwrap();
        assert!(budget.used() >= 6 * MIB, "another use is open");
        if finish {
            other.finish().unwrap();
        } else {
            other.abort();
        }
        assert_returned(&sim, &budget);
    }
}

/// Closing the pool collected what was pending then. This block was not pending.
#[test]
fn a_block_freed_after_its_pool_has_closed_releases_the_pool_after_its_uses() {
    for open in [false, true] {
        let rig = Rig::stepped(8);
        let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
        let (s, u) = (rig.stream(), rig.stream());
        let block = rig.alloc(&s, 6 * MIB);
        let at = range(&block);
        let used = block.prepare(&u, Access::Read).unwrap();
        sim.access(u.raw(), at, Access::Read, None).unwrap();
        drop((rig, s, u));
        let used = if open { Some(used) } else { used.finish().map(|()| None).unwrap() };
        drop(block);
        assert_eq!(budget.used() > 0, open);
        drop(used);
        assert_returned(&sim, &budget);
    }
}

#[test]
fn a_use_that_ends_after_the_drivers_own_resource_is_dropped_returns_its_block() {
    let sim = Sim::h200(1).stepped();
    let streams = StreamPool::new(sim.driver(), DeviceId(0), 4);
    let budget = Budget::new("the device", 64 * MIB);
    let open: [Box<dyn Resource>; 2] = [
        Box::new(Direct::new(sim.driver(), streams.clone(), Some(budget.clone()))),
        Box::new(StreamOrdered::new(sim.driver(), streams.clone(), budget.clone()).unwrap()),
    ];
    for resource in open {
        let (s, u) = (streams.lease().unwrap(), streams.lease().unwrap());
        let block = resource.allocate(&s, Request::bytes(MIB)).unwrap();
        let at = range(&block);
        let used = block.prepare(&u, Access::Read).unwrap();
        drop(block);
        drop(resource);
        sim.access(u.raw(), at, Access::Read, None).unwrap();
        assert!(budget.used() > 0);
        used.finish().unwrap();
        s.synchronize().unwrap();
        assert_eq!(budget.used(), 0);
        assert_silent(&sim);
    }
    drop(streams);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}

#[test]
fn free_drop_and_record_use_make_no_driver_call() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let blocks: Vec<_> = (0..8).map(|i| rig.alloc(&s, MIB << (i % 3))).collect();
    u.wait_for(&s).unwrap();
    let before = rig.sim.driver().calls().made();
    for block in &blocks {
        block.record_use(&u, Access::Read).unwrap();
    }
    drop(blocks);
    assert_eq!(rig.sim.driver().calls().made(), before);
}

#[test]
fn a_warm_stream_allocates_without_a_driver_call() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let round = || {
        let sizes = [1, 511, 4096, 70_000, MIB, 3 * MIB + 1];
        sizes.map(|bytes| rig.alloc(&s, bytes).address())
    };
    round();
    let first = round();
    let before = rig.sim.driver().calls().made();
    for _ in 0..100 {
        assert_eq!(round(), first, "the same operations, the same addresses");
    }
    assert_eq!(rig.sim.driver().calls().made(), before);
}

#[test]
fn blocks_may_outlive_their_pool_and_the_last_one_returns_everything() {
    let rig = Rig::new(64);
    let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
    let s = rig.stream();
    let blocks: Vec<_> = (0..4).map(|_| rig.alloc(&s, 3 * MIB)).collect();
    drop(rig);
    drop(s);
    assert!(budget.used() >= 12 * MIB, "live blocks keep their memory");
    drop(blocks);
    assert_returned(&sim, &budget);
}

/// A value whose destructor panics.
struct Rude;
impl Drop for Rude {
    #[expect(clippy::panic, reason = "what is tested")]
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[test]
fn a_value_kept_until_a_free_may_panic_when_dropped() {
    let rig = Rig::new(64);
    let (s, other) = (rig.stream(), rig.stream());
    for used_elsewhere in [false, true] {
        let mut block = rig.alloc(&s, MIB);
        block.keep_until_free(Box::new(Rude));
        let kept = Arc::new(());
        block.keep_until_free(Box::new(kept.clone()));
        if used_elsewhere {
            block.prepare(&other, Access::Read).unwrap().finish().unwrap();
        }
        drop(block);
        rig.sim.run_all();
        rig.pool.trim(0).unwrap();
        assert_eq!(Arc::strong_count(&kept), 1, "the next one goes all the same");
        let stats = rig.pool.stats();
        assert_eq!((stats.live, stats.pending), (0, 0), "{stats:?}");
    }
    rig.assert_silent();
}

#[test]
fn a_pool_closed_within_a_kernel_is_released_later() {
    for pending in [false, true] {
        let Rig { sim, pool, budget } = Rig::new(64);
        let (s, other) = (pool.stream().unwrap(), pool.stream().unwrap());
        let block = pool.alloc(&s, Request::bytes(MIB)).unwrap();
        if pending {
            block.prepare(&other, Access::Read).unwrap().finish().unwrap();
        }
        drop(block);
        let stream = other.raw();
        // Within a kernel every driver call is refused, including those that wait for work.
        let mut held = Some((pool, s, other));
        let close = SimKernel::new("close").run(move |_| drop(held.take()));
        sim.launch(stream, close).unwrap();
        sim.run_all();
        assert!(budget.used() > 0, "it could not be ended there");
        // The next pool completes the release.
        drop(Rig::new(64));
        assert_eq!(budget.used(), 0);
        assert_silent(&sim);
    }
}
