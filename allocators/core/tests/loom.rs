//! Every interleaving of the protocols of a budget.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p aquifer-core --test loom --release`.
//!
//! | protocol | model |
//! |---|---|
//! | a charge through several nodes | `no_node_is_seen_above_its_limit…`, `a_charge_refused_at_an_ancestor…` |
//! | the wait queue: release and entry | `a_waiter_that_queues…` |
//! | the wait queue: dropped and granted | `a_wait_that_is_dropped…` |
//! | the wait queue: polled during another poll | `two_waiters_are_each_served…` |
//! | the wait queue: entry during a reclaim | `reclaimed_bytes_reach…` |
//! | leases: spare, and waited for or over a limit | `spare_bytes_of_a_lease…`, `a_limit_that_is_lowered…`, `a_lease_that_closes…` |
//! | nodes: the last handle and the last byte | `a_node_leaves_once…` |
//! | a shared root: claimed, charged, released | `what_a_shared_root…` |
//! | a ring of events: filled and emptied at once | `an_event_of_a_ring…` |
#![cfg(loom)]

use aquifer_core::{
    Action, Budget, Charge, Event, EventSink, Tag,
    budget::{CapacitySource, ClaimShortage, Offer, Reclaim},
    event::{BlockKind, MemoryLocation, RingSink},
};
use loom::{sync::Mutex, thread};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
    time::{Duration, Instant},
};

fn model(work: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(work);
}

#[test]
fn no_node_is_seen_above_its_limit_and_of_two_that_do_not_both_fit_one_wins() {
    model(|| {
        let root = Budget::new("root", 100);
        let tenant = root.child("tenant", 70);
        let other = {
            let root = root.clone();
            thread::spawn(move || root.charge(60).ok())
        };
        let own = tenant.charge(60).ok();
        assert!(root.used() <= 100 && tenant.used() <= 70);
        let other = other.join().unwrap();
        assert_eq!(u8::from(own.is_some()) + u8::from(other.is_some()), 1);
        assert_eq!(root.used(), 60);
        drop((own, other));
        assert_eq!((root.used(), tenant.used()), (0, 0));
    });
}

#[test]
fn a_charge_refused_at_an_ancestor_refuses_no_other_charge_below() {
    model(|| {
        let root = Budget::new("root", 100);
        let tenant = root.child("tenant", 110);
        let most = root.charge(50).unwrap();
        let large = {
            let tenant = tenant.clone();
            thread::spawn(move || assert_eq!(tenant.charge(80).unwrap_err().budget, "root"))
        };
        let small = tenant.charge(30).unwrap();
        large.join().unwrap();
        drop((most, small));
        assert_eq!(root.used(), 0);
    });
}

#[test]
fn a_waiter_that_queues_during_a_release_is_served() {
    model(|| {
        let root = Budget::new("root", 100);
        let tenant = root.child("tenant", 100);
        let most = root.charge(80).unwrap();
        let waiter = thread::spawn(move || drop(tenant.charge_by(50, None).unwrap()));
        drop(most);
        waiter.join().unwrap();
        assert_eq!((root.used(), root.waiting()), (0, 0));
    });
}

#[test]
fn two_waiters_are_each_served_whichever_thread_polls() {
    model(|| {
        let root = Budget::new("root", 100);
        let most = root.charge(100).unwrap();
        let waiter = {
            let root = root.clone();
            thread::spawn(move || drop(root.charge_by(60, None).unwrap()))
        };
        drop(most);
        drop(root.charge_by(60, None).unwrap());
        waiter.join().unwrap();
        assert_eq!((root.used(), root.waiting()), (0, 0));
    });
}

#[test]
fn a_wait_that_is_dropped_while_it_is_granted_passes_the_bytes_on() {
    model(|| {
        let root = Budget::new("root", 100);
        let most = root.charge(80).unwrap();
        let (mut passing, mut next) = (root.charge_async(90), root.charge_async(60));
        let mut context = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut passing).poll(&mut context).is_pending());
        assert!(Pin::new(&mut next).poll(&mut context).is_pending());
        let giver = thread::spawn(move || drop(passing));
        drop(most);
        giver.join().unwrap();
        assert!(Pin::new(&mut next).poll(&mut context).is_ready());
        assert_eq!((root.used(), root.waiting()), (0, 0));
    });
}

/// Returns all it has when it is asked.
struct Cache(Mutex<Option<Charge>>);

impl Reclaim for Cache {
    fn name(&self) -> &'static str {
        "a cache"
    }

    fn offer(&self) -> Offer {
        let bytes = self.0.lock().unwrap().as_ref().map_or(0, Charge::bytes);
        Offer { bytes, cost: Duration::ZERO }
    }

    fn reclaim(&self, _: u64, _: Option<Instant>) {
        let given = self.0.lock().unwrap().take();
        drop(given);
    }
}

#[test]
fn reclaimed_bytes_reach_a_waiter_that_queues_meanwhile() {
    model(|| {
        let root = Budget::new("root", 100);
        let (kept, cache) = (root.charge(20).unwrap(), root.child("cache", 100));
        let cached = Arc::new(Cache(Mutex::new(Some(cache.charge(60).unwrap()))));
        let registration = cache.on_need(&cached);
        let waiter = {
            let root = root.clone();
            thread::spawn(move || drop(root.charge_by(50, None).unwrap()))
        };
        // Whether or not the waiter is queued by now, this serves it.
        let room = root.make_room(50, None, None);
        assert!(room.tried.iter().map(|tried| tried.gave).sum::<u64>() <= 60);
        waiter.join().unwrap();
        drop((kept, registration));
        assert_eq!((root.used(), root.waiting()), (0, 0));
    });
}

#[test]
fn spare_bytes_of_a_lease_reach_a_waiter_that_queues_meanwhile() {
    model(|| {
        let root = Budget::new("root", 100);
        let lease = root.lease(40);
        let live = lease.charge(40).unwrap();
        let waiter = {
            let root = root.clone();
            thread::spawn(move || drop(root.charge_by(100, None).unwrap()))
        };
        drop(live);
        waiter.join().unwrap();
        assert_eq!((root.used(), root.waiting()), (0, 0));
        drop(lease);
        assert_eq!(root.used(), 0);
    });
}

#[test]
fn a_limit_that_is_lowered_leaves_nothing_spare_while_a_lease_makes_some() {
    model(|| {
        let root = Budget::new("root", 100);
        let lease = root.lease(40);
        let (live, most) = (lease.charge(40).unwrap(), root.charge(20).unwrap());
        let lower = {
            let root = root.clone();
            thread::spawn(move || root.set_limit(10))
        };
        drop(live);
        lower.join().unwrap();
        assert_eq!((root.used(), lease.spare()), (20, 0));
        drop((most, lease));
        assert_eq!(root.used(), 0);
    });
}

#[test]
fn a_lease_that_closes_while_its_bytes_come_back_keeps_none() {
    model(|| {
        let root = Budget::new("root", 100);
        let tenant = root.child("tenant", 100);
        let lease = tenant.lease(20);
        let live = lease.charge(15).unwrap();
        drop(tenant);
        let closer = thread::spawn(move || drop(lease));
        drop(live);
        // This reclaims the spare bytes of a lease that may be closing.
        drop(root.charge(100));
        closer.join().unwrap();
        assert_eq!((root.used(), root.children().count()), (0, 0));
    });
}

#[test]
fn a_node_leaves_once_whether_the_last_handle_or_the_last_byte_goes_first() {
    model(|| {
        let root = Budget::new("root", 100);
        let tenant = root.child("tenant", 100);
        tenant.set_guarantee(50).unwrap();
        let charge = tenant.charge(10).unwrap();
        let other = thread::spawn(move || drop(charge));
        drop(tenant);
        other.join().unwrap();
        assert_eq!((root.figures().held, root.children().count()), (0, 0));
        // The next child owns it alone.
        let next = root.child("next", 5);
        assert_eq!((next.guarantee(), root.children().count()), (0, 1));
    });
}

/// One slot: the second thread finds the first one done, half way, or not begun.
#[test]
fn an_event_of_a_ring_is_whole_or_counted_as_dropped() {
    let event = |number: u64| Event {
        at_ns: number,
        action: Action::Free,
        place: MemoryLocation::Global,
        thread: number as u32,
        stream: number as u32,
        address: number,
        bytes: number,
        kind: BlockKind::Global,
        tag: Tag::NONE,
        refused_by: Tag::NONE,
    };
    model(move || {
        let ring = Arc::new(RingSink::new(1));
        let filler = {
            let ring = ring.clone();
            thread::spawn(move || ring.record(&event(1)))
        };
        let check = |events: Vec<Event>| {
            events.iter().for_each(|whole| assert_eq!(*whole, event(whole.at_ns)));
            events.len() as u64
        };
        ring.record(&event(2));
        let seen = check(ring.take());
        filler.join().unwrap();
        let seen = seen + check(ring.take());
        ring.record(&event(3));
        let seen = seen + check(ring.take());
        assert_eq!(seen + ring.dropped(), 3);
    });
}

/// What all processes have left.
struct Left(Mutex<u64>);

impl CapacitySource for Left {
    fn claim(&self, bytes: u64) -> Result<(), ClaimShortage> {
        let mut left = self.0.lock().unwrap();
        *left = left.checked_sub(bytes).ok_or(*left)?;
        Ok(())
    }

    fn release(&self, bytes: u64) {
        *self.0.lock().unwrap() += bytes;
    }

    fn room(&self) -> u64 {
        *self.0.lock().unwrap()
    }

    fn shortfall(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.room())
    }
}

#[test]
fn what_a_shared_root_does_not_use_is_back_at_its_source() {
    model(|| {
        let left = Arc::new(Left(Mutex::new(100)));
        let root = Budget::shared("root", 80, left.clone());
        let most = root.charge(50).unwrap();
        let other = {
            let root = root.clone();
            thread::spawn(move || root.charge(40).ok())
        };
        drop(most);
        let own = root.charge(60).ok();
        let other = other.join().unwrap();
        let used = own.as_ref().map_or(0, Charge::bytes) + other.as_ref().map_or(0, Charge::bytes);
        assert!(used == root.used() && used <= 80);
        assert_eq!(left.room(), 100 - used);
        drop((own, other));
        assert_eq!(left.room(), 100);
    });
}
