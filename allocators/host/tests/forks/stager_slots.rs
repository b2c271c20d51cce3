//! Tests of a stager's slots: which worker hands them to the driver, who reuses idle ones, and what
//! a forked child sees of them.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "forks")]

use crate::rig::{GPU, KIB, PATIENCE, Rig, SLOT, block_on, config, pattern, pinned};
use crate::support;
use aquifer_core::{Budget, MemoryError, budget::Room};
use aquifer_driver::{Call, Typed};
use aquifer_host::{
    PinnedPool, Source, StageError, Stager, StagerConfig, kernel::Kernel as System, region::Host,
};
use nix::libc;
use std::{
    io,
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Creates a stager for a machine with more processors than this one may have.
fn on_many_processors(rig: &Rig, workers: usize) -> Stager {
    let host =
        Host::new(support::fixture("two-socket"), System::new()).with_driver(rig.sim.driver(), GPU);
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

/// A source that counts how often it is read.
struct Counting(Vec<u8>, AtomicUsize);

impl Source for Counting {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.read_at(offset, into)
    }
}

#[test]
fn while_one_worker_is_blocked_in_the_driver_the_others_fill_all_their_slots() {
    let rig = Rig::new();
    let stager = on_many_processors(&rig, 4);
    let source = Arc::new(Counting(pattern(40 * SLOT, 3), AtomicUsize::new(0)));
    let ticket = {
        let held = rig.sim.stall(Call::CopyToDevice);
        let ticket = stager.read(source.clone(), 0, rig.operand(40 * SLOT)).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        // Two slots each, and one of the worker that is blocked.
        let filled = || source.1.load(Ordering::Relaxed);
        assert!(
            eventually(|| filled() >= 7),
            "{} slots filled: who hands in does not wait",
            filled()
        );
        ticket
    };
    let x = ticket.wait().unwrap();
    assert!(rig.bytes(&x) == source.0);
    drop((x, stager));
    rig.assert_all_given_back();
}

/// Returns a pool whose budget has room for one region, and a stager whose idle slots hold all of
/// it.
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
fn idle_slots_are_reclaimed_by_their_pool_when_it_is_short() {
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
fn a_region_of_idle_slots_is_reclaimed_by_other_pools_under_the_budget() {
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

#[test]
fn a_forked_child_is_refused_by_its_parents_stager_and_waits_for_nothing() {
    let rig = Rig::new();
    let up = pattern(20 * SLOT, 1);
    let (mut x, mut small) = (rig.operand(2 * SLOT), Some(rig.operand(1)));
    let held = rig.sim.stall(Call::CopyToDevice);
    let ticket = rig.stager.upload(up.clone(), rig.operand(up.len())).unwrap();
    assert!(held.wait_for(1, PATIENCE));
    // SAFETY: 1. the child uses only memory, which the C library prepares for it, and leaves by
    // `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
        unsafe { libc::alarm(120) };
        let elsewhere =
            |error: &StageError| matches!(error, StageError::Memory(MemoryError::OtherProcess));
        let stager = &rig.stager;
        let long = stager.scope(|s| s.upload(&up[..x.len()], &mut x).map(drop)).unwrap();
        let small = std::mem::take(&mut small).unwrap();
        let permits: Vec<_> = (0..20).map(|_| stager.permit()).collect();
        // Never dropped: an operand calls the simulator, whose lock the parent's thread may have
        // held.
        let failed = ManuallyDrop::new(block_on(stager.ready()).upload(vec![1], small));
        let right = [
            long.is_err_and(|error| elsewhere(&error)),
            stager.warm() == Err(MemoryError::OtherProcess) && stager.trim() == 0,
            stager.try_permit().is_some(),
            failed.as_ref().is_err_and(|failed| elsewhere(&failed.error)),
            ticket.is_done() && ticket.watch().wait().is_err_and(|error| elsewhere(&error)),
            ticket
                .watch()
                .try_wait()
                .is_some_and(|told| told.is_err_and(|error| elsewhere(&error))),
        ];
        ticket.cancel();
        drop(permits);
        let wrong = right.iter().position(|right| !right);
        // SAFETY: 1. ends the child.
        unsafe { libc::_exit(wrong.map_or(0, |wrong| 1 + wrong as i32)) };
    }
    let mut status = -1;
    // SAFETY: 1. the child belongs to this process, and the status is a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0), "exit code {}, signal {}", status >> 8, status & 127);
    drop(held);
    let (_, y) = ticket.wait().unwrap();
    assert!(rig.bytes(&y) == up, "nothing has changed here");
    drop((x, y, small));
    rig.assert_all_given_back();
}
