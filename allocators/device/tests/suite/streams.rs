//! Tests of how a stream's kind affects the memory used on it.
//!
//! - Work of isolated streams never waits for other work because of memory.
//! - A foreign stream that may be destroyed without notice is fenced while it exists. One that is
//!   retired is waited for.
//! - A thread's default stream is a different stream on each thread, and is tracked by events that
//!   the thread itself records.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(unsafe_code, reason = "adopts streams and ends their handles")]

use crate::support::{MIB, Rig, assert_silent, range};
use aquifer_core::{DeviceId, MemoryError};
use aquifer_device::{Block, DeviceBuffer, Request};
use aquifer_driver::{Access, Call, Operand, OperandMut, RawStream, sim::Sim};
use aquifer_stream::{Launch, Stream, StreamLifetime, StreamPool};
use std::{sync::mpsc, thread, time::Duration};

const BIG: u64 = 6 * MIB;

fn lease(streams: &StreamPool, isolated: bool) -> Stream {
    if isolated { streams.lease_isolated() } else { streams.lease() }.unwrap()
}

#[test]
fn an_isolated_stream_neither_waits_for_uses_of_its_blocks_nor_delays_others() {
    for (home, user) in [(true, false), (false, true)] {
        let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
        let (s, u) = (lease(rig.pool.streams(), home), lease(rig.pool.streams(), user));
        let block = rig.alloc(&s, BIG);
        let used = block.prepare(&u, Access::Read).unwrap();
        rig.sim.access(u.raw(), range(&block), Access::Read, None).unwrap();
        used.finish().unwrap();
        drop(block);
        let before = rig.calls(Call::StreamWaitEvent);
        assert!(rig.pool.alloc(&s, Request::bytes(BIG)).is_err());
        assert_eq!(rig.calls(Call::StreamWaitEvent), before);
        rig.sim.run_all();
        rig.alloc(&s, BIG);
        rig.assert_silent();
    }
}

#[test]
fn the_pool_does_not_wait_for_memory_during_a_capture_and_keeps_it_valid() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 8, |config| {
        config.wait = Duration::from_millis(20);
    });
    let (s, u) = (rig.stream(), rig.stream());
    for (capturing, asking) in [(&s, &u), (&u, &s)] {
        let block = rig.alloc(capturing, BIG);
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
        rig.alloc(asking, BIG);
    }
    rig.assert_silent();
}

/// Uses a block on a foreign stream, whose owner then destroys it. Its handle is given to the next
/// stream.
fn foreign_use(life: StreamLifetime, retire: bool) -> Rig {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let (s, driver) = (rig.stream(), rig.sim.driver());
    let raw = driver.stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this driver. 2. the callers state whether they follow `life`.
    let foreign = unsafe { rig.pool.streams().adopt(raw, life) }.unwrap();
    let block = rig.alloc(&s, BIG);
    let used = block.prepare(&foreign, Access::Write).unwrap();
    rig.sim.access(raw, range(&block), Access::Write, Some(block.generation())).unwrap();
    used.finish().unwrap();
    go(&rig, foreign, raw, retire);
    drop(block);
    drop(rig.alloc(&s, BIG));
    rig
}

/// The same with a block that is owned by the foreign stream.
fn foreign_home(life: StreamLifetime, retire: bool) -> Rig {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let (s, driver) = (rig.stream(), rig.sim.driver());
    let raw = driver.stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this driver. 2. the callers state whether they follow `life`.
    let foreign = unsafe { rig.pool.streams().adopt(raw, life) }.unwrap();
    let block = rig.alloc(&foreign, BIG);
    rig.sim.access(raw, range(&block), Access::Write, Some(block.generation())).unwrap();
    drop(block);
    go(&rig, foreign, raw, retire);
    drop(rig.alloc(&s, BIG));
    rig
}

/// The owner of a foreign stream destroys it, and another stream gets its handle.
fn go(rig: &Rig, foreign: Stream, raw: RawStream, retire: bool) {
    if retire {
        foreign.retire().unwrap();
    }
    while rig.sim.step(raw) {}
    // SAFETY: 1. the stream belongs to the test and is not used from here on, if `life` has been
    // followed.
    unsafe { rig.sim.driver().stream_destroy(raw) }.unwrap();
    assert_eq!(rig.sim.driver().stream_create(DeviceId(0), 0).unwrap(), raw, "handles come back");
}

#[test]
fn only_streams_usable_by_every_thread_are_reported_as_owners() {
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
    for (life, told) in [(StreamLifetime::Retired, true), (StreamLifetime::Fenced, false)] {
        let raw = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
        // SAFETY: 1. a stream of this driver, which is not destroyed before it is retired or its
        // block is freed.
        let foreign = unsafe { rig.pool.streams().adopt(raw, life) }.unwrap();
        let block = rig.alloc(&foreign, MIB);
        assert_eq!(block.home_stream(), told.then_some(raw));
        foreign.retire().unwrap();
        assert_eq!(block.home_stream(), None, "its owner may destroy it now");
        drop(block);
        // SAFETY: 1. the stream belongs to the test, is retired, and has no blocks left.
        unsafe { rig.sim.driver().stream_destroy(raw) }.unwrap();
    }
    rig.assert_silent();
}

#[test]
fn a_fenced_foreign_stream_may_be_destroyed_at_any_time() {
    for rig in
        [foreign_use(StreamLifetime::Fenced, false), foreign_home(StreamLifetime::Fenced, false)]
    {
        rig.assert_silent();
        let sim = rig.sim.clone();
        drop(rig);
        assert_silent(&sim);
    }
}

#[test]
fn a_retired_foreign_stream_is_waited_for_and_may_be_destroyed() {
    for rig in
        [foreign_use(StreamLifetime::Retired, true), foreign_home(StreamLifetime::Retired, true)]
    {
        rig.assert_silent();
    }
}

#[test]
fn a_threads_default_stream_is_tracked_by_events_of_its_thread() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    let s = rig.stream();
    let block = rig.alloc(&s, BIG);
    let per_thread = RawStream::per_thread(DeviceId(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let own = rig.pool.streams().thread_default().unwrap();
            let used = block.prepare(&own, Access::Write).unwrap();
            rig.sim
                .access(per_thread, range(&block), Access::Write, Some(block.generation()))
                .unwrap();
            used.finish().unwrap();
        });
    });
    drop(block);
    drop(rig.alloc(&s, BIG));
    rig.assert_silent();
    assert_eq!(rig.pool.stats().host_waits, 0);
}

#[test]
fn memory_freed_on_a_threads_default_stream_is_reusable_after_the_thread_ended() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |_| ());
    thread::scope(|scope| {
        scope.spawn(|| {
            let own = rig.pool.streams().thread_default().unwrap();
            let block = rig.alloc(&own, BIG);
            rig.write(&own, &block);
        });
    });
    let s = rig.stream();
    drop(rig.alloc(&s, BIG));
    rig.assert_silent();
    let sim = rig.sim.clone();
    drop((rig, s));
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_silent(&sim);
}

#[test]
fn a_free_by_another_thread_is_pending_until_the_owning_thread_fences() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let (give, take) = mpsc::channel::<Block>();
    let (freed, go_on) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let rig = &rig;
        let owner = scope.spawn(move || {
            let own = rig.pool.streams().thread_default().unwrap();
            let block = rig.alloc(&own, BIG);
            rig.write(&own, &block);
            give.send(block).unwrap();
            go_on.recv().unwrap();
            // A free by the thread itself also covers the other one.
            drop(rig.alloc(&own, MIB));
        });
        drop(take.recv().unwrap());
        assert!(
            rig.pool.alloc(&s, Request::bytes(BIG)).is_err(),
            "nobody knows when its work is done"
        );
        freed.send(()).unwrap();
        owner.join().unwrap();
        rig.alloc(&s, BIG);
    });
    rig.assert_silent();
}

/// Makes a buffer on the default stream of a thread that has queued work on it and goes on.
fn of_another_thread(rig: &Rig) -> DeviceBuffer<u8> {
    let make = || {
        let own = rig.pool.streams().thread_default().unwrap();
        let mut buffer = rig.bytes(&own, 4096);
        own.fill(&mut buffer, 1).unwrap();
        buffer
    };
    thread::scope(|scope| scope.spawn(make).join().unwrap())
}

fn is_refused<T>(result: Result<T, impl Into<MemoryError>>) -> bool {
    matches!(result.map_err(Into::into), Err(MemoryError::OtherThread { stream: 2 }))
}

#[test]
fn work_on_a_threads_default_stream_is_not_taken_for_that_of_another_thread() {
    let rig = Rig::stepped(8);
    let mut theirs = of_another_thread(&rig);
    let own = rig.pool.streams().thread_default().unwrap();
    let mut mine = rig.bytes(&own, 4096);
    own.fill(&mut mine, 2).unwrap();
    let mut back = vec![0; 4096];
    assert!(is_refused(own.fill(&mut theirs, 3)));
    assert!(is_refused(own.copy(&theirs, &mut mine)));
    assert!(is_refused(own.copy(&mine, &mut theirs)));
    assert!(is_refused(own.scope(|c| c.download(&theirs, &mut back)).unwrap()));
    assert!(is_refused(own.scope(|c| c.upload(&back, &mut theirs)).unwrap()));
    assert!(is_refused(own.fill(&mut theirs.slice_mut(0..8).unwrap(), 3)));
    assert!(is_refused(theirs.order(RawStream::per_thread(DeviceId(0)), None, Access::Read)));
    assert!(is_refused(theirs.block().prepare(&own, Access::Read)));
    assert!(is_refused(Launch::on(&own).updates(&theirs).preflight()));
    rig.assert_silent();
}

#[test]
fn a_threads_default_stream_is_refused_on_every_other_thread() {
    let rig = Rig::stepped(8);
    let own = rig.pool.streams().thread_default().unwrap();
    let mut mine = rig.bytes(&own, 4096);
    let s = rig.stream();
    let mut leased = rig.bytes(&s, 4096);
    thread::scope(|scope| {
        scope.spawn(|| {
            for buffer in [&mut mine, &mut leased] {
                assert!(is_refused(own.fill(buffer, 1)));
                let alive = Some(own.timeline().keep_alive());
                assert!(is_refused(buffer.order_mut(own.raw(), alive, Access::Write)));
            }
        });
    });
    // The calls have recorded nothing: there is no work to wait for.
    let waits = rig.calls(Call::StreamWaitEvent);
    s.fill(&mut leased, 2).unwrap();
    assert_eq!(rig.calls(Call::StreamWaitEvent), waits);
    rig.assert_silent();
}

#[test]
fn a_stream_with_the_handle_of_a_destroyed_one_is_not_taken_for_it() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
    let (driver, s) = (rig.sim.driver(), rig.stream());
    let adopt = || {
        let raw = driver.stream_create(DeviceId(0), 0).unwrap();
        // SAFETY: 1. a stream of this device. 2. it is retired before it is destroyed.
        (unsafe { rig.pool.streams().adopt(raw, StreamLifetime::Retired) }.unwrap(), raw)
    };
    let (first, raw) = adopt();
    let mut buffer = rig.bytes(&first, BIG);
    first.retire().unwrap();
    // SAFETY: 1. it was retired.
    unsafe { driver.stream_destroy(raw) }.unwrap();
    let (second, again) = adopt();
    assert_eq!(raw, again, "the handle is not reused, and nothing is tested");
    second.fill(&mut buffer, 1).unwrap();
    drop(buffer);
    assert!(rig.pool.alloc(&s, Request::bytes(BIG)).is_err(), "`second` has not filled it yet");
    rig.sim.run_all();
    rig.alloc(&s, BIG);
    rig.assert_silent();
}
