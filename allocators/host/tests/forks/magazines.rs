//! Tests of thread magazines in front of the pinned pool: their blocks are counted, are reclaimed
//! when another thread needs them, and have one owner each.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "calls the allocator trait and looks into blocks")]

use crate::support::{self, Latch, MIB};
use allocator_api2::alloc::Allocator;
use aquifer_adapters::conformance::Suite;
use aquifer_core::{Budget, DeferReuse, MemoryError};
use aquifer_host::{Grow, PinnedAllocator, PinnedConfig, PinnedPool, kernel::SystemCall, pool};
use nix::libc;
use std::{
    alloc::Layout,
    cell::RefCell,
    ptr::NonNull,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

fn config() -> PinnedConfig {
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.patience = Duration::ZERO;
    config
}

fn pool_of(config: PinnedConfig, limit: usize) -> (PinnedPool, Budget) {
    let budget = Budget::new("pinned", limit as u64);
    (PinnedPool::new(&support::host(), &budget, config).unwrap(), budget)
}

fn small_pool() -> (PinnedPool, Budget) {
    pool_of(config(), 64 * MIB)
}

fn bytes(size: usize) -> Layout {
    Layout::from_size_align(size, 16).unwrap()
}

/// Stops threads that run until told to, also when another thread has failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A block's address, for another thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct At(NonNull<u8>);

// SAFETY: 1. only an address; its user is responsible for access.
unsafe impl Send for At {}
// SAFETY: 1. as above.
unsafe impl Sync for At {}

fn take(allocator: &PinnedAllocator, size: usize) -> Option<At> {
    allocator.allocate(bytes(size)).ok().map(|block| At(block.cast()))
}

fn give(allocator: &PinnedAllocator, at: At, size: usize) {
    // SAFETY: 1. the tests free what they allocated, or check that it is refused.
    unsafe { allocator.deallocate(at.0, bytes(size)) };
}

/// Returns whether the kernel's barrier exists. Without it there are no magazines to test.
fn has_magazines() -> bool {
    let there = support::host().kernel.offers_barrier();
    if !there {
        use std::io::Write;
        let _ = writeln!(
            std::io::stderr(),
            "skipped: the kernel offers no membarrier, so there are no magazines"
        );
    }
    there
}

#[test]
fn blocks_in_magazines_are_counted_as_cached_and_reused() {
    if !has_magazines() {
        return;
    }
    let (pool, budget) = small_pool();
    let allocator = pool.allocator();
    for size in [1, 64, 1000, 64 << 10, 100_000, MIB] {
        let at = take(&allocator, size).unwrap();
        give(&allocator, at, size);
        let stats = pool.stats();
        assert_eq!((stats.memory.live, stats.memory.blocks, stats.memory.requested), (0, 0, 0));
        assert_eq!(stats.memory.cached, stats.memory.physical);
        assert!(stats.in_magazines >= size as u64, "{size}");
        assert_eq!(
            take(&allocator, size),
            Some(at),
            "the block of {size} bytes that was freed last comes first"
        );
        assert_eq!((pool.stats().memory.requested, pool.stats().memory.blocks), (size as u64, 1));
        give(&allocator, at, size);
        assert!(pool.is_consistent());
    }
    let stats = pool.stats().memory;
    assert_eq!((stats.allocations, stats.frees), (12, 12));
    assert_eq!(pool.trim(0).unwrap(), stats.physical, "a trim takes them back");
    assert_eq!((pool.stats().in_magazines, budget.used()), (0, 0));
}

#[test]
fn the_allocator_contract_holds_with_and_without_magazines() {
    let mut without = config();
    without.magazines = false;
    for config in [config(), without] {
        let (pool, _budget) = pool_of(config, 256 * MIB);
        for seed in 0..4 {
            Suite { seed, ..Suite::default() }.check(&pool.allocator()).unwrap();
        }
        assert_eq!((pool.stats().memory.live, pool.stats().refused_frees), (0, 0));
        assert!(pool.is_consistent());
    }
}

#[test]
fn rounding_wastes_at_most_three_parts_in_a_hundred_over_random_sizes() {
    let (pool, _budget) = pool_of(config(), 512 * MIB);
    let allocator = pool.allocator();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for most in [4 << 10, 64 << 10, MIB] {
        let mut held = Vec::new();
        for _ in 0..2000.min((96 * MIB) / most) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let size = 1 + (random >> 11) as usize % most;
            held.push((take(&allocator, size).unwrap(), size));
        }
        let memory = pool.stats().memory;
        let wasted = memory.live - memory.requested;
        assert!(
            wasted * 100 <= memory.requested * 3,
            "{wasted} of {} up to {most}",
            memory.requested
        );
        held.into_iter().for_each(|(at, size)| give(&allocator, at, size));
    }
}

#[test]
fn a_trim_and_a_growth_reclaim_magazines_of_idle_threads() {
    if !has_magazines() {
        return;
    }
    // Room for one region.
    let (pool, budget) = pool_of(config(), 4 * MIB);
    let allocator = pool.allocator();
    let (kept, done) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let held: Vec<_> = (0..4).map(|_| take(&allocator, MIB - 4096).unwrap()).collect();
            held.into_iter().for_each(|at| give(&allocator, at, MIB - 4096));
            kept.wait();
            done.wait();
            // The thread continues as before.
            let at = take(&allocator, 64).unwrap();
            give(&allocator, at, 64);
        });
        kept.wait();
        assert!(pool.stats().in_magazines >= 3 * MIB as u64);
        let all = take(&allocator, 4 * MIB).expect("all of it is free, wherever it is kept");
        assert_eq!(pool.stats().memory.growths, 1);
        give(&allocator, all, 4 * MIB);
        assert_eq!(pool.trim(0).unwrap(), 4 * MIB as u64);
        assert_eq!(budget.used(), 0);
        done.wait();
    });
    assert!(pool.is_consistent());
}

#[test]
fn a_new_thread_takes_over_the_magazines_of_an_ended_one() {
    const THREADS: u64 = 400;
    if !has_magazines() {
        return;
    }
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    for _ in 0..THREADS {
        let pair = move || {
            let at = take(&allocator, 64).unwrap();
            give(&allocator, at, 64);
        };
        thread::spawn(pair).join().unwrap();
    }
    // Threads of other tests take some of the thread numbers.
    let stats = pool.stats();
    assert!(stats.locked < THREADS, "the lock was taken {} times", stats.locked);
    assert_eq!((stats.memory.allocations, stats.memory.frees), (THREADS, THREADS));
}

/// Allocates and frees random sizes on several threads. Returns how often an operation took the
/// lock in the steady state.
fn locked_per_operation(threads: usize, most: usize, live: usize) -> f64 {
    const OPERATIONS: usize = 30_000;
    let (pool, _budget) = pool_of(config(), 2 << 30);
    pool.warm(threads * live * most * 2).unwrap();
    let (allocator, gate) = (pool.allocator(), Barrier::new(threads + 1));
    let mut locked = [0; 2];
    thread::scope(|scope| {
        for id in 0..threads {
            let gate = &gate;
            scope.spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(id as u64 + 1);
                let mut held = vec![None; live];
                for _ in 0..2 {
                    for _ in 0..OPERATIONS {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let place = &mut held[(random >> 40) as usize % live];
                        let size = 1 + (random >> 11) as usize % most;
                        match place.take() {
                            Some((at, size)) => give(&allocator, at, size),
                            None => *place = Some((take(&allocator, size).unwrap(), size)),
                        }
                    }
                    gate.wait();
                    gate.wait();
                }
                held.into_iter().flatten().for_each(|(at, size)| give(&allocator, at, size));
            });
        }
        for count in &mut locked {
            gate.wait();
            *count = pool.stats().locked;
            gate.wait();
        }
    });
    assert!(pool.is_consistent());
    (locked[1] - locked[0]) as f64 / (threads * OPERATIONS) as f64
}

#[test]
fn threads_with_random_sizes_rarely_take_the_lock() {
    if !has_magazines() {
        return;
    }
    for (threads, most, live, bound) in
        [(1, 64 << 10, 400, 64.0), (4, 64 << 10, 400, 64.0), (4, MIB, 32, 64.0)]
    {
        let rate = locked_per_operation(threads, most, live);
        assert!(
            rate <= 1.0 / bound,
            "{rate} for each operation on {threads} threads, up to {most} B"
        );
    }
}

#[test]
fn blocks_freed_by_another_thread_circulate_without_the_lock() {
    const BLOCKS: u64 = 4000;
    if !has_magazines() {
        return;
    }
    let (pool, _budget) = small_pool();
    pool.warm(32 * MIB).unwrap();
    let allocator = pool.allocator();
    let (sender, receiver) = std::sync::mpsc::sync_channel::<At>(4);
    thread::scope(|scope| {
        scope.spawn(move || receiver.iter().for_each(|at| give(&allocator, at, MIB)));
        (0..BLOCKS).for_each(|_| sender.send(take(&allocator, MIB).unwrap()).unwrap());
        drop(sender);
    });
    let stats = pool.stats();
    assert!(stats.locked < BLOCKS / 16, "the lock was taken {} times", stats.locked);
    assert_eq!((stats.memory.frees, stats.memory.blocks, stats.memory.growths), (BLOCKS, 0, 1));
    assert!(pool.is_consistent());
}

#[test]
fn magazines_in_the_depot_are_reclaimed_without_their_threads() {
    if !has_magazines() {
        return;
    }
    let (host, faults) = support::faulty_host();
    let budget = Budget::new("pinned", 4 * MIB as u64);
    let pool = PinnedPool::new(&host, &budget, config()).unwrap();
    let allocator = pool.allocator();
    let held: Vec<_> = (0..4).map(|_| take(&allocator, MIB).unwrap()).collect();
    held.into_iter().for_each(|at| give(&allocator, at, MIB));
    assert!(pool.stats().in_magazines >= 3 * MIB as u64);
    let long = take(&allocator, 2 * MIB).expect("of four MiB one at most is kept at hand");
    assert_eq!(faults.made(SystemCall::Barrier), 0);
    give(&allocator, long, 2 * MIB);
    assert!(pool.is_consistent());
}

#[test]
fn a_thread_that_only_frees_returns_blocks_in_batches() {
    if !has_magazines() {
        return;
    }
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    for size in [64, 4096] {
        let all: Vec<_> = (0..1024).map(|_| take(&allocator, size).unwrap()).collect();
        let before = pool.stats().locked;
        thread::scope(|scope| {
            scope.spawn(|| all.into_iter().for_each(|at| give(&allocator, at, size))).join()
        })
        .unwrap();
        let locked = pool.stats().locked - before;
        assert!(
            locked < 1024 / 4,
            "the lock was taken {locked} times to free 1,024 blocks of {size} B"
        );
    }
    assert_eq!(pool.stats().memory.blocks, 0);
    assert!(pool.is_consistent());
}

#[test]
fn blocks_passed_on_by_magazines_keep_cache_line_alignment() {
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    for size in [100_000, 2 * MIB] {
        let at = take(&allocator, size).unwrap();
        give(&allocator, at, size);
        let layout = Layout::from_size_align(size, 64).unwrap();
        let block = allocator.allocate(layout).unwrap();
        assert!(block.cast::<u8>().addr().get().is_multiple_of(64), "{size}");
        // SAFETY: 1. just allocated with this layout.
        unsafe { allocator.deallocate(block.cast(), layout) };
    }
}

#[test]
fn destructors_of_thread_locals_may_allocate_and_free() {
    struct AtTheEnd(PinnedAllocator, At);
    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            give(&self.0, self.1, 100);
            let more = take(&self.0, 200).unwrap();
            give(&self.0, more, 200);
        }
    }
    thread_local! {
        static HELD: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) };
    }
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    thread::spawn(move || {
        let at = take(&allocator, 100).unwrap();
        HELD.set(Some(AtTheEnd(allocator, at)));
    })
    .join()
    .unwrap();
    let stats = pool.stats();
    assert_eq!((stats.memory.blocks, stats.memory.frees), (0, 2));
    assert!(pool.is_consistent());
}

#[test]
fn a_block_of_another_pool_is_refused_by_its_address() {
    let ((one, _a), (other, _b)) = (small_pool(), small_pool());
    let at = take(&one.allocator(), 64).unwrap();
    let warm = take(&other.allocator(), 64).unwrap();
    give(&other.allocator(), warm, 64);
    give(&other.allocator(), at, 64);
    assert_eq!((one.stats().memory.blocks, other.stats().refused_frees), (1, 1));
    give(&one.allocator(), at, 64);
    assert!(one.is_consistent() && other.is_consistent());
}

#[test]
fn a_small_block_with_a_gate_bypasses_the_magazine_and_keeps_its_bytes() {
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    let warm = take(&allocator, 1000).unwrap();
    give(&allocator, warm, 1000);
    let (gate, at) = (Latch::shut(), take(&allocator, 1000).unwrap());
    // SAFETY: 1. alive, of that size.
    unsafe { at.0.write_bytes(0xab, 1000) };
    allocator.defer(at.0, gate.clone()).unwrap();
    give(&allocator, at, 1000);
    assert_eq!(pool.stats().memory.pending, 1024);
    let held: Vec<_> = (0..1000).map(|_| take(&allocator, 1000).unwrap()).collect();
    assert!(!held.contains(&at), "given out while a copy may be on its way");
    // SAFETY: 1. pending, so still mapped and unwritten as promised.
    assert!((0..1000).all(|n| unsafe { at.0.add(n).read() } == 0xab));
    give(&allocator, at, 1000);
    assert_eq!(pool.stats().refused_frees, 1);
    held.into_iter().for_each(|at| give(&allocator, at, 1000));
    gate.open();
    // Magazines serve from here on, and gates are still polled.
    for _ in 0..1000 {
        let at = take(&allocator, 1000).unwrap();
        give(&allocator, at, 1000);
    }
    assert_eq!(pool.stats().memory.pending, 0);
    assert!(pool.is_consistent());
}

#[test]
fn blocks_grow_and_shrink_where_they_are_if_there_is_room() {
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    for (from, to) in
        [(1001, 1024), (1024, 3), (60_000, 61_440), (2 * MIB, 3 * MIB), (3 * MIB, 70_000)]
    {
        let at = take(&allocator, from).unwrap();
        // SAFETY: 1. alive, with its own layout; the new size is valid for the operation.
        let resized = unsafe {
            if to > from {
                allocator.grow(at.0, bytes(from), bytes(to))
            } else {
                allocator.shrink(at.0, bytes(from), bytes(to))
            }
        };
        assert_eq!(resized.unwrap().cast(), at.0, "{from} to {to}");
        assert_eq!(pool.stats().memory.requested, to as u64);
        give(&allocator, at, to);
        assert!(pool.is_consistent());
    }
}

#[test]
fn a_closed_pool_reclaims_magazines_of_other_threads_and_serves_none() {
    let (pool, budget) = small_pool();
    let allocator = pool.allocator();
    let (kept, closed) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let at = take(&allocator, 64).unwrap();
            give(&allocator, at, 64);
            kept.wait();
            closed.wait();
            assert_eq!(take(&allocator, 64), None, "its magazine is void");
        });
        kept.wait();
        drop(pool);
        assert_eq!(budget.used(), 0);
        closed.wait();
    });
    // The next pool that reuses the core begins with empty magazines.
    let (next, _budget) = small_pool();
    assert_eq!(take(&allocator, 64), None);
    assert_eq!((next.stats().in_magazines, next.stats().memory.blocks), (0, 0));
}

#[test]
fn a_refused_barrier_leaves_blocks_in_magazines_until_one_succeeds() {
    if !has_magazines() {
        return;
    }
    let (host, faults) = support::faulty_host();
    let budget = Budget::new("pinned", 64 * MIB as u64);
    let pool = PinnedPool::new(&host, &budget, config()).unwrap();
    let at = take(&pool.allocator(), 64).unwrap();
    give(&pool.allocator(), at, 64);
    faults.fail_from(SystemCall::Barrier, 1, libc::EPERM);
    assert_eq!(pool.trim(0).unwrap(), 0);
    assert!(pool.stats().in_magazines > 0 && pool.is_consistent());
    let allocator = pool.allocator();
    drop(pool);
    assert_eq!(take(&allocator, 64), None, "what this thread keeps is void all the same");
    assert!(budget.used() > 0, "what the thread keeps lies in it");
    faults.clear();
    support::sweep_out(&budget);
}

#[test]
fn threads_that_pass_blocks_during_trims_never_share_one() {
    const THREADS: usize = 4;
    let rounds = 20_000;
    let (pool, budget) = pool_of(config(), 256 * MIB);
    let (allocator, stop) = (pool.allocator(), AtomicBool::new(false));
    thread::scope(|scope| {
        let over = Stop(&stop);
        let trimmer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pool.trim(0).unwrap();
                let stats = pool.stats().memory;
                assert!(stats.live <= stats.physical);
                thread::yield_now();
            }
        });
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..THREADS).map(|_| std::sync::mpsc::sync_channel::<(At, usize, u8)>(64)).unzip();
        let mut workers = Vec::new();
        for (id, receiver) in receivers.into_iter().enumerate() {
            let next = senders[(id + 1) % THREADS].clone();
            workers.push(scope.spawn(move || {
                let check = |(at, size, stamp): (At, usize, u8)| {
                    for n in [0, size / 2, size - 1] {
                        // SAFETY: 1. alive, of that size, and owned by this thread since it was
                        // sent.
                        assert_eq!(unsafe { at.0.add(n).read() }, stamp, "two owners of one block");
                    }
                    give(&allocator, at, size);
                };
                let sizes = [1, 40, 500, 4000, 30_000, 90_000];
                for round in 0..rounds {
                    let (size, stamp) =
                        (sizes[(round * 7 + id) % sizes.len()], (round * 31 + id) as u8);
                    let at = take(&allocator, size).unwrap();
                    for n in [0, size / 2, size - 1] {
                        // SAFETY: 1. alive, of that size.
                        unsafe { at.0.add(n).write(stamp) };
                    }
                    if round % 3 == 0 {
                        // A full channel does not block: the block is freed here.
                        if let Err(full) = next.try_send((at, size, stamp)) {
                            let (std::sync::mpsc::TrySendError::Full(held)
                            | std::sync::mpsc::TrySendError::Disconnected(held)) = full;
                            check(held);
                        }
                    } else {
                        check((at, size, stamp));
                    }
                    receiver.try_iter().for_each(check);
                }
                drop(next);
                receiver
            }));
        }
        drop(senders);
        let left: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        for (at, size, _) in left.iter().flat_map(|receiver| receiver.try_iter()) {
            give(&allocator, at, size);
        }
        drop(over);
        trimmer.join().unwrap();
    });
    assert!(pool.is_consistent());
    let stats = pool.stats();
    assert_eq!((stats.memory.live, stats.memory.blocks, stats.refused_frees), (0, 0, 0));
    assert_eq!(stats.memory.allocations, (THREADS * rounds) as u64);
    drop(pool);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_pool_that_grows_when_warmed_refuses_until_then() {
    let mut config = config();
    config.grow = Grow::WhenWarmed;
    let (pool, budget) = pool_of(config, 64 * MIB);
    let Err(MemoryError::OutOfMemory(error)) = pool.allocate(bytes(64)) else { panic!("it grew") };
    assert!(error.tried.iter().any(|step| step.step.contains("when warmed")), "{error}");
    assert_eq!((budget.used(), pool.stats().memory.failures), (0, 1));
    pool.warm(6 * MIB).unwrap();
    let at = take(&pool.allocator(), 64).unwrap();
    give(&pool.allocator(), at, 64);
    assert!(pool.allocate(bytes(20 * MIB)).is_err(), "and gives nothing back for it either");
    assert_eq!(pool.stats().regions, 1);
}

#[test]
fn a_pool_core_is_reused_only_after_its_threads_are_notified() {
    if !has_magazines() {
        return;
    }
    let (host, faults) = support::faulty_host();
    let budget = Budget::new("pinned", 64 * MIB as u64);
    let pool = PinnedPool::new(&host, &budget, config()).unwrap();
    let at = take(&pool.allocator(), 64).unwrap();
    give(&pool.allocator(), at, 64);
    pool.trim(0).unwrap();
    faults.fail_from(SystemCall::Barrier, 1, libc::EPERM);
    drop(pool);
    // One of these reuses the core, unless it must wait. They count from zero in either case.
    let fresh: Vec<_> = (0..4).map(|_| small_pool().0).collect();
    assert!(fresh.iter().all(|pool| pool.stats().memory.frees == 0 && pool.is_consistent()));
    faults.clear();
    pool::sweep();
}

#[test]
fn a_forked_child_gets_no_memory_makes_no_pool_and_waits_for_no_lock() {
    let (pool, _budget) = small_pool();
    let allocator = pool.allocator();
    // One block that the thread's magazine would serve at once, and one that is live.
    give(&allocator, take(&allocator, 100).unwrap(), 100);
    let live = take(&allocator, 100).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        // Holds the locks of the pool and of all pools most of the time, also at a fork.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _stats = pool.stats();
                pool::sweep();
            }
        });
        for _ in 0..20 {
            // SAFETY: 1. the child uses only memory, which the C library prepares for it, and
            // leaves by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
                unsafe { libc::alarm(120) };
                let nothing = take(&allocator, 100).is_none() && take(&allocator, MIB).is_none();
                give(&allocator, live, 100);
                let told = pool.allocate(bytes(100)) == Err(MemoryError::OtherProcess)
                    && pool.trim(0) == Err(MemoryError::OtherProcess)
                    && pool.stats() == Default::default();
                let budget = Budget::new("child", MIB as u64);
                let own = PinnedPool::new(&support::host(), &budget, config());
                let refused = own.is_err_and(|error| error == MemoryError::OtherProcess);
                pool::sweep();
                let right = [nothing, told, refused].iter().position(|right| !right);
                // SAFETY: 1. ends the child.
                unsafe { libc::_exit(right.map_or(0, |wrong| 1 + wrong as i32)) };
            }
            let mut status = -1;
            // SAFETY: 1. the child belongs to this process, and the status is a local.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(
                (waited, status),
                (child, 0),
                "exit code {}, signal {}",
                status >> 8,
                status & 127
            );
        }
    });
    give(&allocator, live, 100);
    assert_eq!(pool.stats().memory.live, 0, "what the child freed was the parent's still");
}
