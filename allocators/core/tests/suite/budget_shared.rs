//! Budgets that share their capacity with other processes: what is charged is claimed, what is
//! refused is not, and what is released goes back.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_core::{
    Budget, Charge,
    budget::{CapacitySource, ClaimShortage, Offer, Reclaim},
};
use std::{
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

/// What all processes have left, and how often it was claimed from.
#[derive(Debug)]
struct Left {
    bytes: Mutex<u64>,
    claims: AtomicU64,
}

impl Left {
    fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(bytes), claims: AtomicU64::new(0) })
    }

    fn bytes(&self) -> u64 {
        *self.bytes.lock().unwrap()
    }

    fn add(&self, bytes: u64) {
        *self.bytes.lock().unwrap() += bytes;
    }
}

impl CapacitySource for Left {
    fn claim(&self, bytes: u64) -> Result<(), ClaimShortage> {
        self.claims.fetch_add(1, Relaxed);
        let mut left = self.bytes.lock().unwrap();
        *left = left.checked_sub(bytes).ok_or(*left)?;
        Ok(())
    }

    fn release(&self, bytes: u64) {
        self.add(bytes);
    }

    fn room(&self) -> u64 {
        self.bytes()
    }

    fn shortfall(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.bytes())
    }
}

#[test]
fn every_charge_is_claimed_and_every_release_goes_back() {
    let left = Left::new(100);
    let device = Budget::shared("device 0", 1000, left.clone());
    let tenant = device.child("tenant", 500);
    let mut all: Vec<Charge> = Vec::new();
    for bytes in [30, 0, 20] {
        all.push(tenant.charge(bytes).unwrap());
        all.push(device.charge(bytes / 10).unwrap());
        assert_eq!(left.bytes(), 100 - device.used());
    }
    assert_eq!((device.used(), device.remaining(), tenant.remaining()), (55, 45, 45));
    let reserved = tenant.reserve(45).unwrap();
    assert_eq!((left.bytes(), tenant.refusal(1).is_some(), tenant.shortfall(7)), (0, true, 7));
    drop(reserved);
    assert_eq!((left.bytes(), tenant.refusal(45).is_some(), tenant.shortfall(45)), (45, false, 0));
    while let Some(charge) = all.pop() {
        drop(charge);
        assert_eq!(left.bytes(), 100 - device.used());
    }
    assert_eq!(left.bytes(), 100);
}

#[test]
fn a_refusal_by_the_source_changes_nothing_and_names_the_root() {
    let left = Left::new(50);
    let device = Budget::shared("device 0", 1000, left.clone());
    let tenant = device.child("tenant", 500);
    let refused = tenant.charge(60).unwrap_err();
    assert_eq!((refused.budget, refused.remaining, refused.missing()), ("device 0", 50, 10));
    assert_eq!((device.used(), tenant.used(), tenant.peak(), left.bytes()), (0, 0, 0, 50));
}

#[test]
fn what_the_own_limits_refuse_is_not_claimed() {
    let left = Left::new(1000);
    let device = Budget::shared("device 0", 100, left.clone());
    assert_eq!(device.charge(101).unwrap_err().limit, 100);
    let other = device.child("other", 100);
    other.set_guarantee(60).unwrap();
    let tenant = device.child("tenant", 100);
    assert!(tenant.charge(41).is_err());
    assert_eq!(left.claims.load(Relaxed), 0);
    let _own = other.charge(60).unwrap();
    assert_eq!((left.bytes(), tenant.charge(40).is_ok()), (940, true));
}

/// Another process, asked by a reclaimer.
struct Others(Arc<Left>);

impl Reclaim for Others {
    fn name(&self) -> &'static str {
        "other processes"
    }

    fn offer(&self) -> Offer {
        Offer { bytes: 70, cost: Duration::ZERO }
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        self.0.add(bytes);
    }
}

#[test]
fn a_search_for_room_calls_a_reclaimer_of_the_root_when_the_source_is_short() {
    let left = Left::new(30);
    let device = Budget::shared("device 0", 100, left.clone());
    let tenant = device.child("tenant", 100);
    let others = Arc::new(Others(left.clone()));
    let registration = device.on_need(&others);
    assert_eq!(device.offered(None), 70);
    assert_eq!(device.offered(Some(&registration)), 0);
    assert_eq!(tenant.make_room(30, None, None).tried, []);
    let room = tenant.make_room(80, None, None);
    assert_eq!((room.missing, room.tried[0].step), (0, "other processes"));
    let mut asking = tenant.asking(None);
    left.claim(80).unwrap();
    while tenant.charge(80).is_err() {
        assert!(asking.for_charge(80, None).is_some());
    }
    // Not beyond the own limit.
    assert_eq!(tenant.make_room(101, None, None).missing, 1);
}

#[test]
fn waiters_get_what_this_process_releases_and_what_others_release_by_the_answering_thread() {
    let left = Left::new(100);
    let device = Budget::shared("device 0", 1000, left.clone());
    let most = device.charge(80).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut poll = |waiting: &mut aquifer_core::budget::Waiting| match std::pin::Pin::new(waiting)
        .poll(&mut context)
    {
        Poll::Ready(charge) => charge.ok(),
        Poll::Pending => None,
    };
    let mut waiting = device.charge_async(90);
    assert!(poll(&mut waiting).is_none());
    // Not enough by itself, so that nothing is kept.
    device.serve_waiters();
    assert_eq!((left.bytes(), device.used()), (20, 80));
    drop(most);
    device.serve_waiters();
    let charge = poll(&mut waiting).unwrap();
    assert_eq!((left.bytes(), device.used()), (10, 90));
    let mut waiting = device.charge_async(40);
    assert!(poll(&mut waiting).is_none());
    left.add(50);
    device.serve_waiters();
    let second = poll(&mut waiting).unwrap();
    assert_eq!((left.bytes(), device.used()), (20, 130));
    // A waiter that fits into what is released is served by the release itself.
    let mut waiting = device.charge_async(60);
    assert!(poll(&mut waiting).is_none());
    drop(charge);
    let third = poll(&mut waiting).unwrap();
    drop((second, third));
    assert_eq!((left.bytes(), device.used()), (150, 0));
}

#[test]
fn spare_bytes_of_a_lease_are_claimed_and_recalled() {
    let left = Left::new(100);
    let device = Budget::shared("device 0", 1000, left.clone());
    let lease = device.lease(10);
    let live = lease.charge(5).unwrap();
    drop(live);
    assert_eq!((left.bytes(), lease.spare()), (95, 5));
    let all = device.charge(100).unwrap();
    assert_eq!((lease.spare(), left.bytes()), (0, 0));
    drop((all, lease));
    assert_eq!(left.bytes(), 100);
}

#[test]
fn a_root_that_is_recycled_lets_go_of_its_source() {
    let left = Left::new(100);
    for _ in 0..3 {
        let device = Budget::shared("device 0", 1000, left.clone());
        let charge = device.charge(60).unwrap();
        drop(device);
        assert_eq!((left.bytes(), Arc::strong_count(&left)), (40, 2));
        drop(charge);
        assert_eq!((left.bytes(), Arc::strong_count(&left)), (100, 1));
        // The next root has the node, and is not shared.
        assert_eq!(Budget::new("another", 500).remaining(), 500);
    }
}

#[test]
fn threads_that_charge_and_release_leave_the_source_whole() {
    let left = Left::new(2000);
    let device = Budget::shared("device 0", 700, left.clone());
    thread::scope(|scope| {
        for number in 0..4_u64 {
            let (device, left) = (&device, &left);
            scope.spawn(move || {
                let mut held: Vec<Charge> = Vec::new();
                for round in 0..if cfg!(miri) { 60 } else { 3000 } {
                    match (number + round * 7) % 5 {
                        0 => held.clear(),
                        1 if round % 50 == 0 => {
                            let soon = Instant::now() + Duration::from_micros(200);
                            held.extend(device.charge_by(150, Some(soon)));
                        }
                        bytes => held.extend(device.charge(bytes * 40)),
                    }
                    // A claim comes before its charge. The other threads may have one each that is
                    // about to be refused.
                    let (used, bytes) = (device.used(), left.bytes());
                    assert!(used <= 700 && bytes >= 2000 - 700 - 3 * 160, "{used} {bytes}");
                }
            });
        }
    });
    assert_eq!((device.used(), left.bytes()), (0, 2000));
}
