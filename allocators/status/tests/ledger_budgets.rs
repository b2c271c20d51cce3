//! Budgets of several members: what one lacks, the caches of another give back.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_core::{
    Charge, OutOfMemory,
    budget::{HookRegistration, Offer, Reclaim},
    error::Remedy,
};
use aquifer_status::ledger::{Ledger, Share, SharedBudget};
use std::{
    env, fs,
    panic::resume_unwind,
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("aquifer-budgets-{name}-{}", process::id())))
    }

    fn budget(&self, share: Share) -> SharedBudget {
        let ledger = Ledger::open(&self.0, "gpu", 100).unwrap();
        share.join(ledger).unwrap().budget("device 0", || None).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// A cache of charges of 5 bytes.
struct Cache(Mutex<Vec<Charge>>);

/// A cache of charges of 64 MiB, which a driver takes 40 ms each to unmap, all of a call at once.
struct SlowCache(Cache);
const SLOW: u64 = 64 << 20;

impl Cache {
    /// Fills a cache with `count` charges of 5 bytes.
    fn fill(shared: &SharedBudget, count: usize) -> (Arc<Self>, HookRegistration) {
        let budget = shared.budget();
        let charges = (0..count).map(|_| budget.charge(5).unwrap()).collect();
        let cache = Arc::new(Self(Mutex::new(charges)));
        let registration = budget.on_need(&cache);
        (cache, registration)
    }

    /// Takes the last `count` charges.
    fn take(&self, count: u64) -> Vec<Charge> {
        let mut charges = self.0.lock().unwrap();
        let keep = charges.len().saturating_sub(count as usize);
        charges.split_off(keep)
    }

    fn bytes(&self) -> u64 {
        self.0.lock().unwrap().iter().map(Charge::bytes).sum()
    }
}

impl Reclaim for Cache {
    fn name(&self) -> &'static str {
        "a cache"
    }

    fn offer(&self) -> Offer {
        Offer { bytes: self.bytes(), cost: Duration::ZERO }
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        drop(self.take(bytes.div_ceil(5)));
    }
}

impl Reclaim for SlowCache {
    fn name(&self) -> &'static str {
        "a slow cache"
    }

    fn offer(&self) -> Offer {
        self.0.offer()
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        let released = self.0.take(bytes.div_ceil(SLOW));
        thread::sleep(Duration::from_millis(40) * released.len() as u32);
    }
}

/// Charges as a pool does: it asks one reclaimer after another.
fn charge(shared: &SharedBudget, bytes: u64) -> Option<Charge> {
    let mut asking = shared.budget().asking(None);
    loop {
        match shared.budget().charge(bytes) {
            Ok(charge) => return Some(charge),
            Err(_) => asking.for_charge(bytes, None)?,
        };
    }
}

#[test]
fn a_charge_within_a_guarantee_gets_what_others_have_in_caches() {
    let scratch = Scratch::new("guarantee");
    let borrower = scratch.budget(Share::new().guarantee(40).limit(95));
    let (cache, _registration) = Cache::fill(&borrower, 19);
    let server = scratch.budget(Share::new().guarantee(60).limit(95));
    assert!(server.budget().charge(60).is_err());
    let begun = Instant::now();
    let charge_of_server = charge(&server, 60).unwrap();
    println!("another process gave back within {:?}", begun.elapsed());
    assert_eq!((cache.bytes(), charge_of_server.bytes()), (40, 60));
    assert_eq!((server.member().claimed(), borrower.member().claimed()), (60, 40));
    // Its own guarantee it keeps, whatever the other asks for.
    assert!(charge(&server, 20).is_none());
    assert_eq!(cache.bytes(), 40);
    drop(charge_of_server);
    assert_eq!(charge(&borrower, 55).map(|charge| charge.bytes()), Some(55));
}

#[test]
fn a_request_gets_what_others_take_longer_to_give_back_than_it_waits_at_a_time() {
    let scratch = Scratch::new("slow");
    let join = || {
        let ledger = Ledger::open(&scratch.0, "gpu", 16 * SLOW).unwrap();
        Share::new().join(ledger).unwrap().budget("device 0", || None).unwrap()
    };
    let (other, own) = (join(), join());
    let charges = (0..16).map(|_| other.budget().charge(SLOW).unwrap()).collect();
    let cache = Arc::new(SlowCache(Cache(Mutex::new(charges))));
    let _registration = other.budget().on_need(&cache);
    assert!(charge(&own, 12 * SLOW).is_some());
    assert_eq!(cache.0.bytes(), 4 * SLOW);
}

#[test]
fn a_request_that_its_own_limit_refuses_takes_no_room_from_others() {
    let scratch = Scratch::new("own-limit");
    let other = scratch.budget(Share::new());
    let _held = other.budget().charge(10).unwrap();
    let own = scratch.budget(Share::new().limit(20));
    let _full = own.budget().charge(20).unwrap();
    let room = own.budget().make_room(1, Some(Instant::now() + Duration::from_millis(20)), None);
    assert_eq!((room.missing, other.member().room()), (1, 70));
    // Nothing measures here, so what a driver refuses could not be corrected.
    own.budget().asking(None).refused_by_driver(5);
    assert_eq!(other.member().room(), 70);
}

#[test]
fn others_give_back_what_a_driver_has_taken_for_itself_beyond_all_claims() {
    let scratch = Scratch::new("driver");
    let other = scratch.budget(Share::new());
    let (cache, _registration) = Cache::fill(&other, 19);
    let taken = Arc::new(AtomicU32::new(0));
    let in_use = {
        let (cache, taken) = (cache.clone(), taken.clone());
        move || Some(cache.bytes() + u64::from(taken.load(Relaxed)))
    };
    let ledger = Ledger::open(&scratch.0, "gpu", 100).unwrap();
    let own = Share::new().join(ledger).unwrap().budget("device 0", in_use).unwrap();
    // The ledger has room for 5, which the driver refuses: it has taken them itself.
    drop(own.budget().charge(5).unwrap());
    taken.store(5, Relaxed);
    let mut asking = own.budget().asking(None);
    asking.refused_by_driver(5);
    assert!(asking.for_memory(5, None, &|_| false).is_some());
    assert_eq!(cache.bytes(), 90);
    assert!(own.budget().charge(5).is_ok());
}

#[test]
fn others_give_back_what_a_driver_refuses_although_it_counts_as_much_as_free() {
    let scratch = Scratch::new("refused");
    let other = scratch.budget(Share::new());
    let (cache, _registration) = Cache::fill(&other, 19);
    let ledger = Ledger::open(&scratch.0, "gpu", 100).unwrap();
    let in_use = {
        let cache = cache.clone();
        move || Some(cache.bytes())
    };
    let own = Share::new().limit(5).join(ledger).unwrap().budget("device 0", in_use).unwrap();
    let mut asking = own.budget().asking(None);
    // Twice: the first 5 bytes that the other gives back are refused too.
    for _ in 0..2 {
        let before = cache.bytes();
        drop(own.budget().charge(5).unwrap());
        asking.refused_by_driver(5);
        assert!(asking.for_memory(5, None, &|_| false).is_some());
        assert!(cache.bytes() < before);
    }
    assert!(own.budget().charge(5).is_ok());
}

#[test]
fn a_panic_while_the_use_is_read_does_not_end_the_thread_that_answers_others() {
    let scratch = Scratch::new("panics");
    let calls = Arc::new(AtomicU32::new(0));
    let in_use = {
        let calls = calls.clone();
        move || -> Option<u64> {
            calls.fetch_add(1, Relaxed);
            // As a panic, but without its message.
            resume_unwind(Box::new("the driver is gone"))
        }
    };
    let ledger = Ledger::open(&scratch.0, "gpu", 100).unwrap();
    let holder = Share::new().join(ledger).unwrap().budget("device 0", in_use).unwrap();
    let (cache, _registration) = Cache::fill(&holder, 20);
    while calls.load(Relaxed) < 2 {
        thread::yield_now();
    }
    let other = scratch.budget(Share::new());
    assert_eq!(charge(&other, 50).map(|charge| charge.bytes()), Some(50));
    assert_eq!(cache.bytes(), 50);
}

#[test]
fn what_others_use_is_not_given_back_and_the_charge_is_refused_in_time() {
    let scratch = Scratch::new("in_use");
    let user = scratch.budget(Share::new());
    let _in_use = user.budget().charge(80).unwrap();
    let other = scratch.budget(Share::new());
    let begun = Instant::now();
    assert!(charge(&other, 30).is_none());
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!((other.member().claimed(), other.budget().used()), (0, 0));
    assert!(charge(&other, 20).is_some());
}

#[test]
fn a_refusal_tells_what_others_hold_from_what_is_kept_for_them_and_names_the_largest_holder() {
    let scratch = Scratch::new("holders");
    let [large, small] =
        [Share::new(), Share::new().guarantee(15).reserve()].map(|s| scratch.budget(s));
    let _in_use = [(&large, 50), (&small, 5)].map(|(of, b)| of.budget().charge(b).unwrap());
    let other = scratch.budget(Share::new());
    let refused = other.budget().charge(40).unwrap_err();
    let (held, holder) = (refused.held_elsewhere(), refused.largest_holder());
    let own = process::id();
    assert_eq!(held, 55, "{refused}");
    assert_eq!((refused.remaining, refused.kept()), (35, 10), "{refused}");
    // As a pool tells it, which asks the ledger again.
    assert_eq!(other.budget().refusal(40), Some(refused));
    let hold = format!("other processes hold 55 B, most of it process {own} (\"");
    let text = refused.to_string();
    assert!(text.contains(", 10 B kept for others; ") && text.contains(&hold), "{text}");

    let mut error = OutOfMemory::new("device 0".into(), 40);
    error.refused = Some(refused);
    assert_eq!(error.remedy(), Remedy::FreeElsewhere { place: "device 0", held, holder });
    let remedy = format!("free memory that other programs hold on device 0: {hold}");
    assert!(error.to_string().contains(&remedy), "{error}");
    // A limit that refuses is the budget's own.
    let limited = scratch.budget(Share::new().limit(20));
    let refused = limited.budget().charge(21).unwrap_err();
    assert!(!refused.is_held_elsewhere() && !refused.to_string().contains("process"), "{refused}");
}

#[test]
fn a_thread_that_waits_for_the_budget_is_served_by_another_members_release() {
    let scratch = Scratch::new("waits");
    let (first, second) = (scratch.budget(Share::new()), scratch.budget(Share::new()));
    let held = first.budget().charge(80).unwrap();
    let second = &second;
    thread::scope(|scope| {
        let deadline = Instant::now() + Duration::from_secs(20);
        let waiting = scope.spawn(move || second.budget().charge_by(50, Some(deadline)).is_ok());
        while second.budget().waiting() == 0 {
            thread::yield_now();
        }
        drop(held);
        assert!(waiting.join().unwrap());
    });
}

#[test]
fn credit_that_no_charge_takes_is_released() {
    let scratch = Scratch::new("credit");
    let (first, second) = (scratch.budget(Share::new()), scratch.budget(Share::new()));
    let (_cache, _registration) = Cache::fill(&first, 20);
    assert_eq!(second.budget().make_room(30, None, None).missing, 0);
    assert_eq!(second.member().claimed(), 30);
    let begun = Instant::now();
    while second.member().claimed() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        thread::yield_now();
    }
}

#[test]
fn what_is_charged_stays_claimed_after_the_thread_has_ended() {
    let scratch = Scratch::new("outlives");
    let shared = scratch.budget(Share::new());
    let charge = shared.budget().charge(70).unwrap();
    drop(shared);
    let other = scratch.budget(Share::new());
    assert!(other.budget().charge(31).is_err());
    drop(charge);
    assert_eq!(other.budget().charge(100).map(|charge| charge.bytes()), Ok(100));
}
