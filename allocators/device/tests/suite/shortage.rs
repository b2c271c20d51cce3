//! Tests that out of memory is returned only if releasing all idle memory would not have made room.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig, assert_silent, plain};
use aquifer_core::{
    Budget, OpaqueBlock, Result, Tag,
    budget::{Charge, Offer, Reclaim},
};
use aquifer_device::{Adoption, Block, DevicePool, Park, PoolConfig, Request, Reserved};
use aquifer_driver::{Access, Call, DeviceId, leftovers, sim::Sim};
use aquifer_stream::Stream;
use std::{
    any::Any,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Opens pools on one device, each under the budget given for it, that never wait on the host.
fn pools<const N: usize>(sim: &Sim, budgets: [&Budget; N]) -> [DevicePool; N] {
    budgets.map(|budget| {
        let mut config = PoolConfig::with_budget(budget.clone());
        config.wait = Duration::ZERO;
        DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
    })
}

/// Leaves a free block in the cache of `pool` that was last used on a stream other than its own.
/// Returns the two streams.
fn leave_a_block_that_another_stream_used(pool: &DevicePool, bytes: u64) -> [Stream; 2] {
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let mut block = pool.buffer::<u8>(&s, bytes as usize).unwrap();
    u.fill(&mut block, 1).unwrap();
    drop(block);
    assert_eq!(pool.stats().pending, bytes);
    [s, u]
}

#[test]
fn idle_memory_last_used_on_another_stream_is_reclaimed_from_a_neighbour() {
    let sim = Sim::h200(1);
    let budget = Budget::new("both", 64 * MIB);
    let [first, second] = pools(&sim, [&budget, &budget]);
    let _streams = leave_a_block_that_another_stream_used(&second, 30 * MIB);
    assert!(first.alloc(&first.stream().unwrap(), Request::bytes(60 * MIB)).is_ok());
    assert_silent(&sim);
}

#[test]
fn one_trim_releases_memory_last_used_on_another_stream() {
    let rig = Rig::on(Sim::h200(1), 64, |_| ());
    let _streams = leave_a_block_that_another_stream_used(&rig.pool, 30 * MIB);
    rig.assert_empty();
}

/// Offers nothing, and meanwhile ends a charge.
struct EndsMeanwhile(Mutex<Option<Charge>>);

impl Reclaim for EndsMeanwhile {
    fn name(&self) -> &'static str {
        "another thread"
    }
    fn offer(&self) -> Offer {
        drop(self.0.lock().unwrap().take());
        Offer::default()
    }
    fn reclaim(&self, _bytes: u64, _deadline: Option<Instant>) {}
}

#[test]
fn room_that_others_make_after_a_refusal_is_used() {
    let (sim, device) = (Sim::h200(1), Budget::new("the device", 64 * MIB));
    let [pool] = pools(&sim, [&device.child("the pool", u64::MAX)]);
    let charge = device.charge(60 * MIB).unwrap();
    let other = Arc::new(EndsMeanwhile(Mutex::new(Some(charge))));
    let _registration = device.on_need(&other);
    pool.alloc_stable(&pool.stream().unwrap(), Request::bytes(30 * MIB)).unwrap();
}

/// Returns a pool with 40 MiB idle whose limit was then lowered to 24 MiB.
fn over_its_limit() -> Rig {
    let rig = Rig::on(Sim::h200(1), 64, |config| config.wait = Duration::ZERO);
    drop(rig.alloc(&rig.stream(), 40 * MIB));
    assert!(rig.budget.set_limit(24 * MIB) >= 16 * MIB);
    rig
}

#[test]
#[expect(unsafe_code, reason = "captures a graph")]
fn a_limit_lowered_below_idle_memory_refuses_no_memory_outside_of_the_caches() {
    type Way = fn(&Rig, &Stream) -> Result<Box<dyn Any>>;
    let ways: [Way; 4] = [
        |rig, s| Ok(Box::new(rig.pool.alloc_stable(s, Request::bytes(2 * MIB))?)),
        |rig, s| {
            let mut memory: Reserved<u8> = rig.pool.reserve(s, 8 << 20)?;
            memory.commit_to(2 << 20)?;
            Ok(Box::new(memory))
        },
        |rig, s| {
            let parkable = rig.pool.parkable(Tag::named("weights"))?;
            Ok(Box::new(parkable.alloc(s, Request::bytes(2 * MIB))?))
        },
        |rig, s| {
            let graphs = rig.pool.graph_pool()?;
            let alloc = |s: &Stream| rig.pool.alloc(s, Request::bytes(2 * MIB));
            // SAFETY: 1. and 2. the captured work touches nothing.
            Ok(Box::new(unsafe { graphs.capture(s, alloc) }?))
        },
    ];
    for way in ways {
        let rig = over_its_limit();
        let s = rig.stream();
        let _memory = way(&rig, &s).unwrap();
        assert!(rig.budget.used() <= 24 * MIB);
        rig.assert_silent();
    }
}

#[test]
fn a_limit_lowered_below_idle_memory_refuses_no_block_of_the_caches() {
    for adoption in [Adoption::Never, Adoption::DoneOnly, Adoption::Wait] {
        let rig = Rig::on(Sim::h200(1), 64, |config| {
            (config.wait, config.adoption) = (Duration::ZERO, adoption);
        });
        drop(rig.alloc(&rig.stream(), 40 * MIB));
        rig.budget.set_limit(24 * MIB);
        let _block = rig.alloc(&rig.stream(), 20 * MIB);
        rig.assert_silent();
    }
}

/// Both budgets are short: one of memory that only this pool can release, the other of memory that
/// only its neighbour can.
#[test]
fn a_pool_releases_its_own_idle_memory_for_its_limit_and_reclaims_the_rest() {
    let sim = Sim::h200(1);
    let device = Budget::new("device 0", 20 * MIB);
    let own = device.child("its own", 20 * MIB);
    let [pool, neighbour] = pools(&sim, [&own, &device]);
    let (s, u) = (pool.stream().unwrap(), neighbour.stream().unwrap());
    // Ten MiB idle, in handles that cannot serve a block of sixteen MiB alone.
    drop(pool.alloc(&s, Request::bytes(10 * MIB)).unwrap());
    drop(neighbour.alloc(&u, Request::bytes(10 * MIB)).unwrap());
    assert_eq!(device.used(), 20 * MIB);
    assert!(pool.alloc_stable(&s, Request::bytes(16 * MIB)).is_ok());
    let [pool, neighbour] = pools(&sim, [&own, &device]);
    drop(pool.alloc(&s, Request::bytes(10 * MIB)).unwrap());
    drop(neighbour.alloc(&u, Request::bytes(10 * MIB)).unwrap());
    assert!(pool.alloc(&pool.stream().unwrap(), Request::bytes(16 * MIB)).is_ok());
    assert_silent(&sim);
}

/// Refuses every call of this kind until the failures are cleared.
fn refuse(rig: &Rig, call: Call) {
    rig.sim.fail_every(call, 1, 999);
}

/// Drops a pool and asserts that all its memory was returned to the driver.
fn assert_all_back(rig: Rig) {
    let Rig { sim, pool, budget } = rig;
    drop(pool);
    assert_eq!((budget.used(), budget.stranded()), (0, 0));
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}

#[test]
fn a_handle_whose_release_is_refused_is_reported_as_stranded_and_released_by_the_next_trim() {
    let makes: [fn(&Rig) -> Block; 2] = [
        |rig| rig.alloc(&rig.stream(), 4 * MIB),
        |rig| rig.stable(&rig.stream(), 4 * MIB).into_block(),
    ];
    for make in makes {
        let rig = Rig::new(16);
        drop(make(&rig));
        refuse(&rig, Call::HandleRelease);
        assert!(rig.pool.trim(0).is_err(), "the refusal is told");
        let stats = rig.pool.stats();
        assert_eq!(
            (stats.physical, stats.pending, stats.reaped),
            (4 * MIB, 4 * MIB, 0),
            "{stats:?}"
        );
        assert_eq!((rig.budget.used(), rig.budget.stranded()), (4 * MIB, 4 * MIB));
        rig.sim.clear_failures();
        assert_eq!(rig.pool.trim(0), Ok(4 * MIB));
        let stats = rig.pool.stats();
        assert_eq!((stats.physical, stats.pending), (0, 0), "{stats:?}");
        assert_all_back(rig);
    }
}

#[test]
fn a_release_refused_once_delays_nothing() {
    let rig = Rig::new(16);
    drop(rig.alloc(&rig.stream(), 4 * MIB));
    rig.sim.fail(Call::HandleRelease, 1, 999);
    assert_eq!(rig.pool.trim(0), Ok(4 * MIB));
    assert_all_back(rig);
}

#[test]
fn a_request_gets_memory_whose_release_was_refused() {
    let rig = Rig::new(16);
    let s = rig.stream();
    drop(rig.stable(&s, 12 * MIB));
    refuse(&rig, Call::HandleRelease);
    assert!(rig.pool.trim(0).is_err());
    assert!(rig.pool.alloc(&s, Request::bytes(12 * MIB)).is_err());
    rig.sim.clear_failures();
    assert!(rig.pool.alloc(&s, Request::bytes(12 * MIB)).is_ok());
}

#[test]
#[expect(unsafe_code, reason = "parks")]
fn memory_that_was_parked_and_not_released_is_reported_as_kept() {
    let rig = Rig::new(64);
    let tag = Tag::named("parked");
    let _block = rig.pool.parkable(tag).unwrap().alloc(&rig.stream(), Request::bytes(MIB)).unwrap();
    let held = rig.budget.used();
    refuse(&rig, Call::HandleRelease);
    // SAFETY: 1. and 2. nothing is queued.
    let report = unsafe { rig.pool.park(tag, Park::discard()) }.unwrap();
    assert_eq!((report.released, report.refused), (0, held));
    rig.sim.clear_failures();
    rig.pool.trim(0).unwrap();
    assert_eq!((rig.budget.used(), rig.budget.stranded()), (0, 0));
}

#[test]
#[expect(unsafe_code, reason = "captures a graph")]
fn what_the_driver_refuses_to_release_at_the_end_of_a_pool_is_released_by_a_later_sweep() {
    let calls = [
        Call::HandleRelease,
        Call::Unmap,
        Call::AddressFree,
        Call::EventDestroy,
        Call::StreamDestroy,
        Call::GraphDestroy,
        Call::GraphExecDestroy,
        Call::MemFree,
    ];
    for call in calls {
        for sim in [Sim::h200(1), plain()] {
            let rig = Rig::on(sim, 256, |_| ());
            refuse(&rig, call);
            {
                let (s, u) = (rig.stream(), rig.stream());
                // Devices without virtual memory have no memory of graphs.
                let made = rig.pool.graph_pool().ok().map(|graphs| {
                    // SAFETY: 1. and 2. the captured work touches nothing.
                    unsafe { graphs.capture(&s, |s| rig.pool.alloc(s, Request::bytes(MIB))) }
                        .unwrap()
                });
                let mut buffer = rig.bytes(&s, 4 * MIB);
                u.fill(&mut buffer, 1).unwrap();
                drop((buffer, made, rig.stable(&s, 2 * MIB)));
                let _told = rig.pool.trim(0);
            }
            let Rig { sim, pool, budget } = rig;
            drop(pool);
            let left = !sim.outstanding().is_empty();
            assert_eq!(
                left,
                leftovers::count(&sim.driver()) > 0,
                "{call:?}: {}",
                sim.outstanding()
            );
            if matches!(call, Call::HandleRelease | Call::Unmap | Call::MemFree) && left {
                assert!(budget.used() > 0, "{call:?}");
                assert_eq!(budget.stranded(), budget.used(), "{call:?}");
            }
            sim.clear_failures();
            // Freeing one may free memory that another lies in.
            while leftovers::count(&sim.driver()) > 0 {
                leftovers::sweep(&sim.driver()).unwrap();
            }
            assert_eq!((budget.used(), budget.stranded()), (0, 0), "{call:?}");
            assert!(sim.outstanding().is_empty(), "{call:?}: {}", sim.outstanding());
            assert_silent(&sim);
        }
    }
}

/// Leaves a block on the default stream of a thread that has ended.
fn of_a_thread_that_ended(rig: &Rig, make: fn(&Rig, &Stream) -> Block) -> Block {
    thread::scope(|scope| {
        scope.spawn(|| make(rig, &rig.pool.streams().thread_default().unwrap())).join().unwrap()
    })
}

const KINDS: [fn(&Rig, &Stream) -> Block; 3] = [
    |rig, s| rig.alloc(s, 2 * MIB),
    |rig, s| rig.stable(s, 2 * MIB).into_block(),
    |rig, s| {
        rig.pool
            .parkable(Tag::named("of threads"))
            .unwrap()
            .alloc(s, Request::bytes(2 * MIB))
            .unwrap()
    },
];

#[test]
fn blocks_of_threads_that_have_ended_serve_others_and_are_given_back_by_a_trim() {
    for kind in KINDS {
        let rig = Rig::new(32);
        for _ in 0..40 {
            drop(of_a_thread_that_ended(&rig, kind));
        }
        assert!(rig.pool.alloc(&rig.stream(), Request::bytes(30 * MIB)).is_ok());
        for _ in 0..8 {
            drop(of_a_thread_that_ended(&rig, kind));
        }
        rig.assert_empty();
    }
}

#[test]
fn a_block_last_used_by_an_ended_threads_stream_is_reused() {
    let rig = Rig::new(32);
    let s = rig.stream();
    let mut buffer = rig.bytes(&s, 20 * MIB);
    thread::scope(|scope| {
        scope.spawn(|| rig.pool.streams().thread_default().unwrap().fill(&mut buffer, 1).unwrap());
    });
    drop(buffer);
    assert!(rig.pool.alloc(&rig.stream(), Request::bytes(30 * MIB)).is_ok());
    rig.assert_silent();
}

#[test]
fn a_tenants_budget_returns_to_zero_after_drop_and_trim() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let tenant = Budget::new("tenant a", 32 * MIB);
    let held = rig.pool.for_tenant(&tenant).unwrap();
    drop(held.alloc(&s, Request::bytes(1000)).unwrap());
    let of_tag = rig.pool.limit_tag(Tag::named("limited"), 32 * MIB);
    drop(rig.pool.alloc(&s, Request::bytes(1000).tag(Tag::named("limited"))).unwrap());
    rig.pool.trim(0).unwrap();
    assert_eq!((tenant.used(), of_tag.used()), (0, 0));
    drop(held.alloc(&s, Request::bytes(1000)).unwrap());
    drop(held);
    rig.pool.trim(0).unwrap();
    assert_eq!(tenant.used(), 0);
}

#[test]
fn a_budget_that_a_pool_makes_for_itself_is_named_after_its_device() {
    let pool = DevicePool::open(Sim::h200(2).driver(), DeviceId(1), PoolConfig::default()).unwrap();
    assert_eq!(pool.budget().name(), "device 1");
}

#[test]
fn what_is_kept_until_a_free_is_dropped_by_a_poll_of_an_idle_pool() {
    for make in KINDS {
        let rig = Rig::stepped(32);
        let (s, u) = (rig.stream(), rig.stream());
        let (mut block, kept) = (make(&rig, &s), Arc::new(()));
        block.keep_until_free(Box::new(kept.clone()));
        rig.uses(&u, &block, Access::Write);
        drop(block);
        rig.pool.poll().unwrap();
        assert_eq!(Arc::strong_count(&kept), 2, "its use is queued");
        rig.sim.run_all();
        rig.pool.poll().unwrap();
        assert_eq!(Arc::strong_count(&kept), 1);
        rig.assert_silent();
    }
}
