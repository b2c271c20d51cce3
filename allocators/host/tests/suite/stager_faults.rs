//! Tests of staged transfers under faults: each driver call refused in turn, lost devices, and a
//! driver that does not report completion.

use crate::rig::{GPU, KIB, PATIENCE, Plain, Rig, SLOT, config, pattern, pinned};
use aquifer_core::MemoryError;
use aquifer_driver::{Call, sim::Sim};
use aquifer_host::{Failed, Source, StageError};
use std::{
    io,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const REFUSED: u32 = 999;

/// The driver calls of a transfer.
const CALLS: [Call; 14] = [
    Call::StreamCreate,
    Call::StreamId,
    Call::StreamDestroy,
    Call::StreamWaitEvent,
    Call::StreamIsCapturing,
    Call::StreamSynchronize,
    Call::ExchangeCaptureMode,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventSynchronize,
    Call::EventDestroy,
    Call::HostRegister,
    Call::CopyToDevice,
    Call::CopyToHost,
];

/// Uploads and downloads again, and returns the first error.
fn round(rig: &Rig, size: usize, seed: u8) -> Result<(), StageError> {
    let up = pattern(size, seed);
    let mut x = rig.operand(size);
    let mut down = vec![0; size];
    let outcome = rig
        .stager
        .scope(|s| s.upload(&up, &mut x).map(drop))
        .and_then(|taken| taken)
        .and_then(|()| rig.stager.scope(|s| s.download(&x, &mut down).map(drop)))
        .and_then(|taken| taken);
    // A success must mean that all bytes arrived.
    assert!(outcome.is_err() || down == up, "bytes are missing, and nobody was told");
    outcome
}

#[test]
fn a_failed_driver_call_is_reported_and_the_next_transfer_succeeds() {
    for size in [KIB, 6 * KIB, 6 * SLOT] {
        for call in CALLS {
            for nth in [1, 2, 5, 13] {
                let rig = Rig::new();
                rig.sim.fail(call, nth, REFUSED);
                match round(&rig, size, 1) {
                    Ok(()) | Err(StageError::Memory(MemoryError::Driver(_))) => {}
                    Err(other) => panic!("{call:?} {nth}: {other}"),
                }
                rig.sim.clear_failures();
                round(&rig, size, 2).unwrap();
                // A handle that the driver refuses to destroy stays with the driver.
                if !matches!(call, Call::StreamDestroy | Call::EventDestroy) {
                    rig.assert_all_given_back();
                }
            }
        }
    }
}

#[test]
fn calls_that_fail_again_and_again_lose_no_slot() {
    for call in CALLS {
        for every in [1, 2, 3, 7] {
            let rig = Rig::new();
            rig.stager.warm().unwrap();
            rig.sim.fail_every(call, every, REFUSED);
            for seed in 0..2 {
                // Operands wait for the device when they are dropped, and clear failures for that.
                let _told = round(&rig, 6 * SLOT, seed);
                rig.sim.fail_every(call, every, REFUSED);
            }
            rig.sim.clear_failures();
            round(&rig, 6 * SLOT, 9).unwrap();
            if !matches!(call, Call::StreamDestroy | Call::EventDestroy) {
                rig.assert_all_given_back();
            }
        }
    }
}

/// Calls that report completion of work.
const SAY_DONE: [Call; 4] =
    [Call::EventSynchronize, Call::EventQuery, Call::StreamSynchronize, Call::DeviceSynchronize];

/// Starts an upload that ends with a refusal of the driver, planned when its first copy was about
/// to be queued.
#[allow(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
fn refused_upload(rig: &Rig, plan: impl FnOnce(&Sim)) -> Failed<(Vec<u8>, Plain)> {
    let up = pattern(6 * SLOT, 1);
    let ticket = {
        let held = rig.sim.stall(Call::CopyToDevice);
        let operand = rig.operand(up.len());
        let ticket = rig.stager.upload(up, operand).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        plan(&rig.sim);
        ticket
    };
    let failed = ticket.wait().unwrap_err();
    assert!(matches!(failed.error, StageError::Memory(MemoryError::Driver(_))), "{failed}");
    failed
}

#[test]
fn a_slot_goes_back_only_when_its_copies_are_known_to_be_done() {
    let rig = Rig::new();
    let failed = refused_upload(&rig, |sim| {
        SAY_DONE.into_iter().for_each(|call| sim.fail_every(call, 1, REFUSED));
    });
    assert_eq!(rig.stager.trim() % (2 * SLOT) as u64, 0);
    let memory = rig.pool.stats().memory;
    assert!(memory.pending > 0, "{memory:?}");
    rig.sim.clear_failures();
    let (_, mut x) = failed.back.unwrap();
    // The next user of the operand is ordered after the copies, though their completion was not
    // observed.
    rig.fill(&mut x, 7);
    rig.sim.run_all();
    assert!(rig.bytes(&x).iter().all(|&byte| byte == 7));
    rig.assert_silent();
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.stats().memory.pending, 0, "and now they have been seen");
    round(&rig, 6 * SLOT, 2).unwrap();
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn an_operand_comes_back_only_when_no_copy_touches_it_however_often_the_driver_refuses_to_say() {
    let rig = Rig::new();
    let failed = refused_upload(&rig, |sim| {
        for call in SAY_DONE {
            (1..=8).for_each(|nth| sim.fail(call, nth, REFUSED));
        }
        // The operand's own stream cannot be delayed either.
        sim.fail_every(Call::StreamWaitEvent, 1, REFUSED);
    });
    rig.sim.clear_failures();
    let (_, mut x) = failed.back.unwrap();
    rig.fill(&mut x, 7);
    rig.sim.run_all();
    assert!(rig.bytes(&x).iter().all(|&byte| byte == 7));
    rig.assert_silent();
    drop(x);
    rig.assert_all_given_back();
}

/// Refuses every report of completion, and ends that after a time.
fn refuse_waits_for(sim: &Sim, time: Duration) -> JoinHandle<()> {
    SAY_DONE.into_iter().for_each(|call| sim.fail_every(call, 1, REFUSED));
    let sim = sim.clone();
    thread::spawn(move || {
        thread::sleep(time);
        sim.clear_failures();
    })
}

#[test]
fn an_operand_comes_back_only_when_no_copy_touches_it_however_long_waits_are_refused() {
    // Longer than the two bounded attempts that a lane and an operand could make.
    let refused_for = Duration::from_millis(2500);
    let rig = Rig::new();
    let mut refusal = None;
    let failed = refused_upload(&rig, |sim| {
        // The operand's own stream cannot be delayed either.
        sim.fail_every(Call::StreamWaitEvent, 1, REFUSED);
        refusal = Some((Instant::now(), refuse_waits_for(sim, refused_for)));
    });
    let (begun, end) = refusal.unwrap();
    assert!(begun.elapsed() >= refused_for);
    end.join().unwrap();
    let (_, mut x) = failed.back.unwrap();
    rig.fill(&mut x, 7);
    rig.sim.run_all();
    assert!(rig.bytes(&x).iter().all(|&byte| byte == 7));
    rig.assert_silent();
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn a_copy_from_borrowed_memory_returns_only_when_it_is_done_however_long_waits_are_refused() {
    let refused_for = Duration::from_millis(1500);
    let rig = Rig::new();
    // So short that the driver reads the borrowed bytes itself.
    let up = pattern(KIB / 2, 1);
    let mut x = rig.operand(up.len());
    let begun = Instant::now();
    let end = refuse_waits_for(&rig.sim, refused_for);
    rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).and_then(|taken| taken).unwrap();
    assert!(begun.elapsed() >= refused_for);
    assert_eq!(rig.sim.pending(rig.home.raw()), 0, "what was borrowed may be freed now");
    end.join().unwrap();
    assert!(rig.bytes(&x) == up);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn an_operand_of_another_machine_is_refused_and_keeps_its_bytes() {
    let (here, there) = (Rig::new(), Rig::new());
    let (own, actual) = (here.sim.driver().machine(), there.sim.driver().machine());
    let refused = |what: &str, told: Result<(), StageError>, expected: u64, actual: u64| {
        let Err(StageError::Memory(error)) = told else { panic!("{what}: {told:?}") };
        assert_eq!(error, MemoryError::OtherMachine { expected, actual }, "{what}");
    };
    // The driver, the calling thread and the workers would copy them.
    for size in [KIB, 6 * KIB, 6 * SLOT] {
        let (up, mut down) = (pattern(size, 1), vec![0; size]);
        let mut theirs = there.operand(size);
        there.fill(&mut theirs, 7);
        there.sim.run_all();
        let stager = &here.stager;
        let told = stager.try_scope(|s| s.upload(&up, &mut theirs).map(drop));
        refused("upload", told, own, actual);
        let told = stager.try_scope(|s| s.download(&theirs, &mut down).map(drop));
        refused("download", told, own, actual);
        let failed = stager.upload(up, theirs).unwrap_err();
        refused("owned upload", Err(failed.error), own, actual);
        let (_, theirs) = failed.back.unwrap();
        assert!(there.bytes(&theirs).iter().all(|&byte| byte == 7));
        assert!(down.iter().all(|&byte| byte == 0));
    }
    here.assert_all_given_back();
    there.assert_all_given_back();
}

#[test]
fn a_slot_that_a_short_transfer_used_goes_back_only_when_its_copy_is_known_to_be_done() {
    let rig = Rig::new();
    rig.stager.warm().unwrap();
    let up = pattern(6 * KIB, 1);
    let mut x = rig.operand(up.len());
    SAY_DONE.into_iter().for_each(|call| rig.sim.fail_every(call, 1, REFUSED));
    let told = rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).and_then(|taken| taken);
    assert!(matches!(told, Err(StageError::Memory(MemoryError::Driver(_)))), "{told:?}");
    let _bytes = rig.stager.trim();
    assert!(rig.pool.stats().memory.pending > 0);
    rig.sim.clear_failures();
    rig.sim.run_all();
    assert!(rig.bytes(&x) == up);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.stats().memory.pending, 0, "and now it has been seen");
    drop(x);
    rig.assert_all_given_back();
}

/// A source that loses the device when a byte is read.
struct Fatal {
    sim: Sim,
    at: u64,
}

impl Source for Fatal {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        if (offset..offset + into.len() as u64).contains(&self.at) {
            self.sim.lose_device(GPU);
        }
        into.fill(1);
        Ok(into.len())
    }
}

#[test]
fn a_lost_device_ends_every_transfer_with_that_error_and_all_can_be_dropped() {
    for at in [0, 2 * SLOT as u64 + 5, 40 * SLOT as u64 - 1] {
        let rig = Rig::new();
        rig.stager.warm().unwrap();
        let source = Fatal { sim: rig.sim.clone(), at };
        let other = rig.stager.upload(pattern(40 * SLOT, 1), rig.operand(40 * SLOT)).unwrap();
        let falling = rig.stager.download(rig.operand(40 * SLOT), vec![0u8; 40 * SLOT]).unwrap();
        let mut x = rig.operand(40 * SLOT);
        let answer = rig.stager.scope(|s| s.read(&source, 0, &mut x).map(drop));
        assert!(answer.unwrap_err().is_device_lost());
        // Either done before the loss, or reported.
        if let Err(failed) = other.wait() {
            assert!(failed.error.is_device_lost(), "{failed}");
            assert!(failed.back.is_some());
        }
        if let Err(failed) = falling.wait() {
            assert!(failed.error.is_device_lost(), "{failed}");
        }
        for size in [KIB, 6 * KIB, 4 * SLOT] {
            let bytes = vec![1; size];
            let late = rig.stager.scope(|s| s.upload(&bytes, &mut x).map(drop));
            assert!(late.is_err() || late.unwrap().is_err());
        }
        drop(x);
        rig.assert_silent();
        let Rig { stager, pool, home, streams, .. } = rig;
        assert!(stager.trim() % (2 * SLOT) as u64 == 0);
        drop((stager, pool, home, streams));
    }
}

#[test]
fn a_hanging_driver_call_delays_no_unrelated_transfer() {
    let rig = Rig::new();
    let held = rig.sim.stall(Call::EventSynchronize);
    let ticket = rig.stager.upload(pattern(9 * SLOT, 1), rig.operand(9 * SLOT)).unwrap();
    assert!(held.wait_for(1, PATIENCE));
    thread::scope(|threads| {
        let looking = threads.spawn(|| {
            assert!(!ticket.is_done());
            let _progress = ticket.progress();
            drop(rig.stager.try_permit().unwrap());
            let small = vec![1; KIB];
            let mut y = rig.operand(KIB);
            rig.stager.scope(|s| s.upload(&small, &mut y).map(drop)).unwrap().unwrap();
            ticket.cancel();
        });
        let deadline = Instant::now() + PATIENCE;
        while !looking.is_finished() {
            assert!(Instant::now() < deadline, "somebody holds a lock over a driver call");
            thread::yield_now();
        }
        drop(held);
    });
    drop(ticket.wait());
    rig.assert_silent();
}

#[test]
fn slots_are_not_reused_before_late_completion() {
    for seed in 0..5 {
        let rig = Rig::on(Sim::h200(1).seeded(seed).paced(16), GPU, config(), pinned());
        let mut x = rig.operand(20 * SLOT);
        for round in 0..3 {
            let up = pattern(20 * SLOT, round);
            rig.fill(&mut x, round);
            rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
            rig.look(&x);
            let mut down = vec![0; up.len()];
            rig.stager.scope(|s| s.download(&x, &mut down).map(drop)).unwrap().unwrap();
            assert!(down == up, "seed {seed}, round {round}");
        }
        drop(x);
        rig.assert_all_given_back();
    }
}
