//! Tests of reclaim.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test's own helpers")]

use aquifer_core::{
    Budget, Charge,
    budget::{Offer, Reclaim},
};
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Returns its charges one at a time, at a cost.
struct Cache {
    name: &'static str,
    budget: Budget,
    price: u64,
    held: Mutex<Vec<Charge>>,
    nasty: bool,
}

impl Cache {
    fn new(name: &'static str, budget: &Budget, price: u64, charges: &[u64]) -> Arc<Self> {
        let held = charges.iter().map(|&bytes| budget.charge(bytes).unwrap()).collect();
        Arc::new(Self { name, budget: budget.clone(), price, held: Mutex::new(held), nasty: false })
    }
}

impl Reclaim for Cache {
    fn name(&self) -> &'static str {
        self.name
    }

    fn offer(&self) -> Offer {
        let bytes = self.held.lock().unwrap().iter().map(Charge::bytes).sum();
        Offer { bytes, cost: Duration::from_micros(self.price) }
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        // It requests room itself, and is not called in turn.
        if self.nasty {
            let _ = self.budget.make_room(bytes, None, None);
        }
        let mut gave = 0;
        while gave < bytes {
            let Some(charge) = self.held.lock().unwrap().pop() else { break };
            gave += charge.bytes();
        }
        if self.nasty {
            panic!("a reclaimer panics");
        }
    }
}

#[test]
fn the_cheapest_useful_reclaimer_is_called_first_and_only_the_measured_gain_counts() {
    let root = Budget::new("root", 100);
    let (a, b) = (root.child("a", 100), root.child("b", 60));
    let dear = Cache::new("dear", &a, 9, &[10, 20]);
    let cheap = Cache::new("cheap", &b, 1, &[5, 5]);
    let own = Cache::new("own", &b, 0, &[30]);
    struct Liar;
    impl Reclaim for Liar {
        fn name(&self) -> &'static str {
            "liar"
        }
        fn offer(&self) -> Offer {
            // For the missing bytes it is neither the cheapest nor the most expensive.
            Offer { bytes: 1000, cost: Duration::from_micros(100) }
        }
        fn reclaim(&self, _: u64, _: Option<Instant>) {}
    }
    let liar = Arc::new(Liar);
    let _all = (a.on_need(&dear), b.on_need(&cheap), root.on_need(&liar));
    let asker = b.on_need(&own);
    let names = |tried: &[aquifer_core::error::Tried]| {
        tried.iter().map(|t| (t.step, t.gave)).collect::<Vec<_>>()
    };
    // The tenant's own limit refuses, so only its own caches can help.
    let room = b.make_room(25, None, Some(&asker));
    assert_eq!((room.missing, names(&room.tried)), (0, vec![("cheap", 5)]));
    // Here the root refuses.
    let rest = root.charge(35).unwrap();
    let room = b.make_room(25, None, Some(&asker));
    assert_eq!(
        (room.missing, names(&room.tried)),
        (0, vec![("cheap", 5), ("liar", 0), ("dear", 20)])
    );
    let room = b.make_room(25, Some(Instant::now()), None);
    assert_eq!(room.missing, 0, "there is room already");
    let late = b.make_room(50, Some(Instant::now()), None);
    assert_eq!((late.missing, late.tried.len()), (20, 0));
    drop(rest);
}

#[test]
fn a_lowered_limit_reclaims_the_excess_and_reports_the_rest() {
    let root = Budget::new("root", 100);
    let mut cache = Cache::new("cache", &root, 1, &[10, 10, 10]);
    Arc::get_mut(&mut cache).unwrap().nasty = true;
    let registration = root.on_need(&cache);
    let fixed = root.charge(50).unwrap();
    let room = root.shrink(60, None);
    assert_eq!((room.missing, room.tried[0].gave, root.used()), (0, 20, 60));
    assert_eq!(root.panics(), 1, "a reclaimer that panics has given back what it gave back");
    let room = root.shrink(40, None);
    assert_eq!((room.missing, root.used(), root.limit()), (10, 50, 40));
    drop((registration, cache, fixed));
    assert_eq!(root.shrink(0, None).missing, 0);
}

#[test]
fn bytes_are_reclaimed_on_request_as_far_as_available() {
    let root = Budget::new("root", 100);
    let (a, b) = (root.child("a", 100), root.child("b", 100));
    let dear = Cache::new("dear", &a, 9, &[10, 10]);
    let cheap = Cache::new("cheap", &b, 1, &[10]);
    let _both = (a.on_need(&dear), b.on_need(&cheap));
    let room = root.reclaim(15, None, None);
    assert_eq!((room.missing, room.tried.len(), root.used()), (0, 2, 10));
    let room = b.reclaim(1, None, None);
    assert_eq!((room.missing, room.tried.len()), (1, 0), "those of others are not asked");
    let room = root.reclaim(50, Some(Instant::now()), None);
    assert_eq!((room.missing, root.used()), (50, 10), "nobody is asked after the deadline");
    assert_eq!(root.reclaim(50, None, None).missing, 40);
}
