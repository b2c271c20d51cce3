//! Tests of reclaim between pinned pools under one budget, and of the waits this causes.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a support function that fails is a failed test"
)]
#![expect(unsafe_code, reason = "gives blocks back by hand")]

use crate::support::{self, MIB};
use allocator_api2::alloc::Allocator;
use aquifer_core::{
    Budget, Charge, MemoryError, OutOfMemory,
    budget::{Offer, Reclaim},
};
use aquifer_driver::{Call, DeviceId, sim::Sim};
use aquifer_host::{Grow, PinnedConfig, PinnedPool, region::Host};
use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const REGION: u64 = 4 << 20;

fn pool(host: &Host, budget: &Budget, set: impl FnOnce(&mut PinnedConfig)) -> PinnedPool {
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.patience = Duration::ZERO;
    set(&mut config);
    PinnedPool::new(host, budget, config).unwrap()
}

fn bytes(size: usize) -> Layout {
    Layout::from_size_align(size, 64).unwrap()
}

fn free(pool: &PinnedPool, block: NonNull<[u8]>, layout: Layout) {
    // SAFETY: 1. alive, with its own layout, and freed once.
    unsafe { pool.allocator().deallocate(block.cast(), layout) };
}

/// Leaves a wholly free region in a pool.
fn idle(pool: &PinnedPool) {
    let block = pool.allocate(bytes(4 * MIB)).unwrap();
    free(pool, block, bytes(4 * MIB));
    assert_eq!(pool.stats().memory.physical, REGION);
}

fn refused<T: std::fmt::Debug>(answer: aquifer_core::Result<T>) -> OutOfMemory {
    match answer {
        Err(MemoryError::OutOfMemory(error)) => *error,
        other => panic!("{other:?}"),
    }
}

fn with_driver(sim: &Sim) -> Host {
    support::host().with_driver(sim.driver(), DeviceId(0))
}

#[test]
fn pageable_regions_are_reclaimed_for_another_pool_without_waiting() {
    let budget = Budget::new("pinned", REGION + REGION / 2);
    let [ours, theirs] = [0, 1].map(|_| pool(&support::host(), &budget, |_| ()));
    for _ in 0..3 {
        idle(&theirs);
        idle(&ours);
        assert_eq!((theirs.stats().memory.physical, budget.used()), (0, REGION));
    }
    let kept = ours.allocate(bytes(4 * MIB)).unwrap();
    let error = refused(theirs.allocate(bytes(4 * MIB)));
    assert_eq!(error.refused.unwrap().budget, "pinned");
    assert!(ours.is_consistent() && theirs.is_consistent());
    free(&ours, kept, bytes(4 * MIB));
    drop((ours, theirs));
    support::sweep_out(&budget);
}

#[test]
fn pinned_regions_are_reclaimed_only_for_requests_that_may_wait_for_the_device() {
    let sim = Sim::h200(1);
    let host = with_driver(&sim);
    let budget = Budget::new("pinned", REGION + REGION / 2);
    let theirs = pool(&host, &budget, |_| ());
    idle(&theirs);
    let hasty = pool(&host, &budget, |_| ());
    let before = sim.driver().calls().get(Call::HostUnregister);
    let error = refused(hasty.allocate(bytes(4 * MIB)));
    assert!(error.tried.iter().all(|tried| tried.step != "regions of a pinned pool"), "{error}");
    assert_eq!(sim.driver().calls().get(Call::HostUnregister), before);
    let room = budget.make_room(REGION, Some(Instant::now()), None);
    assert_eq!(room.tried.len(), 0);
    let patient = pool(&host, &budget, |config| config.patience = Duration::from_secs(60));
    idle(&patient);
    assert_eq!(theirs.stats().memory.physical, 0);
    drop((theirs, hasty, patient));
    support::sweep_out(&budget);
    assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
}

#[test]
fn regions_in_use_or_of_a_pool_that_grows_when_warmed_are_not_reclaimed() {
    let budget = Budget::new("pinned", 16 * REGION);
    let host = support::host();
    let quiet = pool(&host, &budget, |config| config.grow = Grow::WhenWarmed);
    let used = pool(&host, &budget, |_| ());
    quiet.warm(4 * MIB).unwrap();
    idle(&used);
    let live = used.allocate(bytes(64)).unwrap();
    let held = budget.used();
    let room = budget.reclaim(held, None, None);
    assert_eq!((room.missing, budget.used()), (held, held), "{room:?}");
    free(&used, live, bytes(64));
    assert_eq!(budget.reclaim(1, None, None).missing, 0);
    assert_eq!(used.stats().memory.physical, 0);
    drop((quiet, used));
    support::sweep_out(&budget);
}

#[test]
fn a_pinned_pool_calls_the_application_and_the_refusal_reports_it() {
    struct Spill(Mutex<Option<Charge>>);
    impl Reclaim for Spill {
        fn name(&self) -> &'static str {
            "spill"
        }
        fn offer(&self) -> Offer {
            Offer {
                bytes: self.0.lock().unwrap().as_ref().map_or(0, Charge::bytes),
                cost: Duration::ZERO,
            }
        }
        fn reclaim(&self, _: u64, _: Option<Instant>) {
            drop(self.0.lock().unwrap().take());
        }
    }
    let budget = Budget::new("pinned", REGION);
    let spill = Arc::new(Spill(Mutex::new(Some(budget.charge(REGION).unwrap()))));
    let _registration = budget.on_need(&spill);
    let pool = pool(&support::host(), &budget, |_| ());
    let block = pool.allocate(bytes(4 * MIB)).unwrap();
    let error = refused(pool.allocate(bytes(4 * MIB)));
    assert!(error.tried.iter().any(|tried| tried.step == "grow"), "{error}");
    free(&pool, block, bytes(4 * MIB));
}

#[test]
fn pools_that_reclaim_from_each_other_on_many_threads_lose_no_byte_and_do_not_deadlock() {
    let budget = Budget::new("pinned", 3 * REGION);
    let host = support::host();
    let pools = [0, 1].map(|_| {
        pool(&host, &budget, |config| {
            config.patience = support::PATIENCE;
        })
    });
    std::thread::scope(|scope| {
        for at in 0..4 {
            let (pool, budget) = (&pools[at % 2], &budget);
            scope.spawn(move || {
                for _ in 0..40 {
                    let end = Instant::now() + Duration::from_secs(60);
                    let block = loop {
                        match pool.allocate(bytes(4 * MIB)) {
                            Ok(block) => break block,
                            Err(refused) => assert!(Instant::now() < end, "{refused}"),
                        }
                        std::thread::yield_now();
                    };
                    assert!(budget.used() <= 3 * REGION);
                    free(pool, block, bytes(4 * MIB));
                }
            });
        }
    });
    for pool in pools {
        pool.trim(0).unwrap();
        assert_eq!(pool.stats().memory.physical, 0);
    }
    support::sweep_out(&budget);
}
