//! Tests of reclaim between pools under one root budget: which pools are asked, for how much, and
//! that every byte is accounted for whatever fails meanwhile.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use crate::support::{MIB, PATIENCE, assert_returned, assert_silent};
use aquifer_core::{Budget, MemoryError, OutOfMemory, Tag};
use aquifer_device::{DevicePool, Opaque, PoolConfig, Request, StreamOrdered};
use aquifer_driver::{Call, DeviceId, sim::Sim};
use aquifer_stream::StreamPool;
use std::{
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// Opens a pool on device 0 under this budget.
fn open(sim: &Sim, budget: &Budget, set: impl FnOnce(&mut PoolConfig)) -> DevicePool {
    open_on(sim, 0, budget, set)
}

fn open_on(
    sim: &Sim,
    device: u32,
    budget: &Budget,
    set: impl FnOnce(&mut PoolConfig),
) -> DevicePool {
    let mut config = PoolConfig::with_budget(budget.clone());
    set(&mut config);
    DevicePool::open(sim.driver(), DeviceId(device), config).unwrap()
}

/// Leaves this many MiB idle in the caches of a pool.
fn idle(pool: &DevicePool, mib: u64) {
    drop(pool.alloc(&pool.stream().unwrap(), Request::bytes(mib * MIB)).unwrap());
    assert_eq!(pool.stats().physical, mib * MIB);
}

fn take(pool: &DevicePool, mib: u64) -> aquifer_core::Result<aquifer_device::Block> {
    pool.alloc(&pool.stream().unwrap(), Request::bytes(mib * MIB))
}

fn refused<T: std::fmt::Debug>(answer: aquifer_core::Result<T>) -> OutOfMemory {
    match answer {
        Err(MemoryError::OutOfMemory(error)) => *error,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_clean(sim: &Sim, budget: &Budget) {
    assert_silent(sim);
    assert_returned(sim, budget);
}

#[test]
fn every_allocation_method_reclaims_idle_memory_of_another_pool() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 16 * MIB);
    let (ours, theirs) = (open(&sim, &budget, |_| ()), open(&sim, &budget, |_| ()));
    let s = ours.stream().unwrap();
    let whole = Request::bytes(12 * MIB);
    let ways: [&dyn Fn(); 4] = [
        &|| drop(ours.alloc(&s, whole).unwrap()),
        &|| {
            // Part of the memory is reserved.
            let held = Mutex::new(budget.reserve(2 * MIB).unwrap());
            drop(ours.alloc_reserved(&s, whole, &held).unwrap());
        },
        &|| drop(ours.alloc_stable(&s, whole).unwrap()),
        &|| ours.reserve::<u8>(&s, 12 << 20).unwrap().commit_to(12 << 20).unwrap(),
    ];
    for way in ways {
        idle(&theirs, 12);
        way();
        assert!(theirs.stats().physical <= 4 * MIB && budget.peak() <= 16 * MIB);
        s.synchronize().unwrap();
        ours.trim(0).unwrap();
        assert_eq!(ours.stats().physical, 0);
    }
    drop((ours, theirs, s));
    assert_clean(&sim, &budget);
}

#[test]
fn reclaim_takes_no_more_from_other_pools_than_is_missing() {
    let sim = Sim::h200(1).symbolic();
    let budget = Budget::new("both", 64 * MIB);
    let (ours, theirs) = (open(&sim, &budget, |_| ()), open(&sim, &budget, |_| ()));
    idle(&theirs, 60);
    let block = take(&ours, 14).unwrap();
    assert_eq!(theirs.stats().physical, 50 * MIB);
    drop(block);
}

#[test]
fn a_tenants_limit_reclaims_from_no_other_pool_and_the_refusal_names_the_tenant() {
    let sim = Sim::h200(1);
    let root = Budget::new("device 0", 64 * MIB);
    let tenant = root.child("tenant", 16 * MIB);
    let short = |config: &mut PoolConfig| config.wait = Duration::ZERO;
    let (ours, sibling) = (open(&sim, &tenant, short), open(&sim, &tenant, short));
    let other = open(&sim, &root, short);
    idle(&other, 20);
    idle(&sibling, 6);
    let live = take(&ours, 8).unwrap();
    let block = take(&ours, 8).unwrap();
    assert_eq!(
        (sibling.stats().physical, other.stats().physical),
        (0, 20 * MIB),
        "the sibling's alone"
    );
    let error = refused(take(&ours, 2));
    let refusal = error.refused.unwrap();
    assert_eq!((refusal.budget, refusal.requested, refusal.remaining), ("tenant", 2 * MIB, 0));
    assert_eq!(other.stats().physical, 20 * MIB);
    drop((live, block));
}

#[test]
fn a_refusal_names_the_budget_above_that_has_no_room_in_figures_of_the_whole_request() {
    let sim = Sim::h200(1);
    let root = Budget::new("process", 16 * MIB);
    let device = root.child("device 0", 64 * MIB);
    let pool = open(&sim, &device, |config| config.wait = Duration::ZERO);
    let _others = root.charge(10 * MIB).unwrap();
    let s = pool.stream().unwrap();
    let mut room = pool.reserve::<u8>(&s, 8 << 20).unwrap();
    let answers = [
        pool.alloc(&s, Request::bytes(8 * MIB)).map(drop),
        pool.alloc_stable(&s, Request::bytes(8 * MIB)).map(drop),
        room.commit_to(8 << 20),
    ];
    for answer in answers {
        let refusal = refused(answer).refused.unwrap();
        let figures = (refusal.requested, refusal.current, refusal.remaining, refusal.limit);
        assert_eq!((refusal.budget, figures), ("process", (8 * MIB, 10 * MIB, 6 * MIB, 16 * MIB)));
    }
    assert_eq!(root.used(), 10 * MIB, "a refusal changes nothing");
}

#[test]
fn memory_the_driver_refuses_is_reclaimed_from_pools_of_that_device_under_any_budget() {
    let sim = Sim::h200(2).symbolic().capacity(64 * MIB);
    let root = Budget::unlimited("process");
    let [a, b, far] = ["a", "b", "far"].map(|name| root.child(name, 1 << 40));
    let (ours, theirs, far) =
        (open(&sim, &a, |_| ()), open(&sim, &b, |_| ()), open_on(&sim, 1, &far, |_| ()));
    idle(&theirs, 60);
    idle(&far, 60);
    let block = take(&ours, 40).unwrap();
    assert!(theirs.stats().physical <= 24 * MIB);
    assert_eq!(far.stats().physical, 60 * MIB, "its memory is of no use here");
    let error = refused(take(&ours, 40));
    assert!(error.driver.is_some() && error.refused.is_none(), "{error}");
    drop(block);
}

#[test]
fn a_request_with_time_waits_for_memory_in_use_by_another_pool() {
    for (wait, served) in [(Duration::ZERO, false), (Duration::MAX, true)] {
        let sim = Sim::h200(1).stepped();
        let budget = Budget::new("both", 16 * MIB);
        let (ours, theirs) = (open(&sim, &budget, |c| c.wait = wait), open(&sim, &budget, |_| ()));
        let s = theirs.stream().unwrap();
        let mut buffer = theirs.buffer::<u8>(&s, 12 << 20).unwrap();
        s.fill(&mut buffer, 1).unwrap();
        drop(buffer);
        let answer = take(&ours, 12);
        assert_eq!(answer.is_ok(), served, "{answer:?}");
        drop(answer);
        assert_silent(&sim);
    }
}

#[test]
fn freed_blocks_of_another_pool_whose_guards_were_not_read_are_reclaimed() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 16 * MIB);
    let ours = open(&sim, &budget, |_| ());
    let theirs = open(&sim, &budget, |config| config.debug.canaries = true);
    let s = theirs.stream().unwrap();
    drop(theirs.alloc(&s, Request::bytes(12 * MIB)).unwrap());
    assert!(theirs.stats().pending >= 12 * MIB);
    drop(take(&ours, 12).unwrap());
    assert!(theirs.stats().physical <= 4 * MIB);
    drop((ours, theirs, s));
    assert_clean(&sim, &budget);
}

#[test]
fn empty_parkable_slots_of_another_pool_are_reclaimed() {
    let sim = Sim::h200(1).symbolic();
    let budget = Budget::new("both", 16 * MIB);
    let (ours, theirs) =
        (open(&sim, &budget, |_| ()), open(&sim, &budget, |c| c.handle_bytes = 2 * MIB));
    let parkable = theirs.parkable(Tag::named("to be given back")).unwrap();
    let s = theirs.stream().unwrap();
    let (live, gone) = (
        parkable.alloc(&s, Request::bytes(2 * MIB)).unwrap(),
        parkable.alloc(&s, Request::bytes(10 * MIB)).unwrap(),
    );
    drop(gone);
    assert_eq!((theirs.stats().physical, theirs.stats().cached), (12 * MIB, 10 * MIB));
    drop(take(&ours, 12).unwrap());
    assert_eq!(theirs.stats().physical, 2 * MIB);
    drop((live, parkable, ours, theirs, s));
    assert_clean(&sim, &budget);
}

#[test]
fn the_drivers_own_pool_reclaims_and_is_reclaimed_from() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 64 * MIB);
    let streams = StreamPool::new(sim.driver(), DeviceId(0), 8);
    let theirs = StreamOrdered::new(sim.driver(), streams.clone(), budget.clone()).unwrap();
    let ours = open(&sim, &budget, |_| ());
    let s = streams.lease().unwrap();
    for _ in 0..3 {
        drop(take(&ours, 60).unwrap());
        drop(theirs.allocate(&s, Request::bytes(60 * MIB)).unwrap());
        s.synchronize().unwrap();
        assert_eq!(budget.used(), theirs.stats().physical + ours.stats().physical);
    }
    drop((ours, theirs, s, streams));
    assert_clean(&sim, &budget);
}

#[test]
fn memory_whose_release_fails_stays_charged_until_the_next_trim() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 16 * MIB);
    let ours = open(&sim, &budget, |config| config.wait = Duration::ZERO);
    let theirs = open(&sim, &budget, |_| ());
    idle(&theirs, 12);
    sim.fail(Call::Unmap, 1, 999);
    let error = refused(take(&ours, 12));
    let asked = error.tried.iter().find(|tried| tried.step == "caches of a pool");
    assert_eq!(asked.map(|tried| tried.gave), Some(0), "{error}");
    assert_eq!((theirs.stats().physical, budget.used()), (12 * MIB, 12 * MIB), "nothing went");
    assert!(take(&ours, 12).is_ok(), "nor is it lost");
    theirs.trim(0).unwrap();
    ours.trim(0).unwrap();
    // A handle that is unmapped but not released has no owner, yet still occupies the device.
    idle(&theirs, 12);
    sim.fail_every(Call::HandleRelease, 1, 999);
    assert!(take(&ours, 12).is_err());
    let stuck = budget.stranded();
    assert!(stuck > 0 && theirs.stats().pending == stuck, "{:?}", theirs.stats());
    assert_eq!(budget.used(), theirs.stats().physical);
    sim.clear_failures();
    let block = take(&ours, 12).unwrap();
    assert_eq!(budget.stranded(), 0);
    assert!(budget.peak() <= 16 * MIB);
    drop(block);
}

#[test]
fn an_offer_waits_for_no_driver_call_and_a_reclaim_in_progress_blocks_no_other_pool() {
    let sim = Sim::h200(1).symbolic();
    let budget = Budget::new("both", 32 * MIB);
    let ours = open(&sim, &budget, |config| config.wait = Duration::from_secs(60));
    let theirs = open(&sim, &budget, |_| ());
    let u = theirs.stream().unwrap();
    let live = theirs.alloc(&u, Request::bytes(MIB)).unwrap();
    idle_more(&theirs, 24);
    let s = ours.stream().unwrap();
    drop(ours.alloc(&s, Request::bytes(MIB)).unwrap());
    thread::scope(|scope| {
        let stalled = sim.stall(Call::HandleRelease);
        let asks = scope.spawn(|| take(&ours, 20).map(drop));
        assert!(stalled.wait_for(1, PATIENCE), "it asks the other pool, which asks the driver");
        // This covers the fast paths and the statistics of both pools, and the budget.
        drop(ours.alloc(&s, Request::bytes(MIB)).unwrap());
        drop(theirs.alloc(&u, Request::bytes(MIB / 2)).unwrap());
        drop(budget.charge(1));
        assert!(ours.stats().physical + theirs.stats().physical > 0);
        // Another pool is short as well and has no time to wait.
        let room = budget.make_room(32 * MIB, Some(Instant::now()), None);
        assert!(room.missing > 0);
        drop(stalled);
        asks.join().unwrap().unwrap();
    });
    drop(live);
}

fn idle_more(pool: &DevicePool, mib: u64) {
    drop(pool.alloc(&pool.stream().unwrap(), Request::bytes(mib * MIB)).unwrap());
}

#[test]
fn a_dropped_pool_is_not_asked_again_and_its_budget_does_not_keep_it_alive() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 16 * MIB);
    let ours = open(&sim, &budget, |config| config.wait = Duration::ZERO);
    let theirs = open(&sim, &budget, |_| ());
    idle(&theirs, 8);
    drop(theirs);
    assert_eq!(budget.used(), 0);
    let _full = budget.charge(16 * MIB).unwrap();
    let error = refused(take(&ours, 8));
    assert!(error.tried.iter().all(|tried| tried.step != "caches of a pool"), "{error}");
    drop(ours);
    drop(_full);
    assert_clean(&sim, &budget);
}

#[test]
fn memory_for_a_foreign_library_is_returned_to_the_driver() {
    let sim = Sim::h200(1).stepped();
    let budget = Budget::new("device 0", 64 * MIB);
    let (ours, theirs) = (open(&sim, &budget, |_| ()), open(&sim, &budget, |_| ()));
    idle(&ours, 16);
    let s = theirs.stream().unwrap();
    let mut buffer = theirs.buffer::<u8>(&s, 16 << 20).unwrap();
    s.fill(&mut buffer, 1).unwrap();
    drop(buffer);
    let before = sim.driver().memory_info(DeviceId(0)).unwrap().free;
    let room = ours.give_back(32 * MIB, Some(Instant::now()));
    assert_eq!(room.missing, 16 * MIB, "what is in use needs time: {room:?}");
    let room = ours.give_back(16 * MIB, None);
    assert_eq!(room.missing, 0, "{room:?}");
    assert_eq!(sim.driver().memory_info(DeviceId(0)).unwrap().free, before + 32 * MIB);
    assert_eq!(ours.give_back(1, None).missing, 1, "nothing is left");
    assert_silent(&sim);
}

/// Two pools under a budget that is too small, with threads on both that allocate and free: every
/// request ends, no request is refused while memory lies idle in the other pool, and at the end
/// every byte is returned.
#[test]
fn pools_that_reclaim_from_each_other_on_many_threads_lose_no_byte_and_do_not_deadlock() {
    let sim = Sim::h200(1).symbolic();
    let budget = Budget::new("both", 48 * MIB);
    let pools = [0, 1].map(|_| open(&sim, &budget, |config| config.wait = PATIENCE));
    thread::scope(|scope| {
        for at in 0..4u64 {
            let (pool, budget) = (&pools[at as usize % 2], &budget);
            scope.spawn(move || {
                let s = pool.stream().unwrap();
                for round in 0..60 {
                    // All four threads together hold at most 40 of the 48 MiB.
                    let block = pool.alloc(&s, Request::bytes((2 + (round + at) % 5 * 2) * MIB));
                    assert!(block.is_ok(), "{}", block.unwrap_err());
                    assert!(budget.used() <= 48 * MIB);
                }
            });
        }
    });
    for pool in &pools {
        pool.trim(0).unwrap();
        let stats = pool.stats();
        assert_eq!((stats.live, stats.cached, stats.pending, stats.physical), (0, 0, 0, 0));
    }
    assert!(budget.peak() <= 48 * MIB);
    drop(pools);
    assert_clean(&sim, &budget);
}
