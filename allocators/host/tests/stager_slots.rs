//! A stager's slots: who hands them to the driver, who gets those that are idle.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]

mod rig;
mod support;

use aquifer_core::{Budget, budget::Room};
use aquifer_driver::{Call, Typed};
use aquifer_host::{
    PinnedPool, Source, Stager, StagerConfig, kernel::Kernel as System, region::Host,
};
use rig::{GPU, KIB, PATIENCE, Rig, SLOT, config, pattern, pinned};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A stager for a machine with more processors than this one may have.
fn on_many_processors(rig: &Rig, workers: usize) -> Stager {
    let host = Host::new(support::fixture("two-socket"), System::new()).with_driver(rig.sim.driver(), GPU);
    let mut config = config();
    config.up_workers = workers;
    let stager = Stager::new(&host, &rig.pool, &rig.streams, config).unwrap();
    assert_eq!(stager.config().up_workers, workers);
    stager
}

fn eventually(what: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !what() && Instant::now() < deadline {
        thread::yield_now();
    }
    what()
}

/// Counts how often it is read.
struct Counting(Vec<u8>, AtomicUsize);

impl Source for Counting {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.read_at(offset, into)
    }
}

#[test]
fn while_the_driver_keeps_one_worker_the_others_fill_all_their_slots() {
    let rig = Rig::new();
    let stager = on_many_processors(&rig, 4);
    let source = Arc::new(Counting(pattern(40 * SLOT, 3), AtomicUsize::new(0)));
    let ticket = {
        let held = rig.sim.stall(Call::CopyToDevice);
        let ticket = stager.read(source.clone(), 0, rig.operand(40 * SLOT)).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        // Two each, and one of the one that is kept.
        let filled = || source.1.load(Ordering::Relaxed);
        assert!(eventually(|| filled() >= 7), "{} slots filled: who hands in does not wait", filled());
        ticket
    };
    let x = ticket.wait().unwrap();
    assert!(rig.bytes(&x) == source.0);
    drop((x, stager));
    rig.assert_all_given_back();
}

/// A pool whose budget has room for one region, and a stager that has all of it in slots that are idle.
fn full(rig: &Rig, budget: &Budget) -> (PinnedPool, Stager) {
    let host = Host::new(support::topology(), System::new()).with_driver(rig.sim.driver(), GPU);
    let mut pinned = pinned();
    pinned.patience = PATIENCE;
    let pool = PinnedPool::new(&host, budget, pinned).unwrap();
    let mut config: StagerConfig = config();
    (config.slot, config.slots) = (256 * KIB, 2);
    let stager = Stager::new(&host, &pool, &rig.streams, config).unwrap();
    stager.warm().unwrap();
    (pool, stager)
}

#[test]
fn idle_slots_go_to_who_asks_their_pool_for_memory_that_there_is_no_more_of() {
    let rig = Rig::new();
    let budget = Budget::new("one region", 2 << 20);
    let (pool, stager) = full(&rig, &budget);
    let kept = pool.buffer::<u8>(1900 * KIB).unwrap();
    assert_eq!(stager.trim(), 0, "they are the pool's again");
    let told = pool.buffer::<u8>(1900 * KIB).unwrap_err().to_string();
    assert!(!told.contains("idle slots"), "there were none: {told}");
    drop(kept);
    let up = pattern(5 * SLOT, 1);
    let mut x = rig.operand(up.len());
    stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
    assert!(rig.bytes(&x) == up, "and made anew");
    drop((x, stager, pool));
    support::sweep_out(&budget);
    rig.assert_all_given_back();
}

#[test]
fn a_region_of_idle_slots_goes_to_others_under_the_budget() {
    let rig = Rig::new();
    let budget = Budget::new("one region", 2 << 20);
    let (pool, stager) = full(&rig, &budget);
    let Room { missing, tried } = budget.make_room(1 << 20, Some(Instant::now() + PATIENCE), None);
    assert_eq!((missing, budget.used(), pool.stats().memory.physical), (0, 0, 0), "{tried:?}");
    drop((stager, pool));
    rig.assert_all_given_back();
}

#[test]
fn slots_that_a_transfer_uses_stay() {
    let rig = Rig::new();
    let budget = Budget::new("one region", 2 << 20);
    let (pool, stager) = full(&rig, &budget);
    let up = pattern(1 << 20, 1);
    let ticket = {
        let held = rig.sim.stall(Call::CopyToDevice);
        let ticket = stager.upload(up.clone(), rig.operand(up.len())).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        let soon = Instant::now() + Duration::from_millis(50);
        assert!(budget.make_room(1 << 20, Some(soon), None).missing > 0);
        assert!(pool.stats().memory.live >= 512 * KIB as u64, "a lane of two slots is in use");
        ticket
    };
    let (_, x) = ticket.wait().unwrap();
    assert!(rig.bytes(&x) == up);
    drop((x, stager, pool));
    support::sweep_out(&budget);
    rig.assert_all_given_back();
}
