//! Tests of streams that have been dropped: their memory serves other streams before any is short,
//! and no state accumulates.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![allow(unsafe_code, reason = "adopts streams and ends their handles")]

use crate::support::{MIB, Rig, assert_returned, plain};
use aquifer_core::{Action, Recorder, event::RingSink};
use aquifer_device::{Adoption, Request};
use aquifer_driver::{Access, Call, DeviceId, RawStream, sim::Sim};
use aquifer_stream::{Stream, StreamLifetime};
use std::{sync::Arc, thread, time::Duration};

fn adopt(rig: &Rig, life: StreamLifetime) -> (Stream, RawStream) {
    let raw = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this driver. 2. the tests follow `life`.
    (unsafe { rig.pool.streams().adopt(raw, life) }.unwrap(), raw)
}

fn destroy(rig: &Rig, raw: RawStream) {
    // SAFETY: 1. the stream belongs to the test and is not used from here on.
    unsafe { rig.sim.driver().stream_destroy(raw) }.unwrap();
}

/// Returns the number of caches of the pool, for live and for dropped streams.
fn caches(rig: &Rig) -> usize {
    let told = rig.pool.alloc(&rig.stream(), Request::bytes(1 << 45)).unwrap_err();
    let aquifer_core::MemoryError::OutOfMemory(told) = told else { panic!("{told:?}") };
    told.stranded.len()
}

#[test]
fn memory_of_a_dropped_stream_serves_other_streams_before_the_pool_grows() {
    for retired in [true, false] {
        for adoption in [Adoption::Wait, Adoption::Never] {
            let rig = Rig::on(Sim::h200(1).symbolic(), 1024, |config| config.adoption = adoption);
            let u = rig.stream();
            let first = rig.take(&u, 1);
            let gone = if retired {
                let (s, raw) = adopt(&rig, StreamLifetime::Retired);
                let blocks: Vec<_> = (0..8).map(|_| rig.take(&s, 4)).collect();
                blocks.iter().for_each(|block| rig.write(&s, block));
                drop(blocks);
                s.retire().unwrap();
                destroy(&rig, raw);
                32
            } else {
                let s = rig.stream();
                let blocks: Vec<_> = (0..8).map(|_| rig.take(&s, 4)).collect();
                drop(s);
                drop(blocks);
                32
            };
            let held = rig.pool.stats().physical;
            let before = rig.calls(Call::HandleCreate);
            let blocks: Vec<_> = (0..gone / 4).map(|_| rig.take(&u, 4)).collect();
            assert_eq!(rig.calls(Call::HandleCreate), before, "{retired}, {adoption:?}");
            assert_eq!(rig.pool.stats().physical, held);
            blocks.iter().for_each(|block| rig.write(&u, block));
            drop((first, blocks));
            rig.assert_silent();
        }
    }
}

#[test]
fn memory_of_a_dropped_stream_is_reused_only_after_its_work() {
    for adoption in [Adoption::Wait, Adoption::DoneOnly] {
        let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 64, |config| {
            (config.adoption, config.wait) = (adoption, Duration::ZERO);
        });
        let (s, u) = (rig.stream(), rig.stream());
        let block = rig.take(&s, 40);
        rig.write(&s, &block);
        drop((block, s));
        match rig.pool.alloc(&u, Request::bytes(60 * MIB)) {
            Ok(block) => {
                assert_eq!(adoption, Adoption::Wait);
                rig.write(&u, &block);
                while rig.sim.step(u.raw()) {}
                assert!(rig.sim.pending(u.raw()) > 0, "what the stream had queued has not run");
            }
            Err(_) => assert_eq!(adoption, Adoption::DoneOnly),
        }
        rig.sim.run_all();
        rig.write(&u, &rig.take(&u, 60));
        rig.assert_silent();
    }
}

#[test]
fn memory_of_the_driver_that_is_freed_during_a_use_waits_for_its_own_ended_stream_too() {
    let rig = Rig::on(plain().symbolic().stepped(), 64, |_| ());
    let user = rig.stream();
    let (s, raw) = adopt(&rig, StreamLifetime::Fenced);
    let block = rig.alloc(&s, 256);
    let used = block.prepare(&user, Access::Read).unwrap();
    rig.access(&s, &block, Access::Read);
    drop((block, s));
    destroy(&rig, raw);
    used.finish().unwrap();
    assert_eq!(rig.pool.stats().pending, 0);
    rig.assert_silent();
}

/// Runs ten thousand streams of one kind one after the other, and compares what remains at the end
/// with the peak.
fn ten_thousand(rig: &Rig, mut live: impl FnMut(u64)) {
    let (mut events, mut streams, mut physical) = (0, 0, 0);
    for nth in 0..10_000 {
        live(nth);
        let outstanding = rig.sim.outstanding();
        (events, streams) = (outstanding.events.max(events), outstanding.streams.max(streams));
        physical = physical.max(rig.pool.stats().physical);
    }
    assert!(events <= 24 && streams <= 8, "{events} events and {streams} streams at once");
    assert!(physical <= 32 * MIB, "{physical} bytes at once");
    let stats = rig.pool.stats();
    assert_eq!(
        (stats.live, stats.allocations, stats.frees),
        (0, 20_000, 20_000),
        "nothing is uncounted"
    );
    assert!(stats.peak_live <= 32 * MIB, "{}", stats.peak_live);
    assert!(caches(rig) <= 4, "{} caches", caches(rig));
    rig.assert_silent();
}

#[test]
fn ten_thousand_short_lived_streams_leave_no_more_than_a_few() {
    for mapping in [true, false] {
        for life in [StreamLifetime::Retired, StreamLifetime::Fenced] {
            let sim = if mapping { Sim::h200(1) } else { plain() };
            let rig = Rig::on(sim.symbolic(), 4096, |_| ());
            ten_thousand(&rig, |nth| {
                let (s, raw) = adopt(&rig, life.clone());
                let blocks = [1, 2].map(|part| {
                    let bytes = (1 + nth * 7919 % 3000) * 1024 / part;
                    rig.alloc(&s, bytes)
                });
                blocks.iter().for_each(|block| rig.write(&s, block));
                drop(blocks);
                if matches!(life, StreamLifetime::Retired) {
                    s.retire().unwrap();
                }
                destroy(&rig, raw);
            });
        }
    }
}

#[test]
fn ten_thousand_leases_of_changing_kinds_leave_no_more_than_a_few() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 4096, |config| config.streams = 2);
    ten_thousand(&rig, |nth| {
        // At the cap, so that a stream of another kind is evicted.
        let streams = rig.pool.streams();
        let s = if nth % 2 == 0 { streams.lease() } else { streams.lease_isolated() }.unwrap();
        let blocks = [rig.take(&s, 3), rig.take(&s, 1)];
        blocks.iter().for_each(|block| rig.write(&s, block));
    });
}

#[test]
fn ended_threads_leave_no_caches_of_their_default_streams() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 1024, |_| ());
    for _ in 0..200 {
        thread::scope(|scope| {
            scope.spawn(|| {
                let own = rig.pool.streams().thread_default().unwrap();
                let block = rig.take(&own, 4);
                rig.write(&own, &block);
            });
        });
    }
    assert!(caches(&rig) <= 4, "{} caches", caches(&rig));
    assert!(rig.pool.stats().physical <= 16 * MIB);
    rig.assert_silent();
}

#[test]
fn threads_create_and_drop_streams_while_others_take_over_their_memory() {
    for seed in 0..4 {
        let ring = Arc::new(RingSink::new(1 << 16));
        let rig = Rig::on(Sim::h200(1).symbolic().seeded(seed), 256, |config| {
            config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
        });
        thread::scope(|scope| {
            for id in 0..4u64 {
                let rig = &rig;
                scope.spawn(move || {
                    let mut late = Vec::new();
                    for nth in 0..100 {
                        let (s, raw) = adopt(rig, StreamLifetime::Retired);
                        let mut blocks: Vec<_> =
                            (0..4).map(|n| rig.take(&s, 1 + (id + n) % 4)).collect();
                        blocks.iter().for_each(|block| rig.write(&s, block));
                        if nth % 3 == 0 {
                            // Blocks returned long after their stream was dropped.
                            late.extend(blocks.pop());
                        }
                        drop(blocks);
                        s.retire().unwrap();
                        destroy(rig, raw);
                        if late.len() > 4 {
                            late.clear();
                        }
                    }
                });
            }
        });
        rig.pool.trim(0).unwrap();
        let stats = rig.pool.stats();
        assert_eq!((stats.live, stats.cached, stats.pending, stats.physical), (0, 0, 0, 0));
        assert_eq!((stats.allocations, stats.frees), (1600, 1600));
        rig.assert_silent();
        let events = ring.take();
        let count = |action| events.iter().filter(|event| event.action == action).count();
        assert_eq!((count(Action::Allocate), count(Action::Free)), (1600, 1600));
        let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
        drop(rig);
        assert_returned(&sim, &budget);
    }
}
