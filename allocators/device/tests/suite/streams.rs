//! What a stream's kind changes for the memory that is used on it, each beside a program that does
//! without.
//!
//! - Work of isolated streams never comes to wait for other work because of memory.
//! - A foreign stream that goes without notice is fenced while it is there; one that is retired is
//!   waited for.
//! - A thread's default stream is another stream on each thread, and known by the events that the
//!   thread itself records.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(unsafe_code, reason = "adopts streams and ends their handles")]

use crate::support::{MIB, Rig, range};
use aquifer_core::{Budget, DeviceId, MemoryError};
use aquifer_device::{Block, DevicePool, PoolConfig, Request};
use aquifer_driver::{
    Access, Call, Operand, RawStream,
    sim::{Sim, ViolationKind},
};
use aquifer_stream::{Lease, Life, Stream};
use std::{sync::mpsc, thread, time::Duration};

const BIG: u64 = 6 * MIB;

/// Kernels of two processes that wait for each other: those of one name, on the two ranks' devices.
struct Ranks {
    sim: Sim,
    pools: [DevicePool; 2],
}

impl Ranks {
    fn new() -> Self {
        let sim = Sim::h200(2).symbolic().stepped();
        let pools = [0, 1].map(|rank| {
            let mut config = PoolConfig::with_budget(Budget::new("the rank", 8 * MIB));
            config.wait = Duration::ZERO;
            DevicePool::open(sim.driver(), DeviceId(rank), config).unwrap()
        });
        Self { sim, pools }
    }

    /// Queues one rank's part of a collective: it ends when the other rank's part has begun.
    fn collective(&self, name: u64, rank: usize, stream: &Stream) {
        let part = |rank: usize| 0x1000 * name + 8 * rank as u64;
        self.sim.write_value(stream.raw(), part(rank), 1).unwrap();
        self.sim.wait_value(stream.raw(), part(1 - rank), 1).unwrap();
    }
}

/// Two ranks queue two collectives in opposite orders on a stream each, which is right. What the
/// memory of the first has held, the second asks for.
fn two_collectives(kind: Lease) -> (usize, [Result<Block, MemoryError>; 2]) {
    let ranks = Ranks::new();
    let streams =
        [0, 1].map(|rank| [1, 2].map(|_| ranks.pools[rank].streams().lease_as(kind).unwrap()));
    let blocks = [0, 1].map(|rank| {
        let (pool, first, second) = (&ranks.pools[rank], rank, 1 - rank);
        let own = pool.alloc(&streams[rank][first], Request::bytes(BIG)).unwrap();
        ranks.collective(first as u64, rank, &streams[rank][first]);
        drop(own);
        let taken = pool.alloc(&streams[rank][second], Request::bytes(BIG));
        ranks.collective(second as u64, rank, &streams[rank][second]);
        taken
    });
    ranks.sim.run_all();
    let stuck = streams.iter().flatten().map(|stream| ranks.sim.pending(stream.raw())).sum();
    if stuck == 0 {
        // Then the memory can be had.
        for rank in [0, 1] {
            drop(ranks.pools[rank].alloc(&streams[rank][1 - rank], Request::bytes(BIG)).unwrap());
        }
    } else {
        // Nothing can wait for these any more.
        ranks.sim.lose_device(DeviceId(0));
        ranks.sim.lose_device(DeviceId(1));
    }
    (stuck, blocks)
}

#[test]
fn collectives_on_isolated_streams_never_wait_for_each_other_through_memory() {
    let (stuck, blocks) = two_collectives(Lease::default().isolated());
    assert_eq!(stuck, 0);
    for refused in blocks {
        assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "the memory is in use");
    }
}

#[test]
fn on_other_streams_the_same_collectives_wait_for_each_other_for_ever() {
    let (stuck, blocks) = two_collectives(Lease::default());
    assert!(stuck > 0);
    assert!(blocks.iter().all(Result::is_ok), "each was given memory behind the other");
}

#[test]
fn an_isolated_stream_is_made_to_wait_for_no_use_of_its_own_blocks_and_nobody_for_its() {
    for (home, user) in [(true, false), (false, true)] {
        let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
        let lease = |isolated: bool| {
            let kind = if isolated { Lease::default().isolated() } else { Lease::default() };
            rig.pool.streams().lease_as(kind).unwrap()
        };
        let (s, u) = (lease(home), lease(user));
        let block = rig.pool.alloc(&s, Request::bytes(BIG)).unwrap();
        let used = block.prepare(&u, Access::Read).unwrap();
        rig.sim.access(u.raw(), range(&block), Access::Read, None).unwrap();
        used.finish().unwrap();
        drop(block);
        let before = rig.sim.driver().calls().get(Call::StreamWaitEvent);
        assert!(rig.pool.alloc(&s, Request::bytes(BIG)).is_err());
        assert_eq!(rig.sim.driver().calls().get(Call::StreamWaitEvent), before);
        rig.sim.run_all();
        rig.pool.alloc(&s, Request::bytes(BIG)).unwrap();
        rig.assert_silent();
    }
}

#[test]
fn memory_is_not_waited_for_where_a_graph_is_being_captured_and_the_capture_stays_whole() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 8, |config| {
        config.wait = Duration::from_millis(20);
    });
    let (s, u) = (rig.stream(), rig.stream());
    for (capturing, asking) in [(&s, &u), (&u, &s)] {
        let block = rig.pool.alloc(capturing, Request::bytes(BIG)).unwrap();
        rig.sim.access(capturing.raw(), range(&block), Access::Write, None).unwrap();
        rig.sim
            .driver()
            .capture_begin(capturing.raw(), aquifer_driver::CaptureMode::Global)
            .unwrap();
        drop(block);
        let refused = rig.pool.alloc(asking, Request::bytes(BIG)).map(drop);
        assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
        let graph = rig.sim.driver().capture_end(capturing.raw()).unwrap();
        assert_eq!(rig.sim.graph_nodes(graph), Some(0));
        rig.pool.alloc(asking, Request::bytes(BIG)).unwrap();
    }
    rig.assert_silent();
}

/// A block that a foreign stream uses, whose owner then destroys it. What the next one is called
/// who gets the handle.
fn foreign_use(life: Life, retire: bool) -> Rig {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let (s, driver) = (rig.stream(), rig.sim.driver());
    let raw = driver.stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this driver. 2. the callers say whether `life` is kept.
    let foreign = unsafe { rig.pool.streams().adopt(raw, life) }.unwrap();
    let block = rig.pool.alloc(&s, Request::bytes(BIG)).unwrap();
    let used = block.prepare(&foreign, Access::Write).unwrap();
    rig.sim.access(raw, range(&block), Access::Write, Some(block.generation())).unwrap();
    used.finish().unwrap();
    go(&rig, foreign, raw, retire);
    drop(block);
    drop(rig.pool.alloc(&s, Request::bytes(BIG)).unwrap());
    rig
}

/// The same with a block that belongs to the foreign stream.
fn foreign_home(life: Life, retire: bool) -> Rig {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let (s, driver) = (rig.stream(), rig.sim.driver());
    let raw = driver.stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this driver. 2. the callers say whether `life` is kept.
    let foreign = unsafe { rig.pool.streams().adopt(raw, life) }.unwrap();
    let block = rig.pool.alloc(&foreign, Request::bytes(BIG)).unwrap();
    rig.sim.access(raw, range(&block), Access::Write, Some(block.generation())).unwrap();
    drop(block);
    go(&rig, foreign, raw, retire);
    drop(rig.pool.alloc(&s, Request::bytes(BIG)).unwrap());
    rig
}

/// The owner of a foreign stream destroys it, and another stream gets its handle.
fn go(rig: &Rig, foreign: Stream, raw: RawStream, retire: bool) {
    if retire {
        foreign.retire().unwrap();
    }
    while rig.sim.step(raw) {}
    // SAFETY: 1. the test's own, which nobody calls for from here on, if `life` has been kept.
    unsafe { rig.sim.driver().stream_destroy(raw) }.unwrap();
    assert_eq!(rig.sim.driver().stream_create(DeviceId(0), 0).unwrap(), raw, "handles come back");
}

#[test]
fn only_a_stream_that_every_thread_may_call_for_is_told_as_a_home() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let s = rig.stream();
    let buffer = rig.bytes(&s, MIB);
    assert_eq!(buffer.home_stream(), Some(s.raw()));
    assert_eq!(buffer.block().home_stream(), Some(s.raw()));
    assert_eq!(
        buffer.slice(0..9).unwrap().home_stream(),
        Some(s.raw()),
        "a part lives where the whole does"
    );
    for (life, told) in [(Life::Retired, true), (Life::Fenced, false)] {
        let raw = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
        // SAFETY: 1. a stream of this driver, which is not destroyed before it is retired or its
        // block is freed.
        let foreign = unsafe { rig.pool.streams().adopt(raw, life) }.unwrap();
        let block = rig.pool.alloc(&foreign, Request::bytes(MIB)).unwrap();
        assert_eq!(block.home_stream(), told.then_some(raw));
        foreign.retire().unwrap();
        assert_eq!(block.home_stream(), None, "its owner may destroy it now");
        drop(block);
        // SAFETY: 1. the test's own, retired, and no block is left on it.
        unsafe { rig.sim.driver().stream_destroy(raw) }.unwrap();
    }
    rig.assert_silent();
}

#[test]
fn a_foreign_stream_that_is_fenced_may_go_at_any_time() {
    for rig in [foreign_use(Life::Fenced, false), foreign_home(Life::Fenced, false)] {
        rig.assert_silent();
        let sim = rig.sim.clone();
        drop(rig);
        assert!(sim.violations().is_empty());
    }
}

#[test]
fn a_foreign_stream_that_is_retired_is_waited_for_and_may_go() {
    for rig in [foreign_use(Life::Retired, true), foreign_home(Life::Retired, true)] {
        rig.assert_silent();
    }
}

#[test]
fn a_foreign_stream_that_is_neither_is_taken_for_the_one_that_got_its_handle() {
    for rig in [foreign_use(Life::Retired, false), foreign_home(Life::Retired, false)] {
        let found = rig.sim.violations();
        let is_reuse = |kind| matches!(kind, ViolationKind::Reuse | ViolationKind::UnmapInFlight);
        assert!(found.iter().any(|fault| is_reuse(fault.kind)), "{found:?}");
        // The pool's end adds to it.
        rig.sim.oracle(false);
    }
}

/// What ends a thread's use of a block: told to the pool by the thread, or an event that the main
/// thread records on the same handle, which on the main thread is another stream.
#[derive(PartialEq)]
enum Ending {
    ByItsThread,
    ByHandle,
}

fn a_thread_uses_a_block(ending: &Ending) -> Rig {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let s = rig.stream();
    let block = rig.pool.alloc(&s, Request::bytes(BIG)).unwrap();
    let per_thread = RawStream::per_thread(DeviceId(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let own = rig.pool.streams().thread_default().unwrap();
            let used = block.prepare(&own, Access::Write).unwrap();
            rig.sim
                .access(per_thread, range(&block), Access::Write, Some(block.generation()))
                .unwrap();
            match ending {
                Ending::ByItsThread => used.finish().unwrap(),
                Ending::ByHandle => used.abort(),
            }
        });
    });
    if *ending == Ending::ByHandle {
        let driver = rig.sim.driver();
        let event = driver.event_create(DeviceId(0)).unwrap();
        driver.event_record(event, per_thread).unwrap();
        driver.stream_wait_event(s.raw(), event).unwrap();
    }
    drop(block);
    drop(rig.pool.alloc(&s, Request::bytes(BIG)).unwrap());
    rig
}

#[test]
fn a_threads_default_stream_is_known_by_the_events_that_its_thread_records() {
    let rig = a_thread_uses_a_block(&Ending::ByItsThread);
    rig.assert_silent();
    assert_eq!(rig.pool.stats().host_waits, 0);
}

#[test]
fn an_event_recorded_on_the_same_handle_by_another_thread_orders_nothing() {
    let rig = a_thread_uses_a_block(&Ending::ByHandle);
    assert!(rig.sim.violations().iter().any(|fault| fault.kind == ViolationKind::Reuse));
    // The pool's end adds to it.
    rig.sim.oracle(false);
}

#[test]
fn what_is_freed_on_a_threads_default_stream_may_be_taken_over_when_the_thread_is_gone() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    thread::scope(|scope| {
        scope.spawn(|| {
            let own = rig.pool.streams().thread_default().unwrap();
            let block = rig.pool.alloc(&own, Request::bytes(BIG)).unwrap();
            rig.sim
                .access(own.raw(), range(&block), Access::Write, Some(block.generation()))
                .unwrap();
        });
    });
    let s = rig.stream();
    drop(rig.pool.alloc(&s, Request::bytes(BIG)).unwrap());
    rig.assert_silent();
    let sim = rig.sim.clone();
    drop((rig, s));
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert!(sim.violations().is_empty());
}

#[test]
fn what_another_thread_frees_for_a_threads_default_stream_is_held_back_until_that_thread_fences() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let (give, take) = mpsc::channel::<Block>();
    let (freed, go_on) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let rig = &rig;
        let owner = scope.spawn(move || {
            let own = rig.pool.streams().thread_default().unwrap();
            let block = rig.pool.alloc(&own, Request::bytes(BIG)).unwrap();
            rig.sim
                .access(own.raw(), range(&block), Access::Write, Some(block.generation()))
                .unwrap();
            give.send(block).unwrap();
            go_on.recv().unwrap();
            // Any free of its own covers the other.
            drop(rig.pool.alloc(&own, Request::bytes(MIB)).unwrap());
        });
        drop(take.recv().unwrap());
        assert!(
            rig.pool.alloc(&s, Request::bytes(BIG)).is_err(),
            "nobody knows when its work is done"
        );
        freed.send(()).unwrap();
        owner.join().unwrap();
        rig.pool.alloc(&s, Request::bytes(BIG)).unwrap();
    });
    rig.assert_silent();
}
