//! Tests of reclaim, one reclaimer at a time: every reclaimer with an offer is called, and neither
//! deadlock nor livelock occurs.
#![expect(clippy::unwrap_used, reason = "a test's own helpers")]

use aquifer_core::{
    Budget, Charge, DeviceId,
    budget::{Asking, HookRegistration, Offer, Reclaim},
    event::MemoryLocation,
};
use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// A minimal pool: bytes in use, and idle bytes that are charged as well.
struct Pool {
    name: &'static str,
    budget: Budget,
    idle: Mutex<Vec<Charge>>,
    place: Option<MemoryLocation>,
    waits: bool,
    /// At most this many charges are returned per call.
    step: usize,
    times: AtomicU64,
    /// Held by the test to delay the answer.
    gate: Mutex<()>,
    inside: AtomicBool,
    registration: OnceLock<HookRegistration>,
}

impl Pool {
    fn new(name: &'static str, budget: &Budget, change: impl FnOnce(&mut Self)) -> Arc<Self> {
        let mut pool = Self {
            name,
            budget: budget.clone(),
            idle: Mutex::default(),
            place: None,
            waits: false,
            step: usize::MAX,
            times: AtomicU64::new(0),
            gate: Mutex::new(()),
            inside: AtomicBool::new(false),
            registration: OnceLock::new(),
        };
        change(&mut pool);
        let pool = Arc::new(pool);
        let _only_once = pool.registration.set(budget.on_need(&pool));
        pool
    }

    fn fill(&self, bytes: u64) {
        self.idle.lock().unwrap().push(self.budget.charge(bytes).unwrap());
    }

    /// Charges bytes, and reclaims from others if needed.
    fn take(&self, bytes: u64, deadline: Option<Instant>) -> Option<Charge> {
        let mut asking = self.budget.asking(self.registration.get());
        loop {
            if let Ok(charge) = self.budget.charge(bytes) {
                return Some(charge);
            }
            asking.for_charge(bytes, deadline)?;
        }
    }

    fn times(&self) -> u64 {
        self.times.load(SeqCst)
    }
}

impl Reclaim for Pool {
    fn name(&self) -> &'static str {
        self.name
    }
    fn offer(&self) -> Offer {
        let bytes = self.idle.lock().unwrap().iter().map(Charge::bytes).sum();
        Offer { bytes, cost: Duration::from_micros(bytes) }
    }
    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        self.times.fetch_add(1, SeqCst);
        self.inside.store(true, SeqCst);
        drop(self.gate.lock().unwrap());
        let (mut gave, mut left) = (0, self.step);
        while gave < bytes && left > 0 {
            let Some(charge) = self.idle.lock().unwrap().pop() else { break };
            gave += charge.bytes();
            left -= 1;
        }
    }
    fn waits(&self) -> bool {
        self.waits
    }
    fn place(&self) -> Option<MemoryLocation> {
        self.place
    }
}

#[test]
fn a_reclaimer_is_called_until_there_is_room_and_only_once_if_it_returns_nothing() {
    let budget = Budget::new("both", 100);
    let stingy = Pool::new("stingy", &budget, |pool| pool.step = 1);
    (0..10).for_each(|_| stingy.fill(10));
    struct Liar(AtomicU64);
    impl Reclaim for Liar {
        fn name(&self) -> &'static str {
            "liar"
        }
        fn offer(&self) -> Offer {
            Offer { bytes: 100, cost: Duration::ZERO }
        }
        fn reclaim(&self, _: u64, _: Option<Instant>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let liar = Arc::new(Liar(AtomicU64::new(0)));
    let _registration = budget.on_need(&liar);
    let asker = Pool::new("asker", &budget, |_| ());
    let charge = asker.take(50, None).unwrap();
    assert_eq!((charge.bytes(), stingy.times(), liar.0.load(SeqCst)), (50, 5, 1));
    assert!(asker.take(60, None).is_none(), "half is live");
    assert_eq!((budget.used(), liar.0.load(SeqCst)), (50, 2));
}

#[test]
fn a_reclaimer_whose_offer_grew_is_called_again() {
    let budget = Budget::new("both", 100);
    let cache = Pool::new("cache", &budget, |_| ());
    /// Frees blocks, which puts them into the cache.
    struct App(Arc<Pool>, Mutex<Vec<Charge>>);
    impl Reclaim for App {
        fn name(&self) -> &'static str {
            "application"
        }
        fn offer(&self) -> Offer {
            let bytes = self.1.lock().unwrap().iter().map(Charge::bytes).sum();
            Offer { bytes, cost: Duration::from_secs(1) }
        }
        fn reclaim(&self, _: u64, _: Option<Instant>) {
            let block = self.1.lock().unwrap().pop();
            self.0.idle.lock().unwrap().extend(block);
        }
    }
    let live = (0..4).map(|_| budget.charge(20).unwrap()).collect();
    let app = Arc::new(App(Arc::clone(&cache), Mutex::new(live)));
    let _registration = budget.on_need(&app);
    cache.fill(20);
    let asker = Pool::new("asker", &budget, |_| ());
    assert!(asker.take(60, None).is_some());
    assert_eq!((cache.times(), app.1.lock().unwrap().len()), (3, 2), "each is asked in turn");
}

#[test]
fn a_waiting_reclaimer_is_called_last_and_only_by_requests_with_time() {
    let budget = Budget::new("both", 100);
    let slow = Pool::new("slow", &budget, |pool| pool.waits = true);
    let quick = Pool::new("quick", &budget, |_| ());
    slow.fill(1);
    quick.fill(99);
    let asker = Pool::new("asker", &budget, |_| ());
    assert!(asker.take(100, Some(Instant::now())).is_none());
    assert_eq!((slow.times(), quick.times(), budget.used()), (0, 1, 1));
    assert!(asker.take(100, None).is_some());
    assert_eq!(slow.times(), 1);
}

#[test]
fn a_reclaimer_that_returned_nothing_without_waiting_is_called_again_with_time() {
    /// Can return its bytes only if it may wait for them.
    struct Busy(Mutex<Option<Charge>>);
    impl Reclaim for Busy {
        fn name(&self) -> &'static str {
            "busy"
        }
        fn offer(&self) -> Offer {
            Offer {
                bytes: self.0.lock().unwrap().as_ref().map_or(0, Charge::bytes),
                cost: Duration::ZERO,
            }
        }
        fn reclaim(&self, _: u64, deadline: Option<Instant>) {
            if deadline.is_none_or(|deadline| Instant::now() < deadline) {
                drop(self.0.lock().unwrap().take());
            }
        }
    }
    let budget = Budget::new("both", 100);
    let busy = Arc::new(Busy(Mutex::new(Some(budget.charge(100).unwrap()))));
    let _registration = budget.on_need(&busy);
    let mut asking = budget.asking(None);
    let mut ask = |deadline| asking.for_charge(10, deadline).map(|tried| tried.gave);
    let now = Some(Instant::now());
    assert_eq!([ask(now), ask(now), ask(None), ask(None)], [Some(0), None, Some(100), None]);
}

#[test]
fn a_charge_above_a_limit_reclaims_nothing() {
    let root = Budget::new("root", 100);
    let cache = Pool::new("cache", &root, |_| ());
    cache.fill(90);
    let asker = Pool::new("asker", &root.child("tenant", 200), |_| ());
    assert!(asker.take(101, None).is_none());
    assert_eq!((cache.times(), root.used()), (0, 90));
    assert!(asker.take(100, None).is_some());
}

#[test]
fn memory_refused_by_a_driver_is_reclaimed_from_its_device_across_the_tree() {
    let root = Budget::new("process", 1000);
    let [a, b, host] = ["device 0", "device 1", "host"].map(|name| root.child(name, 1000));
    let on =
        |device| move |pool: &mut Pool| pool.place = Some(MemoryLocation::Device(DeviceId(device)));
    let ours = Pool::new("ours", &a.child("tenant", 100), on(0));
    let same = Pool::new("same", &a, on(0));
    let other = Pool::new("other", &b, on(1));
    let pinned = Pool::new("pinned", &host, |pool| pool.place = Some(MemoryLocation::Host(None)));
    let unknown = Pool::new("unknown", &root, |_| ());
    let all = [&ours, &same, &other, &pinned, &unknown];
    all.iter().for_each(|pool| pool.fill(50));
    let here = |place| place == MemoryLocation::Device(DeviceId(0));
    let mut asking = ours.budget.asking(ours.registration.get());
    let ask = |asking: &mut Asking<'_>| {
        asking.for_memory(100, None, &here).map(|tried| (tried.step, tried.gave))
    };
    let mut steps = [ask(&mut asking), ask(&mut asking)].map(Option::unwrap);
    steps.sort_unstable();
    assert_eq!((steps, ask(&mut asking)), ([("same", 50), ("unknown", 50)], None));
    let room = root.reclaim_of(200, None, None, &here);
    assert_eq!((room.missing, all.map(|pool| pool.times())), (150, [1, 1, 0, 0, 1]));
}

#[test]
fn a_reclaimer_in_use_by_another_thread_is_waited_for() {
    let budget = Budget::new("both", 100);
    let cache = Pool::new("cache", &budget, |_| ());
    (0..10).for_each(|_| cache.fill(10));
    let askers = [Pool::new("a", &budget, |_| ()), Pool::new("b", &budget, |_| ())];
    let closed = cache.gate.lock().unwrap();
    thread::scope(|scope| {
        let first = scope.spawn(|| askers[0].take(50, None));
        while !cache.inside.load(SeqCst) {
            thread::yield_now();
        }
        // It has time, and finds no other reclaimer.
        let second = scope.spawn(|| askers[1].take(50, None));
        // A request without time is refused immediately.
        assert!(askers[1].take(50, Some(Instant::now())).is_none());
        drop(closed);
        let both = [first, second].map(|thread| thread.join().unwrap().unwrap());
        assert_eq!((both.each_ref().map(Charge::bytes), budget.used()), ([50, 50], 100));
    });
}

#[test]
fn reclaimers_that_reclaim_from_each_other_do_not_deadlock() {
    let budget = Budget::new("both", 100);
    /// Requests room before it returns any.
    struct Greedy(Budget, AtomicU64);
    impl Reclaim for Greedy {
        fn name(&self) -> &'static str {
            "greedy"
        }
        fn offer(&self) -> Offer {
            Offer { bytes: 10, cost: Duration::ZERO }
        }
        fn reclaim(&self, bytes: u64, _: Option<Instant>) {
            self.1.fetch_add(1, SeqCst);
            let _ = self.0.make_room(bytes, None, None);
        }
    }
    let both = [(), ()].map(|()| Arc::new(Greedy(budget.clone(), AtomicU64::new(0))));
    let _registrations = both.each_ref().map(|one| budget.on_need(one));
    let full = budget.charge(100).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..if cfg!(miri) { 3 } else { 200 } {
                    assert_eq!(budget.make_room(10, None, None).missing, 10);
                }
            });
        }
    });
    drop(full);
    assert!(both.iter().all(|one| one.1.load(SeqCst) > 0));
}

/// Two pools under one budget that holds what one of them needs repeatedly take from each other on
/// two threads. Every request ends, and a refused request lost against one that was served
/// meanwhile.
#[test]
fn one_of_two_pools_that_reclaim_from_each_other_is_always_served() {
    let budget = Budget::new("both", 100);
    let pools = [Pool::new("a", &budget, |_| ()), Pool::new("b", &budget, |_| ())];
    let served = AtomicU64::new(0);
    thread::scope(|scope| {
        for pool in &pools {
            let served = &served;
            scope.spawn(move || {
                for _ in 0..if cfg!(miri) { 10 } else { 2000 } {
                    drop(pool.idle.lock().unwrap().pop());
                    let before = served.load(SeqCst);
                    if let Some(charge) = pool.take(60, None) {
                        pool.idle.lock().unwrap().push(charge);
                        served.fetch_add(1, SeqCst);
                        continue;
                    }
                    let patience = Instant::now() + Duration::from_secs(60);
                    while served.load(SeqCst) == before {
                        assert!(Instant::now() < patience, "refused, and nobody was served");
                        thread::yield_now();
                    }
                }
            });
        }
    });
    assert!(served.into_inner() > 0);
    pools.iter().for_each(|pool| pool.idle.lock().unwrap().clear());
    assert_eq!(budget.used(), 0);
    assert!(budget.peak() <= 100);
}
