//! Tests of the pinned pool without a driver: blocks, reuse after gates, growth, budget and
//! shutdown.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "calls the allocator trait and looks into blocks")]

use crate::support::{self, Latch, MIB};
use allocator_api2::{alloc::Allocator, boxed::Box as AllocBox, vec::Vec as AllocVec};
use aquifer_core::{
    Action, Budget, DeferReuse, MemoryError, Recorder,
    event::{Event, EventSink, MemoryLocation, RingSink},
};
use aquifer_host::{PinnedAllocator, PinnedBuf, PinnedConfig, PinnedPool, topology::NodeId};
use hashbrown::HashMap;
use std::{
    alloc::Layout,
    hash::RandomState,
    ptr::NonNull,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

fn config() -> PinnedConfig {
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.patience = Duration::ZERO;
    config
}

fn small_pool(limit: usize) -> (PinnedPool, Budget) {
    let budget = Budget::new("pinned", limit as u64);
    (PinnedPool::new(&support::host(), &budget, config()).unwrap(), budget)
}

fn bytes(size: usize) -> Layout {
    Layout::from_size_align(size, 16).unwrap()
}

/// A block that is filled with a pattern, which is checked when it is freed.
struct Block {
    at: NonNull<u8>,
    layout: Layout,
    pattern: u8,
}

// SAFETY: 1. the block has a single owner, as a `Box` has.
unsafe impl Send for Block {}

impl Block {
    fn new(allocator: &PinnedAllocator, layout: Layout, pattern: u8) -> Option<Self> {
        let at = allocator.allocate(layout).ok()?.cast::<u8>();
        assert!(at.addr().get().is_multiple_of(layout.align()));
        // SAFETY: 1. fresh, of that size.
        unsafe { at.write_bytes(pattern, layout.size()) };
        Some(Self { at, layout, pattern })
    }

    fn check(&self, upto: usize) {
        // SAFETY: 1. alive and written when it was made.
        let bytes = unsafe { std::slice::from_raw_parts(self.at.as_ptr(), upto) };
        assert!(bytes.iter().all(|&b| b == self.pattern), "somebody wrote into a live block");
    }

    fn free(self, allocator: &PinnedAllocator) {
        self.check(self.layout.size());
        // SAFETY: 1. alive, with its own layout.
        unsafe { allocator.deallocate(self.at, self.layout) };
    }

    fn resize(&mut self, allocator: &PinnedAllocator, layout: Layout) -> bool {
        let (old, grows) = (self.layout, layout.size() >= self.layout.size());
        // SAFETY: 1. alive, with its own layout; the new layout is valid for the operation.
        let answer = unsafe {
            if grows {
                allocator.grow(self.at, old, layout)
            } else {
                allocator.shrink(self.at, old, layout)
            }
        };
        self.check(if answer.is_ok() { 0 } else { old.size() });
        let Ok(block) = answer else { return false };
        (self.at, self.layout) = (block.cast(), layout);
        self.check(old.size().min(layout.size()));
        // SAFETY: 1. alive, of the new size.
        unsafe { self.at.write_bytes(self.pattern, layout.size()) };
        true
    }
}

#[test]
fn threads_share_a_pool_and_lose_nothing() {
    let (pool, budget) = small_pool(256 * MIB);
    let allocator = pool.allocator();
    thread::scope(|scope| {
        let (give, take) = std::sync::mpsc::channel::<Block>();
        for id in 0..4u8 {
            let give = give.clone();
            scope.spawn(move || {
                for round in 0..500usize {
                    let layout = bytes(1 + (round * 7919 + usize::from(id) * 104_729) % 1000);
                    let block = Block::new(&allocator, layout, id).unwrap();
                    // Another thread frees half of them.
                    if round % 2 == 0 { give.send(block).unwrap() } else { block.free(&allocator) }
                }
            });
        }
        drop(give);
        for block in take {
            block.free(&allocator);
        }
    });
    assert!(pool.is_consistent());
    let stats = pool.stats();
    assert_eq!((stats.memory.live, stats.memory.allocations, stats.memory.frees), (0, 2000, 2000));
    assert_eq!(
        stats.memory.growths, 1,
        "threads that meet a growth wait for it instead of growing too"
    );
    drop(pool);
    assert_eq!(budget.used(), 0);
}

#[test]
fn collections_live_in_it_and_outlive_the_pool() {
    let (pool, budget) = small_pool(64 * MIB);
    let allocator = pool.allocator();
    let mut vec = AllocVec::new_in(allocator);
    vec.extend(0..100_000u64);
    let mut map =
        HashMap::<u64, u64, RandomState, _>::with_hasher_in(RandomState::new(), allocator);
    map.extend((0..10_000u64).map(|n| (n, n * n)));
    let boxed = AllocBox::new_in([7u8; 4096], allocator);
    assert!(allocator.owns(NonNull::from(&vec[0]).cast()));
    drop(pool);
    assert!(!allocator.is_open());
    assert!(allocator.allocate(bytes(1)).is_err(), "a closed pool serves nothing");
    assert!(budget.used() > 0, "regions with live blocks stay");
    assert!(vec.iter().copied().eq(0..100_000));
    assert!((0..10_000).all(|n| map[&n] == n * n));
    assert!(vec.try_reserve(1 << 20).is_err());
    drop((vec, map));
    assert!(boxed.iter().all(|&b| b == 7));
    drop(boxed);
    assert_eq!(budget.used(), 0, "the last block took the last region with it");
}

#[test]
fn a_stale_allocator_is_refused_by_the_next_pool_of_its_core() {
    // Cores of pools are reused, so one of these stale handles sooner or later meets its successor.
    let stale: Vec<_> = (0..4).map(|_| small_pool(8 * MIB).0.allocator()).collect();
    let (pool, _budget) = small_pool(8 * MIB);
    let block = pool.allocator().allocate(bytes(64)).unwrap();
    for allocator in &stale {
        assert!(allocator.allocate(bytes(64)).is_err());
        assert!(allocator.defer(block.cast(), Latch::shut()).is_err());
        // SAFETY: 1. of another generation, so it is refused, which is what is tested.
        unsafe { allocator.deallocate(block.cast(), bytes(64)) };
    }
    assert_eq!(pool.stats().memory.blocks, 1);
    // SAFETY: 1. alive, with its own layout.
    unsafe { pool.allocator().deallocate(block.cast(), bytes(64)) };
    assert_eq!(pool.stats().memory.blocks, 0);
}

#[test]
fn a_block_freed_behind_a_gate_is_not_reused_until_the_gate_opens() {
    let (pool, _budget) = small_pool(4 * MIB);
    let allocator = pool.allocator();
    let gate = Latch::shut();
    let block = Block::new(&allocator, bytes(3 * MIB), 0xab).unwrap();
    let at = block.at;
    // Also an address inside the block.
    // SAFETY: 1. inside the block.
    let inside = unsafe { at.add(4097) };
    allocator.defer(inside, gate.clone()).unwrap();
    block.free(&allocator);
    let memory = pool.stats().memory;
    assert_eq!((memory.live, memory.pending), (0, 3 * MIB as u64));
    assert!(
        Block::new(&allocator, bytes(2 * MIB), 1).is_none(),
        "given out while a copy may be on its way"
    );
    // SAFETY: 1. pending, so still mapped and unwritten as promised.
    assert!((0..3 * MIB).step_by(4096).all(|n| unsafe { at.add(n).read() } == 0xab));
    gate.open();
    let again = Block::new(&allocator, bytes(3 * MIB), 2).unwrap();
    assert_eq!((again.at, pool.stats().memory.pending), (at, 0));
    again.free(&allocator);
    assert!(pool.is_consistent());
}

#[test]
fn a_free_polls_no_gate_and_an_allocation_polls_a_few() {
    let (pool, _budget) = small_pool(64 * MIB);
    let allocator = pool.allocator();
    let gate = Latch::shut();
    for _ in 0..10 {
        let block = Block::new(&allocator, bytes(1000), 1).unwrap();
        allocator.defer(block.at, gate.clone()).unwrap();
        let before = gate.asked.load(std::sync::atomic::Ordering::Relaxed);
        block.free(&allocator);
        assert_eq!(gate.asked.load(std::sync::atomic::Ordering::Relaxed), before);
    }
    assert_eq!(pool.stats().memory.pending, 10 * 1024);
    gate.open();
    while pool.stats().memory.pending > 0 {
        Block::new(&allocator, bytes(16), 1).unwrap().free(&allocator);
    }
}

#[test]
fn gates_of_a_block_that_lives_long_do_not_pile_up() {
    let (pool, _budget) = small_pool(8 * MIB);
    let allocator = pool.allocator();
    let block = Block::new(&allocator, bytes(1000), 1).unwrap();
    let gates: Vec<_> = (0..200).map(|_| Latch::shut()).collect();
    for gate in &gates {
        allocator.defer(block.at, gate.clone()).unwrap();
        gate.open();
    }
    let kept = gates.iter().filter(|gate| Arc::strong_count(gate) > 1).count();
    assert!(kept < 20, "{kept} of 200");
    block.free(&allocator);
}

#[test]
fn a_shrinking_block_with_a_gate_keeps_its_tail() {
    let (pool, _budget) = small_pool(4 * MIB);
    let allocator = pool.allocator();
    let mut block = Block::new(&allocator, bytes(4 * MIB), 5).unwrap();
    allocator.defer(block.at, Latch::shut()).unwrap();
    assert!(block.resize(&allocator, bytes(MIB)));
    assert!(Block::new(&allocator, bytes(MIB), 6).is_none(), "the tail went to somebody else");
    block.free(&allocator);
}

#[test]
fn double_frees_foreign_pointers_and_wrong_layouts_are_counted_and_change_nothing() {
    let (pool, _budget) = small_pool(16 * MIB);
    let allocator = pool.allocator();
    let kept = Block::new(&allocator, bytes(100), 1).unwrap();
    let freed = Block::new(&allocator, bytes(100_000), 2).unwrap();
    let (at, pending) = (freed.at, Block::new(&allocator, bytes(100), 3).unwrap());
    let pending_at = pending.at;
    allocator.defer(pending.at, Latch::shut()).unwrap();
    freed.free(&allocator);
    pending.free(&allocator);
    let before = pool.stats();
    let mut stack = [0u8; 64];
    // SAFETY: 1. none of these is a block of the allocator with that layout. The test checks that
    // they are refused, and the bytes are not accessed.
    unsafe {
        allocator.deallocate(at, bytes(100_000));
        allocator.deallocate(pending_at, bytes(100));
        allocator.deallocate(NonNull::from(&mut stack).cast(), bytes(64));
        allocator.deallocate(kept.at.add(16), bytes(16));
        allocator.deallocate(kept.at, bytes(1 << 20));
        allocator.deallocate(NonNull::dangling(), bytes(8));
    }
    let after = pool.stats();
    assert_eq!(after.refused_frees, 6);
    assert_eq!(after.memory, before.memory);
    assert!(allocator.defer(NonNull::from(&mut stack).cast(), Latch::shut()).is_err());
    assert!(allocator.defer(at, Latch::shut()).is_err());
    assert!(pool.is_consistent());
    kept.free(&allocator);
}

#[test]
fn zero_sized_huge_and_over_aligned_requests_follow_the_contract() {
    let (pool, _budget) = small_pool(64 * MIB);
    let allocator = pool.allocator();
    let none = allocator.allocate(Layout::from_size_align(0, 4096).unwrap()).unwrap();
    assert!(none.is_empty() && none.cast::<u8>().addr().get().is_multiple_of(4096));
    // SAFETY: 1. the returned block with its layout.
    unsafe { allocator.deallocate(none.cast(), Layout::from_size_align(0, 4096).unwrap()) };
    assert_eq!(pool.stats().memory.physical, 0, "nothing was taken for nothing");
    for size in [isize::MAX as usize - 4095, 1 << 50, 128 * MIB] {
        assert!(allocator.allocate(bytes(size)).is_err());
        assert!(matches!(
            pool.allocate(bytes(size)),
            Err(MemoryError::TooLarge { .. } | MemoryError::OutOfMemory(_))
        ));
    }
    for shift in [12, 16, 21, 23] {
        let layout = Layout::from_size_align(100, 1 << shift).unwrap();
        Block::new(&allocator, layout, 1).unwrap().free(&allocator);
    }
    assert!(allocator.allocate(Layout::from_size_align(1, 1 << 62).unwrap()).is_err());
    let zeroed = allocator.allocate_zeroed(bytes(70_000)).unwrap();
    // SAFETY: 1. alive, zeroed by the call.
    assert!(unsafe { zeroed.as_ref() }.iter().all(|&b| b == 0));
    // SAFETY: 1. alive, with its own layouts; grown to the second.
    unsafe {
        zeroed.cast::<u8>().write_bytes(0xff, 70_000);
        let grown = allocator.grow_zeroed(zeroed.cast(), bytes(70_000), bytes(90_000)).unwrap();
        assert!(grown.as_ref()[..70_000].iter().all(|&b| b == 0xff));
        assert!(grown.as_ref()[70_000..].iter().all(|&b| b == 0));
        allocator.deallocate(grown.cast(), bytes(90_000));
    }
    assert_eq!(pool.stats().memory.live, 0);
}

#[test]
fn a_large_request_gets_a_region_of_its_own_and_no_block_crosses_regions() {
    let (pool, budget) = small_pool(64 * MIB);
    let allocator = pool.allocator();
    let large = Block::new(&allocator, bytes(10 * MIB + 100), 1).unwrap();
    // Rounded up to base pages: whole huge pages would waste more than a thirtieth.
    assert_eq!(budget.used(), (10 * MIB + 4096) as u64);
    let small = Block::new(&allocator, bytes(3 * MIB), 2).unwrap();
    assert_eq!(pool.stats().regions, 2);
    assert_eq!(budget.used(), (14 * MIB + 4096) as u64);
    large.free(&allocator);
    let within = Block::new(&allocator, bytes(9 * MIB), 3).unwrap();
    assert_eq!(pool.stats().regions, 2, "a free region is used again");
    within.free(&allocator);
    assert_eq!(pool.trim(0).unwrap(), (10 * MIB + 4096) as u64);
    small.free(&allocator);
    assert_eq!(pool.trim(5 * MIB).unwrap(), 0, "less than what is to be kept");
    assert_eq!(
        pool.trim(MIB).unwrap(),
        0,
        "giving the region back would leave less than a mebibyte"
    );
    assert_eq!(pool.trim(0).unwrap(), 4 * MIB as u64);
    assert_eq!((budget.used(), pool.stats().memory.reaped), (0, (14 * MIB + 4096) as u64));
}

#[test]
fn the_budget_is_exact_and_a_smaller_region_and_free_regions_make_room() {
    let (pool, budget) = small_pool(10 * MIB);
    let allocator = pool.allocator();
    let first = Block::new(&allocator, bytes(4 * MIB), 1).unwrap();
    let second = Block::new(&allocator, bytes(4 * MIB), 2).unwrap();
    // A chunk would not fit under the budget, but a region of the request's size does.
    let third = Block::new(&allocator, bytes(2 * MIB), 3).unwrap();
    assert_eq!((budget.used(), budget.remaining()), (10 * MIB as u64, 0));
    match pool.allocate(bytes(1)) {
        Err(MemoryError::OutOfMemory(error)) => {
            let refused = error.refused.unwrap();
            assert_eq!((refused.limit, refused.remaining), (10 * MIB as u64, 0));
            assert_eq!((error.live, error.cached, error.physical), (10 << 20, 0, 10 << 20));
            assert_eq!(error.tried[0].step, "grow");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pool.stats().memory.failures, 1);
    // Two free regions of 4 MiB, too small for a block of 7 MiB.
    first.free(&allocator);
    second.free(&allocator);
    let large = Block::new(&allocator, bytes(7 * MIB), 4).unwrap();
    assert!(budget.used() <= budget.limit() && budget.peak() <= budget.limit());
    large.free(&allocator);
    third.free(&allocator);
    drop(pool);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_failing_allocation_waits_for_pending_blocks_up_to_its_time_limit() {
    let budget = Budget::new("pinned", 4 * MIB as u64);
    let mut config = config();
    config.patience = Duration::from_secs(60);
    let patience = config.patience;
    let pool = PinnedPool::new(&support::host(), &budget, config).unwrap();
    let allocator = pool.allocator();
    let gate = Latch::shut();
    let block = Block::new(&allocator, bytes(4 * MIB), 1).unwrap();
    allocator.defer(block.at, gate.clone()).unwrap();
    block.free(&allocator);
    let again = thread::scope(|scope| {
        scope.spawn(|| {
            // Not before a thread waits, unless none does within the time limit.
            let end = Instant::now() + patience;
            while pool.stats().memory.host_waits == 0 && Instant::now() < end {
                thread::yield_now();
            }
            gate.open();
        });
        Block::new(&allocator, bytes(4 * MIB), 2)
    });
    assert!(pool.stats().memory.host_waits >= 1);
    again.unwrap().free(&allocator);
}

#[test]
fn warming_allocates_what_is_missing_immediately() {
    let (pool, budget) = small_pool(64 * MIB);
    pool.warm(20 * MIB).unwrap();
    assert_eq!(budget.used(), 20 * MIB as u64);
    pool.warm(8 * MIB).unwrap();
    assert_eq!(budget.used(), 20 * MIB as u64);
    let growths = pool.stats().memory.growths;
    let blocks: Vec<_> =
        (0..5).filter_map(|_| Block::new(&pool.allocator(), bytes(4 * MIB), 1)).collect();
    assert_eq!((blocks.len(), pool.stats().memory.growths), (5, growths));
    blocks.into_iter().for_each(|block| block.free(&pool.allocator()));
    assert!(matches!(pool.warm(1 << 40), Err(MemoryError::OutOfBudget(_))));
}

#[test]
fn buffers_are_zeroed_typed_and_reported_as_pageable() {
    let (pool, _budget) = small_pool(16 * MIB);
    let mut dirty = PinnedBuf::<u8>::new_in(&pool, 4096).unwrap();
    dirty.fill(0xff);
    drop(dirty);
    let mut buffer: PinnedBuf<u32> = pool.buffer(1024).unwrap();
    assert!(buffer.iter().all(|&n| n == 0));
    buffer[1023] = 9;
    assert!(!buffer.is_pinned());
    let copy = PinnedBuf::copy_in(&pool, &buffer).unwrap();
    assert_eq!(copy[..], buffer[..]);
    assert_eq!(PinnedBuf::<u64>::new_in(&pool, 0).unwrap().len(), 0);
    assert!(matches!(
        PinnedBuf::<u64>::new_in(&pool, usize::MAX),
        Err(MemoryError::TooLarge { .. })
    ));
    assert_eq!(pool.is_pinned(NonNull::from(&copy[5]).cast()), Some(false));
    let boxed = copy.into_boxed_slice();
    drop((boxed, buffer));
    assert_eq!(pool.stats().memory.blocks, 0);
}

#[test]
fn every_step_is_recorded_in_order() {
    let ring = Arc::new(RingSink::new(64));
    let mut config = config();
    config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    let budget = Budget::new("pinned", 4 * MIB as u64);
    let pool = PinnedPool::new(&support::host(), &budget, config).unwrap();
    let allocator = pool.allocator();
    let gate = Latch::shut();
    let block = Block::new(&allocator, bytes(1000), 1).unwrap();
    allocator.defer(block.at, gate.clone()).unwrap();
    block.free(&allocator);
    assert!(allocator.allocate(bytes(8 * MIB)).is_err());
    gate.open();
    pool.trim(0).unwrap();
    let events: Vec<_> = ring.take().into_iter().map(|e| (e.action, e.bytes)).collect();
    assert_eq!(
        events,
        [
            (Action::Limit, 4 * MIB as u64),
            (Action::Grow, 4 * MIB as u64),
            (Action::Allocate, 1000),
            (Action::Free, 1000),
            (Action::Fail, 8 * MIB as u64),
            (Action::Complete, 1000),
            (Action::Reap, 4 * MIB as u64),
        ]
    );
    Block::new(&allocator, bytes(1), 1).unwrap().free(&allocator);
    assert!(ring.take().iter().all(|event| event.place == MemoryLocation::Host(None)));
}

#[test]
fn the_tightest_limit_of_pinned_memory_is_recorded_before_what_a_change_has_caused() {
    let ring = Arc::new(RingSink::new(64));
    let machine = Budget::unlimited("machine");
    let open = |budget: &Budget| {
        let mut config = config();
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
        PinnedPool::new(&support::host(), budget, config).unwrap()
    };
    let told = || ring.take().into_iter().map(|e| (e.action, e.bytes)).collect::<Vec<_>>();
    drop(open(&machine.child("unlimited", u64::MAX)));
    assert_eq!(told(), []);
    let budget = machine.child("pinned", 64 * MIB as u64);
    let pool = open(&budget);
    assert_eq!(told(), [(Action::Limit, 64 * MIB as u64)]);
    let block = Block::new(&pool.allocator(), bytes(1000), 1).unwrap();
    assert_eq!(told().iter().filter(|(action, _)| *action == Action::Limit).count(), 0);

    // That of a budget above counts too.
    machine.set_limit(8 * MIB as u64);
    assert!(pool.allocate(bytes(16 * MIB)).is_err());
    let by = ring.kept().iter().map(|event| event.refused_by.name()).collect::<Vec<_>>();
    assert_eq!(by, ["untagged", "machine/pinned"]);
    assert_eq!(told(), [(Action::Limit, 8 * MIB as u64), (Action::Fail, 16 * MIB as u64)]);
    machine.set_limit(u64::MAX);
    budget.set_limit(u64::MAX);
    block.free(&pool.allocator());
    pool.trim(0).unwrap();
    assert!(told().contains(&(Action::Limit, u64::MAX)));
}

/// Has another thread trim all free memory whenever the pool has grown.
#[derive(Debug, Default)]
struct Trims(Mutex<Option<PinnedPool>>);

impl EventSink for Trims {
    fn record(&self, event: &Event) {
        let pool = self.0.lock().unwrap().clone().filter(|_| event.action == Action::Grow);
        if let Some(pool) = pool {
            thread::spawn(move || pool.trim(0).unwrap()).join().unwrap();
        }
    }

    /// The result has no fixed order, because that thread reports its frees meanwhile.
    fn reserve(&self) -> Option<u64> {
        Some(0)
    }
}

#[test]
fn memory_grown_for_a_request_serves_it_despite_concurrent_trims() {
    let (budget, trims) = (Budget::new("pinned", 16 * MIB as u64), Arc::new(Trims::default()));
    let mut config = config();
    config.recorder = Some(Arc::new(Recorder::new(trims.clone())));
    let pool = PinnedPool::new(&support::host(), &budget, config).unwrap();
    *trims.0.lock().unwrap() = Some(pool.clone());
    for size in [100, 90_000, 3 * MIB, 9 * MIB] {
        let block = Block::new(&pool.allocator(), bytes(size), 1).unwrap();
        block.free(&pool.allocator());
        pool.trim(0).unwrap();
        assert_eq!(budget.used(), 0);
    }
    trims.0.lock().unwrap().take();
}

#[test]
fn impossible_settings_are_reported() {
    for wrong in [0, MIB, 1 << 40] {
        let mut config = config();
        config.chunk = wrong;
        let refused = PinnedPool::new(&support::host(), &Budget::unlimited("pinned"), config);
        assert!(matches!(refused, Err(MemoryError::BadSetting { name: "chunk", .. })));
    }
    let on_nowhere = PinnedConfig::on(NodeId(4000));
    let pool = PinnedPool::new(&support::host(), &Budget::unlimited("pinned"), on_nowhere).unwrap();
    assert!(
        matches!(pool.allocate(bytes(1)), Err(MemoryError::Unsupported { .. })),
        "an unknown node is refused"
    );
    assert_eq!(pool.stats().memory.physical, 0);
}

#[test]
fn time_limits_beyond_the_clocks_range_count_as_long_ones() {
    let host = support::host();
    let mut config = config();
    config.patience = Duration::MAX;
    let pool = PinnedPool::new(&host, &Budget::new("pinned", 64 << 20), config).unwrap();
    let allocator = pool.allocator();
    let layout = Layout::from_size_align(1 << 20, 64).unwrap();
    let block = Allocator::allocate(&allocator, layout).unwrap();
    // SAFETY: 1. the block is live, and of this layout.
    unsafe { Allocator::deallocate(&allocator, block.cast(), layout) };
    let too_large = Layout::from_size_align(1 << 30, 64).unwrap();
    assert!(Allocator::allocate(&allocator, too_large).is_err());
}

/// Set in the process that the test below starts.
const OVER_BUDGET: &str = "AQUIFER_TEST_OVER_BUDGET";

#[test]
fn a_vector_over_its_budget_ends_with_the_explanation_of_its_pool() {
    const NAME: &str = "pool::a_vector_over_its_budget_ends_with_the_explanation_of_its_pool";
    if std::env::var_os(OVER_BUDGET).is_some() {
        let budget = Budget::new("pinned batches", 8 << 20);
        let pool = PinnedPool::new(&support::host(), &budget, config()).unwrap();
        let mut handled = AllocVec::<u8, _>::new_in(pool.allocator());
        assert!(handled.try_reserve(64 << 20).is_err());
        let _never = AllocVec::<u8, _>::with_capacity_in(64 << 20, pool.allocator());
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let ended = child.args(["--exact", NAME, "--nocapture"]).env(OVER_BUDGET, "1").output();
    let ended = ended.unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success(), "{told}");
    assert!(told.contains("out of memory on the host: 64.00 MiB requested"), "{told}");
    assert!(told.contains("raise the limit of pinned batches to"), "{told}");
    assert_eq!(told.matches("aquifer: ").count(), 1, "told once: {told}");
}
