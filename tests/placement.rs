//! A device is picked and its bytes are held in one step, for as long as the lease lasts.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer::{DeviceBuffer, DeviceId, MemoryError, Place, Policy, Request, Runtime, sim::Sim};
use std::thread;

const MIB: u64 = 1 << 20;

/// A machine with so many devices of so many MiB each.
fn machine(devices: u32, mib: u64) -> Runtime {
    let sim = Sim::h200(devices).symbolic();
    Runtime::builder().driver(sim.driver()).device_budget(mib * MIB).build().unwrap()
}

fn picks(rt: &Runtime, policy: Policy, count: usize) -> Vec<u32> {
    let placer = rt.placer(policy);
    let leases: Vec<_> = (0..count).map(|_| placer.place(&Place::bytes(MIB)).unwrap()).collect();
    leases.iter().map(|lease| lease.device().0).collect()
}

#[test]
fn round_robin_takes_each_device_in_turn() {
    assert_eq!(picks(&machine(2, 64), Policy::RoundRobin, 4), [0, 1, 0, 1]);
}

#[test]
fn a_burst_spreads_over_the_freest_and_herds_on_none() {
    let rt = machine(4, 256);
    let placer = rt.placer(Policy::MostFree);
    let leases: Vec<_> = thread::scope(|scope| {
        let place = || (0..25).map(|_| placer.place(&Place::bytes(2 * MIB)).unwrap()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(place)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    for device in 0..4 {
        let here = leases.iter().filter(|lease| lease.device() == DeviceId(device)).count();
        // Threads that read at the same moment may pick the same device, so one may be ahead by a few.
        assert!((20..=30).contains(&here), "{here} of 100 on device {device}");
        assert_eq!(rt.device(device as usize).unwrap().budget().used(), here as u64 * 2 * MIB);
    }
}

#[test]
fn a_lease_holds_its_bytes_against_everybody_and_returns_the_rest() {
    let rt = machine(1, 64);
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let lease = rt.placer(Policy::MostFree).place(&Place::bytes(48 * MIB)).unwrap();
    assert!(matches!(pool.alloc(&s, Request::bytes(20 * MIB)), Err(MemoryError::OutOfMemory(_))));
    let drawn: DeviceBuffer<u8> = lease.buffer(&s, 30 << 20).unwrap();
    assert_eq!((lease.remaining(), pool.budget().used()), (18 * MIB, 48 * MIB));
    drop(lease);
    assert_eq!(pool.budget().used(), 30 * MIB, "what was drawn stays, the rest is given back");
    assert!(pool.alloc(&s, Request::bytes(20 * MIB)).is_ok());
    drop(drawn);
}

#[test]
fn what_a_lease_draws_from_the_cache_is_taken_off_it_all_the_same() {
    let rt = machine(1, 64);
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    drop(pool.alloc(&s, Request::bytes(20 * MIB)).unwrap());
    let lease = rt.placer(Policy::MostFree).place(&Place::bytes(40 * MIB)).unwrap();
    let before = pool.budget().used();
    let drawn = lease.alloc(&s, Request::bytes(20 * MIB)).unwrap();
    assert_eq!(lease.remaining(), 20 * MIB);
    assert_eq!(pool.budget().used(), before - 20 * MIB, "the cache had it, so the reserve is free again");
    drop(drawn);
}

#[test]
fn of_two_requests_for_the_last_bytes_one_wins_and_the_other_is_sent_elsewhere_or_told() {
    let rt = machine(2, 64);
    let placer = rt.placer(Policy::MostFree);
    let first = placer.place(&Place::bytes(60 * MIB)).unwrap();
    let second = placer.place(&Place::bytes(60 * MIB)).unwrap();
    assert_ne!(first.device(), second.device());
    assert!(matches!(placer.place(&Place::bytes(60 * MIB)), Err(MemoryError::NoDevice { count: 2, .. })));
    drop(first);
    assert!(placer.place(&Place::bytes(60 * MIB)).is_ok());
}

#[test]
fn a_pool_whose_budget_is_all_cache_gives_it_up_for_a_lease() {
    let rt = machine(1, 64);
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    drop(pool.alloc(&s, Request::bytes(60 * MIB)).unwrap());
    assert_eq!(pool.budget().remaining(), 4 * MIB);
    let lease = rt.placer(Policy::MostFree).place(&Place::bytes(32 * MIB)).unwrap();
    assert_eq!(lease.remaining(), 32 * MIB);
    assert!(pool.budget().used() <= 64 * MIB);
}

#[test]
fn hints_are_honoured_and_a_request_that_none_satisfies_is_told() {
    let rt = machine(3, 64);
    let placer = rt.placer(Policy::RoundRobin);
    for _ in 0..3 {
        let only = Place::bytes(MIB).only([DeviceId(2)]);
        assert_eq!(placer.place(&only).unwrap().device(), DeviceId(2));
        let others = Place::bytes(MIB).not_on([DeviceId(0), DeviceId(2)]);
        assert_eq!(placer.place(&others).unwrap().device(), DeviceId(1));
    }
    let none = |place: Place| matches!(placer.place(&place), Err(MemoryError::NoDevice { .. }));
    assert!(none(Place::bytes(65 * MIB)));
    assert!(none(Place::bytes(1).min_free(65 * MIB)));
    assert!(none(Place::bytes(1).min_compute((99, 0))));
    assert!(none(Place::bytes(1).only([])));
    assert_eq!(placer.place(&Place::bytes(0)).map(drop), Err(MemoryError::ZeroSize));
}
