//! Sampled call stacks name who holds memory, stand for about as much as is held, and end with
//! their blocks.
//!
//! A binary without a test harness: what the process allocates is what is sampled.
#![expect(clippy::unwrap_used, reason = "a test, though not in a harness")]

use aquifer_core::{Tag, tagged};
use aquifer_global::{Global, Stack, Tracked, held_under, sample_every, stacks, stats};
use std::{alloc::System, hint::black_box, thread};

#[global_allocator]
static GLOBAL: Global<System, Tracked> = Global::new();

const MIB: u64 = 1 << 20;

fn main() {
    assert!(stacks(10).is_empty());
    sample_every(64 << 10);
    // Threads look again after a MiB.
    drop(black_box(vec![0u8; 2 << 20]));

    estimates_are_near_the_truth_whatever_the_sizes();
    stacks_name_their_functions();
    a_report_asks_for_less_than_there_are_places();
    a_sampled_block_keeps_its_tag_and_is_forgotten_when_it_ends();
    threads_sample_and_report_at_once();
    a_walk_below_a_printed_backtrace_waits_for_nothing();
    nothing_is_sampled_once_it_is_switched_off();
}

#[inline(never)]
fn holds_small_blocks() -> Vec<Vec<u8>> {
    (0..100_000).map(|_| vec![1u8; 100]).collect()
}

#[inline(never)]
fn holds_large_blocks() -> Vec<Vec<u8>> {
    (0..20).map(|_| vec![1u8; 1 << 20]).collect()
}

fn total() -> u64 {
    stacks(usize::MAX).iter().map(|stack| stack.live).sum()
}

fn estimates_are_near_the_truth_whatever_the_sizes() {
    let live = stats().live;
    let (small, large) = (holds_small_blocks(), holds_large_blocks());
    let held = stats().live - live;
    let estimate = total();
    // 9.5 MiB in small blocks are 153 samples, so a fortieth is one deviation of the whole, and ten
    // of them still leave the large blocks first.
    assert!((held * 3 / 4..held * 5 / 4).contains(&estimate), "{estimate} of {held}");
    let all = stacks(usize::MAX);
    assert!(all.is_sorted_by_key(|stack| std::cmp::Reverse(stack.live)));
    assert!(
        all[0].live >= 19 * MIB && all[0].blocks == 20,
        "large blocks are all sampled: {:?}",
        all[0]
    );
    assert_eq!(all[0].sampled, 20 * MIB);
    drop((small, large));
    assert!(total() < MIB, "{} after all is free", total());
}

fn stacks_name_their_functions() {
    let large = holds_large_blocks();
    let named = stacks(1)[0].to_string();
    let first = named.lines().nth(1).unwrap_or_default();
    assert!(
        named.contains("holds_large_blocks") && named.contains("stacks_name_their_functions"),
        "{named}"
    );
    assert!(!first.contains("aquifer_global") && !first.contains("__rust"), "{named}");
    drop(large);
}

/// A block whose stack is so much deeper than its caller's.
#[inline(never)]
fn holds_at_depth(depth: usize) -> Vec<u8> {
    match depth {
        0 => vec![1u8; 1 << 20],
        _ => black_box(holds_at_depth(depth - 1)),
    }
}

fn a_report_asks_for_less_than_there_are_places() {
    // A stack is cut after 40 frames, so the deepest calls are one place. The standard library
    // takes 16 frames of a stack where it is optimised, and 23 where it is not.
    let held: Vec<_> = (0..20).map(holds_at_depth).collect();
    let places = stacks(usize::MAX).len() as u64;
    let before = stats().allocations;
    assert_eq!(stacks(1).len(), 1);
    let asked = stats().allocations - before;
    assert!(places >= 15 && asked < places, "{asked} allocations to tell one of {places} places");
    drop(held);
}

fn a_sampled_block_keeps_its_tag_and_is_forgotten_when_it_ends() {
    let tag = Tag::named("sampled");
    let mut block = tagged(tag, || vec![1u8; 8 << 20]);
    assert_eq!(held_under(tag).unwrap().live, 8 * MIB);
    block.reserve_exact(16 << 20);
    let whole = block.capacity() as u64;
    assert_eq!((held_under(tag).unwrap().live, held_under(tag).unwrap().blocks), (whole, 1));
    let now = stacks(1)[0].sampled;
    assert_eq!(now, whole, "it counts with its new size, and no longer with the one before");
    block.shrink_to_fit();
    thread::spawn(move || drop(block)).join().unwrap();
    assert_eq!((held_under(tag).unwrap().live, held_under(tag).unwrap().blocks), (0, 0));
    assert!(total() < MIB);
}

fn threads_sample_and_report_at_once() {
    let live = stats().live;
    thread::scope(|threads| {
        for seed in 0..4usize {
            threads.spawn(move || {
                let mut held = Vec::new();
                for round in 0..3000usize {
                    held.push(vec![1u8; (round * 7919 + seed) % 50_000 + 1]);
                    if held.len() == 50 {
                        held.drain(..round % 50);
                    }
                }
            });
        }
        threads.spawn(|| {
            for _ in 0..30 {
                assert!(
                    stacks(5).iter().map(Stack::to_string).all(|text| text.contains("sampled"))
                );
            }
        });
    });
    let left = stats().live.saturating_sub(live);
    assert!(total() < left + MIB, "{} of {left}", total());
}

/// std holds its lock of backtraces while it prints one, which allocates.
fn a_walk_below_a_printed_backtrace_waits_for_nothing() {
    sample_every(64);
    drop(black_box(vec![0u8; 2 << 20]));
    let text = std::backtrace::Backtrace::force_capture().to_string();
    assert!(text.contains("a_walk_below"));
    sample_every(64 << 10);
    drop(black_box(vec![0u8; 2 << 20]));
}

fn nothing_is_sampled_once_it_is_switched_off() {
    sample_every(0);
    drop(black_box(vec![0u8; 2 << 20]));
    // What std keeps to name functions was sampled before.
    let before = total();
    let large = holds_large_blocks();
    assert!(total() <= before, "{} after {before}", total());
    drop(large);
}
