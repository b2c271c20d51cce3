//! Tests of waiting for room: no waiter is lost, deadlines hold, and a second grant is returned.

use super::*;
use crate::support::woken::Woken;
use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
};

/// Returns a deadline that no test reaches.
fn late() -> Option<Instant> {
    Instant::now().checked_add(Duration::from_secs(60))
}

fn waiting(rt: &Runtime) -> usize {
    rt.devices().iter().map(|pool| pool.budget().waiting()).sum()
}

#[test]
fn a_waiter_gets_the_first_device_with_room() {
    let (_, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = [place(&placer, 8).unwrap(), place(&placer, 8).unwrap()];
    thread::scope(|scope| {
        let waits = scope.spawn(|| placer.place_by(&PlacementRequest::bytes(6 * MIB), late()));
        while waiting(&rt) < 2 {
            thread::yield_now();
        }
        let [_kept, freed] = held;
        let device = freed.device();
        drop(freed);
        let lease = waits.join().unwrap().unwrap();
        assert_eq!((lease.device(), lease.remaining()), (device, 6 * MIB));
    });
    assert_eq!(waiting(&rt), 0, "its place at the other is given up");
    assert!(rt.devices().iter().all(|pool| pool.budget().used() == 0));
}

#[test]
fn a_wait_ends_at_its_deadline_with_every_device_and_why() {
    let (_, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let _held = [place(&placer, 8).unwrap(), place(&placer, 8).unwrap()];
    let soon = Instant::now() + Duration::from_millis(5);
    let refused = placer.place_by(&PlacementRequest::bytes(6 * MIB), Some(soon)).unwrap_err();
    assert!(Instant::now() >= soon);
    assert_eq!(why(&refused, 1), RejectReason::Free { needs: 6 * MIB });
    let never = placer.place_by(&PlacementRequest::bytes(11 * MIB), None).unwrap_err();
    assert_eq!(why(&never, 0), RejectReason::Free { needs: 11 * MIB }, "at once");
    assert!(placer.place_by(&PlacementRequest::bytes(MIB).only([]), None).is_err(), "at once");
    assert_eq!(
        placer.place_by(&PlacementRequest::bytes(0), None).unwrap_err(),
        PlaceError::ZeroSize
    );
    assert_eq!(waiting(&rt), 0);
}

#[test]
fn memory_held_by_caches_is_reclaimed_for_waiters() {
    let (_, rt) = machine(1, 10);
    let placer = rt.placer(Policy::MostFree);
    let pool = rt.device(0).unwrap();
    let block = fill(pool, 10).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| placer.place_by(&PlacementRequest::bytes(6 * MIB), late()));
        while waiting(&rt) < 1 {
            thread::yield_now();
        }
        // Into the cache, which no budget is notified of.
        drop(block);
        assert_eq!(waits.join().unwrap().unwrap().remaining(), 6 * MIB);
    });
}

#[test]
fn a_future_is_woken_by_a_grant_and_dropping_it_hands_the_bytes_on() {
    let (_, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = [place(&placer, 8).unwrap(), place(&placer, 8).unwrap()];
    let wakes = [(); 2].map(|()| Woken::here());
    let mut waits =
        [(); 2].map(|()| Box::pin(placer.place_async(PlacementRequest::bytes(6 * MIB))));
    for (wait, wakes) in waits.iter_mut().zip(&wakes) {
        assert!(wakes.poll(wait).is_pending());
    }
    let [kept, freed] = held;
    drop(freed);
    assert!(wakes[0].times() > 0 && wakes[1].times() == 0, "in order");
    let [first, mut second] = waits;
    // It was granted, and is dropped without having taken the bytes.
    drop(first);
    assert!(wakes[1].times() > 0);
    let Poll::Ready(lease) = wakes[1].poll(&mut second) else { panic!("its turn") };
    assert_eq!(lease.unwrap().remaining(), 6 * MIB);
    drop((kept, second));
    assert_eq!(waiting(&rt), 0);
    assert!(rt.devices().iter().all(|pool| pool.budget().used() == 0));
}

#[test]
fn bytes_that_two_devices_grant_at_once_are_taken_once() {
    let (_, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = [place(&placer, 8).unwrap(), place(&placer, 8).unwrap()];
    let mut wait = pin!(placer.place_async(PlacementRequest::bytes(6 * MIB)));
    let mut context = Context::from_waker(Waker::noop());
    assert!(wait.as_mut().poll(&mut context).is_pending());
    drop(held);
    let Poll::Ready(lease) = wait.as_mut().poll(&mut context) else { panic!("there is room") };
    let lease = lease.unwrap();
    let used: u64 = rt.devices().iter().map(|pool| pool.budget().used()).sum();
    assert_eq!((used, lease.remaining()), (6 * MIB, 6 * MIB));
}

#[test]
fn waiters_are_woken_when_a_device_leaves_or_returns() {
    let (sim, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = place(&placer, 8).unwrap();
    placer.drain(DeviceId(1)).unwrap();
    let wakes = Woken::here();
    let mut wait = pin!(placer.place_async(PlacementRequest::bytes(6 * MIB)));
    let waker = Waker::from(wakes.clone());
    let mut context = Context::from_waker(&waker);
    assert!(wait.as_mut().poll(&mut context).is_pending());
    placer.undrain(DeviceId(1)).unwrap();
    assert_eq!(wakes.times(), 1);
    let Poll::Ready(lease) = wait.poll(&mut context) else { panic!("one is back") };
    assert_eq!(lease.unwrap().device(), DeviceId(1));
    // If no device is left, the wait ends.
    let all = [0, 1].map(|device| {
        placer.place(&PlacementRequest::bytes(2 * MIB).only([DeviceId(device)])).unwrap()
    });
    let mut wait = pin!(placer.place_async(PlacementRequest::bytes(10 * MIB)));
    assert!(wait.as_mut().poll(&mut context).is_pending());
    for device in [0, 1] {
        sim.lose_device(DeviceId(device));
        assert!(sim.driver().memory_info(DeviceId(device)).is_err());
    }
    let Poll::Ready(Err(refused)) = wait.poll(&mut context) else {
        panic!("nothing is left to wait for")
    };
    assert_eq!((why(&refused, 0), why(&refused, 1)), (RejectReason::Lost, RejectReason::Lost));
    drop((held, all));
}

#[test]
fn a_higher_priority_is_served_first() {
    let (_, rt) = machine(1, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = place(&placer, 8).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut low = pin!(placer.place_async(PlacementRequest::bytes(6 * MIB)));
    assert!(low.as_mut().poll(&mut context).is_pending());
    assert!(place(&placer, 2).is_err(), "what is left is waited for");
    let urgent = placer.place(&PlacementRequest::bytes(MIB).priority(1)).unwrap();
    let mut high = pin!(placer.place_async(PlacementRequest::bytes(6 * MIB).priority(1)));
    assert!(high.as_mut().poll(&mut context).is_pending());
    drop((held, urgent));
    assert!(low.as_mut().poll(&mut context).is_pending());
    assert!(high.as_mut().poll(&mut context).is_ready());
}

#[test]
fn a_wait_for_more_free_bytes_than_it_takes_holds_no_more_than_it_takes() {
    let (_, rt) = machine(1, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = place(&placer, 4).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut wait = pin!(placer.place_async(PlacementRequest::bytes(2 * MIB).min_free(8 * MIB)));
    assert!(wait.as_mut().poll(&mut context).is_pending());
    drop(held);
    let Poll::Ready(lease) = wait.poll(&mut context) else { panic!("there is room") };
    let lease = lease.unwrap();
    assert_eq!((lease.remaining(), rt.device(0).unwrap().budget().used()), (2 * MIB, 2 * MIB));
}
