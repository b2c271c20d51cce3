//! Tests of placement over the devices of a node by its ledgers. Several sources on several
//! simulated machines stand for processes: the ledgers do not know the difference.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::itself::{itself, texts};
use aquifer::{
    Driver, Group, MemoryError, PlaceError, PlacementRequest, Policy, Request, Runtime,
    placement::{Candidate, DeviceSource, LedgerDevices, RejectReason},
    sim::Sim,
};
use std::{
    env, fs,
    path::PathBuf,
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 100 * MIB;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("aquifer-by-ledger-{name}-{}", process::id())))
    }

    fn node(&self, devices: u32) -> LedgerDevices {
        LedgerDevices::join(&driver(devices), Some(&self.0)).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

fn driver(devices: u32) -> Arc<dyn Driver> {
    Sim::h200(devices).symbolic().capacity(CAPACITY).driver()
}

#[test]
fn what_other_processes_have_claimed_is_not_free_and_what_is_held_is_claimed() {
    let scratch = Scratch::new("sees");
    let node = scratch.node(2);
    let free = || node.candidates().iter().map(|device| device.free).collect::<Vec<_>>();
    assert_eq!(free(), [CAPACITY; 2]);
    let sim = Sim::h200(2).capacity(CAPACITY);
    let server = Runtime::builder().driver(sim.driver()).shared(0).ledger_folder(&scratch.0);
    let server = server.build().unwrap();
    let pool = server.device(0).unwrap();
    let stream = pool.stream().unwrap();
    let block = pool.alloc(&stream, Request::bytes(60 * MIB)).unwrap();
    assert!(free()[0] <= 40 * MIB && free()[1] == CAPACITY);
    let place = PlacementRequest::bytes(50 * MIB);
    let (device, held) = Policy::BestFit.place_in(&node, &place, 0).unwrap();
    assert_eq!((device.0, held.bytes()), (1, 50 * MIB), "the first has no room");
    // The server is refused what is held.
    let second = server.device(1).unwrap();
    let t = second.stream().unwrap();
    let refused = second.alloc(&t, Request::bytes(60 * MIB)).map(drop);
    assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
    drop(held);
    drop(second.alloc(&t, Request::bytes(60 * MIB)).unwrap());
    drop((block, stream, t));
}

#[test]
fn a_request_that_fits_nowhere_names_each_device_with_its_reason() {
    let scratch = Scratch::new("nowhere");
    let node = scratch.node(3);
    let place = PlacementRequest::bytes(CAPACITY + 1).not_on([aquifer::DeviceId(1)]);
    let Err(PlaceError::Nowhere(refused)) = Policy::RoundRobin.place_in(&node, &place, 0) else {
        panic!("there is no room")
    };
    let why: Vec<_> = refused.devices.iter().map(|device| device.why.clone()).collect();
    let free = RejectReason::Free { needs: CAPACITY + 1 };
    assert_eq!(why, [free.clone(), RejectReason::Excluded, free]);
    let none = Policy::RoundRobin.place_in(&node, &PlacementRequest::bytes(0), 0);
    assert!(matches!(none, Err(PlaceError::ZeroSize)));
    // Devices in turn, and one that a policy of the program names.
    let small = PlacementRequest::bytes(MIB);
    let turns: Vec<u32> =
        (0..4).map(|n| Policy::RoundRobin.place_in(&node, &small, n).unwrap().0.0).collect();
    assert_eq!(turns, [0, 1, 2, 0]);
    let last =
        Policy::custom("last", |_, devices| devices.iter().rev().map(|d| d.device).collect());
    assert_eq!(last.place_in(&node, &small, 0).unwrap().0.0, 2);
    let nothing = Policy::custom("none", |_, _| Vec::new());
    let Err(PlaceError::Nowhere(refused)) = nothing.place_in(&node, &small, 0) else {
        panic!("it names none")
    };
    assert!(refused.devices.iter().all(|device| device.why == RejectReason::NotNamed));
}

#[test]
#[ignore = "a program of another test, under caps"]
fn places_under_caps() {
    let scratch = Scratch::new("caps");
    let node = scratch.node(3);
    let of =
        |of: fn(&Candidate<'_>) -> u64| -> Vec<u64> { node.candidates().iter().map(of).collect() };
    assert_eq!(of(|device| device.total), [30 * MIB, CAPACITY, CAPACITY]);
    assert_eq!(of(|device| device.free), [30 * MIB, CAPACITY, CAPACITY]);
    let first = node.hold(0, 20 * MIB).unwrap();
    assert_eq!(of(|device| device.free)[0], 10 * MIB);
    assert!(matches!(node.hold(0, 11 * MIB), Err(RejectReason::Free { .. })));
    let rest = node.hold(0, 10 * MIB).unwrap();
    drop((first, rest));
    assert_eq!(of(|device| device.free)[0], 30 * MIB);
}

#[test]
fn what_is_held_of_a_device_stays_below_the_cap_of_the_process() {
    let under = |limits: &str| {
        let output = itself("placement::by_ledger::places_under_caps")
            .env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limits)
            .output()
            .unwrap();
        (output.status.success(), texts(&output).concat())
    };
    let (passed, told) = under("0=30M,1=1G");
    assert!(passed && told.contains("1 passed"), "{told}");
    // A cap that cannot be read is an error, and neither 0 nor unlimited.
    let (passed, told) = under("0=much");
    assert!(!passed && told.contains("0=much"), "{told}");
}

#[test]
fn processes_that_place_at_one_moment_never_hold_more_than_there_is() {
    let scratch = Scratch::new("race");
    let held: [AtomicU64; 3] = Default::default();
    thread::scope(|threads| {
        for number in 0..4_u64 {
            let (node, held) = (scratch.node(3), &held);
            threads.spawn(move || {
                let mut mine = Vec::new();
                for turn in 0..300 {
                    let bytes = (1 + (turn * 7 + number * 13) % 40) * MIB;
                    let place = PlacementRequest::bytes(bytes);
                    if let Ok((device, hold)) = Policy::MostFree.place_in(&node, &place, turn) {
                        let sum = &held[device.0 as usize];
                        assert!(sum.fetch_add(bytes, Ordering::SeqCst) + bytes <= CAPACITY);
                        mine.push((device, hold));
                    }
                    if mine.len() > 3 || turn % 5 == 0 {
                        for (device, hold) in mine.drain(..mine.len().min(2)) {
                            held[device.0 as usize].fetch_sub(hold.bytes(), Ordering::SeqCst);
                        }
                    }
                }
                for (device, hold) in mine {
                    held[device.0 as usize].fetch_sub(hold.bytes(), Ordering::SeqCst);
                }
            });
        }
    });
    assert!(scratch.node(3).candidates().iter().all(|device| device.free == CAPACITY));
}

/// Returns a deadline that no test reaches.
fn late() -> Option<Instant> {
    Instant::now().checked_add(Duration::from_secs(60))
}

#[test]
fn groups_of_processes_that_wait_for_each_others_bytes_all_get_through() {
    let scratch = Scratch::new("groups");
    let held: [AtomicU64; 3] = Default::default();
    thread::scope(|threads| {
        for number in 0..3_usize {
            let (node, held) = (scratch.node(3), &held);
            threads.spawn(move || {
                let group = Group::of(2, PlacementRequest::bytes(60 * MIB));
                for turn in 0..10 {
                    let turn = turn + number as u64;
                    let shards = Policy::RoundRobin.place_group_in_by(&node, &group, turn, late());
                    let shards = shards.unwrap();
                    assert_ne!(shards[0].0, shards[1].0);
                    for (device, _) in &shards {
                        let of_others = held[device.0 as usize].fetch_add(1, Ordering::SeqCst);
                        assert_eq!(of_others, 0, "two do not fit");
                    }
                    thread::yield_now();
                    for (device, _) in &shards {
                        held[device.0 as usize].fetch_sub(1, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    let node = scratch.node(3);
    assert!(node.candidates().iter().all(|device| device.free == CAPACITY));
    let never = Group::of(4, PlacementRequest::bytes(MIB));
    assert!(Policy::MostFree.place_group_in_by(&node, &never, 0, None).is_err(), "at once");
}

#[test]
fn a_group_that_waits_gets_what_other_processes_have_in_caches_and_what_they_release() {
    let scratch = Scratch::new("caches");
    let sim = Sim::h200(2).capacity(CAPACITY);
    let server = Runtime::builder().driver(sim.driver()).shared(0).ledger_folder(&scratch.0);
    let server = server.build().unwrap();
    let pools = [0, 1].map(|at| server.device(at).unwrap());
    let streams = pools.map(|pool| pool.stream().unwrap());
    let block = |at: usize| pools[at].alloc(&streams[at], Request::bytes(60 * MIB)).unwrap();
    let (cached, live) = (block(0), block(1));
    drop(cached);
    let node = scratch.node(2);
    let group = Group::of(2, PlacementRequest::bytes(60 * MIB));
    assert!(Policy::MostFree.place_group_in(&node, &group, 0).is_err(), "not without waiting");
    let soon = Instant::now().checked_add(Duration::from_millis(100));
    let refused = Policy::MostFree.place_group_in_by(&node, &group, 0, soon);
    assert!(refused.is_err(), "a live block stays");
    assert!(node.candidates().iter().all(|device| device.free >= 40 * MIB), "nothing is held");
    thread::scope(|threads| {
        let waits = threads.spawn(|| Policy::MostFree.place_group_in_by(&node, &group, 0, late()));
        thread::sleep(Duration::from_millis(30));
        drop(live);
        assert_eq!(waits.join().unwrap().unwrap().len(), 2);
    });
}

#[test]
fn a_wait_for_one_device_is_served_by_another_that_gets_room_first() {
    let scratch = Scratch::new("either");
    let (node, other) = (scratch.node(2), scratch.node(2));
    let on = |device| PlacementRequest::bytes(90 * MIB).only([aquifer::DeviceId(device)]);
    let [first, second] = [0, 1].map(|at| Policy::MostFree.place_in(&other, &on(at), 0).unwrap());
    let mut holds = Vec::new();
    for (freed, kept) in [(first, 1), (second, 0)] {
        let place = PlacementRequest::bytes(80 * MIB);
        let (device, held) = thread::scope(|threads| {
            let waits = threads.spawn(|| Policy::MostFree.place_in_by(&node, &place, 0, late()));
            thread::sleep(Duration::from_millis(30));
            drop(freed);
            waits.join().unwrap().unwrap()
        });
        assert_ne!(device.0, kept);
        // Full again, before the other one is freed.
        holds.push(held);
    }
}
