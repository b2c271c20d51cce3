//! Placement over several real GPUs: each policy, groups, copies between devices, and a device that drains.
//!
//! The loss of a device is not tried here: a sticky error ends the primary context for every test of the process. What
//! follows from one is shown on the simulator.
//!
//! With fewer than two GPUs each test says that it was skipped, and fails with `AQUIFER_REQUIRE_GPU=1`.
#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "support/gpu.rs"]
mod gpu;

use aquifer::{
    DeviceBuffer, DeviceId, Group, Lease, MemoryError, Near, Place, PlaceError, Policy, Runtime, Stream, Tag,
    placement::{Candidate, Why, key_of},
};
use std::{
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// What each device may have.
const LIMIT: u64 = 1 << 30;
const LEN: usize = 4 << 20;

fn runtime() -> Option<Runtime> {
    let rt = Runtime::builder().device_budget(LIMIT).build().unwrap();
    if rt.devices().len() < 2 {
        gpu::skip(format!("{} GPUs, two are needed", rt.devices().len()));
        return None;
    }
    Some(rt)
}

/// Numbers that tell where they come from.
fn pattern(seed: u32) -> Vec<u32> {
    (0..LEN as u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ seed).collect()
}

/// A buffer with the pattern, of what the lease holds.
fn filled(lease: &Lease, stream: &Stream, seed: u32) -> DeviceBuffer<u32> {
    let mut buffer = lease.buffer(stream, LEN).unwrap();
    let numbers = pattern(seed);
    stream.scope(|c| c.upload(&numbers, &mut buffer)).unwrap().unwrap();
    buffer
}

fn read(stream: &Stream, buffer: &DeviceBuffer<u32>) -> Vec<u32> {
    let mut back = vec![0; LEN];
    stream.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn each_policy_places_on_real_devices_and_what_is_leased_can_be_used() {
    let Some(rt) = runtime() else { return };
    let count = rt.devices().len();
    let last = |_: &Place, devices: &[Candidate<'_>]| devices.iter().rev().map(|d| d.device).collect();
    let ids: Vec<DeviceId> = rt.devices().iter().map(|pool| pool.device()).collect();
    let place = Place::bytes(64 * MIB).key(key_of(b"a session"));
    for policy in [
        Policy::RoundRobin,
        Policy::LeastLoaded,
        Policy::MostFree,
        Policy::BestFit,
        Policy::BestCompute,
        Policy::weighted(ids.iter().map(|&id| (id, 1))),
        Policy::Affinity,
        Policy::Near,
        Policy::custom("the last", last),
    ] {
        let placer = rt.placer(policy.clone());
        let leases: Vec<Lease> = (0..count).map(|_| placer.place(&place).unwrap()).collect();
        let mut used: Vec<_> = leases.iter().map(Lease::device).collect();
        used.sort_unstable();
        used.dedup();
        match policy {
            Policy::RoundRobin | Policy::MostFree | Policy::LeastLoaded => {
                assert_eq!(used.len(), count, "{policy:?}");
            }
            Policy::BestFit | Policy::Affinity | Policy::Custom(_) => {
                assert_eq!(used.len(), 1, "{policy:?}");
            }
            _ => {}
        }
        for (seed, lease) in (0..).zip(&leases) {
            let stream = lease.stream().unwrap();
            let buffer = filled(lease, &stream, seed);
            assert!(read(&stream, &buffer) == pattern(seed), "{policy:?} on {}", lease.device());
        }
    }
    for pool in rt.devices() {
        pool.trim(0).unwrap();
        assert_eq!(pool.budget().used(), 0);
    }
}

#[test]
fn near_goes_to_the_device_that_has_the_data_and_then_to_its_peers() {
    let Some(rt) = runtime() else { return };
    let (placer, tag) = (rt.placer(Policy::Near), Tag::named("the cache"));
    let there = rt.devices().last().unwrap();
    let _data = there.alloc(&there.stream().unwrap(), aquifer::Request::bytes(64 * MIB).tag(tag)).unwrap();
    let place = Place::bytes(MIB).near(Near::Data(tag));
    assert_eq!(placer.place(&place).unwrap().device(), there.device());
    let next = placer.place(&place.not_on([there.device()])).unwrap();
    let peers = rt.devices().iter().filter(|pool| pool.info().peers.contains(&there.device()));
    assert!(peers.clone().count() == 0 || peers.clone().any(|pool| pool.device() == next.device()));
}

#[test]
fn bytes_arrive_from_every_device_on_every_other() {
    let Some(rt) = runtime() else { return };
    let placer = rt.placer(Policy::RoundRobin);
    let leases = placer.place_group(&Group::of(rt.devices().len(), Place::bytes(64 * MIB))).unwrap();
    for (seed, from) in (0..).zip(&leases) {
        let s = from.stream().unwrap();
        let x = filled(from, &s, seed);
        for to in leases.iter().filter(|to| to.device() != from.device()) {
            let t = to.stream().unwrap();
            let mut y: DeviceBuffer<u32> = to.buffer(&t, LEN).unwrap();
            t.fill(&mut y, 0).unwrap();
            let begun = Instant::now();
            s.copy_to_peer(&x, &mut y, &t).unwrap();
            t.synchronize().unwrap();
            let seconds = begun.elapsed().as_secs_f64();
            assert!(read(&t, &y) == pattern(seed), "from {} to {}", from.device(), to.device());
            let peers = from.pool().info().peers.contains(&to.device());
            let how = if peers { "peers" } else { "through the host" };
            say(&format!(
                "{} to {}, {how}: {:.1} GB/s",
                from.device(),
                to.device(),
                4.0 * LEN as f64 / seconds / 1e9
            ));
            // The wrong device is refused.
            let wrong = MemoryError::WrongDevice { expected: from.device(), actual: to.device() };
            assert_eq!(s.copy(&x, &mut y).unwrap_err(), wrong);
        }
    }
}

#[expect(clippy::print_stdout, reason = "figures to look at")]
fn say(line: &str) {
    println!("{line}");
}

#[test]
fn a_group_on_peers_is_held_whole_and_a_draining_device_takes_nothing_new() {
    let Some(rt) = runtime() else { return };
    let placer = rt.placer(Policy::MostFree);
    let all = rt.devices();
    let mutual = |pool: &aquifer::DevicePool| {
        all.iter().all(|other| other.device() == pool.device() || pool.info().peers.contains(&other.device()))
    };
    let group = Group::of(all.len(), Place::bytes(64 * MIB)).on_peers();
    match placer.place_group(&group) {
        Ok(leases) => {
            assert!(all.iter().all(mutual));
            assert_eq!(leases.len(), all.len());
        }
        Err(refused) => assert!(!all.iter().all(mutual), "{refused}"),
    }
    let away = all[0].device();
    let lease = placer.place(&Place::bytes(64 * MIB).only([away])).unwrap();
    placer.drain(away).unwrap();
    for _ in 0..8 {
        assert_ne!(placer.place(&Place::bytes(MIB)).unwrap().device(), away);
    }
    let Err(PlaceError::Nowhere(refused)) = placer.place(&Place::bytes(MIB).only([away])) else {
        panic!("it drains")
    };
    assert_eq!(refused.devices[0].why, Why::Draining);
    let s = lease.stream().unwrap();
    assert!(read(&s, &filled(&lease, &s, 3)) == pattern(3), "what is leased lives on");
    placer.undrain(away).unwrap();
    assert_eq!(placer.place(&Place::bytes(MIB).only([away])).unwrap().device(), away);
}

#[test]
fn tenants_that_wait_for_real_memory_all_get_through() {
    let Some(rt) = runtime() else { return };
    let placer = rt.placer(Policy::MostFree);
    let deadline = Instant::now() + Duration::from_secs(60);
    thread::scope(|scope| {
        for number in 0..16u32 {
            let placer = &placer;
            scope.spawn(move || {
                for _ in 0..4 {
                    let lease = placer.place_by(&Place::bytes(LIMIT / 3), Some(deadline)).unwrap();
                    let s = lease.stream().unwrap();
                    let buffer = filled(&lease, &s, number);
                    assert!(read(&s, &buffer) == pattern(number));
                }
            });
        }
    });
    for pool in rt.devices() {
        assert!(pool.budget().peak() <= LIMIT);
        assert_eq!(pool.budget().waiting(), 0);
        pool.trim(0).unwrap();
        assert_eq!(pool.budget().used(), 0);
    }
}
