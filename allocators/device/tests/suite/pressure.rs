//! Tests of the steps taken when memory is short, their order, and what an allocation costs other
//! callers meanwhile.

use crate::support::{
    self, MIB, PATIENCE, Random, Reclaimer, Rig, assert_returned, assert_silent, plain, range,
};
use aquifer_adapters::Limit;
use aquifer_core::{Action, Budget, MemoryError, Recorder, Tag, event::RingSink};
use aquifer_device::{
    Adoption, DevicePool, Direct, FailureCallback, OnFailure, Opaque, PoolConfig, Request,
    Resource, StreamOrdered,
};
use aquifer_driver::{
    Access, Call, DeviceId,
    sim::{DeviceConfig, Sim, SimConfig, StallGuard},
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

#[test]
fn a_fragmented_cache_serves_a_large_block_by_moving_handles() {
    let rig = Rig::new(32);
    let s = rig.stream();
    let blocks: Vec<_> = (0..8).map(|_| rig.alloc(&s, 4 * MIB)).collect();
    assert_eq!(rig.budget.used(), 32 * MIB);
    let (kept, freed): (Vec<_>, Vec<_>) =
        blocks.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    drop(freed);
    s.synchronize().unwrap();
    // Sixteen MiB are free, in four pieces of four.
    let large = rig.alloc(&s, 16 * MIB);
    let stats = rig.pool.stats();
    assert!(stats.moves > 0 && stats.physical == 32 * MIB, "{stats:?}");
    assert_eq!(large.capacity(), 16 * MIB);
    drop(kept);
    rig.assert_silent();
}

#[test]
fn memory_in_use_is_moved_after_a_device_side_wait() {
    let rig = Rig::stepped(32);
    let (s, u) = (rig.stream(), rig.stream());
    let mut a = rig.bytes(&s, 20 * MIB);
    let mut keep = rig.bytes(&s, 8 * MIB);
    s.fill(&mut a, 1).unwrap();
    s.fill(&mut keep, 2).unwrap();
    drop(a);
    // `s` has run nothing yet, so work may still write all the free memory.
    let mut b = rig.bytes(&u, 24 * MIB);
    u.fill(&mut b, 3).unwrap();
    let stats = rig.pool.stats();
    assert_eq!(stats.host_waits, 0);
    assert!(stats.stream_waits > 0, "{stats:?}");
    assert!(support::read(&u, &b).iter().all(|&byte| byte == 3));
    assert!(support::read(&s, &keep).iter().all(|&byte| byte == 2));
    rig.assert_silent();
}

#[test]
fn one_stream_takes_over_memory_another_has_finished_with() {
    let rig = Rig::new(32);
    let (s, u) = (rig.stream(), rig.stream());
    drop(rig.alloc(&s, 24 * MIB));
    let before = rig.calls(Call::HandleCreate);
    let taken = rig.alloc(&u, 24 * MIB);
    assert_eq!(rig.calls(Call::HandleCreate), before);
    assert_eq!(rig.pool.stats().adoptions, 1);
    assert_eq!(taken.home().number(), u.number());
    rig.assert_silent();
}

#[test]
fn streams_that_do_not_share_never_wait_for_each_other_and_never_take() {
    let rig = Rig::on(Sim::h200(1).stepped(), 32, |c| {
        c.adoption = Adoption::Never;
        c.wait = Duration::ZERO;
    });
    let (s, u) = (rig.stream(), rig.stream());
    let mut a = rig.bytes(&s, 24 * MIB);
    s.fill(&mut a, 1).unwrap();
    drop(a);
    assert!(matches!(
        rig.pool.alloc(&u, Request::bytes(24 * MIB)),
        Err(MemoryError::OutOfMemory(_))
    ));
    assert!(rig.pool.alloc(&s, Request::bytes(24 * MIB)).is_ok(), "its own it may have");
    // The driver completes the work before any request is refused.
    rig.sim.run_all();
    let before = rig.calls(Call::HandleCreate);
    assert!(rig.pool.alloc(&u, Request::bytes(24 * MIB)).is_ok());
    assert!(rig.calls(Call::HandleCreate) > before);
    assert_eq!((rig.pool.stats().adoptions, rig.calls(Call::StreamWaitEvent)), (0, 0));
    rig.assert_silent();
}

#[test]
fn done_only_takes_only_memory_that_is_done() {
    let rig = Rig::on(Sim::h200(1).stepped(), 32, |c| {
        c.adoption = Adoption::DoneOnly;
        c.wait = Duration::ZERO;
    });
    let (s, u) = (rig.stream(), rig.stream());
    let mut a = rig.bytes(&s, 24 * MIB);
    s.fill(&mut a, 1).unwrap();
    drop(a);
    assert!(rig.pool.alloc(&u, Request::bytes(24 * MIB)).is_err());
    rig.sim.run_all();
    assert!(rig.pool.alloc(&u, Request::bytes(24 * MIB)).is_ok());
    assert_eq!(rig.calls(Call::StreamWaitEvent), 0);
    rig.assert_silent();
}

#[test]
fn a_refusal_names_the_holders_of_memory_and_a_remedy() {
    let rig = Rig::on(Sim::h200(1), 16, |c| c.wait = Duration::ZERO);
    let s = rig.stream();
    let _kv = rig.pool.alloc(&s, Request::bytes(9 * MIB).tag(Tag::named("kv-cache"))).unwrap();
    let _step = rig.pool.alloc(&s, Request::bytes(3 * MIB).tag(Tag::named("step"))).unwrap();
    let error = rig.pool.alloc(&s, Request::bytes(10 * MIB)).unwrap_err();
    let expected = "\
out of memory on device 0: 10.00 MiB requested
  refused by  10.00 MiB asked of the budget of the device, 12.00 MiB of 16.00 MiB used, 4.00 MiB left
  held        12.00 MiB live, 0 B cached, 0 B pending, 12.00 MiB physical
  largest     0 B free in one range
  holder      9.00 MiB in 1 block: \"kv-cache\"
  holder      3.00 MiB in 1 block: \"step\"
  tried       collect own frees: 0 B; fence and poll: 0 B; grow: 0 B; take over what is done: 0 B; wait on the device: 0 B; take over what is in use: 0 B; move what is done: 0 B
  do          free 6.00 MiB or more of the 9.00 MiB that \"kv-cache\" holds, or raise the limit of the device to 22.00 MiB";
    assert_eq!(error.to_string(), expected);
    assert_eq!(rig.budget.used(), 12 * MIB, "a failed request has taken nothing");
}

#[test]
fn invalid_requests_are_distinguished_and_change_nothing() {
    let rig = Rig::new(16);
    let s = rig.stream();
    let ask = |request: Request| rig.pool.alloc(&s, request).map(drop);
    assert!(matches!(
        ask(Request::bytes(u64::MAX)),
        Err(MemoryError::TooLarge { requested: u64::MAX, .. })
    ));
    assert_eq!(ask(Request::bytes(1).align(3)), Err(MemoryError::BadAlignment { align: 3 }));
    assert_eq!(ask(Request::bytes(1).align(0)), Err(MemoryError::BadAlignment { align: 0 }));
    assert_eq!(
        ask(Request::bytes(1).align(4 << 20)),
        Err(MemoryError::BadAlignment { align: 4 << 20 })
    );
    assert!(matches!(ask(Request::bytes(1 << 40)), Err(MemoryError::OutOfMemory(_))));
    assert!(matches!(rig.pool.buffer::<u64>(&s, usize::MAX), Err(MemoryError::TooLarge { .. })));
    assert_eq!(rig.budget.used(), 0);

    let two = Sim::h200(2).symbolic();
    let pools =
        [0, 1].map(|d| DevicePool::open(two.driver(), DeviceId(d), PoolConfig::default()).unwrap());
    let wrong = pools[0].alloc(&pools[1].stream().unwrap(), Request::bytes(1)).map(drop);
    assert_eq!(wrong, Err(MemoryError::WrongDevice { expected: DeviceId(0), actual: DeviceId(1) }));
    let none = PoolConfig::with_budget(Budget::new("nothing", 0));
    assert!(matches!(
        DevicePool::open(two.driver(), DeviceId(0), none),
        Err(MemoryError::BadSetting { name: "budget", .. })
    ));
}

#[test]
fn a_handler_is_called_until_there_is_room() {
    let rig = Rig::new(16);
    let s = rig.stream();
    let blocks: Vec<_> = (0..4).map(|_| rig.alloc(&s, 4 * MIB)).collect();
    let blocks = Arc::new(Mutex::new(blocks));
    let evicted = blocks.clone();
    let evict = Reclaimer::new(move || drop(evicted.lock().unwrap().pop()));
    let _registration = rig.budget.on_need(&evict);
    assert!(rig.pool.alloc(&s, Request::bytes(8 * MIB)).is_ok());
    assert_eq!((evict.calls(), blocks.lock().unwrap().len()), (2, 2));
}

#[test]
fn an_allocation_waits_for_queued_work_only_as_a_last_resort() {
    let rig = Rig::on(Sim::h200(1).stepped(), 16, |c| {
        c.adoption = Adoption::DoneOnly;
        c.wait = Duration::MAX;
    });
    let (s, u) = (rig.stream(), rig.stream());
    let mut a = rig.bytes(&s, 12 * MIB);
    s.fill(&mut a, 1).unwrap();
    drop(a);
    let b = rig.alloc(&u, 12 * MIB);
    assert_eq!(rig.pool.stats().host_waits, 1);
    drop(b);
    rig.assert_silent();
}

#[test]
fn a_thread_waiting_for_the_device_blocks_no_other_allocation() {
    for call in [Call::HandleCreate, Call::EventRecord, Call::SetAccess] {
        let rig = Rig::new(64);
        let (s, u) = (rig.stream(), rig.stream());
        // Between two live blocks, so that no larger request can use it.
        let mut blocks: Vec<_> = (0..3).map(|_| rig.alloc(&u, MIB / 2)).collect();
        drop(blocks.remove(1));
        drop(rig.alloc(&s, MIB));
        thread::scope(|scope| {
            let stalled = rig.sim.stall(call);
            let slow = scope.spawn(|| rig.pool.alloc(&s, Request::bytes(32 * MIB)).map(drop));
            assert!(stalled.wait_for(1, PATIENCE), "the slow path calls {call:?}");
            drop(rig.alloc(&u, MIB / 2));
            assert!(rig.pool.stats().physical > 0);
            drop(stalled);
            slow.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_trim_releases_done_memory_down_to_its_target_once() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let live = rig.alloc(&s, 4 * MIB);
    drop(rig.alloc(&s, 40 * MIB));
    assert_eq!(rig.pool.trim(20 * MIB), Ok(24 * MIB));
    assert_eq!(rig.pool.stats().physical, 20 * MIB);
    assert_eq!(rig.pool.trim(0), Ok(16 * MIB));
    assert_eq!(rig.pool.trim(0), Ok(0));
    assert_eq!(rig.budget.used(), 4 * MIB);
    drop(live);
}

#[test]
fn a_trim_that_fails_keeps_the_rest_charged_and_the_next_one_drains_it() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let first = rig.pool.alloc(&s, Request::bytes(8 * MIB));
    // A live block in between makes the trim take two calls.
    let kept = rig.alloc(&s, 2 * MIB);
    drop((first, rig.pool.alloc(&u, Request::bytes(20 * MIB))));
    rig.sim.fail(Call::Unmap, 2, 999);
    assert!(rig.pool.trim(0).is_err());
    let stats = rig.pool.stats();
    assert!(stats.physical > 2 * MIB && stats.physical == rig.budget.used(), "{stats:?}");
    assert_eq!(stats.cached + stats.live, stats.physical, "{stats:?}");
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), 2 * MIB);
    drop(kept);
}

#[test]
fn on_a_device_without_mappings_each_block_is_an_allocation_of_the_driver() {
    let rig = Rig::on(plain(), 128, |_| ());
    let s = rig.stream();
    let small = rig.bytes(&s, 1000);
    let large = rig.alloc(&s, 50 * MIB);
    let made = [Call::MemAlloc, Call::HandleCreate].map(|call| rig.calls(call));
    assert_eq!(made, [2, 0]);
    assert_eq!((rig.pool.stats().physical, rig.budget.used()), (50 * MIB + 1000, 50 * MIB + 1000));
    drop(large);
    assert_eq!(rig.budget.used(), 1000, "nothing is cached");
    drop(small);
    assert_eq!(rig.budget.used(), 0);
    rig.assert_silent();
}

/// A handler that refuses everything and counts its calls.
#[derive(Debug)]
struct Refuses(AtomicUsize);

impl Opaque for Refuses {
    type Stream = aquifer_stream::Stream;
    type Block = aquifer_device::Block;
    fn device(&self) -> DeviceId {
        DeviceId(0)
    }
    fn allocate(
        &self,
        _stream: &aquifer_stream::Stream,
        _request: Request,
    ) -> aquifer_core::Result<aquifer_device::Block> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(MemoryError::Closed)
    }
    fn stats(&self) -> aquifer_core::PoolStats {
        aquifer_core::PoolStats::default()
    }
    fn trim(&self, _keep: u64) -> aquifer_core::Result<u64> {
        Ok(0)
    }
}

#[test]
fn a_limit_rolls_back_when_its_inner_source_fails_and_does_not_call_it_when_refusing() {
    let rig = Rig::new(16);
    let s = rig.stream();
    let below = Arc::new(Refuses(AtomicUsize::new(0)));
    let limit = Limit::new(below.clone() as Arc<dyn Resource>, Budget::new("tenant", 100));
    assert_eq!(limit.allocate(&s, Request::bytes(60)).unwrap_err(), MemoryError::Closed);
    assert_eq!(limit.budget().used(), 0);
    assert!(matches!(limit.allocate(&s, Request::bytes(101)), Err(MemoryError::OutOfMemory(_))));
    assert_eq!(below.0.load(Ordering::Relaxed), 1);
}

#[test]
fn a_failure_callback_decides_the_number_of_attempts() {
    let rig = Rig::new(16);
    let s = rig.stream();
    let below = Arc::new(Refuses(AtomicUsize::new(0)));
    let asked = AtomicUsize::new(0);
    let patient = FailureCallback::new(below.clone(), 3, |_: &Request, _: &MemoryError| {
        asked.fetch_add(1, Ordering::Relaxed);
        OnFailure::Retry
    });
    assert!(patient.allocate(&s, Request::bytes(1)).is_err());
    assert_eq!((below.0.load(Ordering::Relaxed), asked.load(Ordering::Relaxed)), (4, 3));
}

#[test]
fn every_event_of_a_pool_is_recorded_in_order() {
    let ring = Arc::new(RingSink::new(64));
    let recorder = Arc::new(Recorder::new(ring.clone()));
    let rig = Rig::on(Sim::h200(1), 4, |c| {
        c.recorder = Some(recorder);
        c.wait = Duration::ZERO;
    });
    let s = rig.stream();
    drop(rig.alloc(&s, 100));
    assert!(rig.pool.alloc(&s, Request::bytes(8 * MIB)).is_err());
    rig.pool.trim(0).unwrap();
    let actions: Vec<Action> = ring.take().iter().map(|e| e.action).collect();
    let expected = [
        Action::Limit,
        Action::Outside,
        Action::Grow,
        Action::Allocate,
        Action::Free,
        Action::Complete,
        Action::Fail,
        Action::Reap,
    ];
    assert_eq!(actions, expected);
}

#[test]
fn the_drivers_own_allocators_count_and_release_everything() {
    let sim = Sim::h200(1).stepped();
    let budget = Budget::new("the device", 64 * MIB);
    let streams = aquifer_stream::StreamPool::new(sim.driver(), DeviceId(0), 8);
    let resources: [Arc<dyn Resource>; 2] = [
        Arc::new(Direct::new(sim.driver(), streams.clone(), Some(budget.clone()))),
        Arc::new(StreamOrdered::new(sim.driver(), streams.clone(), budget.clone()).unwrap()),
    ];
    let (s, u) = (streams.lease().unwrap(), streams.lease().unwrap());
    for resource in &resources {
        let block = resource.allocate(&s, Request::bytes(5 * MIB)).unwrap();
        sim.access(s.raw(), range(&block), Access::Write, Some(block.generation())).unwrap();
        let used = block.prepare(&u, Access::Read).unwrap();
        sim.access(u.raw(), range(&block), Access::Read, Some(block.generation())).unwrap();
        used.finish().unwrap();
        assert!(budget.used() >= 5 * MIB);
        drop(block);
        s.synchronize().unwrap();
        u.synchronize().unwrap();
        resource.trim(0).unwrap();
        let stats = resource.stats();
        assert_eq!((stats.live, stats.pending, stats.physical), (0, 0, 0), "{resource:?}");
        assert_eq!(budget.used(), 0, "{resource:?}");
    }
    assert_silent(&sim);
}

#[test]
fn with_dedicated_blocks_a_trim_and_a_drop_release_memory_after_its_uses() {
    let sim = Sim::h200(1);
    let rig = Rig::on(sim.clone(), 16, |c| c.bypass = true);
    let (s, u) = (rig.stream(), rig.stream());
    for trimmed in [true, false] {
        let block = rig.alloc(&s, MIB);
        let used = block.prepare(&u, Access::Read).unwrap();
        drop(block);
        assert_eq!((rig.budget.used(), rig.pool.stats().pending), (MIB, MIB));
        used.finish().unwrap();
        if trimmed {
            rig.assert_empty();
        }
    }
    let budget = rig.budget.clone();
    drop((s, u));
    drop(rig);
    assert_returned(&sim, &budget);
}

#[test]
fn a_free_that_the_driver_refuses_stays_charged_and_is_retried() {
    let sim = Sim::h200(1);
    let budget = Budget::new("the device", 64 * MIB);
    let streams = aquifer_stream::StreamPool::new(sim.driver(), DeviceId(0), 8);
    let direct = Direct::new(sim.driver(), streams.clone(), Some(budget.clone()));
    let s = streams.lease().unwrap();
    sim.fail(Call::MemFree, 1, 999);
    drop(direct.allocate(&s, Request::bytes(MIB)).unwrap());
    assert_eq!(budget.used(), MIB);
    direct.trim(0).unwrap();
    assert_eq!(budget.used(), 0);
}

#[test]
fn memory_being_released_by_another_thread_is_waited_for_before_out_of_memory() {
    let stalled = Arc::new(Mutex::new(None));
    let resumed = stalled.clone();
    let let_go = Reclaimer::new(move || drop::<Option<StallGuard>>(resumed.lock().unwrap().take()));
    let rig = Rig::on(Sim::h200(1).symbolic(), 64, |config| config.wait = PATIENCE);
    let _registration = rig.budget.on_need(&let_go);
    let s = rig.stream();
    drop(rig.alloc(&s, 40 * MIB));
    s.synchronize().unwrap();
    let slow = rig.sim.stall(Call::HandleRelease);
    thread::scope(|scope| {
        scope.spawn(|| rig.pool.trim(0).unwrap());
        // All of it has left the cache and is still charged.
        assert!(slow.wait_for(1, PATIENCE));
        *stalled.lock().unwrap() = Some(slow);
        rig.alloc(&s, 40 * MIB);
    });
    assert_eq!(rig.pool.stats().failures, 0);
    rig.assert_silent();
}

/// This holds for any earlier allocations, number of streams and handle sizes.
#[test]
fn with_nothing_live_the_whole_budget_can_be_allocated() {
    for seed in 0..120 {
        let mut random = Random::new(seed);
        let plain = seed % 4 == 3;
        let mut config = SimConfig::h200(1);
        config.devices =
            vec![if plain { DeviceConfig::without_virtual_memory() } else { DeviceConfig::h200() }];
        // Handles of up to 64 MiB, or of 2 MiB only.
        let vast = seed % 2 == 0 && !plain;
        let sim = Sim::new(config).symbolic().capacity(1 << if vast { 42 } else { 34 });
        let limit = if vast { 1 << 20 } else { 64 + 2 * random.below(200) };
        let rig = Rig::on(sim, limit, |config| {
            config.adoption =
                [Adoption::Wait, Adoption::DoneOnly, Adoption::Never][random.below(3) as usize];
            config.wait = Duration::ZERO;
        });
        let streams: Vec<_> = (0..1 + random.below(4)).map(|_| rig.stream()).collect();
        let stream = |random: &mut Random| &streams[random.below(streams.len() as u64) as usize];
        for _ in 0..6 {
            let mut live = Vec::new();
            if vast {
                // The limit under which large handles are created.
                rig.budget.set_limit(1 << 40);
            }
            for _ in 0..random.below(40) {
                let scale = 10 + random.below(17);
                let bytes = 1 + random.below(1 << scale);
                live.extend(rig.pool.alloc(stream(&mut random), Request::bytes(bytes)).ok());
                if random.below(3) == 0 && !live.is_empty() {
                    drop(live.swap_remove(random.below(live.len() as u64) as usize));
                }
                // This leaves gaps between handles.
                if random.below(4) == 0 {
                    let held = rig.budget.used();
                    rig.pool.trim(held - random.below(held + 1)).unwrap();
                }
            }
            drop(live);
            if vast {
                rig.budget.set_limit((rig.budget.used() + (random.below(8) << 21)).max(2 * MIB));
            }
            let whole = rig.budget.limit() / (2 * MIB) * 2 * MIB;
            // Without mappings a block may also need room for its alignment.
            let most = if plain { whole - 2 * MIB } else { whole };
            for bytes in [most, 1 + random.below(most), most] {
                let answer = rig.pool.alloc(stream(&mut random), Request::bytes(bytes));
                assert!(answer.is_ok(), "seed {seed}: {bytes} of {whole}: {}", answer.unwrap_err());
            }
        }
        rig.assert_silent();
    }
}

/// Three handles of 64 MiB with gaps of 16 MiB between them. A window over two of them and their
/// gaps takes half of the third handle, which then cannot move to where memory is missing.
#[test]
fn scattered_handles_are_released_before_a_request_is_refused() {
    let rig = Rig::on(Sim::h200(1).symbolic().capacity(1 << 40), 1 << 20, |config| {
        config.wait = Duration::ZERO;
    });
    let s = rig.stream();
    let take = |mib: u64| rig.alloc(&s, mib * MIB);
    let (a, gap, b, other, c) = (take(64), take(16), take(64), take(16), take(64));
    drop((gap, other));
    rig.pool.trim(0).unwrap();
    drop((a, b, c));
    rig.budget.set_limit(192 * MIB);
    assert_eq!(rig.budget.used(), 192 * MIB);
    assert_eq!(take(192).capacity(), 192 * MIB);
    rig.assert_silent();
}

#[test]
fn a_request_that_can_never_fit_trims_no_cache() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 64, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let _live = rig.alloc(&s, 32 * MIB);
    drop(rig.alloc(&s, 16 * MIB));
    assert!(rig.pool.alloc(&s, Request::bytes(34 * MIB)).is_err());
    let before = rig.calls(Call::HandleCreate);
    drop(rig.alloc(&s, 16 * MIB));
    assert_eq!(rig.calls(Call::HandleCreate), before);
}

/// Equal streams near the limit. No single stream has enough room for the request.
#[test]
fn equal_streams_share_memory_near_the_limit_without_moving_a_handle() {
    for count in [2, 4, 8, 16] {
        let rig = Rig::on(Sim::h200(1).symbolic(), count * 8, |_| ());
        let streams: Vec<_> = (0..count).map(|_| rig.stream()).collect();
        let mut live: Vec<_> = streams
            .iter()
            .map(|stream| (0..8).map(|_| rig.alloc(stream, MIB)).collect::<Vec<_>>())
            .collect();
        // Free half of each stream's memory: every other MiB, so that no handle is free.
        live.iter_mut().for_each(|blocks| {
            let mut nth = 0;
            blocks.retain(|_| {
                nth += 1;
                nth % 2 == 0
            });
        });
        // One stream takes what all streams have freed.
        let taken: Vec<_> = (0..count * 4).map(|_| rig.alloc(&streams[0], MIB)).collect();
        let stats = rig.pool.stats();
        assert_eq!((stats.moves, stats.physical), (0, count * 8 * MIB), "{count} streams");
        drop((taken, live));
        rig.assert_silent();
    }
}
