//! The account is exact to the byte, for any thread that allocates or frees.
//!
//! A binary without a test harness: it counts what the process allocates, so nothing else may.
#![expect(unsafe_code, reason = "an allocator that fails on command; `fork`")]
#![expect(clippy::unwrap_used, reason = "a test, though not in a harness")]

use aquifer_core::{Tag, tagged};
use aquifer_global::{Global, Stats, allocated_under, is_installed, reset_peak, stats};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::RefCell,
    hint::black_box,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// The system's allocator, which fails on command.
struct Flaky;

static FAIL: AtomicBool = AtomicBool::new(false);

// SAFETY: the system's blocks, or none.
unsafe impl GlobalAlloc for Flaky {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if FAIL.load(Ordering::Relaxed) {
            std::ptr::null_mut()
        } else {
            // SAFETY: the caller's promise.
            unsafe { System.alloc(layout) }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) };
    }
}

#[global_allocator]
static GLOBAL: Global<Flaky> = Global::over(Flaky);

fn main() {
    assert!(is_installed());
    // Whatever the standard library keeps for good it has after this.
    let _warm = thread::spawn(|| black_box(vec![0u8; 10]).len()).join();

    every_size_counts_as_it_was_asked_for();
    a_failure_below_changes_nothing();
    totals_are_exact_when_threads_have_ended();
    a_block_may_be_freed_by_another_thread();
    destructors_of_thread_locals_are_counted();
    the_peak_is_never_below_the_truth_and_little_above();
    tags_count_what_is_allocated_under_them();
    a_forked_child_goes_on_counting();
}

/// Runs `work` on threads of their own and waits until they have ended: the end of a scope alone
/// waits for the work, and not for what the standard library frees behind it.
fn together<R: Send>(threads: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (0..threads).map(|seed| scope.spawn(move || work(seed))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What changed since `before`.
fn since(before: &Stats) -> (i64, u64, u64) {
    let now = stats();
    let live = i64::try_from(now.live).unwrap() - i64::try_from(before.live).unwrap();
    (live, now.allocations - before.allocations, now.frees - before.frees)
}

fn every_size_counts_as_it_was_asked_for() {
    for size in [1usize, 7, 64, 4096, 65_535, 65_536, 65_537, 131_072, 131_073, 1 << 20, 3 << 20] {
        let before = stats();
        let mut vector = Vec::<u8>::with_capacity(size);
        assert_eq!(since(&before), (size as i64, 1, 0));
        vector.reserve_exact(2 * size);
        assert_eq!(since(&before), (2 * size as i64, 1, 0), "growth is no allocation");
        vector.push(1);
        vector.shrink_to_fit();
        assert_eq!(since(&before), (1, 1, 0));
        let zeroed = vec![0u64; size];
        assert_eq!(since(&before), (1 + 8 * size as i64, 2, 0));
        drop(black_box((vector, zeroed)));
        assert_eq!(since(&before), (0, 2, 2));
    }
}

fn a_failure_below_changes_nothing() {
    let mut kept = vec![7u8; 100];
    let before = stats();
    for size in [10usize, 100_000, 10 << 20] {
        let mut vector = Vec::<u8>::new();
        FAIL.store(true, Ordering::Relaxed);
        let (fresh, grown) = (vector.try_reserve_exact(size), kept.try_reserve_exact(size));
        FAIL.store(false, Ordering::Relaxed);
        assert!(fresh.is_err() && grown.is_err());
        assert_eq!(since(&before), (0, 0, 0));
        assert!(kept.iter().all(|&byte| byte == 7));
    }
}

fn totals_are_exact_when_threads_have_ended() {
    let kept = Mutex::new(Vec::with_capacity(100));
    let before = stats();
    together(8, |seed| {
        let mut live = Vec::with_capacity(64);
        for round in 0..3000usize {
            live.push(vec![seed as u8; (round * 7919 + seed * 104_729) % 5000 + 1]);
            if live.len() == 64 {
                live.drain(..round % 60);
            }
        }
        kept.lock().unwrap().push(vec![1u8; 1000 + seed]);
    });
    assert_eq!(since(&before).0, (0..8).map(|seed| 1000 + seed).sum::<i64>());
    drop(std::mem::take(&mut *kept.lock().unwrap()));
    let (live, allocations, frees) = since(&before);
    // The list of what was kept was there before.
    assert_eq!((live, frees - allocations), (-100 * 24, 1));
}

fn a_block_may_be_freed_by_another_thread() {
    let before = stats();
    for _ in 0..50 {
        let blocks: Vec<_> = (0..100).map(|size| vec![1u8; size * 100 + 1]).collect();
        thread::spawn(move || drop(blocks)).join().unwrap();
    }
    assert_eq!(since(&before).0, 0);
    let made = thread::spawn(|| (0..100).map(|size| vec![1u8; size * 100 + 1]).collect::<Vec<_>>())
        .join()
        .unwrap();
    drop(made);
    assert_eq!(since(&before).0, 0);
}

static LEFT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Allocates and frees in its destructor, after and before the thread's own state has been given
/// back, and leaves a block behind.
struct Late(RefCell<Vec<u8>>, usize);

impl Drop for Late {
    fn drop(&mut self) {
        self.0.borrow_mut().resize(10_000, 1);
        drop(black_box(vec![0u8; 200_000]));
        LEFT.lock().unwrap().push(vec![3u8; self.1]);
    }
}

thread_local! {
    static EARLY: Late = const { Late(RefCell::new(Vec::new()), 1000) };
    static LATE: Late = Late(RefCell::new(vec![1; 300]), 2000);
}

fn destructors_of_thread_locals_are_counted() {
    LEFT.lock().unwrap().reserve(16);
    let before = stats();
    for _ in 0..4 {
        thread::spawn(|| {
            // Registered at once, or after the thread has allocated: destroyed in the other order.
            EARLY.with(|early| early.0.borrow_mut().push(1));
            drop(black_box(vec![0u8; 100]));
            LATE.with(|late| late.0.borrow_mut().push(1));
        })
        .join()
        .unwrap();
    }
    assert_eq!(LEFT.lock().unwrap().len(), 8);
    assert_eq!(since(&before).0, 4 * (1000 + 2000));
    LEFT.lock().unwrap().clear();
    assert_eq!(since(&before).0, 0);
}

fn the_peak_is_never_below_the_truth_and_little_above() {
    const CHANGE: u64 = 128 << 10;
    reset_peak();
    let before = stats();
    assert!(before.peak >= before.live && before.peak - before.live <= 2 * CHANGE);
    drop(black_box(vec![1u8; 50 << 20]));
    let peak = stats().peak - before.live;
    assert!((50 << 20..=(50 << 20) + 2 * CHANGE).contains(&peak), "{peak}");
    drop(black_box(vec![1u8; 10 << 20]));
    assert_eq!(stats().peak - before.live, peak, "a lower one changes nothing");
    reset_peak();
    assert!(stats().peak - before.live <= 2 * CHANGE);
    together(4, |_| {
        for round in 0..1000usize {
            drop(black_box(vec![0u8; round * 10 + 1]));
        }
    });
    assert!(stats().peak - before.live <= 6 * CHANGE + 4 * 10_000 + 10_000);
}

fn tags_count_what_is_allocated_under_them() {
    let (parse, render) = (Tag::named("parse"), Tag::named("render"));
    let before = allocated_under(parse);
    assert_eq!(before.bytes, 0);
    tagged(parse, || {
        let mut list = Vec::<u8>::with_capacity(1000);
        list.reserve_exact(1500);
        tagged(render, || drop(black_box(vec![0u8; 77])));
        drop(black_box(list));
    });
    drop(black_box(vec![0u8; 5000]));
    let (parsed, rendered) = (allocated_under(parse), allocated_under(render));
    assert_eq!((parsed.bytes, parsed.allocations), (1500, 1));
    assert_eq!((rendered.bytes, rendered.allocations), (77, 1));
    assert_eq!(allocated_under(Tag::NONE).bytes, 0);
    together(4, |_| tagged(render, || (0..100).for_each(|_| drop(black_box(vec![0u8; 10])))));
    assert_eq!(allocated_under(render).bytes, 77 + 4 * 1000);
}

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

#[cfg(target_os = "linux")]
fn a_forked_child_goes_on_counting() {
    // Other threads hold change and are not there in the child.
    let before = stats();
    let (ready, go) = (Barrier::new(3), Barrier::new(3));
    let others = || {
        drop(black_box(vec![0u8; 1000]));
        ready.wait();
        go.wait();
    };
    let parent = || {
        ready.wait();
        let kept = vec![1u8; 12_345];
        let during = stats();
        // SAFETY: the child uses the allocator under test, which takes no lock, and leaves by
        // `_exit`.
        let child = unsafe { fork() };
        if child == 0 {
            drop(kept);
            let fresh = black_box(vec![1u8; 100_000]);
            let right = stats().live == during.live - 12_345 + 100_000;
            drop(fresh);
            let right = right && stats().live == during.live - 12_345;
            // SAFETY: ends the child.
            unsafe { _exit(if right { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and the status a local.
        let waited = unsafe { waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0), "the child counted right");
        assert_eq!(stats().live, during.live, "and its parent did not notice");
        go.wait();
    };
    together(3, |seed| if seed == 0 { parent() } else { others() });
    assert_eq!(since(&before).0, 0);
}

#[cfg(not(target_os = "linux"))]
fn a_forked_child_goes_on_counting() {}
