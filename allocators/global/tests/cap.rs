//! The cap holds: never exceeded, exact for one thread, and answered with null.
//!
//! A binary without a test harness: it counts what the process allocates, so nothing else may.

use aquifer_global::{Global, cap, set_cap, stats};
use std::{
    hint::black_box,
    panic::{set_hook, take_hook},
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

#[global_allocator]
static GLOBAL: Global = Global::new();

/// The most that another thread can hold as change.
const CHANGE: u64 = 128 << 10;

fn main() {
    assert_eq!(cap(), u64::MAX);
    // A backtrace needs memory.
    let report = take_hook();
    set_hook(Box::new(move |info| {
        set_cap(u64::MAX);
        report(info);
    }));
    let _warm = thread::spawn(|| black_box(vec![0u8; 10]).len()).join();

    one_thread_gets_its_cap_to_the_byte();
    growth_and_zeroed_memory_are_capped_too();
    a_cap_below_what_is_live_refuses_until_enough_is_freed();
    change_taken_before_does_not_serve_under_a_lower_cap();
    what_one_thread_frees_another_can_have();
    no_thread_ever_passes_it();
}

fn reserve(bytes: usize) -> Option<Vec<u8>> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(bytes).ok().map(|()| vector)
}

fn one_thread_gets_its_cap_to_the_byte() {
    for room in [1usize, 1000, 65_536, 65_537, 200_000, 10 << 20] {
        let before = stats();
        assert_eq!(set_cap(before.live + room as u64), 0);
        assert!(reserve(room + 1).is_none());
        let all = reserve(room);
        assert!(all.is_some());
        assert_eq!(stats().live, cap());
        assert!(reserve(1).is_none());
        drop(all);
        // And again from what was freed, bit by bit.
        let mut bits = Vec::new();
        set_cap(u64::MAX);
        bits.reserve_exact(room / 100 + 2);
        let before_bits = stats().live;
        set_cap(before_bits + room as u64);
        let mut left = room;
        while left > 0 {
            let bit = left.min(100);
            let Some(vector) = reserve(bit) else { break };
            bits.push(vector);
            left -= bit;
        }
        assert_eq!(left, 0, "of {room}");
        assert!(reserve(1).is_none());
        assert_eq!(stats().live, cap());
        assert_eq!(stats().refusals - before.refusals, 3);
        set_cap(u64::MAX);
        assert_eq!(stats().live, before_bits + room as u64);
    }
}

fn growth_and_zeroed_memory_are_capped_too() {
    let mut vector = vec![5u8; 1000];
    let before = stats();
    set_cap(before.live + 1000);
    assert!(vector.try_reserve_exact(2001).is_err());
    assert!(vector.iter().all(|&byte| byte == 5));
    assert_eq!(stats().live, before.live, "a refusal changes nothing");
    assert!(vector.try_reserve_exact(1000).is_ok());
    assert!(reserve(1).is_none());
    vector.shrink_to_fit();
    assert!(reserve(1000).is_some());
    set_cap(u64::MAX);
}

fn a_cap_below_what_is_live_refuses_until_enough_is_freed() {
    let (first, second) = (vec![1u8; 3 << 20], vec![1u8; 2 << 20]);
    let mut bits: Vec<_> = (0..100).map(|_| vec![1u8; 100]).collect();
    let live = stats().live;
    assert_eq!(set_cap(live - (4 << 20)), 4 << 20);
    assert!(reserve(1).is_none());
    drop(first);
    assert!(reserve(1).is_none(), "one MiB too much is live");
    // Nor is what a thread frees bit by bit its own to reuse before that.
    let mut refused = 0;
    for round in 0..100 {
        bits.pop();
        refused += u32::from(reserve(100 + round % 2).is_none());
    }
    assert_eq!(refused, 100);
    drop(second);
    bits.clear();
    set_cap(stats().live + (1 << 20));
    assert!(reserve(1 << 20).is_some());
    assert!(reserve((1 << 20) + 1).is_none());
    set_cap(u64::MAX);
}

fn change_taken_before_does_not_serve_under_a_lower_cap() {
    let (ready, go) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|threads| {
        let other = threads.spawn(|| {
            // Leaves the thread with change.
            drop(black_box(vec![0u8; 60_000]));
            ready.wait();
            go.wait();
            reserve(1).is_none()
        });
        ready.wait();
        set_cap(stats().live);
        go.wait();
        let refused = other.join();
        set_cap(u64::MAX);
        assert_eq!(refused.ok(), Some(true));
    });
}

fn what_one_thread_frees_another_can_have() {
    let block = vec![1u8; 8 << 20];
    set_cap(stats().live + CHANGE);
    thread::scope(|threads| {
        let freed = threads.spawn(move || drop(block)).join();
        assert!(freed.is_ok());
    });
    let again = reserve(8 << 20);
    assert!(again.is_some());
    set_cap(u64::MAX);
}

fn no_thread_ever_passes_it() {
    const THREADS: u64 = 4;
    const ROOM: u64 = 4 << 20;
    // Counted by the threads themselves, and so never more than what is really live.
    static HELD: AtomicU64 = AtomicU64::new(0);
    let served = AtomicU64::new(0);
    // Three times: when the threads and their lists are there, when the cap is set, and when all
    // are done. In between only the blocks below are allocated, and nothing else is freed.
    let ready = Barrier::new(THREADS as usize + 1);
    thread::scope(|threads| {
        let mut lists: Vec<Vec<Vec<u8>>> = (0..THREADS).map(|_| Vec::with_capacity(1000)).collect();
        for (seed, list) in lists.drain(..).enumerate() {
            let (ready, served) = (&ready, &served);
            threads.spawn(move || {
                let mut list = list;
                ready.wait();
                ready.wait();
                for round in 0..20_000usize {
                    let bytes = (round * 7919 + seed * 104_729) % 40_000 + 1;
                    match reserve(bytes) {
                        Some(vector) if list.len() < 1000 => {
                            served.fetch_add(1, Ordering::Relaxed);
                            let held =
                                HELD.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
                            assert!(held <= ROOM, "{held} bytes under a cap of {ROOM}");
                            list.push(vector);
                        }
                        _ => {
                            for vector in list.drain(..) {
                                HELD.fetch_sub(vector.capacity() as u64, Ordering::Relaxed);
                                drop(vector);
                            }
                        }
                    }
                }
                ready.wait();
            });
        }
        ready.wait();
        set_cap(stats().live + ROOM);
        ready.wait();
        ready.wait();
    });
    assert!(stats().refusals > 0 && served.load(Ordering::Relaxed) > 1000);
    set_cap(u64::MAX);
}
