//! Tests of waiting for bytes: by priority, then in order, without lost wakeups, for threads and
//! futures.

#[path = "../../../../tests/support/woken.rs"]
mod woken;

use aquifer_core::{Budget, Charge, OutOfBudget, budget::Waiting};
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};
use woken::Woken;

/// A wait that is polled directly.
struct Polled {
    waiting: Waiting,
    woken: Arc<Woken>,
}

impl Polled {
    fn new(waiting: Waiting) -> Self {
        Self { waiting, woken: Woken::here() }
    }

    fn poll(&mut self) -> Option<Result<Charge, OutOfBudget>> {
        match self.woken.poll(&mut self.waiting) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }

    fn woken(&self) -> u32 {
        self.woken.times()
    }
}

fn wait(budget: &Budget, bytes: u64) -> Polled {
    let mut polled = Polled::new(budget.charge_async(bytes));
    assert!(polled.poll().is_none(), "there is room");
    polled
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

#[test]
fn waits_are_served_in_order_and_a_smaller_one_behind_does_not_pass() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(90).unwrap();
    let (mut first, mut second) = (wait(&budget, 50), wait(&budget, 5));
    assert_eq!(budget.waiting(), 2);
    assert!(second.poll().is_none(), "10 bytes are left, and waited for");
    let refused = budget.charge(5).unwrap_err();
    assert_eq!((refused.remaining, refused.kept()), (0, 10), "nor does one who only tries");
    drop(most);
    assert_eq!(
        (first.woken(), second.woken(), budget.used()),
        (1, 1, 55),
        "granted before they look"
    );
    let both = (first.poll().unwrap().unwrap(), second.poll().unwrap().unwrap());
    assert_eq!((both.0.bytes(), both.1.bytes(), budget.waiting()), (50, 5, 0));
    drop(both);
    assert_eq!(budget.used(), 0);
}

#[test]
fn higher_priorities_are_served_first_and_pass_earlier_waiters() {
    let root = Budget::new("root", 100);
    let (low, high) = (root.child("low", 100), root.child("high", 100));
    low.set_priority(-1);
    high.set_priority(1);
    let most = root.charge(95).unwrap();
    let (mut first, mut second) = (wait(&low, 60), wait(&high, 60));
    assert!(low.charge(5).is_err() && root.charge(5).is_err() && high.charge(5).is_err());
    drop(second);
    drop(high.charge(5).unwrap());
    second = wait(&high, 60);
    drop(most);
    assert!(first.poll().is_none());
    let charge = second.poll().unwrap().unwrap();
    assert_eq!(root.used(), 60);
    drop(charge);
    assert_eq!(first.poll().unwrap().unwrap().bytes(), 60);
}

#[test]
fn a_wait_for_one_node_does_not_delay_waiters_of_other_nodes() {
    let root = Budget::new("root", 100);
    let (a, b) = (root.child("a", 50), root.child("b", 100));
    b.set_guarantee(10).unwrap();
    let own = a.charge(50).unwrap();
    let mut at_a = wait(&a, 20);
    let other = b.charge(40).unwrap();
    let mut at_root = wait(&b, 20);
    assert!(a.charge(1).is_err());
    let mut later = wait(&root, 1);
    drop(own);
    for polled in [&mut at_a, &mut at_root, &mut later] {
        assert!(polled.poll().unwrap().is_ok());
    }
    drop(other);
    // Guaranteed bytes take nothing from waiters.
    let (most, mut big) = (root.charge(50).unwrap(), wait(&root, 60));
    drop(b.charge(10).unwrap());
    assert!(b.charge(11).is_err());
    drop(most);
    assert!(big.poll().unwrap().is_ok());
}

#[test]
fn an_impossible_request_is_refused_immediately_or_when_it_becomes_impossible() {
    let root = Budget::new("root", 100);
    let (a, b) = (root.child("a", 80), root.child("b", 100));
    b.set_guarantee(40).unwrap();
    assert_eq!(a.charge_by(81, None).unwrap_err().budget, "a");
    assert_eq!(a.charge_by(61, None).unwrap_err().budget, "root");
    assert_eq!(b.charge_by(101, None).unwrap_err().budget, "b");
    let own = a.charge(60).unwrap();
    let (mut first, mut second) = (wait(&a, 60), wait(&a, 10));
    b.set_guarantee(50).unwrap_err();
    root.set_limit(90);
    assert_eq!(first.poll().unwrap().unwrap_err().requested, 60);
    assert!(second.poll().is_none());
    a.set_limit(9);
    assert_eq!(second.poll().unwrap().unwrap_err().budget, "a");
    drop(own);
    assert_eq!((root.used(), root.waiting()), (0, 0));
}

#[test]
fn a_wait_that_is_dropped_gives_up_its_place_and_passes_on_what_it_was_granted() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(90).unwrap();
    let (first, mut second, third) = (wait(&budget, 50), wait(&budget, 5), wait(&budget, 100));
    drop(first);
    assert_eq!(second.woken(), 1, "whoever stood behind it is next");
    let small = second.poll().unwrap().unwrap();
    drop((most, small));
    assert_eq!((third.woken(), budget.used()), (1, 100));
    let mut fourth = wait(&budget, 70);
    drop(third);
    assert_eq!((fourth.woken(), budget.used()), (1, 70), "it was granted, and had not looked");
    assert!(fourth.poll().unwrap().is_ok());
    assert_eq!((budget.used(), budget.waiting()), (0, 0));
}

#[test]
fn a_deadline_ends_a_wait_with_the_refusal_of_that_moment_and_lets_the_next_go_on() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(90).unwrap();
    assert_eq!(budget.charge_by(20, Some(Instant::now())).unwrap_err().remaining, 10);
    assert_eq!(budget.charge_by(10, Some(Instant::now())).unwrap().bytes(), 10, "as a try");
    let deadline = far();
    let mut first = Polled::new(budget.charge_async(20).until(deadline));
    assert!(first.poll().is_none());
    let mut second = wait(&budget, 10);
    budget.expire_waits(deadline - Duration::from_secs(1));
    assert_eq!((first.woken(), second.woken()), (0, 0));
    budget.expire_waits(deadline);
    assert_eq!((first.woken(), second.woken()), (1, 1));
    assert_eq!(first.poll().unwrap().unwrap_err().requested, 20);
    assert!(second.poll().unwrap().is_ok());
    drop(most);
    assert_eq!((budget.used(), budget.waiting()), (0, 0));
}

#[test]
fn a_deadline_that_has_passed_in_line_ends_the_wait_of_its_thread_and_of_those_behind() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(90).unwrap();
    // This wait is not polled again.
    let soon = Instant::now() + Duration::from_millis(5);
    let mut forgotten = Polled::new(budget.charge_async(50).until(soon));
    if forgotten.poll().is_none() {
        // The waiter behind it has no deadline, and no bytes are released.
        assert_eq!(budget.charge_by(10, None).unwrap().bytes(), 10);
        assert!(forgotten.poll().unwrap().is_err());
    }
    let refused =
        budget.charge_by(50, Some(Instant::now() + Duration::from_millis(2))).unwrap_err();
    assert_eq!(refused.current, 90);
    drop(most);
}

#[test]
fn raising_a_limit_and_lowering_a_guarantee_serve_waiters() {
    let root = Budget::new("root", 100);
    let (a, b) = (root.child("a", 100), root.child("b", 100));
    let most = root.charge(50).unwrap();
    b.set_guarantee(30).unwrap();
    let mut waiting = wait(&a, 30);
    b.set_guarantee(10).unwrap();
    let charge = waiting.poll().unwrap().unwrap();
    let mut waiting = wait(&a, 30);
    root.set_limit(120);
    assert!(waiting.poll().unwrap().is_ok());
    drop((most, charge));
    let (most, mut waiting) = (root.charge(110).unwrap(), wait(&a, 10));
    drop(b);
    assert!(waiting.poll().unwrap().is_ok(), "a child that goes gives up its guarantee");
    drop(most);
}

#[test]
fn a_reservation_is_waited_for_as_a_charge_is() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(90).unwrap();
    let mut waiting = wait(&budget, 40);
    thread::scope(|s| {
        let reserved = s.spawn(|| budget.reserve_by(50, None).unwrap());
        while budget.waiting() < 2 {
            thread::yield_now();
        }
        drop(most);
        assert_eq!(reserved.join().unwrap().draw(20).unwrap().bytes(), 20);
    });
    let held = aquifer_core::Reservation::from(waiting.poll().unwrap().unwrap());
    assert_eq!((held.remaining(), budget.used()), (40, 40));
}

#[test]
fn a_release_is_not_lost_on_a_thread_that_only_counts_waiters() {
    let (budget, stop) = (Budget::new("b", 1), AtomicBool::new(false));
    thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _counted = budget.waiting();
            }
        });
        for _ in 0..if cfg!(miri) { 5 } else { 300 } {
            let held = budget.charge(1).unwrap();
            let waiter = s.spawn(|| {
                let begun = Instant::now();
                drop(budget.charge_by(1, Some(begun + Duration::from_secs(20))).unwrap());
                begun.elapsed()
            });
            while budget.waiting() == 0 {
                thread::yield_now();
            }
            drop(held);
            let took = waiter.join().unwrap();
            if took > Duration::from_secs(10) {
                stop.store(true, Ordering::Relaxed);
                panic!("it slept until its deadline, {took:?}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A waker may run any code: this one drops a charge, polls, waits and panics when it is woken or
/// dropped.
#[test]
fn a_waker_that_calls_back_and_panics_affects_no_other_waiter() {
    struct Nasty(Budget, Mutex<Vec<Charge>>);
    impl Wake for Nasty {
        fn wake(self: Arc<Self>) {
            let kept = std::mem::take(&mut *self.1.lock().unwrap());
            drop(kept);
            let _ = self.0.charge(1);
            let _ = self.0.waiting();
            panic!("a waker panics");
        }
    }
    impl Drop for Nasty {
        fn drop(&mut self) {
            let _ = self.0.charge(1);
        }
    }
    let budget = Budget::new("b", 100);
    let (most, part) = (budget.charge(60).unwrap(), budget.charge(30).unwrap());
    let waker = Waker::from(Arc::new(Nasty(budget.clone(), Mutex::new(vec![part]))));
    let mut first = budget.charge_async(20);
    assert!(Pin::new(&mut first).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    let mut second = wait(&budget, 75);
    drop(most);
    assert_eq!(
        (second.woken(), budget.used()),
        (1, 95),
        "what the waker gave back went to the next"
    );
    drop(first);
    assert!(second.poll().unwrap().is_ok());
    assert_eq!((budget.used(), budget.waiting()), (0, 0));
}

/// Many threads wait for more bytes than exist, some with deadlines, and some with futures that are
/// dropped half way.
#[test]
fn every_waiter_is_served_or_refused_and_nothing_remains() {
    let root = Budget::new("root", 100);
    let tenants: Vec<_> = (0..4).map(|i| root.child("tenant", 60 + 10 * i)).collect();
    let (granted, late) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let rounds = if cfg!(miri) { 5 } else { 1500 };
    thread::scope(|s| {
        for seed in 0..8u64 {
            let (tenants, root, granted, late) = (&tenants, &root, &granted, &late);
            s.spawn(move || {
                let mut state = seed + 1;
                for round in 0..rounds {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let (tenant, bytes) =
                        (&tenants[(state >> 60) as usize % 4], 1 + (state >> 40) % 60);
                    if round % 7 == 6 {
                        // Takes a place in the queue and leaves it without another poll.
                        let mut passing = Polled::new(tenant.charge_async(bytes));
                        drop(passing.poll());
                    }
                    let deadline = (round % 5 == 4)
                        .then(|| Instant::now() + Duration::from_micros(state >> 56));
                    match tenant.charge_by(bytes, deadline) {
                        Ok(charge) => {
                            assert!(root.used() <= 100 && tenant.used() <= tenant.limit());
                            granted.fetch_add(1, Ordering::Relaxed);
                            if state & 1 == 1 {
                                thread::yield_now();
                            }
                            drop(charge);
                        }
                        Err(_) => {
                            assert!(deadline.is_some(), "refused with no deadline");
                            late.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    assert_eq!(granted.into_inner() + late.into_inner(), 8 * rounds);
    assert_eq!((root.used(), root.waiting()), (0, 0));
    assert!(root.peak() <= 100);
}
