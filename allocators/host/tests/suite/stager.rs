//! Tests of staged transfers on a simulated device: the bytes arrive, in order with all other work,
//! and each waiter is notified.
#![expect(unsafe_code, reason = "ends a graph")]

use crate::rig::{self, KIB, PATIENCE, Rig, SLOT, block_on, config, pattern, pinned};
use crate::support;
use aquifer_core::{DeviceId, MemoryError};
use aquifer_driver::{Call, CaptureMode, Typed, sim::Sim};
use aquifer_host::{
    PinnedConfig, Source, StageError, Stager, StagerConfig, Ticket, region::Pinning,
};
use std::{
    future::Future,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

/// Empty, direct, one chunk, and many slots. No size is a round number.
const SIZES: [usize; 9] =
    [0, 1, 511, KIB, KIB + 1, 8 * KIB + 3, SLOT - 1, 5 * SLOT + 77, 1000 * KIB + 13];

#[test]
fn every_byte_arrives_whatever_the_size_and_wherever_it_begins() {
    let rig = Rig::new();
    for size in SIZES {
        let whole = pattern(size + 5, size as u8);
        let up = &whole[5..];
        let mut x = rig.operand(size);
        rig.stager.scope(|s| s.upload(up, &mut x).map(drop)).unwrap().unwrap();
        assert!(size == 0 || rig.bytes(&x) == up, "{size} bytes up");
        let mut back = vec![0; size + 3];
        rig.stager.scope(|s| s.download(&x, &mut back[3..]).map(drop)).unwrap().unwrap();
        assert!(back[3..] == *up && back[..3] == [0; 3], "{size} bytes down");
    }
    rig.assert_all_given_back();
}

#[test]
fn memory_that_cannot_be_written_can_be_read() {
    static CONSTANT: [u8; 3 * SLOT] = [7; 3 * SLOT];
    let rig = Rig::new();
    let mut x = rig.operand(CONSTANT.len());
    rig.stager.scope(|s| s.upload(&CONSTANT, &mut x).map(drop)).unwrap().unwrap();
    assert!(rig.bytes(&x) == CONSTANT);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn a_transfer_comes_after_earlier_uses_and_before_later_ones() {
    for (size, homely) in
        [KIB, 6 * KIB, 6 * SLOT].into_iter().flat_map(|size| [(size, true), (size, false)])
    {
        let rig = Rig::new();
        let mut x = rig.operand(size);
        x.homely = homely;
        let (up, mut down) = (pattern(size, 3), vec![0; size]);
        rig.fill(&mut x, 9);
        rig.look(&x);
        rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
        rig.look(&x);
        rig.stager.scope(|s| s.download(&x, &mut down).map(drop)).unwrap().unwrap();
        assert!(down == up);
        rig.fill(&mut x, 5);
        rig.stager.scope(|s| s.download(&x, &mut down).map(drop)).unwrap().unwrap();
        assert!(down.iter().all(|&byte| byte == 5), "the kernel had been queued before");
        drop(x);
        rig.assert_all_given_back();
    }
}

#[test]
fn without_the_order_the_simulator_objects() {
    for size in [KIB, 6 * KIB, 6 * SLOT] {
        for upload in [true, false] {
            let rig = Rig::new();
            let mut x = rig.operand(size);
            rig.fill(&mut x, 9);
            (x.ordered, x.homely) = (false, false);
            let mut bytes = pattern(size, 3);
            let staged = if upload {
                rig.stager.scope(|s| s.upload(&bytes, &mut x).map(drop))
            } else {
                rig.stager.scope(|s| s.download(&x, &mut bytes).map(drop))
            };
            staged.unwrap().unwrap();
            let found = rig.sim.take_violations();
            assert!(!found.is_empty(), "{size} bytes, upload: {upload}");
            assert_eq!(
                found[0].later.site.file(),
                file!(),
                "whoever copied, it was asked for here"
            );
        }
    }
}

/// Returns the driver calls made so far.
fn made(rig: &Rig) -> Vec<(Call, u64)> {
    rig.sim.driver().calls().made()
}

#[test]
fn a_short_transfer_is_one_copy_on_the_home_stream_and_one_wait() {
    for size in [4, KIB, 6 * KIB] {
        let rig = Rig::new();
        rig.stager.warm().unwrap();
        let mut x = rig.operand(size);
        let (up, mut down) = (pattern(size, 3), vec![0; size]);
        rig.fill(&mut x, 9);
        for (upload, copy) in [(true, Call::CopyToDevice), (false, Call::CopyToHost)] {
            let before = made(&rig);
            let staged = if upload {
                rig.stager.scope(|s| s.upload(&up, &mut x).map(drop))
            } else {
                rig.stager.scope(|s| s.download(&x, &mut down).map(drop))
            };
            staged.unwrap().unwrap();
            let calls: Vec<_> = made(&rig)
                .into_iter()
                .map(|(call, count)| {
                    let earlier =
                        before.iter().find(|(other, _)| *other == call).map_or(0, |&(_, n)| n);
                    (call, count - earlier)
                })
                .filter(|&(_, count)| count > 0)
                .collect();
            // The copy and the wait. Each is preceded by a query whether a capture is open, and the
            // wait is made in the relaxed capture mode.
            let mut expected = vec![
                (Call::StreamIsCapturing, 2),
                (Call::ExchangeCaptureMode, 2),
                (Call::StreamSynchronize, 1),
                (copy, 1),
            ];
            let order = |call: Call| Call::ALL.iter().position(|&other| other == call);
            expected.sort_by_key(|&(call, _)| order(call));
            assert_eq!(calls, expected, "{size} bytes, upload: {upload}");
        }
        assert!(down == up);
        drop(x);
        rig.assert_all_given_back();
    }
}

#[test]
fn a_short_transfer_goes_in_pieces_from_96_kib_on() {
    let mut config = config();
    (config.slot, config.alone, config.down_alone) = (1024 * KIB, 1024 * KIB, 1024 * KIB);
    (config.direct, config.down_direct) = (0, 0);
    let rig = Rig::with(config);
    for (size, pieces) in
        [(1, 1), (96 * KIB, 1), (96 * KIB + 1, 2), (256 * KIB, 2), (512 * KIB, 3), (1024 * KIB, 4)]
    {
        let (mut x, up) = (rig.operand(size), pattern(size, 3));
        let made = |call| rig.sim.driver().calls().get(call);
        let [sent, came, fenced] = [Call::CopyToDevice, Call::CopyToHost, Call::EventRecord]
            .map(|call| (call, made(call)));
        rig.stager.scope(|s| s.gather(up.chunks(50_001), &mut x).map(drop)).unwrap().unwrap();
        assert!(rig.bytes(&x) == up, "{size} bytes up");
        assert_eq!(made(sent.0) - sent.1, pieces, "{size} bytes");
        assert_eq!(made(fenced.0), fenced.1, "the stream is waited for, once");
        let mut down = vec![0; size];
        rig.stager.scope(|s| s.scatter(&x, down.chunks_mut(70_001)).map(drop)).unwrap().unwrap();
        assert!(down == up, "{size} bytes down");
        assert_eq!(made(came.0) - came.1, pieces, "{size} bytes");
        assert_eq!(made(fenced.0) - fenced.1, pieces - 1, "each is waited for as it comes");
    }
    rig.assert_all_given_back();
}

#[test]
fn transfers_record_the_same_events_again_and_again() {
    let rig = Rig::new();
    rig.stager.warm().unwrap();
    let up = pattern(6 * SLOT, 3);
    let mut x = rig.operand(up.len());
    for _ in 0..60 {
        rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
    }
    // One event for each slot, and one more than in flight for each lane and the owner stream.
    let config = rig.stager.config();
    let most = (config.up_workers + 1) * (config.slots + 1) + 2;
    let events = rig.sim.driver().calls().get(Call::EventCreate);
    assert!(events <= most as u64, "{events} events, where {most} would do");
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn a_short_transfer_of_a_home_that_captures_is_refused_and_the_capture_is_whole() {
    for size in [KIB, 6 * KIB, 2 * SLOT] {
        let rig = Rig::new();
        let mut x = rig.operand(size);
        let up = pattern(size, 3);
        rig.sim.driver().capture_begin(rig.home.raw(), CaptureMode::Relaxed).unwrap();
        let refused = rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap();
        assert!(
            matches!(refused, Err(StageError::Memory(MemoryError::Capturing { .. }))),
            "{size} bytes: {refused:?}"
        );
        let graph = rig.sim.driver().capture_end(rig.home.raw()).unwrap();
        // SAFETY: 1. the handle is known only here.
        unsafe { rig.sim.driver().graph_destroy(graph) }.unwrap();
        rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
        assert!(rig.bytes(&x) == up);
        drop(x);
        rig.assert_all_given_back();
    }
}

#[test]
fn a_short_transfer_captured_midway_is_reported_and_its_memory_stays_with_the_graph() {
    for (size, copy) in
        [(KIB, Call::CopyToDevice), (6 * KIB, Call::CopyToDevice), (6 * KIB, Call::CopyToHost)]
    {
        let rig = Rig::new();
        rig.stager.warm().unwrap();
        let lanes = rig.pool.stats().memory.live;
        let (mut x, up, mut down) = (rig.operand(size), pattern(size, 3), vec![0; size]);
        let (driver, home) = (rig.sim.driver(), rig.home.raw());
        let refused = thread::scope(|threads| {
            let at_copy = rig.sim.stall(copy);
            let transfer = threads.spawn(|| match copy {
                Call::CopyToDevice => rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)),
                _ => rig.stager.scope(|s| s.download(&x, &mut down).map(drop)),
            });
            assert!(at_copy.wait_for(1, PATIENCE));
            driver.capture_begin(home, CaptureMode::Relaxed).unwrap();
            // Each attempt to wait relaxes the capture mode, asks whether a capture is open, and
            // restores the mode. So after two such calls the first attempt has seen the capture.
            let modes = || driver.calls().get(Call::ExchangeCaptureMode);
            let (before, deadline) = (modes(), Instant::now() + PATIENCE);
            drop(at_copy);
            while modes() < before + 2 {
                assert!(Instant::now() < deadline, "the transfer does not wait");
                thread::yield_now();
            }
            let graph = driver.capture_end(home).unwrap();
            // SAFETY: 1. the handle is known only here.
            unsafe { driver.graph_destroy(graph) }.unwrap();
            transfer.join().unwrap().unwrap()
        });
        assert!(
            matches!(refused, Err(StageError::Memory(MemoryError::Capturing { .. }))),
            "{size} bytes, {copy:?}: {refused:?}"
        );
        rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
        assert!(rig.bytes(&x) == up);
        let (given, lost) = (rig.stager.trim(), rig.pool.stats().memory.live);
        assert_eq!(lost > 0, size > KIB, "a direct copy uses no slot");
        assert_eq!(lost + given, lanes);
    }
}

#[test]
fn both_directions_together_have_no_more_workers_than_there_are_cpus() {
    let rig = Rig::new();
    let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let host =
        aquifer_host::region::Host::new(support::topology(), aquifer_host::kernel::Kernel::new());
    for (up, down) in [(1, 1), (8, 8), (256, 1), (1, 256), (256, 256)] {
        let mut config = config();
        (config.up_workers, config.down_workers) = (up, down);
        let stager = Stager::new(&host, &rig.pool, &rig.streams, config).unwrap();
        let (up, down) = (stager.config().up_workers, stager.config().down_workers);
        assert!(up >= 1 && down >= 1 && (up + down <= cpus.max(2)), "{up} and {down} on {cpus}");
    }
}

#[test]
fn sides_that_differ_are_refused_and_nothing_has_happened() {
    let rig = Rig::new();
    let (mut x, bytes) = (rig.operand(100), vec![0; 99]);
    let refused = rig.stager.scope(|s| s.upload(&bytes, &mut x).map(drop)).unwrap();
    let differ = MemoryError::LengthMismatch { from: 99, to: 100 };
    assert!(matches!(refused, Err(StageError::Memory(error)) if error == differ));
    let mut longer = vec![0; 101];
    let refused = rig.stager.scope(|s| s.download(&x, &mut longer).map(drop)).unwrap();
    let differ = MemoryError::LengthMismatch { from: 100, to: 101 };
    assert!(matches!(refused, Err(StageError::Memory(error)) if error == differ));
    let failed = rig.stager.upload(bytes, x).unwrap_err();
    let (bytes, x) = failed.back.unwrap();
    assert_eq!((bytes.len(), x.len()), (99, 100), "both came back");
    assert_eq!(rig.sim.driver().calls().get(Call::CopyToDevice), 0);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn an_operand_of_another_device_is_refused() {
    let sim = Sim::h200(2).stepped();
    let (first, second) = (
        Rig::on(sim.clone(), DeviceId(0), config(), pinned()),
        Rig::on(sim, DeviceId(1), config(), pinned()),
    );
    for size in [KIB, 2 * SLOT] {
        let (mut x, bytes) = (second.operand(size), vec![0; size]);
        let refused = first.stager.scope(|s| s.upload(&bytes, &mut x).map(drop)).unwrap();
        assert!(matches!(refused, Err(StageError::Memory(MemoryError::WrongDevice { .. }))));
    }
}

#[test]
fn several_devices_are_served_side_by_side() {
    let sim = Sim::h200(3).seeded(4);
    let rigs: Vec<_> =
        (0..3).map(|device| Rig::on(sim.clone(), DeviceId(device), config(), pinned())).collect();
    thread::scope(|threads| {
        for (seed, rig) in rigs.iter().enumerate() {
            threads.spawn(move || {
                let up = pattern(9 * SLOT, seed as u8);
                let mut x = rig.operand(up.len());
                let mut down = vec![0; up.len()];
                rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
                rig.stager.scope(|s| s.download(&x, &mut down).map(drop)).unwrap().unwrap();
                assert!(up == down);
            });
        }
    });
    rigs.into_iter().for_each(|rig| rig.assert_silent());
}

#[test]
fn small_pieces_share_slots() {
    let rig = Rig::new();
    let pieces: Vec<_> = (0..200).map(|at| pattern(37 + at, at as u8)).collect();
    let all = pieces.concat();
    let mut x = rig.operand(all.len());
    rig.stager
        .scope(|s| s.gather(pieces.iter().map(|piece| &piece[..]), &mut x).map(drop))
        .unwrap()
        .unwrap();
    assert!(rig.bytes(&x) == all);
    let copies = rig.sim.driver().calls().get(Call::CopyToDevice);
    assert!(copies <= all.len().div_ceil(8 * KIB) as u64 + 1, "{copies} copies for 200 pieces");

    let mut back: Vec<_> = pieces.iter().map(|piece| vec![0; piece.len()]).collect();
    let slices = back.iter_mut().map(|piece| &mut piece[..]);
    rig.stager.scope(|s| s.scatter(&x, slices).map(drop)).unwrap().unwrap();
    assert!(back == pieces);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn one_direction_goes_on_while_the_other_is_held_up() {
    let rig = Rig::new();
    let (mut x, mut y) = (rig.operand(9 * SLOT), rig.operand(9 * SLOT));
    rig.fill(&mut y, 4);
    let (up, mut down) = (pattern(9 * SLOT, 1), vec![0; 9 * SLOT]);
    rig.stager
        .scope(|s| {
            let held = rig.sim.stall(Call::CopyToDevice);
            let rising = s.upload(&up, &mut x).unwrap();
            assert!(held.wait_for(1, PATIENCE));
            let falling = s.download(&y, &mut down).unwrap();
            falling.wait_until(Instant::now() + PATIENCE).unwrap().unwrap();
            assert!(!rising.is_done());
            assert_eq!(rising.progress().done, 0);
            assert_eq!(falling.progress().done, 9 * SLOT as u64);
            drop(held);
        })
        .unwrap();
    assert!(down.iter().all(|&byte| byte == 4) && rig.bytes(&x) == up);
    drop((x, y));
    rig.assert_all_given_back();
}

#[test]
fn owned_sides_are_returned() {
    let rig = Rig::new();
    let up = pattern(7 * SLOT + 9, 6);
    let ticket = rig.stager.upload(up.clone(), rig.operand(up.len())).unwrap();
    assert_eq!(ticket.progress().total, up.len() as u64);
    let (same, x) = ticket.wait().unwrap();
    assert!(same == up && rig.bytes(&x) == up);
    let ticket = rig.stager.download(x, vec![0; up.len()].into_boxed_slice()).unwrap();
    let (x, down) = ticket.wait_until(Instant::now() + PATIENCE).unwrap().unwrap();
    assert!(*down == *up);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn each_wait_can_be_tried_timed_and_awaited() {
    let rig = Rig::new();
    let held = rig.sim.stall(Call::CopyToDevice);
    let up = pattern(4 * SLOT, 6);
    let ticket = rig.stager.upload(up.clone(), rig.operand(up.len())).unwrap();
    assert!(!ticket.is_done());
    let ticket = ticket.try_wait().unwrap_err();
    let mut ticket = ticket.wait_until(Instant::now() + Duration::from_millis(5)).unwrap_err();
    // A wait that is dropped loses nothing.
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(Pin::new(&mut ticket).poll(&mut context), Poll::Pending));
    drop(held);
    let (same, x) = block_on(&mut ticket).unwrap();
    assert!(same == up && rig.bytes(&x) == up);
    let again = block_on(&mut ticket).unwrap_err();
    assert!(matches!(again.error, StageError::Taken) && again.back.is_none());
    drop(ticket);

    // The same inside a scope.
    let mut y = x;
    rig.stager
        .scope(|s| {
            let staged = s.upload(&up, &mut y).unwrap();
            block_on(staged.clone()).unwrap();
            assert!(matches!(staged.try_wait(), Some(Ok(()))));
            staged.wait().unwrap();
        })
        .unwrap();
    drop(y);
    rig.assert_all_given_back();
}

#[test]
fn a_forgotten_ticket_leaks_and_corrupts_nothing() {
    let rig = Rig::new();
    let up = pattern(5 * SLOT, 6);
    let ticket = rig.stager.upload(up.clone(), rig.operand(up.len())).unwrap();
    let watch = ticket.watch();
    let _forgotten = std::mem::ManuallyDrop::new(ticket);
    watch.wait().unwrap();
    rig.assert_silent();
    let mut y = rig.operand(up.len());
    rig.stager.scope(|s| s.upload(&up, &mut y).map(drop)).unwrap().unwrap();
    assert!(rig.bytes(&y) == up);
    rig.assert_silent();
}

/// A vector that records when it is dropped.
struct Watched(Vec<u8>, Arc<AtomicUsize>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[expect(unsafe_code, reason = "implements a buffer")]
// SAFETY: 1. moving a vector does not move its bytes.
unsafe impl aquifer_host::HostBuffer for Watched {
    type Item = u8;
    fn elements(&mut self) -> std::ptr::NonNull<[u8]> {
        std::ptr::NonNull::from(&mut self.0[..])
    }
}

fn eventually(what: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !what() {
        assert!(Instant::now() < deadline, "this should have come true by now");
        thread::yield_now();
    }
}

#[test]
fn a_dropped_ticket_cancels_and_a_detached_one_does_not() {
    for detached in [false, true] {
        let rig = Rig::new();
        let dropped = Arc::new(AtomicUsize::new(0));
        let held = rig.sim.stall(Call::CopyToDevice);
        let up = Watched(pattern(40 * SLOT, 6), dropped.clone());
        let ticket = rig.stager.upload(up, rig.operand(40 * SLOT)).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        let watch = ticket.watch();
        if detached {
            ticket.detach();
        } else {
            drop(ticket);
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 0, "a worker is at it");
        drop(held);
        match watch.wait_until(Instant::now() + PATIENCE).unwrap() {
            Ok(()) => assert!(detached),
            Err(error) => assert!(!detached && matches!(error, StageError::Cancelled), "{error}"),
        }
        eventually(|| dropped.load(Ordering::Relaxed) == 1);
        assert_eq!(watch.progress().done == watch.progress().total, detached);
        drop((watch, dropped));
        rig.assert_all_given_back();
    }
}

#[test]
fn a_cancelled_transfer_gives_both_sides_back() {
    let rig = Rig::new();
    let held = rig.sim.stall(Call::CopyToDevice);
    let ticket = rig.stager.upload(pattern(40 * SLOT, 6), rig.operand(40 * SLOT)).unwrap();
    assert!(held.wait_for(1, PATIENCE));
    ticket.cancel();
    drop(held);
    let failed = ticket.wait().unwrap_err();
    assert!(matches!(failed.error, StageError::Cancelled));
    let (up, x) = failed.back.unwrap();
    assert_eq!((up.len(), x.len()), (40 * SLOT, 40 * SLOT));
    // At its end there is nothing left to cancel.
    let ticket = rig.stager.upload(up, x).unwrap();
    eventually(|| ticket.is_done());
    ticket.cancel();
    drop(ticket.wait().unwrap());
    rig.assert_all_given_back();
}

#[test]
fn a_scope_that_unwinds_waits_for_its_transfers_first() {
    let rig = Rig::new();
    let mut x = rig.operand(40 * SLOT);
    let mut up = pattern(40 * SLOT, 6);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        rig.stager.scope(|s| -> () {
            s.upload(&up, &mut x).unwrap();
            panic!("on purpose")
        })
    }));
    assert!(unwound.is_err());
    // The bytes are no longer read. Otherwise the simulator would see a slot filled from them, and
    // Miri a race.
    up.fill(0);
    rig.fill(&mut x, 3);
    rig.sim.run_all();
    assert!(rig.bytes(&x).iter().all(|&byte| byte == 3));
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn a_thread_that_unwinds_may_wait_for_a_transfer() {
    /// Waits when it is dropped.
    struct Waits<'a>(Option<Ticket<rig::Plain>>, &'a Mutex<Option<Result<(), StageError>>>);
    impl Drop for Waits<'_> {
        fn drop(&mut self) {
            let outcome =
                self.0.take().map(|ticket| ticket.wait().map(drop).map_err(StageError::from));
            if let Ok(mut told) = self.1.lock() {
                *told = outcome;
            }
        }
    }
    /// A source whose readers wait for each other.
    struct Together(std::sync::Barrier, AtomicUsize);
    impl Source for Together {
        fn read_at(&self, _: u64, into: &mut [u8]) -> io::Result<usize> {
            if self.1.fetch_add(1, Ordering::Relaxed) < 2 {
                self.0.wait();
            }
            into.fill(7);
            Ok(into.len())
        }
    }
    let mut config = config();
    config.up_workers = 1;
    let rig = Rig::with(config);
    let outcome = Mutex::new(None);
    {
        // The worker and the waiting thread: one alone would wait for ever.
        let source = Arc::new(Together(std::sync::Barrier::new(2), AtomicUsize::new(0)));
        let ticket = rig.stager.read(source, 0, rig.operand(200 * SLOT)).unwrap();
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _waits = Waits(Some(ticket), &outcome);
            panic!("on purpose");
        }));
        assert!(unwound.is_err());
    }
    assert!(matches!(outcome.lock().unwrap().take(), Some(Ok(()))));
    rig.assert_all_given_back();
}

#[test]
fn a_scope_returns_the_error_that_ended_a_transfer_early() {
    let rig = Rig::new();
    let mut x = rig.operand(40 * SLOT);
    let up = pattern(40 * SLOT, 6);
    let answer = rig.stager.scope(|s| {
        let held = rig.sim.stall(Call::CopyToDevice);
        let staged = s.upload(&up, &mut x).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        staged.cancel();
        drop(held);
    });
    assert!(matches!(answer, Err(StageError::Cancelled)));
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn transfers_in_flight_never_exceed_their_limit() {
    let mut config = config();
    config.depth = 2;
    let rig = Rig::with(config);
    let held = rig.sim.stall(Call::CopyToDevice);
    let tickets: Vec<_> = (0..2)
        .map(|_| rig.stager.upload(vec![1u8; 2 * SLOT], rig.operand(2 * SLOT)).unwrap())
        .collect();
    assert!(rig.stager.try_permit().is_none());
    let mut ready = rig.stager.ready();
    let mut context = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut ready).poll(&mut context).is_pending());
    drop(ready);
    thread::scope(|threads| {
        let blocked = threads.spawn(|| rig.stager.permit());
        let awaited = threads.spawn(|| block_on(rig.stager.ready()));
        drop(held);
        drop((blocked.join().unwrap(), awaited.join().unwrap()));
    });
    tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    let both = (rig.stager.try_permit(), rig.stager.try_permit(), rig.stager.try_permit());
    assert!(both.0.is_some() && both.1.is_some() && both.2.is_none());
    drop(both);
    rig.assert_all_given_back();
}

#[test]
fn memory_that_cannot_be_pinned_is_no_obstacle() {
    let mut pinned: PinnedConfig = pinned();
    pinned.pinning = Pinning::Off;
    let rig = Rig::on(Sim::h200(1).stepped(), rig::GPU, config(), pinned);
    rig.stager.warm().unwrap();
    let up = pattern(5 * SLOT + 1, 3);
    let mut x = rig.operand(up.len());
    let mut down = vec![0; up.len()];
    rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
    rig.stager.scope(|s| s.download(&x, &mut down).map(drop)).unwrap().unwrap();
    assert!(down == up);
    let (_, x) = rig.stager.upload(vec![1u8; x.len()], x).unwrap().wait().unwrap();
    assert!(rig.bytes(&x).iter().all(|&byte| byte == 1));
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn one_lane_serves_all_where_there_is_memory_for_no_more() {
    let rig = Rig::new();
    // All of the budget but one lane's share is charged elsewhere.
    let mut config = config();
    config.slot = 512 * KIB;
    let stager = {
        let host = aquifer_host::region::Host::new(
            support::topology(),
            aquifer_host::kernel::Kernel::new(),
        )
        .with_driver(rig.sim.driver(), rig::GPU);
        let budget = aquifer_core::Budget::new("one region", 2 << 20);
        let pool = aquifer_host::PinnedPool::new(&host, &budget, pinned()).unwrap();
        let _other = std::mem::ManuallyDrop::new(pool.buffer::<u8>(100 * KIB).unwrap());
        let stager = Stager::new(&host, &pool, &rig.streams, config).unwrap();
        stager.warm().unwrap_err();
        stager
    };
    let up = pattern(3 << 20, 1);
    let (x, y) = (rig.operand(up.len()), rig.operand(up.len()));
    let first = stager.upload(up.clone(), x).unwrap();
    let second = stager.upload(up.clone(), y).unwrap();
    let ((_, x), (_, y)) = (first.wait().unwrap(), second.wait().unwrap());
    assert!(rig.bytes(&x) == up && rig.bytes(&y) == up);
    rig.assert_silent();
}

#[test]
fn transfers_outlive_their_stager() {
    let rig = Rig::new();
    let held = rig.sim.stall(Call::CopyToDevice);
    let up = pattern(6 * SLOT, 1);
    let ticket = rig.stager.upload(up.clone(), rig.operand(up.len())).unwrap();
    let Rig { sim, stager, budget, pool, streams, home } = rig;
    drop(stager);
    drop(held);
    let (_, x) = ticket.wait().unwrap();
    assert!(sim.read_back(x.range).unwrap() == up);
    drop((x, pool, streams, home));
    eventually(|| budget.used() == 0 && sim.outstanding().is_empty());
}

#[test]
fn slots_are_kept_until_they_are_trimmed() {
    let rig = Rig::new();
    rig.stager.warm().unwrap();
    let regions = rig.pool.stats().regions;
    let up = vec![1u8; 40 * SLOT];
    let mut x = rig.operand(up.len());
    for _ in 0..3 {
        rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
    }
    assert_eq!(rig.pool.stats().regions, regions, "no transfer takes pinned memory after that");
    drop(x);
    let lanes = rig.stager.config().up_workers + rig.stager.config().down_workers + 2;
    assert_eq!(rig.stager.trim(), (lanes * 2 * SLOT) as u64);
    assert_eq!(rig.pool.stats().memory.live, 0);
    rig.assert_all_given_back();
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let changes: [fn(&mut StagerConfig); 7] = [
        |config| config.up_workers = 0,
        |config| config.down_workers = 257,
        |config| config.slots = 0,
        |config| config.depth = 0,
        |config| config.slot = 4097,
        |config| config.least_chunk = 2 * config.slot,
        |config| config.slot = 0,
    ];
    let rig = Rig::new();
    let host =
        aquifer_host::region::Host::new(support::topology(), aquifer_host::kernel::Kernel::new());
    for change in changes {
        let mut config = StagerConfig::default();
        change(&mut config);
        let made = Stager::new(&host, &rig.pool, &rig.streams, config);
        assert!(matches!(made, Err(MemoryError::BadSetting { .. })), "{made:?}");
    }
}

#[test]
fn one_lane_and_one_slot_are_enough() {
    let mut config = config();
    (config.up_workers, config.down_workers, config.slots) = (1, 1, 1);
    let rig = Rig::with(config);
    let up = pattern(20 * SLOT + 3, 5);
    let mut x = rig.operand(up.len());
    let mut down = vec![0; up.len()];
    rig.stager.scope(|s| s.upload(&up, &mut x).map(drop)).unwrap().unwrap();
    rig.stager.scope(|s| s.download(&x, &mut down).map(drop)).unwrap().unwrap();
    assert!(down == up);
    drop(x);
    rig.assert_all_given_back();
}
