//! What accounting adds to an allocation and its free.
//!
//! Bare and wrapped alternate in short rounds, so that both see the same machine; the best round of each counts.
#![expect(unsafe_code, reason = "calls allocators by hand")]
#![expect(clippy::print_stdout, reason = "that is what it is for")]

use aquifer_core::{Tag, tagged};
use aquifer_global::{Global, set_cap};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    env,
    hint::black_box,
    sync::Barrier,
    thread,
    time::Instant,
};

static WRAPPED: Global = Global::new();
const PAIRS: u32 = 200_000;

/// Rounds of each; one where the bench is only to be seen to run, without `cargo bench`'s flag.
fn rounds() -> usize {
    if env::args().any(|arg| arg == "--bench") { 30 } else { 1 }
}

fn pairs(allocator: &impl GlobalAlloc, layout: Layout) -> f64 {
    let start = Instant::now();
    for _ in 0..PAIRS {
        // SAFETY: the layout has a size; the block is freed once, with its layout.
        unsafe {
            let block = black_box(allocator.alloc(black_box(layout)));
            if !block.is_null() {
                allocator.dealloc(block, layout);
            }
        }
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
}

/// The best round of each, over all threads' means.
fn compare(threads: usize, layout: Layout) -> (f64, f64) {
    let barrier = Barrier::new(threads);
    let each: Vec<(f64, f64)> = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut best = (f64::MAX, f64::MAX);
                    for _ in 0..rounds() {
                        barrier.wait();
                        best.0 = best.0.min(pairs(&System, layout));
                        barrier.wait();
                        best.1 = best.1.min(pairs(&WRAPPED, layout));
                    }
                    best
                })
            })
            .collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
    });
    let count = each.len() as f64;
    (each.iter().map(|best| best.0).sum::<f64>() / count, each.iter().map(|best| best.1).sum::<f64>() / count)
}

fn main() {
    let report = |what: &str, threads, layout| {
        let (bare, wrapped) = compare(threads, layout);
        let added = wrapped - bare;
        println!(
            "{what:<28} {threads} threads: {bare:6.2} bare {wrapped:6.2} wrapped {added:+6.2} ns a pair"
        );
    };
    for size in [64, 1024, 32 << 10] {
        let layout = Layout::from_size_align(size, 8).unwrap_or(Layout::new::<u64>());
        for threads in [1, 2] {
            report(&format!("{size} B"), threads, layout);
        }
    }
    let layout = Layout::new::<[u8; 64]>();
    set_cap(1 << 40);
    report("64 B under a cap", 1, layout);
    set_cap(u64::MAX);
    let bench = Tag::named("bench");
    let tagged_pairs =
        (0..rounds()).map(|_| tagged(bench, || pairs(&WRAPPED, layout))).fold(f64::MAX, f64::min);
    println!("64 B under a tag             1 thread: {tagged_pairs:6.2} wrapped");
}
