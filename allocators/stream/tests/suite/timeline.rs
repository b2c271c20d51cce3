//! Tests of a stream's timeline.
//!
//! - An event is recorded on request, once for what one event can prove.
//! - Work reported as done is done and stays so. A refusal by the driver proves nothing.
//! - Events are reused. An event with a possible waiter is not recorded again. None remains at the
//!   end.

use crate::support::{GPU, PATIENCE, Rig, within};
use aquifer_core::{Gate, MemoryError};
use aquifer_driver::{Call, CaptureMode, sim::Sim};
use aquifer_stream::{Fence, Point, Stream};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const UNKNOWN: u32 = 999;

/// Queues work and returns the epoch that covers it.
fn work(rig: &Rig, stream: &Stream) -> u64 {
    rig.launch(stream);
    stream.timeline().open()
}

#[test]
fn stamping_asks_nothing_of_the_driver_and_fencing_twice_records_once() {
    let rig = Rig::stepped(2);
    let s = rig.lease();
    let (early, late) = (work(&rig, &s), work(&rig, &s));
    assert_eq!(early, late, "nobody has asked in between");
    assert_eq!(rig.made(Call::EventRecord), 0);
    assert_eq!(s.timeline().fence(late), Ok(Fence::Recorded));
    assert_eq!(s.timeline().fence(early), Ok(Fence::Standing));
    assert!(s.timeline().is_fenced(late) && !s.timeline().is_done(late));
    assert_eq!(rig.made(Call::EventRecord), 1);
    assert!(work(&rig, &s) > late, "what is queued behind the event belongs to the next epoch");
}

#[test]
fn an_epoch_whose_event_could_not_be_recorded_is_covered_by_the_next_event() {
    for call in [Call::EventCreate, Call::EventRecord] {
        let rig = Rig::stepped(2);
        let (s, u) = (rig.lease(), rig.lease());
        let first = work(&rig, &s);
        rig.sim.fail(call, 1, UNKNOWN);
        assert!(matches!(s.timeline().fence(first), Err(MemoryError::Driver(_))));
        assert!(!s.timeline().is_fenced(first), "there is no event");
        let second = work(&rig, &s);
        rig.sim.run_all();
        s.timeline().poll().unwrap();
        assert!(!s.timeline().is_done(first), "it is, but nothing has proved it");
        assert_eq!(u.timeline().wait_for(s.timeline(), first), Ok(true));
        assert!(s.timeline().is_fenced(first) && s.timeline().is_fenced(second));
        s.timeline().poll().unwrap();
        assert!(s.timeline().is_done(first) && s.timeline().is_done(second));
        drop((s, u));
        rig.assert_all_given_back();
    }
}

#[test]
fn a_stream_waits_once_for_what_one_wait_covers() {
    let rig = Rig::stepped(2);
    let (s, u) = (rig.lease(), rig.lease());
    let waits = || rig.made(Call::StreamWaitEvent);
    let first = work(&rig, &s);
    s.timeline().fence(first).unwrap();
    let second = work(&rig, &s);
    assert_eq!(u.timeline().wait_for(s.timeline(), second), Ok(true));
    assert_eq!(u.timeline().wait_for(s.timeline(), second), Ok(false));
    assert_eq!(
        u.timeline().wait_for(s.timeline(), first),
        Ok(false),
        "the later wait covers the earlier"
    );
    assert_eq!(waits(), 1);
    let third = work(&rig, &s);
    assert_eq!(u.timeline().wait_for(s.timeline(), third), Ok(true));
    assert_eq!(waits(), 2);
    assert_eq!(
        s.timeline().wait_for(s.timeline(), third),
        Ok(false),
        "a stream is in order with itself"
    );
    s.synchronize().unwrap();
    let other = rig.adopt(rig.foreign(), aquifer_stream::StreamLifetime::Retired).unwrap();
    assert_eq!(other.timeline().wait_for(s.timeline(), third), Ok(false), "that is done");
    assert_eq!(waits(), 2);
}

#[test]
fn a_wait_that_the_driver_refused_is_not_taken_for_one() {
    let rig = Rig::stepped(2);
    let (s, u) = (rig.lease(), rig.lease());
    let epoch = work(&rig, &s);
    rig.sim.fail(Call::StreamWaitEvent, 1, UNKNOWN);
    assert!(matches!(u.timeline().wait_for(s.timeline(), epoch), Err(MemoryError::Driver(_))));
    assert_eq!(u.timeline().wait_for(s.timeline(), epoch), Ok(true));
    rig.launch(&u);
    assert!(!rig.sim.step(u.raw()), "it really waits");
    rig.sim.run_all();
    assert_eq!(rig.sim.pending(u.raw()), 0);
}

#[test]
fn more_streams_than_are_remembered_are_waited_for_all_the_same() {
    let rig = Rig::stepped(100);
    let u = rig.lease();
    let others: Vec<_> = (0..80).map(|_| rig.lease()).collect();
    let epochs: Vec<_> = others.iter().map(|s| work(&rig, s)).collect();
    for _ in 0..2 {
        for (s, &epoch) in others.iter().zip(&epochs) {
            // Forgetting one costs a wait but never the order.
            u.timeline().wait_for(s.timeline(), epoch).unwrap();
        }
    }
    rig.launch(&u);
    u.synchronize().unwrap();
    assert!(others.iter().all(|s| rig.sim.pending(s.raw()) == 0));
}

#[test]
fn polling_stops_at_the_first_event_that_has_not_passed() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    let epochs: Vec<u64> = (0..5)
        .map(|_| {
            let epoch = work(&rig, &s);
            s.timeline().fence(epoch).unwrap();
            epoch
        })
        .collect();
    let done = || epochs.iter().filter(|&&epoch| s.timeline().is_done(epoch)).count();
    s.timeline().poll().unwrap();
    assert_eq!((done(), rig.made(Call::EventQuery)), (0, 1), "one that has not passed is enough");
    assert!(rig.sim.step(s.raw()) && rig.sim.step(s.raw()));
    s.timeline().poll().unwrap();
    assert_eq!((done(), rig.made(Call::EventQuery)), (2, 4), "two that have, and one that has not");
    rig.sim.run_all();
    rig.sim.fail(Call::EventQuery, 2, UNKNOWN);
    assert!(matches!(s.timeline().poll(), Err(MemoryError::Driver(_))));
    assert_eq!(done(), 3, "what was seen before the refusal has been seen");
    s.timeline().poll().unwrap();
    assert_eq!(done(), 5);
    s.timeline().poll().unwrap();
    assert_eq!(rig.made(Call::EventQuery), 8, "there is nothing left to ask about");
}

#[test]
fn events_are_reused() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    for _ in 0..100 {
        let epoch = work(&rig, &s);
        s.timeline().fence(epoch).unwrap();
        assert_eq!(s.timeline().wait(epoch, None), Ok(true));
    }
    assert_eq!(rig.made(Call::EventCreate), 1);
    // A device that lags by hundreds of events costs no new ones, again and again.
    let lag = |events: u64| {
        for _ in 0..events {
            let epoch = work(&rig, &s);
            s.timeline().fence(epoch).unwrap();
        }
        assert_eq!(rig.sim.outstanding().events, events);
        s.synchronize().unwrap();
        rig.sim.outstanding().events
    };
    assert_eq!((lag(400), lag(400)), (400, 400));
    assert_eq!(rig.made(Call::EventCreate), 400);
    // Of more events at once, some are kept and the others destroyed.
    let kept = lag(1000);
    assert!((400..=600).contains(&kept), "{kept} are kept");
    drop(s);
    rig.assert_all_given_back();
}

#[test]
fn an_event_with_a_waiter_is_not_recorded_again() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    let first = work(&rig, &s);
    s.timeline().fence(first).unwrap();
    let slow = rig.sim.stall(Call::EventSynchronize);
    let waiter = s.clone();
    let waiting = thread::spawn(move || waiter.timeline().wait(first, None));
    assert!(slow.wait_for(1, PATIENCE));
    // Meanwhile another thread sees that the event has completed.
    rig.sim.run_all();
    s.timeline().poll().unwrap();
    assert!(s.timeline().is_done(first));
    let second = work(&rig, &s);
    s.timeline().fence(second).unwrap();
    assert_eq!(rig.made(Call::EventCreate), 2, "the first is still held");
    drop(slow);
    assert_eq!(waiting.join().unwrap(), Ok(true));
    assert_eq!(rig.sim.pending(s.raw()), 1, "the waiter has not waited for the second");
    assert!(!s.timeline().is_done(second));
    drop(s);
    rig.sim.run_all();
    rig.assert_all_given_back();
}

#[test]
fn what_is_done_stays_done_while_threads_fence_poll_and_wait() {
    let rig = Rig::on(Sim::h200(1).symbolic().seeded(3), 2);
    let (s, u) = (rig.lease(), rig.lease());
    let (over, seen) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    thread::scope(|scope| {
        let checking = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let highest = seen.load(Ordering::Acquire);
                assert!(s.timeline().is_done(highest), "{highest} was done");
                thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..4u64)
            .map(|thread| {
                let (rig, s, u, seen) = (&rig, &s, &u, &seen);
                scope.spawn(move || {
                    for round in 0..200 {
                        let epoch = work(rig, s);
                        match (thread + round) % 4 {
                            0 => assert_eq!(s.timeline().wait(epoch, None), Ok(true)),
                            1 => s.timeline().fence(epoch).map(drop).unwrap(),
                            2 => u.timeline().wait_for(s.timeline(), epoch).map(drop).unwrap(),
                            _ => s.timeline().poll().unwrap(),
                        }
                        if s.timeline().is_done(epoch) {
                            seen.fetch_max(epoch, Ordering::AcqRel);
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = workers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        checking.join().unwrap();
        assert!(ended.iter().all(Result::is_ok));
    });
    let last = s.timeline().open();
    s.synchronize().unwrap();
    assert!(s.timeline().is_done(last) && !s.timeline().is_done(last + 1));
    drop((s, u));
    rig.assert_all_given_back();
}

#[test]
fn a_wait_with_a_deadline_comes_back_at_the_deadline_with_the_truth() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    let epoch = work(&rig, &s);
    let start = Instant::now();
    let deadline = start + Duration::from_millis(20);
    assert_eq!(s.timeline().wait(epoch, Some(deadline)), Ok(false));
    assert!(start.elapsed() >= Duration::from_millis(20) && start.elapsed() < PATIENCE);
    assert_eq!(s.timeline().wait(epoch, Some(start)), Ok(false), "a deadline that is over");
    rig.sim.run_all();
    assert_eq!(s.timeline().wait(epoch, Some(start)), Ok(true), "it is done, however late it is");
}

#[test]
fn no_lock_is_held_while_a_thread_waits() {
    let rig = Rig::stepped(2);
    let (s, u) = (rig.lease(), rig.lease());
    let epoch = work(&rig, &s);
    for call in [Call::EventSynchronize, Call::StreamSynchronize] {
        let slow = rig.sim.stall(call);
        let waiter = s.clone();
        let waiting = thread::spawn(move || match call {
            Call::EventSynchronize => waiter.timeline().wait(epoch, None).map(drop),
            _ => waiter.synchronize(),
        });
        assert!(slow.wait_for(1, PATIENCE));
        let (s, u) = (s.clone(), u.clone());
        within(move || {
            let now = s.timeline().open();
            s.timeline().fence(now).unwrap();
            u.timeline().wait_for(s.timeline(), now).unwrap();
            s.timeline().poll().unwrap();
        });
        drop(slow);
        waiting.join().unwrap().unwrap();
    }
    assert!(s.timeline().is_done(epoch));
}

#[test]
fn a_refused_synchronisation_proves_nothing_and_the_next_one_drains() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    let epoch = work(&rig, &s);
    rig.sim.fail(Call::StreamSynchronize, 1, UNKNOWN);
    assert!(matches!(s.synchronize(), Err(MemoryError::Driver(_))));
    assert!(!s.timeline().is_done(epoch));
    s.synchronize().unwrap();
    assert!(s.timeline().is_done(epoch));
    assert_eq!(rig.sim.pending(s.raw()), 0);
}

#[test]
fn an_open_capture_survives_every_wait_and_query() {
    let rig = Rig::stepped(2);
    let (s, capturing) = (rig.lease(), rig.lease());
    rig.sim.driver().capture_begin(capturing.raw(), CaptureMode::Global).unwrap();
    rig.launch(&capturing);
    let epoch = work(&rig, &s);
    s.timeline().fence(epoch).unwrap();
    s.timeline().poll().unwrap();
    assert_eq!(s.timeline().wait(epoch, Some(Instant::now())), Ok(false));
    assert_eq!(s.timeline().wait(epoch, None), Ok(true));
    work(&rig, &s);
    s.synchronize().unwrap();
    assert_eq!(rig.end_capture(capturing.raw()), Ok(1), "the capture is whole");
}

#[test]
fn on_a_lost_device_waits_say_so_and_an_abandoned_stream_holds_nothing_back() {
    let rig = Rig::stepped(2);
    let (s, u) = (rig.lease(), rig.lease());
    let epoch = work(&rig, &s);
    s.timeline().fence(epoch).unwrap();
    let point = s.point();
    rig.sim.lose_device(GPU);
    let lost = Err(MemoryError::DeviceLost { device: GPU });
    assert_eq!(s.timeline().wait(epoch, None).map(drop), lost);
    assert_eq!(s.timeline().poll(), lost);
    assert_eq!(s.synchronize(), lost);
    assert!(!point.is_open(), "a gate opens for what is done");
    s.timeline().abandon();
    assert!(s.timeline().is_done(epoch), "nothing runs there any more");
    assert!(point.is_open());
    assert_eq!(s.synchronize(), lost, "but nothing was done either");
    rig.launch_refused(&s);
    assert_eq!(s.wait_for(&u), lost);
}

#[test]
fn a_stream_that_can_be_waited_for_is_waited_for_and_not_abandoned() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    // With each wait, fewer methods of the driver are left.
    for refused in
        [&[][..], &[Call::StreamSynchronize], &[Call::StreamSynchronize, Call::EventSynchronize]]
    {
        let epoch = work(&rig, &s);
        refused.iter().for_each(|&call| rig.sim.fail(call, 1, UNKNOWN));
        s.timeline().abandon();
        assert!(s.timeline().is_done(epoch));
        assert_eq!(rig.sim.pending(s.raw()), 0, "{refused:?}");
        assert!(!s.timeline().is_retired());
    }
    rig.launch(&s);
    assert_eq!(s.is_idle(), Ok(false), "it lives on");
    s.synchronize().unwrap();
    assert_eq!(rig.sim.pending(s.raw()), 0);
}

#[test]
fn a_point_stays_shut_until_it_is_reached_and_its_work_is_done() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    let point = Point::ahead(s.timeline());
    assert!(!point.is_open(), "the stream is idle, and the work still to come");
    assert_eq!(point.wait(Some(Instant::now())), Ok(false));
    rig.launch(&s);
    let clone = point.clone();
    clone.reached();
    let behind = work(&rig, &s);
    point.reached();
    assert!(!point.is_open());
    assert!(rig.sim.step(s.raw()));
    assert!(!point.is_open(), "nobody has looked between the two, so one event stands behind both");
    rig.sim.run_all();
    assert!(point.is_open() && clone.is_open());
    assert_eq!(point.wait(Some(Instant::now())), Ok(true));
    assert!(s.timeline().is_done(behind));
}

#[test]
fn a_point_covers_work_queued_before_it_and_not_after_its_first_poll() {
    let rig = Rig::stepped(1);
    let s = rig.lease();
    rig.launch(&s);
    let point = s.point();
    assert!(!point.is_open());
    rig.launch(&s);
    assert!(rig.sim.step(s.raw()));
    assert!(point.is_open());
    assert_eq!(rig.sim.pending(s.raw()), 1);
    assert_eq!(point.wait(None), Ok(true));
    assert_eq!(rig.sim.pending(s.raw()), 1);
}

#[test]
fn each_pool_keeps_one_number_for_a_stream() {
    let rig = Rig::new(1);
    let s = rig.lease();
    let t = s.timeline();
    assert_eq!(t.attachment(1), None);
    assert_eq!(t.attach(1, 10), 10);
    assert_eq!(t.attach(1, 11), 10, "what is kept stays");
    assert_eq!(t.attach(2, 20), 20);
    assert_eq!((t.attachment(1), t.attachment(2)), (Some(10), Some(20)));
    t.detach(2);
    assert_eq!((t.attachment(1), t.attachment(2)), (Some(10), None));
}

#[test]
fn a_stream_that_is_only_fenced_records_few_events_again_and_queries_few_of_them() {
    const FENCES: u64 = 10_000;
    let rig = Rig::stepped(1);
    let s = rig.lease();
    for _ in 0..FENCES {
        let epoch = work(&rig, &s);
        rig.sim.run_all();
        assert_eq!(s.timeline().fence(epoch), Ok(Fence::Recorded));
    }
    assert_eq!(rig.made(Call::EventRecord), FENCES);
    assert!(rig.made(Call::EventCreate) <= 64, "{}", rig.made(Call::EventCreate));
    assert!(rig.made(Call::EventQuery) <= FENCES / 16, "{}", rig.made(Call::EventQuery));
    // While work is pending, no event is recorded again, and few queries are made in vain.
    let (created, queried) = (rig.made(Call::EventCreate), rig.made(Call::EventQuery));
    let pending: Vec<u64> = (0..1000)
        .map(|_| {
            let epoch = work(&rig, &s);
            s.timeline().fence(epoch).unwrap();
            epoch
        })
        .collect();
    assert!(rig.made(Call::EventCreate) >= created + 900);
    assert!(rig.made(Call::EventQuery) <= queried + 40);
    assert!(pending.iter().all(|&epoch| !s.timeline().is_done(epoch)));
    rig.sim.run_all();
    s.timeline().poll().unwrap();
    assert!(pending.iter().all(|&epoch| s.timeline().is_done(epoch)));
    drop(s);
    rig.assert_all_given_back();
}
