//! Tests of placement over the devices of a node by its ledgers. Several sources on several
//! simulated machines stand for processes: the ledgers do not know the difference.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer::{
    Driver, MemoryError, PlaceError, PlacementRequest, Policy, Request, Runtime,
    placement::{DeviceSource, LedgerDevices, RejectReason},
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
