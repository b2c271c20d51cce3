//! Tests of streams during a graph capture: calls neither break the capture nor treat captured work
//! as running.
//!
//! - An event recorded in a capture advances no epoch. The epoch has no proof until the stream is
//!   fenced after the capture.
//! - A wait that is impossible is refused, without a call that would break the capture.

#![expect(unsafe_code, reason = "lends leaked bytes to copies")]

use crate::support::{PATIENCE, Plain, Rig};
use aquifer_core::{DeviceId, Gate, MemoryError};
use aquifer_driver::{Access, Call, CaptureMode, sim::Sim};
use aquifer_stream::{Fence, HostOwned, Stream, StreamLifetime, UseList};
use std::{
    ptr::NonNull,
    sync::{Arc, Barrier},
    time::Instant,
};

/// Bytes that are never freed.
struct Host(&'static mut [u8]);

// SAFETY: 1. initialised, and outside the value. 2. leaked.
unsafe impl HostOwned for Host {
    type Item = u8;
    fn bytes(&mut self) -> NonNull<[u8]> {
        NonNull::from(&mut *self.0)
    }
    fn defer(&mut self, _until: Arc<dyn Gate>) -> Result<(), MemoryError> {
        Ok(())
    }
}

const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

fn capturing(stream: &Stream) -> MemoryError {
    MemoryError::Capturing { stream: stream.raw().handle() }
}

#[test]
fn leasing_or_adopting_a_stream_breaks_no_other_streams_capture() {
    for mode in MODES {
        let rig = Rig::stepped(1);
        let (s, driver) = (rig.lease(), rig.sim.driver());
        let foreign = driver.stream_create(s.device(), 0).unwrap();
        driver.capture_begin(s.raw(), mode).unwrap();
        rig.launch(&s);
        // SAFETY: 1. it is destroyed at the end.
        let taken = unsafe { rig.pool.adopt(foreign, StreamLifetime::Fenced) }.unwrap();
        // SAFETY: 1. as above. The stream is known, so it is only checked to be the same one.
        let again = unsafe { rig.pool.adopt(foreign, StreamLifetime::Fenced) }.unwrap();
        assert_eq!(rig.end_capture(s.raw()), Ok(1));
        drop((taken, again));
        // SAFETY: 1. no copy of the handle is used any more.
        unsafe { driver.stream_destroy(foreign) }.unwrap();
    }
}

#[test]
fn adopting_a_capturing_stream_keeps_its_capture_valid() {
    for mode in MODES {
        for life in [StreamLifetime::Retired, StreamLifetime::Fenced] {
            let rig = Rig::stepped(1);
            let (foreign, driver) = (rig.foreign(), rig.sim.driver());
            driver.capture_begin(foreign, mode).unwrap();
            let new = rig.adopt(foreign, life.clone()).unwrap();
            assert_eq!(new.timeline().id(), None, "the driver does not tell");
            assert_eq!(rig.adopt(foreign, life.clone()), Ok(new.clone()));
            assert!(Arc::ptr_eq(&rig.pool.timeline(foreign, None).unwrap(), new.timeline()));
            rig.launch(&new);
            assert_eq!(rig.end_capture(foreign), Ok(1));
            // The stream now answers. One that may have been destroyed without notice is not taken
            // for the same stream.
            let later = rig.adopt(foreign, life.clone()).unwrap();
            assert_eq!(later == new, matches!(life, StreamLifetime::Retired), "{life:?}");
            assert!(later.timeline().id().is_some());
            // A known stream keeps its identity while it captures.
            driver.capture_begin(foreign, mode).unwrap();
            assert_eq!(rig.adopt(foreign, life.clone()), Ok(later.clone()));
            assert_eq!(rig.end_capture(foreign), Ok(0));
            drop((new, later));
            rig.destroy(foreign);
            rig.assert_all_given_back();
        }
    }
}

#[test]
fn a_fence_during_a_capture_proves_nothing_and_the_next_one_after_it_covers_the_epoch() {
    for mode in MODES {
        let rig = Rig::stepped(2);
        let s = rig.lease();
        let t = s.timeline();
        rig.launch(&s);
        let before = t.open();
        rig.sim.driver().capture_begin(s.raw(), mode).unwrap();
        rig.launch(&s);
        assert_eq!(t.fence(before), Ok(Fence::Capturing));
        assert!(!t.is_fenced(before) && !t.is_done(before));
        let open = t.open();
        assert_eq!(t.fence(before), Ok(Fence::Capturing));
        assert_eq!(t.open(), open, "the stream is known to capture, and its epoch stays open");
        t.poll().unwrap();
        assert!(!t.is_done(before));
        assert_eq!(rig.end_capture(s.raw()), Ok(1), "nothing but the kernel is in the graph");
        assert_eq!(t.fence(before), Ok(Fence::Recorded));
        t.poll().unwrap();
        assert!(!t.is_done(before), "what was queued before the capture has not run");
        rig.sim.run_all();
        t.poll().unwrap();
        assert!(t.is_done(before));
    }
}

#[test]
fn no_fence_closes_an_epoch_in_a_capture_that_was_expected() {
    let rig = Rig::stepped(2);
    let s = rig.lease();
    rig.launch(&s);
    s.timeline().expect_capture();
    let before = s.timeline().open();
    rig.sim.driver().capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
    assert_eq!(s.timeline().fence(before), Ok(Fence::Capturing));
    assert_eq!((s.timeline().open(), rig.made(Call::EventRecord)), (before, 0));
    rig.end_capture(s.raw()).unwrap();
}

/// A caller that treats a block as free because of a captured event would reuse it while its kernel
/// is queued.
#[test]
fn a_capture_that_begins_under_a_fence_is_seen_after_the_record() {
    let rig = Rig::stepped(2);
    let s = rig.lease();
    rig.launch(&s);
    let epoch = s.timeline().open();
    let slow = rig.sim.stall(Call::EventRecord);
    let fence = std::thread::scope(|scope| {
        let fencing = scope.spawn(|| s.timeline().fence(epoch));
        assert!(slow.wait_for(1, PATIENCE));
        rig.sim.driver().capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
        drop(slow);
        fencing.join().unwrap()
    });
    assert_eq!(fence, Ok(Fence::Capturing));
    assert!(!s.timeline().is_fenced(epoch));
    assert_eq!(
        rig.end_capture(s.raw()),
        Ok(0),
        "the event became part of the graph, and is no node"
    );
    assert_eq!(s.timeline().wait(epoch, None), Ok(true));
    assert_eq!(rig.sim.pending(s.raw()), 0, "and what was queued before it has really run");
}

/// The fence sees no capture, and its event is part of the graph all the same.
#[test]
fn an_event_whose_capture_ends_before_the_query_is_withdrawn_and_recorded_again() {
    type Proof = fn(&Rig, &Stream, u64);
    let poll: Proof = |rig, s, epoch| {
        s.timeline().poll().unwrap();
        assert!(!s.timeline().is_fenced(epoch) && !s.timeline().is_done(epoch));
        assert_eq!(s.timeline().fence(epoch), Ok(Fence::Recorded), "the next event covers it");
        rig.sim.run_all();
        s.timeline().poll().unwrap();
    };
    let wait: Proof = |_, s, epoch| assert_eq!(s.timeline().wait(epoch, None), Ok(true));
    let wait_for: Proof = |rig, s, epoch| {
        let u = rig.lease();
        assert_eq!(u.timeline().wait_for(s.timeline(), epoch), Ok(true));
        u.synchronize().unwrap();
        s.timeline().poll().unwrap();
    };
    for prove in [poll, wait, wait_for] {
        let rig = Rig::stepped(2);
        let s = rig.lease();
        rig.launch(&s);
        let epoch = s.timeline().open();
        rig.sim.driver().capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
        let slow = rig.sim.stall(Call::StreamIsCapturing);
        std::thread::scope(|scope| {
            let fencing = scope.spawn(|| s.timeline().fence(epoch));
            assert!(slow.wait_for(1, PATIENCE));
            assert_eq!(rig.end_capture(s.raw()), Ok(0));
            drop(slow);
            assert_eq!(fencing.join().unwrap(), Ok(Fence::Recorded));
        });
        prove(&rig, &s, epoch);
        assert!(s.timeline().is_done(epoch));
        assert_eq!(rig.sim.pending(s.raw()), 0, "its work has really run");
    }
}

#[test]
fn an_event_that_the_driver_refuses_again_and_again_is_an_error_and_no_endless_loop() {
    for code in [907, 1] {
        let rig = Rig::stepped(2);
        let (s, u) = (rig.lease(), rig.lease());
        let epoch = s.timeline().open();
        rig.launch(&s);
        assert_eq!(s.timeline().fence(epoch), Ok(Fence::Recorded));
        // A refusal that is not the event's leaves the event.
        rig.sim.fail(Call::StreamWaitEvent, 1, code);
        let waited = u.timeline().wait_for(s.timeline(), epoch);
        assert!(matches!(waited, Err(MemoryError::Driver(_))));
        assert!(s.timeline().is_fenced(epoch));
        assert_eq!(rig.made(Call::EventRecord), 1);
        for nth in [1, 2] {
            rig.sim.fail(Call::StreamWaitEvent, nth, code);
            rig.sim.fail(Call::EventQuery, nth, code);
        }
        let waited = u.timeline().wait_for(s.timeline(), epoch);
        assert!(matches!(waited, Err(MemoryError::Driver(_))));
        assert_eq!(rig.made(Call::EventRecord), 2, "it was withdrawn once");
        rig.sim.fail(Call::EventSynchronize, 1, code);
        rig.sim.fail(Call::EventSynchronize, 2, code);
        assert!(matches!(s.timeline().wait(epoch, None), Err(MemoryError::Driver(_))));
        assert_eq!(u.timeline().wait_for(s.timeline(), epoch), Ok(true));
        assert_eq!(s.timeline().wait(epoch, None), Ok(true));
    }
}

#[test]
fn waits_that_a_capture_forbids_are_refused_before_they_break_it() {
    for mode in MODES {
        let rig = Rig::stepped(3);
        let (s, u) = (rig.lease(), rig.lease());
        rig.launch(&s);
        rig.launch(&u);
        let epoch = s.timeline().open();
        rig.sim.driver().capture_begin(s.raw(), mode).unwrap();
        let refused = Err(capturing(&s));
        assert_eq!(s.timeline().wait(epoch, None).map(drop), refused);
        assert_eq!(s.timeline().wait(epoch, Some(Instant::now())).map(drop), refused);
        assert_eq!(s.synchronize(), refused);
        assert_eq!(s.is_idle().map(drop), refused);
        assert_eq!(s.wait_for(&u), refused, "from outside of the capture");
        assert_eq!(u.timeline().wait_for(s.timeline(), epoch).map(drop), refused);
        assert!(!s.point().is_open());
        assert_eq!(rig.end_capture(s.raw()), Ok(0), "the capture is whole");
        assert_eq!(u.timeline().wait_for(s.timeline(), epoch), Ok(true));
        s.synchronize().unwrap();
    }
}

#[test]
fn a_capture_forks_and_joins_by_waits_between_its_streams() {
    let rig = Rig::stepped(3);
    let (s, u) = (rig.lease(), rig.lease());
    rig.launch(&u);
    rig.sim.driver().capture_begin(s.raw(), CaptureMode::Global).unwrap();
    rig.launch(&s);
    u.wait_for(&s).unwrap();
    assert_eq!(u.timeline().is_capturing(), Ok(true));
    rig.launch(&u);
    s.wait_for(&u).unwrap();
    assert_eq!(rig.end_capture(s.raw()), Ok(2), "two kernels; events and waits are the edges");
    assert_eq!(u.timeline().is_capturing(), Ok(false));
    let epoch = u.timeline().open();
    assert!(!u.timeline().is_fenced(epoch), "the events were the graph's");
    u.synchronize().unwrap();
    drop((s, u));
    rig.assert_all_given_back();
}

#[test]
fn a_use_that_ends_in_a_capture_is_pending_until_a_later_fence() {
    let rig = Rig::stepped(3);
    let (home, u) = (rig.lease(), rig.lease());
    rig.sim.driver().capture_begin(u.raw(), CaptureMode::Relaxed).unwrap();
    let mut uses = UseList::new();
    uses.record(home.timeline(), u.timeline(), Access::Read).unwrap();
    let noted = uses.take();
    let (on, epoch) = noted.iter().map(|n| (n.on().clone(), n.epoch().unwrap())).next().unwrap();
    on.fence(epoch).unwrap();
    on.poll().unwrap();
    assert!(!on.is_done(epoch));
    rig.end_capture(u.raw()).unwrap();
    on.fence(epoch).unwrap();
    rig.sim.run_all();
    on.poll().unwrap();
    assert!(noted.iter().all(|n| n.is_done()));
}

#[test]
fn the_legacy_stream_cannot_be_fenced_while_a_stream_ordered_with_it_captures() {
    let sim = Sim::h200(1).symbolic();
    let blocking = sim.blocking_stream(DeviceId(0)).unwrap();
    let legacy = sim.legacy_stream(DeviceId(0));
    let driver = sim.driver();
    assert_eq!(driver.stream_is_capturing(legacy), Ok(false));
    driver.capture_begin(blocking, CaptureMode::Relaxed).unwrap();
    assert_eq!(driver.stream_is_capturing(blocking), Ok(true));
    assert_eq!(driver.stream_is_capturing(legacy), Ok(true));
    assert!(driver.capture_end(blocking).is_ok(), "asking breaks nothing");
    assert_eq!(driver.stream_is_capturing(legacy), Ok(false));
}

/// A graph would access the borrowed memory at every launch, long after the borrow has ended.
#[test]
fn copies_that_borrow_or_own_their_host_side_are_refused_in_a_capture() {
    for mode in MODES {
        let rig = Rig::stepped(2);
        let s = rig.lease();
        let mut x = Plain::new(&rig, &s, 64);
        let (up, mut down) = (vec![1; 64], vec![0; 64]);
        rig.sim.driver().capture_begin(s.raw(), mode).unwrap();
        let mut inner = Vec::new();
        let outer = s.scope(|c| inner.extend([c.upload(&up, &mut x), c.download(&x, &mut down)]));
        assert_eq!(outer, Err(capturing(&s)));
        assert_eq!(inner, [Err(capturing(&s)), Err(capturing(&s))]);
        let refused = s.upload(Host(Box::leak(Box::new([7; 64]))), &mut x).unwrap_err();
        assert_eq!((refused.error, refused.host.0.len()), (capturing(&s), 64));
        assert_eq!(
            s.download(&x, Host(Box::leak(Box::new([7; 64])))).unwrap_err().error,
            capturing(&s)
        );
        assert_eq!(rig.end_capture(s.raw()), Ok(0), "nothing has become part of the graph");
        s.scope(|c| c.upload(&up, &mut x)).unwrap().unwrap();
    }
}

#[test]
fn a_scope_whose_stream_begins_to_capture_behind_its_copies_ends_after_the_capture() {
    let rig = Rig::stepped(2);
    let s = rig.lease();
    let mut x = Plain::new(&rig, &s, 64);
    let up = vec![1; 64];
    let captured = Barrier::new(2);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let looks = || rig.made(Call::StreamIsCapturing);
            captured.wait();
            let before = looks();
            captured.wait();
            // Not before the scope has queried the stream at its end.
            while looks() == before {
                std::thread::yield_now();
            }
            rig.end_capture(s.raw()).unwrap();
        });
        let scope = s.scope(|c| {
            c.upload(&up, &mut x).unwrap();
            rig.sim.driver().capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
            captured.wait();
            captured.wait();
        });
        assert_eq!(scope, Ok(()));
    });
    assert_eq!(rig.sim.pending(s.raw()), 0, "what was borrowed is nobody's any more");
}
