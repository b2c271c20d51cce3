//! What accounting of the global allocator adds to an allocation and its free.
//!
//! Bare and wrapped alternate in short rounds, so that both see the same machine; the best round of
//! each counts. Under `callgrind`, `pair COUNT ALLOCATOR SIZE` runs pairs of one kind only, to
//! count their instructions.
#![expect(unsafe_code, reason = "calls allocators by hand")]
#![expect(clippy::print_stdout, reason = "that is what it is for")]

use aquifer_core::{Tag, tagged};
use aquifer_global::{Global, Tracked, Uncounted, set_cap};
use mimalloc::MiMalloc;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    env,
    hint::black_box,
    sync::Barrier,
    thread,
    time::Instant,
};
use tikv_jemallocator::Jemalloc;

static UNCOUNTED: Global<System, Uncounted> = Global::new();
static COUNTED: Global = Global::new();
static TRACKED: Global<System, Tracked> = Global::new();
static OVER_MIMALLOC: Global<MiMalloc> = Global::over(MiMalloc);
static OVER_JEMALLOC: Global<Jemalloc> = Global::over(Jemalloc);
const PAIRS: u32 = 200_000;

type Pairs = fn(u32, Layout) -> f64;

/// Rounds of each; one where the bench is only to be seen to run, without `cargo bench`'s flag.
fn rounds() -> usize {
    if env::args().any(|arg| arg == "--bench") { 30 } else { 1 }
}

#[inline(never)]
fn pairs(allocator: &impl GlobalAlloc, count: u32, layout: Layout) -> f64 {
    let start = Instant::now();
    for _ in 0..count {
        // SAFETY: the layout has a size; the block is freed once, with its layout.
        unsafe {
            let block = black_box(allocator.alloc(black_box(layout)));
            if !block.is_null() {
                allocator.dealloc(block, layout);
            }
        }
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(count)
}

const ALL: [(&str, Pairs); 8] = [
    ("system", |count, layout| pairs(&System, count, layout)),
    ("uncounted", |count, layout| pairs(&UNCOUNTED, count, layout)),
    ("counted", |count, layout| pairs(&COUNTED, count, layout)),
    ("tracked", |count, layout| pairs(&TRACKED, count, layout)),
    ("named", |count, layout| tagged(Tag::OTHER, || pairs(&COUNTED, count, layout))),
    ("tagged", |count, layout| tagged(Tag::OTHER, || pairs(&TRACKED, count, layout))),
    ("mimalloc", |count, layout| pairs(&OVER_MIMALLOC, count, layout)),
    ("jemalloc", |count, layout| pairs(&OVER_JEMALLOC, count, layout)),
];
const BARE: [(&str, Pairs); 2] = [
    ("mimalloc", |count, layout| pairs(&MiMalloc, count, layout)),
    ("jemalloc", |count, layout| pairs(&Jemalloc, count, layout)),
];

/// The best round of each, over all threads' means.
fn compare(threads: usize, bare: Pairs, wrapped: Pairs, layout: Layout) -> (f64, f64) {
    let barrier = Barrier::new(threads);
    let each: Vec<(f64, f64)> = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut best = (f64::MAX, f64::MAX);
                    for _ in 0..rounds() {
                        barrier.wait();
                        best.0 = best.0.min(bare(PAIRS, layout));
                        barrier.wait();
                        best.1 = best.1.min(wrapped(PAIRS, layout));
                    }
                    best
                })
            })
            .collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
    });
    let count = each.len() as f64;
    (
        each.iter().map(|best| best.0).sum::<f64>() / count,
        each.iter().map(|best| best.1).sum::<f64>() / count,
    )
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).unwrap_or(Layout::new::<u64>())
}

fn main() {
    let arguments: Vec<_> = env::args().collect();
    if let [_, count, kind, size, ..] = arguments.as_slice()
        && let (Ok(count), Some((_, pairs))) =
            (count.parse(), ALL.iter().find(|(name, _)| name == kind))
    {
        println!("{:.2} ns", pairs(count, layout(size.parse().unwrap_or(64))));
        return;
    }
    let report = |what: &str, threads, bare: Pairs, wrapped: Pairs, layout| {
        let (bare, wrapped) = compare(threads, bare, wrapped, layout);
        let added = wrapped - bare;
        println!(
            "{what:<28} {threads} threads: {bare:6.2} bare {wrapped:6.2} wrapped {added:+6.2} ns a pair"
        );
    };
    for size in [64, 1024, 32 << 10] {
        for threads in [1, 2] {
            for (name, wrapped) in &ALL[1..] {
                let bare = BARE.iter().find(|(bare, _)| bare == name).unwrap_or(&ALL[0]).1;
                report(&format!("{size} B, {name}"), threads, bare, *wrapped, layout(size));
            }
        }
    }
    set_cap(1 << 40);
    report("64 B under a cap", 1, ALL[0].1, ALL[2].1, layout(64));
    set_cap(u64::MAX);
}
