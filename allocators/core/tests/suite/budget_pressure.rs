//! Tests of pressure levels and reclaim: every change is reported once, in order, with no lock
//! held, whatever a hook does.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test's own helpers")]

use aquifer_core::{
    Budget, Charge,
    budget::{Level, LevelChange, Levels, Offer, Reclaim},
};
use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

type Heard = Arc<Mutex<Vec<(Level, Level)>>>;

fn listen(budget: &Budget) -> (Heard, aquifer_core::budget::HookRegistration) {
    let heard = Heard::default();
    let ears = Arc::clone(&heard);
    let registration = budget.on_level(Arc::new(move |_: &Budget, change: LevelChange| {
        ears.lock().unwrap().push((change.from, change.to));
    }));
    (heard, registration)
}

#[test]
fn a_level_rises_above_its_threshold_and_falls_only_below_the_slack() {
    use Level::{Critical, Nominal, Warning};
    let root = Budget::new("root", 200);
    let budget = root.child("b", 100);
    budget.set_levels(Levels { soft: 70, critical: 90, slack: 10 });
    let (heard, registration) = listen(&budget);
    let mut held = budget.charge(70).unwrap();
    assert_eq!((budget.level(), root.level()), (Nominal, Nominal));
    held.merge(budget.charge(1).unwrap()).unwrap();
    drop(held.split(10).unwrap());
    assert_eq!(budget.level(), Warning, "61 is above 70 − 10");
    held.merge(budget.charge(30).unwrap()).unwrap();
    assert_eq!(budget.level(), Critical);
    drop(held.split(11).unwrap());
    assert_eq!(budget.level(), Warning);
    drop(held.split(20).unwrap());
    assert_eq!(budget.level(), Nominal);
    let most = budget.charge(40).unwrap();
    drop((most, held));
    let told = [
        (Nominal, Warning),
        (Warning, Critical),
        (Critical, Warning),
        (Warning, Nominal),
        (Nominal, Critical),
    ];
    let all = heard.lock().unwrap().clone();
    assert_eq!(all[..5], told, "a jump is told as one");
    assert_eq!(all.last().unwrap().1, Nominal);
    drop(registration);
    drop(budget.charge(100).unwrap());
    assert_eq!(heard.lock().unwrap().len(), all.len(), "whoever has left is told nothing");
}

#[test]
fn a_threshold_below_an_earlier_peak_is_reported() {
    let budget = Budget::new("b", 100);
    drop(budget.charge(100).unwrap());
    budget.set_levels(Levels { soft: 40, critical: 60, slack: 10 });
    let (heard, _registration) = listen(&budget);
    let held = budget.charge(41).unwrap();
    assert_eq!(budget.level(), Level::Warning);
    let more = budget.charge(20).unwrap();
    assert_eq!(budget.level(), Level::Critical);
    drop((more, held));
    assert_eq!(heard.lock().unwrap().len(), 4);
}

#[test]
fn thresholds_that_move_change_the_level_too() {
    let budget = Budget::new("b", 100);
    let (heard, _registration) = listen(&budget);
    let held = budget.charge(50).unwrap();
    budget.set_levels(Levels { soft: 40, ..Levels::default() });
    budget.set_levels(Levels { soft: 10, critical: 20, slack: 0 });
    budget.set_levels(Levels::default());
    assert_eq!(heard.lock().unwrap().len(), 3);
    assert_eq!(budget.level(), Level::Nominal);
    drop(held);
}

#[test]
fn a_hook_that_calls_back_and_panics_affects_no_other_caller() {
    use Level::{Critical, Nominal};
    let root = Budget::new("root", 100);
    let budget = root.child("b", 100);
    budget.set_levels(Levels { soft: 50, critical: 80, slack: 0 });
    let cache: Arc<Mutex<Vec<Charge>>> = Arc::default();
    let (nested, depth) = (Arc::clone(&cache), Arc::new(Mutex::new(())));
    let inside = Arc::clone(&depth);
    let _first = budget.on_level(Arc::new(move |budget: &Budget, change: LevelChange| {
        let _inside = inside.try_lock().expect("no hook runs within itself");
        if change.to > Nominal {
            // The hook releases a charge, which changes the level again, charges, sets limits and
            // registers hooks.
            let kept = std::mem::take(&mut *nested.lock().unwrap());
            drop(kept);
            drop(budget.charge(1));
            budget.set_limit(100);
            drop(budget.on_level(Arc::new(|_, _| {})));
        }
    }));
    let _second = budget.on_level(Arc::new(|_, _| panic!("a hook panics")));
    let (heard, _third) = listen(&budget);
    cache.lock().unwrap().push(budget.charge(45).unwrap());
    let more = budget.charge(40).unwrap();
    assert_eq!((budget.used(), budget.level()), (40, Nominal), "the hook gave back");
    assert_eq!(*heard.lock().unwrap(), [(Nominal, Critical), (Critical, Nominal)]);
    assert_eq!(budget.panics(), 2);
    drop(more);
    assert_eq!(root.used(), 0);
}

#[test]
fn the_last_level_a_hook_receives_is_the_current_one() {
    let budget = Budget::new("b", 1000);
    budget.set_levels(Levels { soft: 300, critical: 600, slack: 20 });
    let (heard, _registration) = listen(&budget);
    thread::scope(|s| {
        for seed in 0..4u64 {
            let budget = &budget;
            s.spawn(move || {
                let mut held = Vec::new();
                for round in 0..if cfg!(miri) { 30 } else { 5000 } {
                    held.extend(budget.charge(100 + seed * 10).ok());
                    if held.len() > 2 || round % 3 == 0 {
                        held.pop();
                    }
                }
            });
        }
    });
    let heard = heard.lock().unwrap();
    assert!(
        heard.windows(2).all(|pair| pair[0].1 == pair[1].0),
        "each begins where the last one ended"
    );
    assert_eq!(heard.last().map_or(Level::Nominal, |last| last.1), Level::Nominal);
}

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
