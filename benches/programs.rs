//! Four programs by which allocators are compared, over `Global` and pinned memory, with mimalloc
//! and the system's allocator for comparison.
//!
//! ```text
//! cargo bench -p aquifer-benches --features peers --bench programs             with 2 threads
//! cargo bench -p aquifer-benches --features peers --bench programs -- 8 larson  one, with 8 threads
//! ```
//!
//! They are rewritten from what is published of their patterns.
//!
//! - *larson* (Larson and Krishnan, 1998): a server. A thread replaces blocks of 8 to 1,000 bytes
//!   among 5,000 at random, and hands them to its successor.
//! - *xmalloc-test* (Lever and Boreham, 2000): one half of the threads allocates blocks of 64 bytes,
//!   and the other half frees them.
//! - *cache-scratch* (Berger, 2000): each thread frees a block of 8 bytes that the first thread
//!   allocated, and then adds to blocks of its own, which must not share a cache line with
//!   another thread's.
//! - *sh6bench* (`MicroQuill`): batches of one size, mostly small, of which a half is freed in order,
//!   and the other in reverse order, some later than others.
//!
//! Times are ns a block (cache-scratch: 1,000 atomic additions), of each thread, the median of rounds in which
//! all allocators take turns. *Simulated* is pinned memory of a simulated device, whose oracle sees
//! every free.
#![expect(clippy::print_stdout, reason = "a benchmark shows what it found")]
#![expect(unsafe_code, reason = "calls allocators by hand")]

use allocator_api2::alloc::Allocator;
use aquifer::{Driver, Global, global::Counted, host::Topology, sim::Sim};
use aquifer_core::{Budget, DeviceId, random::SplitMix64};
use aquifer_host::{PinnedAllocator, PinnedConfig, PinnedPool, kernel::Kernel, region::Host};
use mimalloc::MiMalloc;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    env,
    error::Error,
    panic::resume_unwind,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
        mpsc::sync_channel,
    },
    thread,
    time::Instant,
};

/// Rounds of each program. The result is their median.
const ROUNDS: usize = 7;

/// A block and its size.
struct Block(NonNull<u8>, u32);

// SAFETY: 1. only its owner accesses the memory.
unsafe impl Send for Block {}

/// What the programs allocate from.
trait Heap: Sync {
    fn take(&self, bytes: u32) -> Block;
    fn give(&self, block: Block);
}

fn layout(bytes: u32) -> Layout {
    // SAFETY: 1. a power of two. 2. far below `isize::MAX`.
    unsafe { Layout::from_size_align_unchecked(bytes as usize, 8) }
}

/// The memory is written, as programs do.
#[expect(clippy::expect_used, reason = "there is nothing to measure without memory")]
fn used(memory: Option<NonNull<u8>>, bytes: u32) -> Block {
    let memory = memory.expect("memory");
    // SAFETY: 1. at least one byte, allocated just now.
    unsafe { memory.as_ptr().write(bytes as u8) };
    Block(memory, bytes)
}

struct Called<A>(A);

impl<A: GlobalAlloc + Sync> Heap for Called<A> {
    fn take(&self, bytes: u32) -> Block {
        // SAFETY: 1. the programs allocate no blocks of zero bytes.
        used(NonNull::new(unsafe { self.0.alloc(layout(bytes)) }), bytes)
    }

    fn give(&self, Block(memory, bytes): Block) {
        // SAFETY: 1. from `take`, with this layout, and freed once.
        unsafe { self.0.dealloc(memory.as_ptr(), layout(bytes)) };
    }
}

struct Pinned(PinnedAllocator);

impl Heap for Pinned {
    fn take(&self, bytes: u32) -> Block {
        used(self.0.allocate(layout(bytes)).ok().map(NonNull::cast), bytes)
    }

    fn give(&self, Block(memory, bytes): Block) {
        // SAFETY: 1. from `take`, with this layout, and freed once.
        unsafe { self.0.deallocate(memory, layout(bytes)) };
    }
}

/// Runs `work` on each of `threads` threads, by number. Returns the blocks of each.
fn crew(threads: usize, work: impl Fn(usize) -> u64 + Sync) -> f64 {
    let begun = Instant::now();
    let blocks: u64 = thread::scope(|scope| {
        let work = &work;
        let crew: Vec<_> = (0..threads).map(|number| scope.spawn(move || work(number))).collect();
        crew.into_iter().map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic))).sum()
    });
    begun.elapsed().as_nanos() as f64 * threads as f64 / blocks.max(1) as f64
}

fn larson(heap: &dyn Heap, threads: usize) -> f64 {
    const SUCCESSORS: u64 = 10;
    const REPLACED: u64 = 50_000;
    crew(threads, |number| {
        let mut random = SplitMix64::new(number as u64);
        let mut size = move || 8 + (random.next_u64() % 993) as u32;
        let mut blocks: Vec<_> = (0..5000).map(|_| heap.take(size())).collect();
        for successor in 0..SUCCESSORS {
            blocks = thread::scope(|scope| {
                let next = scope.spawn(|| {
                    let mut random = SplitMix64::new(successor << 32 | number as u64);
                    for _ in 0..REPLACED {
                        let place = (random.next_u64() % 5000) as usize;
                        let fresh = heap.take(8 + (random.next_u64() % 993) as u32);
                        heap.give(std::mem::replace(&mut blocks[place], fresh));
                    }
                    blocks
                });
                next.join().unwrap_or_else(|panic| resume_unwind(panic))
            });
        }
        blocks.into_iter().for_each(|block| heap.give(block));
        SUCCESSORS * REPLACED
    })
}

fn xmalloc(heap: &dyn Heap, threads: usize) -> f64 {
    const BATCHES: u64 = 2000;
    const BATCH: u64 = 256;
    crew(threads.div_ceil(2), |_| {
        let (sender, receiver) = sync_channel::<Vec<Block>>(8);
        thread::scope(|scope| {
            scope.spawn(|| receiver.into_iter().flatten().for_each(|block| heap.give(block)));
            for _ in 0..BATCHES {
                let batch = (0..BATCH).map(|_| heap.take(64)).collect();
                // The receiver is there as long as the sender, unless it has panicked.
                let Ok(()) = sender.send(batch) else { return };
            }
            drop(sender);
        });
        BATCHES * BATCH
    })
}

fn scratch(heap: &dyn Heap, threads: usize) -> f64 {
    const BLOCKS: u64 = 2000;
    let mut given: Vec<_> = (0..threads).map(|_| Some(heap.take(8))).collect();
    let given: Vec<_> = given.iter_mut().map(|one| std::sync::Mutex::new(one.take())).collect();
    crew(threads, |number| {
        if let Some(block) = given[number].lock().ok().and_then(|mut one| one.take()) {
            heap.give(block);
        }
        for _ in 0..BLOCKS {
            let block = heap.take(8);
            // SAFETY: 1. a byte of this block, which nothing else accesses meanwhile.
            let byte = unsafe { AtomicU8::from_ptr(block.0.as_ptr()) };
            for _ in 0..1000 {
                // Plain writes to a shared line are merged before they reach it.
                byte.fetch_add(1, Ordering::Relaxed);
            }
            heap.give(block);
        }
        BLOCKS
    })
}

fn sh6bench(heap: &dyn Heap, threads: usize) -> f64 {
    const TURNS: u64 = 40;
    crew(threads, |_| {
        let (mut count, mut kept) = (0, Vec::new());
        for turn in 0..TURNS {
            for size in [8, 16, 24, 32, 48, 64, 100, 128, 256, 500, 1000_u32] {
                let batch = u64::from(100_000 / (size + 50));
                let mut blocks: Vec<_> = (0..batch).map(|_| heap.take(size)).collect();
                count += batch;
                let late = blocks.split_off(blocks.len() * 3 / 4);
                let back = blocks.split_off(blocks.len() / 2);
                blocks.into_iter().for_each(|block| heap.give(block));
                back.into_iter().rev().for_each(|block| heap.give(block));
                kept.push(late);
            }
            if turn % 4 == 3 {
                kept.drain(..).flatten().for_each(|block| heap.give(block));
            }
        }
        count
    })
}

fn pool(host: &Host) -> aquifer_core::Result<PinnedPool> {
    PinnedPool::new(host, &Budget::unlimited("bench"), PinnedConfig::default())
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<_> = env::args().skip(1).filter(|word| word != "--bench").collect();
    let threads = words.iter().find_map(|word| word.parse().ok()).unwrap_or(2);
    let host = Host::new(Topology::read()?, Kernel::new());
    let sim: Arc<dyn Driver> = Sim::h200(1).symbolic().driver();
    let simulated = pool(&host.clone().with_driver(sim, DeviceId(0)))?;
    let pinned = pool(&host)?;
    let heaps: [(&str, Box<dyn Heap>); 6] = [
        ("system", Box::new(Called(System))),
        ("Global over it", Box::new(Called(Global::<System, Counted>::over(System)))),
        ("mimalloc", Box::new(Called(MiMalloc))),
        ("Global over it", Box::new(Called(Global::<MiMalloc, Counted>::over(MiMalloc)))),
        ("pinned", Box::new(Pinned(pinned.allocator()))),
        ("simulated", Box::new(Pinned(simulated.allocator()))),
    ];
    let names: Vec<_> = heaps.iter().map(|(name, _)| *name).collect();
    println!("| ns, {threads} threads | {} | adds | adds | of mimalloc |", names.join(" | "));
    println!("|---|{}", "---|".repeat(heaps.len() + 3));
    type Program = fn(&dyn Heap, usize) -> f64;
    // The first one hands out neighbours, as only fresh memory has them.
    let programs: [(&str, Program); 4] = [
        ("cache-scratch", scratch),
        ("larson", larson),
        ("xmalloc-test", xmalloc),
        ("sh6bench", sh6bench),
    ];
    let chosen: Vec<_> = words.iter().filter(|word| word.parse::<usize>().is_err()).collect();
    if let Some(unknown) = chosen.iter().find(|word| programs.iter().all(|(name, _)| name != *word))
    {
        return Err(format!("no program {unknown}").into());
    }
    for (name, program) in programs {
        if !chosen.is_empty() && chosen.iter().all(|word| *word != name) {
            continue;
        }
        let mut times = vec![Vec::new(); heaps.len()];
        for _ in 0..ROUNDS {
            for ((_, heap), times) in heaps.iter().zip(&mut times) {
                times.push(program(&**heap, threads));
            }
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[ROUNDS / 2]
        };
        let found: Vec<_> = times.iter_mut().map(median).collect();
        let cells: Vec<_> = found.iter().map(|ns| format!("{ns:.1}")).collect();
        let adds = [found[1] - found[0], found[3] - found[2]];
        let of = found[4] / found[2];
        println!("| {name} | {} | {:.1} | {:.1} | {of:.2} |", cells.join(" | "), adds[0], adds[1]);
    }
    Ok(())
}
