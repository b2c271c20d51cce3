//! Tests of which device serves a request, and that the leased bytes can be drawn.
//!
//! - A lease holds its bytes exclusively, whatever other callers request.
//! - Every hint is honoured, whatever the policy.
//! - Picking and holding are one step: bytes granted to one request are not granted to another.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod bursts;
mod by_ledger;
mod groups;
mod health;
mod over_sources;
mod waits;

use crate::support;
use aquifer::{
    Access, Block, Budget, DeviceId, DevicePool, Group, Lease, MemoryError, Near, OutOfBudget,
    PlaceError, PlacementRequest, Placer, Policy, PoolConfig, Request, Runtime, Tag,
    driver::Call,
    host::{NodeId, Topology},
    placement::{Candidate, RejectReason},
    sim::{DeviceConfig, Sim, SimConfig},
};
use std::{
    path::Path,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// Returns devices under a limit in MiB each, on a machine without bytes.
fn machine(devices: u32, limit_mib: u64) -> (Sim, Runtime) {
    on(Sim::h200(devices).symbolic(), limit_mib)
}

fn on(sim: Sim, limit_mib: u64) -> (Sim, Runtime) {
    let rt =
        Runtime::builder().driver(sim.driver()).device_budget(limit_mib * MIB).build().unwrap();
    (sim, rt)
}

fn place(placer: &Placer, mib: u64) -> Result<Lease, PlaceError> {
    placer.place(&PlacementRequest::bytes(mib * MIB))
}

/// Returns why a device was rejected.
fn why(refused: &PlaceError, device: usize) -> RejectReason {
    let PlaceError::Nowhere(nowhere) = refused else { panic!("{refused}") };
    nowhere.devices[device].why.clone()
}

fn devices(leases: &[Lease]) -> Vec<u32> {
    leases.iter().map(|lease| lease.device().0).collect()
}

fn fill(pool: &DevicePool, mib: u64) -> Result<Block, MemoryError> {
    pool.alloc(&pool.stream()?, Request::bytes(mib * MIB))
}

#[test]
fn round_robin_takes_each_device_in_turn() {
    let (_, rt) = machine(2, 100);
    let placer = rt.placer(Policy::RoundRobin);
    let leases: Vec<_> = (0..4).map(|_| place(&placer, 1).unwrap()).collect();
    assert_eq!(devices(&leases), [0, 1, 0, 1]);
    let clone = placer.clone();
    assert_eq!(
        place(&clone, 1).unwrap().device(),
        DeviceId(0),
        "a clone goes on where the other was"
    );
    assert_eq!(place(&placer, 1).unwrap().device(), DeviceId(1));
    assert!(placer.devices().map(|device| device.seen.device).eq([DeviceId(0), DeviceId(1)]));
}

#[test]
fn round_robin_passes_over_a_device_that_is_full() {
    let (_, rt) = machine(3, 100);
    let _full = fill(rt.device(1).unwrap(), 100).unwrap();
    let placer = rt.placer(Policy::RoundRobin);
    let leases: Vec<_> = (0..4).map(|_| place(&placer, 1).unwrap()).collect();
    assert!(!devices(&leases).contains(&1));
    assert_eq!(devices(&leases), [0, 2, 2, 0], "and each keeps its turn");
}

#[test]
fn the_freest_device_is_taken_and_what_is_leased_is_not_free() {
    let (_, rt) = machine(3, 100);
    let _held =
        [fill(rt.device(0).unwrap(), 50).unwrap(), fill(rt.device(2).unwrap(), 20).unwrap()];
    let placer = rt.placer(Policy::MostFree);
    let leases: Vec<_> = (0..4).map(|_| place(&placer, 30).unwrap()).collect();
    assert_eq!(devices(&leases), [1, 2, 1, 0]);
}

fn every_policy() -> Vec<Policy> {
    let last = |_: &PlacementRequest, devices: &[Candidate<'_>]| {
        devices.iter().rev().map(|d| d.device).collect()
    };
    vec![
        Policy::RoundRobin,
        Policy::LeastLoaded,
        Policy::MostFree,
        Policy::BestFit,
        Policy::BestCompute,
        Policy::weighted([(DeviceId(1), 3), (DeviceId(2), 0)]),
        Policy::Affinity,
        Policy::Near,
        Policy::custom("the last", last),
    ]
}

#[test]
fn every_hint_is_honoured_by_every_policy() {
    let mut config = SimConfig::h200(4);
    config.devices[1].info.compute_capability = (8, 0);
    config.devices[3] = DeviceConfig::without_virtual_memory();
    let (_, rt) = on(Sim::new(config).symbolic(), 100);
    let _held = fill(rt.device(2).unwrap(), 60).unwrap();
    let one = || PlacementRequest::bytes(MIB);
    let only = |device: u32| one().only([DeviceId(device)]);
    for policy in every_policy() {
        let placer = rt.placer(policy);
        for _ in 0..8 {
            let on = |place: PlacementRequest| placer.place(&place).unwrap().device().0;
            assert_eq!(on(only(1)), 1);
            assert_ne!(on(one().min_compute((9, 0))), 1);
            assert_ne!(on(one().min_free(50 * MIB)), 2);
            assert_ne!(on(PlacementRequest::bytes(41 * MIB)), 2);
            assert_eq!(on(one().not_on([0, 2, 3].map(DeviceId))), 1);
            assert_eq!(on(one().min_compute((9, 0)).not_on([DeviceId(0), DeviceId(2)])), 3);
        }
        for impossible in [
            one().min_compute((10, 0)),
            one().only([]),
            one().only([DeviceId(9)]),
            only(1).min_compute((9, 0)),
            only(2).not_on([DeviceId(2)]),
            only(2).min_free(50 * MIB),
            PlacementRequest::bytes(101 * MIB),
        ] {
            let refused = MemoryError::from(placer.place(&impossible).unwrap_err());
            assert_eq!(refused, MemoryError::NoDevice { asked: 0, count: 4 }, "{impossible:?}");
        }
        assert_eq!(placer.place(&PlacementRequest::bytes(0)).unwrap_err(), PlaceError::ZeroSize);
    }
    assert!(rt.devices().iter().all(|pool| pool.budget().used() == pool.stats().physical));
}

#[test]
fn one_of_two_requests_for_the_last_bytes_wins_and_the_other_is_refused() {
    for _ in 0..50 {
        let (_, rt) = machine(1, 10);
        let (placer, start) = (rt.placer(Policy::MostFree), Barrier::new(2));
        let both = thread::scope(|scope| {
            let race = || {
                start.wait();
                place(&placer, 6)
            };
            let (a, b) = (scope.spawn(race), scope.spawn(race));
            [a.join().unwrap(), b.join().unwrap()]
        });
        assert_eq!(both.iter().filter(|lease| lease.is_ok()).count(), 1);
        let told = both.into_iter().find_map(Result::err).unwrap();
        match MemoryError::from(told) {
            // It was second at the budget, or saw that not enough was left.
            MemoryError::OutOfBudget(OutOfBudget { requested, remaining, .. }) => {
                assert_eq!((requested, remaining), (6 * MIB, 4 * MIB));
            }
            other => assert_eq!(other, MemoryError::NoDevice { asked: 0, count: 1 }),
        }
        assert_eq!(rt.device(0).unwrap().budget().used(), 0, "both leases are gone by now");
    }
}

#[test]
fn a_pool_gives_up_its_cache_for_a_lease() {
    let (_, rt) = machine(2, 10);
    let pool = rt.device(0).unwrap();
    drop(fill(pool, 10).unwrap());
    assert_eq!((pool.stats().cached, pool.budget().remaining()), (10 * MIB, 0));
    let placer = rt.placer(Policy::RoundRobin);
    let lease = place(&placer, 6).unwrap();
    assert_eq!(lease.device(), DeviceId(0), "what is cached counts as free");
    assert_eq!(pool.stats().physical, 4 * MIB, "as much as was needed, and no more");
    assert_eq!(pool.budget().used(), 10 * MIB);
    let drawn = lease.alloc(&lease.stream().unwrap(), Request::bytes(6 * MIB)).unwrap();
    assert_eq!(drawn.device(), DeviceId(0));
}

#[test]
fn what_the_cache_of_another_device_holds_of_a_shared_budget_is_given_up_for_a_lease() {
    // One budget for both, and one for each below a common one.
    for below in [false, true] {
        let root = Budget::new("the process", 10 * MIB);
        let sim = Sim::h200(2).symbolic();
        let budget = if below { root.child("the devices", 10 * MIB) } else { root.clone() };
        let builder =
            Runtime::builder().driver(sim.driver()).pools(PoolConfig::with_budget(budget));
        let builder = if below { builder.keep_free(1) } else { builder };
        let rt = builder.build().unwrap();
        drop(fill(rt.device(1).unwrap(), 8).unwrap());
        assert!(root.used() >= 8 * MIB, "its cache has them");
        let placer = rt.placer(Policy::MostFree);
        let here = PlacementRequest::bytes(6 * MIB).only([DeviceId(0)]);
        let lease = placer.place(&here).unwrap();
        assert_eq!((lease.device(), lease.remaining()), (DeviceId(0), 6 * MIB));
        drop(lease);
        // This also holds for a waiter.
        drop(fill(rt.device(1).unwrap(), 8).unwrap());
        assert!(placer.place_by(&here, Some(Instant::now())).is_ok());
        // This also holds for a group.
        drop(fill(rt.device(1).unwrap(), 8).unwrap());
        let group = Group::of(2, PlacementRequest::bytes(4 * MIB));
        assert_eq!(placer.place_group(&group).unwrap().len(), 2);
        drop(fill(rt.device(1).unwrap(), 8).unwrap());
        assert!(placer.place_group_by(&group, Some(Instant::now())).is_ok());
        // Live memory is not reclaimed.
        let _live = fill(rt.device(1).unwrap(), 8).unwrap();
        assert!(placer.place(&here).is_err());
        assert!(root.peak() <= 10 * MIB);
    }
}

#[test]
fn a_device_that_has_to_refuse_after_all_sends_the_request_on() {
    let (_, rt) = machine(2, 2);
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let [_kept, freed] = [0, 1].map(|_| pool.alloc(&s, Request::bytes(MIB)).unwrap());
    drop(freed);
    // Half of a handle whose other half is in use: it counts as free, but cannot be released.
    assert_eq!((pool.stats().cached, pool.budget().remaining()), (MIB, 0));
    let lease = place(&rt.placer(Policy::RoundRobin), 1).unwrap();
    assert_eq!(lease.device(), DeviceId(1));
    let only = PlacementRequest::bytes(MIB).only([DeviceId(0)]);
    let refused = rt.placer(Policy::RoundRobin).place(&only).unwrap_err();
    assert!(matches!(why(&refused, 0), RejectReason::Budget(_)), "{refused:?}");
}

#[test]
fn memory_that_another_stream_still_uses_is_not_given_up() {
    let (sim, rt) = on(Sim::h200(1).symbolic().stepped(), 10);
    let pool = rt.device(0).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let block = pool.alloc(&s, Request::bytes(10 * MIB)).unwrap();
    let used = block.prepare(&u, Access::Read).unwrap();
    drop(block);
    let placer = rt.placer(Policy::MostFree);
    assert!(place(&placer, 6).is_err());
    assert_eq!(pool.stats().physical, 10 * MIB);
    used.finish().unwrap();
    sim.run_all();
    // A trim has to poll before it is known.
    pool.trim(u64::MAX).unwrap();
    assert!(place(&placer, 6).is_ok());
}

#[test]
fn a_stable_block_is_drawn_from_a_lease_by_its_whole_handle() {
    let (_, rt) = machine(1, 16);
    let pool = rt.device(0).unwrap();
    let lease = place(&rt.placer(Policy::MostFree), 7).unwrap();
    let s = lease.stream().unwrap();
    let first = lease.alloc_stable(&s, Request::bytes(3 * MIB)).unwrap();
    assert_eq!((lease.remaining(), pool.budget().used()), (3 * MIB, 7 * MIB));
    let second = lease.alloc_stable(&s, Request::bytes(4 * MIB)).unwrap();
    assert_eq!(
        (lease.remaining(), pool.budget().used()),
        (0, 8 * MIB),
        "and what it lacked from the budget"
    );
    assert!(lease.alloc_stable(&s, Request::bytes(9 * MIB)).is_err());
    assert_eq!(pool.budget().used(), 8 * MIB);
    drop((first, second));
    pool.trim(0).unwrap();
    assert_eq!(pool.budget().used(), 0);
}

#[test]
fn a_stable_block_that_cannot_be_had_leaves_the_lease_as_it_was() {
    let (sim, rt) = machine(1, 16);
    let lease = place(&rt.placer(Policy::MostFree), 7).unwrap();
    let s = lease.stream().unwrap();
    sim.fail_every(Call::HandleCreate, 1, 999);
    assert!(lease.alloc_stable(&s, Request::bytes(8 * MIB)).is_err());
    assert_eq!((lease.remaining(), rt.device(0).unwrap().budget().used()), (7 * MIB, 7 * MIB));
}

#[test]
fn near_goes_by_nodes_by_peers_and_by_where_data_is() {
    let mut config = SimConfig::h200(3);
    config.peers = false;
    let (_, rt) = on(Sim::new(config).symbolic(), 100);
    let placer = rt.placer(Policy::Near);
    let tag = Tag::named("the cache");
    let pool = rt.device(2).unwrap();
    let _data = pool.alloc(&pool.stream().unwrap(), Request::bytes(8 * MIB).tag(tag)).unwrap();
    let near = |near| placer.place(&PlacementRequest::bytes(MIB).near(near)).unwrap().device().0;
    assert_eq!(near(Near::Data(tag)), 2);
    assert_eq!(near(Near::Data(Tag::named("nobody's"))), 0);
    assert_eq!(near(Near::Device(DeviceId(1))), 1);
    placer.drain(DeviceId(1)).unwrap();
    assert_eq!(
        near(Near::Device(DeviceId(1))),
        0,
        "the freest of those that are no nearer than others"
    );
    assert!(near(Near::Caller) < 3);
}

#[test]
fn choices_of_a_custom_policy_are_validated() {
    let (_, rt) = machine(3, 10);
    let named = |devices: &'static [u32]| {
        rt.placer(Policy::custom("a test", move |_, _| {
            devices.iter().copied().map(DeviceId).collect()
        }))
    };
    let place_on = |placer: &Placer, place: PlacementRequest| {
        placer.place(&place).map(|lease| lease.device().0)
    };
    assert_eq!(place_on(&named(&[9, 1, 1]), PlacementRequest::bytes(MIB)), Ok(1));
    assert_eq!(
        place_on(&named(&[1, 2]), PlacementRequest::bytes(MIB).not_on([DeviceId(1)])),
        Ok(2),
        "not admitted"
    );
    let refused = named(&[]).place(&PlacementRequest::bytes(MIB)).unwrap_err();
    assert_eq!(why(&refused, 0), RejectReason::NotNamed);
    let panics = rt.placer(Policy::custom("a test", |_, _| panic!("on purpose")));
    assert_eq!(
        panics.place(&PlacementRequest::bytes(MIB)).unwrap_err(),
        PlaceError::PolicyPanicked { policy: "a test" }
    );
    assert!(rt.devices().iter().all(|pool| pool.budget().used() == 0));
}

#[test]
fn a_key_has_its_device_and_another_only_while_that_has_no_room() {
    let (_, rt) = machine(8, 10);
    let placer = rt.placer(Policy::Affinity);
    let on = |key| placer.place(&PlacementRequest::bytes(6 * MIB).key(key)).unwrap();
    let homes: Vec<_> = (0..100).map(|key| on(key).device()).collect();
    assert!((0..8).all(|device| homes.contains(&DeviceId(device))));
    let first = on(7);
    assert_eq!(first.device(), homes[7]);
    assert_ne!(on(7).device(), homes[7], "it is full");
    drop(first);
    assert_eq!(on(7).device(), homes[7]);
    placer.drain(homes[7]).unwrap();
    for (key, home) in homes.iter().enumerate() {
        assert!(*home == homes[7] || on(key as u64).device() == *home, "only what must move moves");
    }
}

#[test]
fn near_a_node_is_the_device_on_it_and_then_the_one_on_the_nearest() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("allocators/host/tests/fixtures");
    let mut config = SimConfig::h200(3);
    config.devices[1].info.host_node = Some(8);
    config.devices[2].info.host_node = Some(0);
    let topology = Topology::read_under(&fixtures.join("power9")).unwrap();
    let sim = Sim::new(config).symbolic();
    let rt = Runtime::builder()
        .driver(sim.driver())
        .device_budget(100 * MIB)
        .topology(topology)
        .build()
        .unwrap();
    let placer = rt.placer(Policy::Near);
    let on = |place: PlacementRequest, node| {
        placer.place(&place.near(Near::Node(NodeId(node)))).unwrap().device().0
    };
    let one = || PlacementRequest::bytes(MIB);
    assert_eq!((on(one(), 0), on(one(), 8)), (2, 1));
    // The node of the first device is unknown, so it is the last choice.
    assert_eq!(on(one().not_on([DeviceId(2)]), 0), 1);
    assert_eq!(on(one().not_on([DeviceId(1), DeviceId(2)]), 0), 0);
}

#[test]
fn growable_memory_draws_from_its_lease_and_then_from_the_budget() {
    let (_sim, rt) = machine(1, 64);
    let placer = rt.placer(Policy::MostFree);
    let lease = place(&placer, 8).unwrap();
    let budget = rt.device(0).unwrap().budget().clone();
    let s = lease.stream().unwrap();
    let mut keys = lease.reserve::<u8>(&s, 1 << 30).unwrap();
    assert_eq!((lease.remaining(), budget.used()), (8 * MIB, 8 * MIB), "addresses are not charged");
    keys.commit_to(6 << 20).unwrap();
    assert_eq!((lease.remaining(), budget.used()), (2 * MIB, 8 * MIB));

    // All but 2 MiB of the device is taken, and the lease has 2 MiB: 4 MiB fit only in both
    // together.
    let other = budget.charge(54 * MIB).unwrap();
    assert!(keys.commit_to(12 << 20).is_err());
    assert_eq!(
        (lease.remaining(), budget.used()),
        (2 * MIB, 62 * MIB),
        "a refusal changes nothing"
    );
    keys.commit_to(10 << 20).unwrap();
    assert_eq!((lease.remaining(), budget.used()), (0, 64 * MIB));
    drop(other);

    drop(place(&placer, 4).unwrap());
    let second = place(&placer, 4).unwrap();
    let mut more = second.reserve_in_steps::<u8>(&s, 1 << 30, 4 * MIB).unwrap();
    drop(second);
    assert_eq!(
        budget.used(),
        10 * MIB,
        "the rest of a lease goes back though memory could grow from it"
    );
    more.commit_to(1).unwrap();
    assert_eq!((more.step(), budget.used()), (4 * MIB, 14 * MIB));
}

#[test]
fn a_tenant_of_a_lease_draws_from_it_and_from_the_budget_once_it_is_dropped() {
    let rt = Runtime::on(Sim::h200(1).driver()).unwrap();
    let lease = rt.placer(Policy::MostFree).place(&PlacementRequest::bytes(64 << 20)).unwrap();
    let (s, limit) = (lease.stream().unwrap(), Budget::new("tenant a", 48 << 20));
    let tenant = lease.for_tenant(&limit).unwrap();
    let used = || rt.device(0).unwrap().budget().used();
    let block = tenant.alloc(&s, Request::bytes(16 << 20)).unwrap();
    let stable = tenant.alloc_stable(&s, Request::bytes(8 << 20)).unwrap();
    let mut room = tenant.reserve::<u8>(&s, 1 << 30).unwrap();
    room.commit_to(8 << 20).unwrap();
    assert_eq!((lease.remaining(), tenant.live(), used()), (32 << 20, 32 << 20, 64 << 20));
    // What the tenant's limit refuses is not drawn.
    assert!(tenant.alloc(&s, Request::bytes(20 << 20)).is_err());
    assert_eq!((lease.remaining(), limit.used()), (32 << 20, 32 << 20));
    drop(lease);
    assert_eq!(used(), 32 << 20, "the rest is the budget's again");
    let more = tenant.alloc(&s, Request::bytes(16 << 20)).unwrap();
    assert_eq!((tenant.live(), used()), (48 << 20, 48 << 20));
    drop((block, stable, room, more));
    assert_eq!(limit.used(), 0);
}
