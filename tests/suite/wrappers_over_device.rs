//! Tests of the wrappers over device memory: one rule for host and device memory, whether or not
//! the host can access the bytes.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::assert_silent;
use aquifer::{
    Budget, DeviceBuffer, DeviceId, DevicePool, Limit, MemoryError, Opaque, PoolConfig, PoolStats,
    Request, Stream, Tag,
    adapters::{CountingAllocator, Fallback, Segregate, Tagged},
    sim::Sim,
    vec::Vec,
};

const MIB: u64 = 1 << 20;

struct Rig {
    sim: Sim,
    pool: DevicePool,
    s: Stream,
    u: Stream,
}

/// Returns a pool of 64 MiB on a device that works when it is waited for.
fn rig() -> Rig {
    let sim = Sim::h200(1).stepped();
    let config = PoolConfig::with_budget(Budget::new("the device", 64 * MIB));
    let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    Rig { sim, pool, s, u }
}

#[test]
fn a_limit_refuses_before_the_pool_is_asked_and_ends_when_the_bytes_are_free() {
    let rig = rig();
    let below = CountingAllocator::new(rig.pool.clone());
    let limit = Limit::new(&below, Budget::new("tenant", MIB));
    assert!(matches!(
        limit.allocate(&rig.s, Request::bytes(MIB + 1)),
        Err(MemoryError::OutOfMemory(_))
    ));
    assert_eq!(
        below.stats(),
        PoolStats::default(),
        "a request that is refused never reaches the pool"
    );
    assert_eq!(limit.allocate(&rig.s, Request::bytes(0)).unwrap().bytes(), 0);
    assert_eq!((limit.live(), limit.budget().used(), below.stats().failures), (0, 0, 0));

    let mut x: DeviceBuffer<u8> = DeviceBuffer::new_in(&limit, &rig.s, MIB as usize).unwrap();
    rig.u.fill(&mut x, 1).unwrap();
    assert_eq!((limit.live(), below.stats().live), (MIB, MIB));
    drop(x);
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!(
        (limit.live(), limit.budget().used()),
        (MIB, MIB),
        "the other stream still writes it"
    );
    rig.u.synchronize().unwrap();
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!((limit.live(), limit.budget().used(), below.stats().blocks), (0, 0, 0));
    assert_eq!((below.stats().peak_live, below.stats().allocations), (MIB, 2));
    assert_silent(&rig.sim);
}

#[test]
fn forgotten_blocks_stay_charged_and_counted_after_the_wrappers_are_dropped() {
    let rig = rig();
    let budget = Budget::new("tenant", MIB);
    let stack = CountingAllocator::new(Limit::new(rig.pool.clone(), budget.clone()));
    let _forgotten =
        std::mem::ManuallyDrop::new(stack.allocate(&rig.s, Request::bytes(1000)).unwrap());
    let block = stack.allocate(&rig.s, Request::bytes(500)).unwrap();
    let twin = stack.clone();
    drop(stack);
    assert_eq!((budget.used(), twin.stats().live), (1500, 1500));
    drop((block, twin));
    assert_eq!(budget.used(), 1000);
}

#[test]
fn a_tag_is_the_requests_whatever_it_said_and_whatever_scope_it_came_from() {
    let rig = rig();
    let (kv, other) = (Tag::named("kv"), Tag::named("other"));
    let tagged = Tagged::new(rig.pool.clone(), kv);
    let block =
        aquifer::tagged(other, || tagged.allocate(&rig.s, Request::bytes(100).tag(other))).unwrap();
    assert_eq!((block.tag(), block.bytes()), (kv, 100));
}

#[test]
fn a_second_pool_serves_what_the_first_refuses_and_blocks_return_to_their_pool() {
    let rig = rig();
    let first = CountingAllocator::new(Limit::new(rig.pool.clone(), Budget::new("first", MIB)));
    let second = CountingAllocator::new(rig.pool.clone());
    let both = Fallback::new(&first, &second);
    let a = both.allocate(&rig.s, Request::bytes(MIB)).unwrap();
    let b = both.allocate(&rig.s, Request::bytes(MIB)).unwrap();
    assert_eq!((first.stats().live, second.stats().live, both.stats().live), (MIB, MIB, 2 * MIB));
    drop(a);
    assert_eq!((first.stats().live, second.stats().live), (0, MIB));
    drop(b);
    assert_eq!(both.stats().live, 0);
    let refused = both.allocate(&rig.s, Request::bytes(100 * MIB)).unwrap_err();
    assert!(
        matches!(refused, MemoryError::OutOfMemory(_)),
        "the last word is the second's: {refused}"
    );
}

#[test]
fn small_blocks_and_large_ones_come_from_pools_of_their_own() {
    let rig = rig();
    let (small, large) =
        (CountingAllocator::new(rig.pool.clone()), CountingAllocator::new(rig.pool.clone()));
    let by_size = Segregate::new(4096, &small, &large);
    let blocks =
        [1, 4096, 4097].map(|bytes| by_size.allocate(&rig.s, Request::bytes(bytes)).unwrap());
    assert_eq!((small.stats().live, large.stats().live), (4097, 4097));
    assert_eq!((small.stats().blocks, large.stats().blocks), (2, 1));
    drop(blocks);
    assert_eq!(by_size.stats().live, 0);
}

/// The same wrapper over host memory in the same program.
#[test]
fn one_budget_holds_both_kinds() {
    let rig = rig();
    let budget = Budget::new("both", 1000);
    let (host, device) = (
        Limit::new(allocator_api2::alloc::Global, budget.clone()),
        Limit::new(rig.pool.clone(), budget.clone()),
    );
    let list: Vec<u8, _> = Vec::with_capacity_in(600, &host);
    assert!(device.allocate(&rig.s, Request::bytes(500)).is_err());
    let block = device.allocate(&rig.s, Request::bytes(400)).unwrap();
    assert_eq!(budget.used(), 1000);
    drop((list, block));
    assert_eq!(budget.used(), 0);
}
