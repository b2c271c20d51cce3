//! Tests of reserved addresses: the addresses stay, memory is committed and decommitted behind
//! them, and exactly the committed memory is charged.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::single_range_in_vec_init, reason = "one range is what is meant")]

use crate::support::{MIB, Rig, assert_returned, plain};
use aquifer_core::{Action, Event, MemoryError, Recorder, event::RingSink};
use aquifer_device::{DevicePool, Reserved};
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange,
    sim::{Sim, ViolationKind},
};
use aquifer_stream::Stream;
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

const STEP: usize = 2 << 20;

fn fill(stream: &Stream, reserved: &mut Reserved<u8>, range: Range<usize>, byte: u8) {
    stream.fill(&mut reserved.slice_mut(range).unwrap(), byte).unwrap();
}

fn read(stream: &Stream, reserved: &Reserved<u8>, range: Range<usize>) -> Vec<u8> {
    let mut back = vec![0; range.len()];
    stream.scope(|c| c.download(reserved.slice(range).unwrap(), &mut back)).unwrap().unwrap();
    back
}

fn range_of(reserved: &Reserved<u8>, range: Range<usize>) -> DeviceRange {
    let address = reserved.address() + range.start as u64;
    DeviceRange { device: DeviceId(0), address, bytes: range.len() as u64 }
}

#[test]
fn steps_have_the_pools_handle_size_or_the_requested_one() {
    let rig = Rig::on(Sim::h200(1), 64, |config| config.handle_bytes = 4 * MIB);
    let s = rig.stream();
    let mut r = rig.pool.reserve::<u8>(&s, 100).unwrap();
    r.commit_to(1).unwrap();
    assert_eq!((r.step(), rig.budget.used()), (4 * MIB, 4 * MIB));
    assert_eq!(r.committed(), [0..100], "no further than there are elements");
    let creates = rig.calls(Call::HandleCreate);
    let mut r = rig.pool.reserve_in_steps::<u8>(&s, 64 << 20, 31 * MIB).unwrap();
    r.commit_to(1).unwrap();
    assert_eq!((r.step(), rig.budget.used()), (32 * MIB, 36 * MIB));
    assert_eq!(rig.calls(Call::HandleCreate), creates + 1);
}

#[test]
fn a_refused_slice_names_its_first_uncommitted_part() {
    let rig = Rig::new(32);
    let s = rig.stream();
    let mut r = rig.pool.reserve::<u32>(&s, 8 * STEP).unwrap();
    r.commit(0..STEP / 4).unwrap();
    r.commit(STEP..STEP + 1).unwrap();
    assert_eq!(r.committed(), [0..STEP / 4, STEP..STEP / 4 * 5]);
    let step = STEP as u64;
    let missing = |range: Range<usize>| match r.slice(range) {
        Err(MemoryError::Uncommitted { offset, len }) => (offset, len),
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(0..STEP + 1), (step, 3 * step));
    assert_eq!(missing(STEP / 2..STEP), (2 * step, 2 * step));
    assert_eq!(missing(STEP..2 * STEP), (5 * step, 3 * step));
    assert!(r.slice(0..STEP / 4).is_ok() && r.slice(5..5).is_ok());
    assert!(matches!(r.slice(0..8 * STEP + 1), Err(MemoryError::OutOfRange { .. })));
    assert!(matches!(r.commit(0..8 * STEP + 1), Err(MemoryError::OutOfRange { .. })));
    assert!(matches!(r.slice_mut(STEP..2 * STEP), Err(MemoryError::Uncommitted { .. })));
}

#[test]
fn a_decommitted_step_is_recorded_as_done_when_its_memory_is_free() {
    let ring = Arc::new(RingSink::new(64));
    let rig = Rig::on(Sim::h200(1).stepped(), 32, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    });
    let (s, u) = (rig.stream(), rig.stream());
    let mut r = rig.pool.reserve::<u8>(&s, 4 * STEP).unwrap();
    r.commit_to(4 * STEP).unwrap();
    fill(&s, &mut r, 0..4 * STEP, 1);
    // What is allocated, and what is freed and not done.
    let recorded = || {
        let (mut live, mut pending) = (0, 0);
        for Event { action, bytes, .. } in ring.kept() {
            match action {
                Action::Allocate => live += bytes,
                Action::Free => (live, pending) = (live - bytes, pending + bytes),
                Action::Complete => pending -= bytes,
                _ => {}
            }
        }
        (live, pending)
    };
    let counted = || {
        let stats = rig.pool.stats();
        (stats.live, stats.pending)
    };
    // By its own stream alone, and by another one too.
    r.decommit(3 * STEP..4 * STEP).unwrap();
    u.fill(&mut r.slice_mut(STEP..2 * STEP).unwrap(), 2).unwrap();
    r.decommit(STEP..2 * STEP).unwrap();
    assert_eq!((recorded(), counted()), ((4 * MIB, 4 * MIB), (4 * MIB, 4 * MIB)));
    s.synchronize().unwrap();
    u.synchronize().unwrap();
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!((recorded(), counted()), ((4 * MIB, 0), (4 * MIB, 0)));
    // A step that is committed again before its memory is free is a block of its own.
    fill(&s, &mut r, 0..STEP, 3);
    r.decommit(0..STEP).unwrap();
    r.commit_to(STEP).unwrap();
    s.synchronize().unwrap();
    rig.pool.trim(u64::MAX).unwrap();
    let done = || ring.kept().iter().filter(|event| event.action == Action::Complete).count();
    assert_eq!((done(), counted()), (2, (4 * MIB, 0)));
    fill(&s, &mut r, 0..STEP, 3);
    drop(r);
    assert_eq!(counted(), (0, 4 * MIB));
    s.synchronize().unwrap();
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!((done(), counted()), (4, (0, 0)));
    rig.assert_silent();
}

#[test]
fn a_commit_before_the_pending_unmap_restores_the_same_memory_in_order() {
    let rig = Rig::on(Sim::h200(1).stepped(), 4, |config| config.wait = Duration::ZERO);
    let (s, u) = (rig.stream(), rig.stream());
    let mut r = rig.pool.reserve::<u8>(&s, 2 * STEP).unwrap();
    r.commit_to(2 * STEP).unwrap();
    fill(&s, &mut r, 0..2 * STEP, 1);
    u.fill(&mut r.slice_mut(STEP..2 * STEP).unwrap(), 2).unwrap();
    r.decommit(0..2 * STEP).unwrap();
    let driver = rig.sim.driver();
    let calls = driver.calls();
    let creates = (calls.get(Call::HandleCreate), calls.get(Call::Map), calls.get(Call::Unmap));
    r.commit_to(2 * STEP).unwrap();
    assert_eq!(
        creates,
        (calls.get(Call::HandleCreate), calls.get(Call::Map), calls.get(Call::Unmap))
    );
    assert_eq!((rig.budget.used(), rig.pool.stats().pending), (4 * MIB, 0));
    fill(&s, &mut r, 0..2 * STEP, 3);
    u.synchronize().unwrap();
    assert!(
        read(&s, &r, 0..2 * STEP).iter().all(|&byte| byte == 3),
        "the other stream's fill came first"
    );
    rig.assert_silent();
}

#[test]
fn uses_of_the_remaining_part_are_kept_after_a_partial_decommit() {
    let rig = Rig::stepped(8);
    let (s, u) = (rig.stream(), rig.stream());
    let mut r = rig.pool.reserve::<u8>(&s, 2 * STEP).unwrap();
    r.commit_to(2 * STEP).unwrap();
    u.fill(&mut r.slice_mut(0..STEP).unwrap(), 2).unwrap();
    r.decommit(STEP..2 * STEP).unwrap();
    fill(&s, &mut r, 0..STEP, 3);
    u.synchronize().unwrap();
    assert!(read(&s, &r, 0..STEP).iter().all(|&byte| byte == 3));
    rig.assert_silent();
}

#[test]
fn use_after_decommit_is_reported() {
    let rig = Rig::new(16);
    let s = rig.stream();
    let mut r = rig.pool.reserve::<u8>(&s, 2 * STEP).unwrap();
    r.commit_to(2 * STEP).unwrap();
    let stale = range_of(&r, STEP..2 * STEP);
    r.decommit(STEP..2 * STEP).unwrap();
    rig.sim.access(s.raw(), stale, Access::Read, Some(r.generation())).unwrap();
    assert_eq!(rig.sim.violations()[0].kind, ViolationKind::UseAfterFree);
}

#[test]
fn a_commit_beyond_the_budget_is_refused_whole_after_reclaim() {
    let rig = Rig::new(8);
    let s = rig.stream();
    drop(rig.alloc(&s, 8 * MIB));
    let mut r = rig.pool.reserve::<u8>(&s, 8 * STEP).unwrap();
    r.commit_to(3 * STEP).unwrap();
    assert_eq!(
        rig.budget.used(),
        8 * MIB,
        "the cache gave what it had free, and no more than that"
    );
    let refused = r.commit_to(5 * STEP).unwrap_err();
    let MemoryError::OutOfMemory(refused) = refused else { panic!("{refused:?}") };
    assert_eq!((refused.requested, refused.live), (4 * MIB, 6 * MIB));
    assert_eq!(r.committed(), [0..3 * STEP]);
    r.commit_to(4 * STEP).unwrap();
    r.decommit(0..2 * STEP).unwrap();
    let block = rig.alloc(&s, 4 * MIB);
    assert_eq!(block.capacity(), 4 * MIB, "an allocation takes what was decommitted");
    rig.assert_silent();
}

#[test]
fn reserved_memory_may_outlive_its_pool_and_then_releases_everything() {
    let rig = Rig::new(32);
    let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
    let s = rig.stream();
    let mut r = rig.pool.reserve::<u8>(&s, 8 * STEP).unwrap();
    r.commit_to(3 * STEP).unwrap();
    drop(rig);
    assert_eq!(r.commit_to(8 * STEP), Err(MemoryError::Closed));
    fill(&s, &mut r, 0..3 * STEP, 1);
    r.decommit(0..STEP).unwrap();
    drop(s);
    drop(r);
    assert_returned(&sim, &budget);
}

#[test]
fn invalid_and_unsatisfiable_reservations_are_refused() {
    let rig = Rig::on(Sim::h200(2), 8, |_| ());
    let s = rig.stream();
    assert_eq!(rig.pool.reserve::<u8>(&s, 0).unwrap_err(), MemoryError::ZeroSize);
    assert_eq!(rig.pool.reserve::<()>(&s, 5).unwrap_err(), MemoryError::ZeroSize);
    assert!(matches!(rig.pool.reserve::<u64>(&s, usize::MAX), Err(MemoryError::TooLarge { .. })));
    let other = DevicePool::open(rig.sim.driver(), DeviceId(1), Default::default()).unwrap();
    assert!(matches!(other.reserve::<u8>(&s, 5), Err(MemoryError::WrongDevice { .. })));
    let without = Rig::on(plain(), 16, |_| ());
    let s = without.stream();
    assert!(matches!(without.pool.reserve::<u8>(&s, 5), Err(MemoryError::Unsupported { .. })));
}

#[test]
fn a_commit_in_one_thread_and_a_trim_in_another_never_lose_memory() {
    for seed in 0..16 {
        let rig = Rig::on(Sim::h200(1).seeded(seed).symbolic(), 64, |_| ());
        let s = rig.stream();
        let mut r = rig.pool.reserve::<u8>(&s, 8 * STEP).unwrap();
        std::thread::scope(|scope| {
            let pool = rig.pool.clone();
            let done = Arc::new(());
            let running = Arc::downgrade(&done);
            scope.spawn(move || {
                while running.strong_count() > 0 {
                    pool.trim(u64::MAX).unwrap();
                    pool.budget().reclaim(2 * MIB, None, None);
                }
            });
            for round in 0..200 {
                r.commit(round % 5 * STEP..(round % 5 + 3) * STEP).unwrap();
                fill(&s, &mut r, round % 5 * STEP..(round % 5 + 3) * STEP, 1);
                r.decommit((round + 2) % 7 * STEP..8 * STEP).unwrap();
                r.idle((round + 1) % 7 * STEP..8 * STEP).unwrap();
            }
            drop(done);
        });
        r.decommit(0..8 * STEP).unwrap();
        r.release_idle(u64::MAX, None);
        s.synchronize().unwrap();
        rig.assert_empty();
    }
}

#[test]
fn an_idle_step_keeps_its_memory_until_it_is_needed_and_is_committed_without_a_driver_call() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let mut r = rig.pool.reserve::<u8>(&s, 16 * STEP).unwrap();
    r.commit_to(4 * STEP).unwrap();
    fill(&s, &mut r, 0..4 * STEP, 1);
    assert_eq!(r.idle(STEP - 1..4 * STEP).unwrap(), 6 * MIB, "whole steps only");
    assert!(matches!(r.slice(STEP..STEP + 1), Err(MemoryError::Uncommitted { .. })));
    rig.pool.trim(0).unwrap();
    let stats = rig.pool.stats();
    assert_eq!((stats.live, stats.cached, stats.pending), (2 * MIB, 6 * MIB, 0));
    let calls = || rig.sim.driver().calls().made();
    let before = calls();
    r.commit(STEP..2 * STEP).unwrap();
    assert_eq!((calls(), r.idle_bytes(), rig.budget.used()), (before, 4 * MIB, 8 * MIB));
    // The highest are given to another part and to a block, and only as many as these need.
    r.commit(8 * STEP..9 * STEP).unwrap();
    assert_eq!((r.idle_bytes(), rig.budget.used()), (2 * MIB, 8 * MIB));
    r.commit_to(3 * STEP).unwrap();
    r.idle(0..3 * STEP).unwrap();
    let block = rig.alloc(&s, 4 * MIB);
    assert_eq!((r.idle_bytes(), rig.budget.used()), (2 * MIB, 8 * MIB));
    assert!(matches!(r.commit_to(2 * STEP), Err(MemoryError::OutOfMemory(_))));
    assert_eq!(r.committed(), [8 * STEP..9 * STEP]);
    drop((block, r));
    s.synchronize().unwrap();
    rig.assert_empty();
}

#[test]
fn an_idle_step_is_not_unmapped_under_queued_work() {
    let rig = Rig::stepped(16);
    let (s, u) = (rig.stream(), rig.stream());
    let mut r = rig.pool.reserve::<u8>(&s, 4 * STEP).unwrap();
    r.commit_to(3 * STEP).unwrap();
    r.idle(0..STEP).unwrap();
    s.synchronize().unwrap();
    fill(&s, &mut r, STEP..2 * STEP, 1);
    u.fill(&mut r.slice_mut(2 * STEP..3 * STEP).unwrap(), 2).unwrap();
    r.idle(STEP..3 * STEP).unwrap();
    // The work of the first is done, and so it is given although it is the lowest.
    assert_eq!(r.release_idle(6 * MIB, Some(Instant::now())), 2 * MIB);
    let room = rig.budget.reclaim(2 * MIB, None, None);
    assert_eq!((room.missing, r.idle_bytes()), (0, 2 * MIB), "it has waited");
    r.commit(STEP..2 * STEP).unwrap();
    u.fill(&mut r.slice_mut(STEP..2 * STEP).unwrap(), 3).unwrap();
    r.idle(0..4 * STEP).unwrap();
    assert_eq!(r.release_idle(u64::MAX, None), 2 * MIB);
    drop(r);
    rig.assert_empty();
}

#[test]
fn each_idle_step_is_recorded_as_done_when_its_memory_is_free() {
    let ring = Arc::new(RingSink::new(64));
    let rig = Rig::on(Sim::h200(1).stepped(), 32, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    });
    let (sim, budget, s) = (rig.sim.clone(), rig.budget.clone(), rig.stream());
    let mut r = rig.pool.reserve::<u8>(&s, 4 * STEP).unwrap();
    r.commit_to(4 * STEP).unwrap();
    r.idle(0..3 * STEP).unwrap();
    r.release_idle(2 * MIB, None);
    r.commit_to(STEP).unwrap();
    let done = || ring.kept().iter().filter(|event| event.action == Action::Complete).count();
    assert_eq!(done(), 1, "one step is free, and one was committed again");
    drop(rig);
    assert_eq!(r.idle(0..STEP).unwrap(), 2 * MIB, "without a pool, as a decommit");
    assert_eq!(r.idle_bytes(), 2 * MIB);
    drop((s, r));
    assert_returned(&sim, &budget);
}
