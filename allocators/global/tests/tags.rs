//! The bytes of each tag are exact, whichever thread frees or grows a block and whichever
//! allocator serves it.
//!
//! A binary without a test harness: it counts what the process allocates, so nothing else may.
#![expect(unsafe_code, reason = "an allocator that keeps books; a route")]
#![expect(clippy::unwrap_used, reason = "a test, though not in a harness")]

use aquifer_core::{Tag, impl_allocator, tagged};
use aquifer_global::{
    Global, Held, Over, Tracked, allocated_under, capture, held_under, register, reset_peak, route,
    set_cap, stats, top,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::RefCell,
    hint::black_box,
    ptr::NonNull,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

/// The system's allocator, which counts what it is asked for, fails on command, and hands out dirt.
struct Books;

static LIVE: AtomicU64 = AtomicU64::new(0);
static ZEROED: AtomicU64 = AtomicU64::new(0);
static REALLOCATED: AtomicU64 = AtomicU64::new(0);
static FAIL: AtomicBool = AtomicBool::new(false);

// SAFETY: the system's blocks, or none.
unsafe impl GlobalAlloc for Books {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if FAIL.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        let block = unsafe { System.alloc(layout) };
        // SAFETY: the block has that many bytes.
        unsafe { block.write_bytes(0xA5, layout.size()) };
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        ZEROED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if FAIL.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        LIVE.fetch_add(new_size as u64, Ordering::Relaxed);
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        REALLOCATED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(block, layout, new_size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) };
    }
}

#[global_allocator]
static GLOBAL: Global<Books, Tracked> = Global::over(Books);

fn main() {
    // Whatever the standard library keeps for good it has after this.
    let _warm = thread::spawn(|| black_box(vec![0u8; 10]).len()).join();

    blocks_keep_their_tag_as_they_grow_shrink_and_end_anywhere();
    every_alignment_and_size_has_room_for_its_note();
    what_is_refused_changes_nothing();
    zeroed_and_realloc_are_forwarded();
    more_tags_than_cells_are_exact_over_threads();
    thread_local_destructors_count_under_the_right_tag();
    routed_blocks_count_too();
    peaks_are_never_below_the_truth_and_little_above();
    the_largest_come_first();
    a_context_carries_tags_and_routes_to_other_threads();
    the_sum_over_all_tags_is_the_whole();
}

fn held(tag: Tag) -> Held {
    held_under(tag).unwrap()
}

fn bytes_and_blocks(tag: Tag) -> (u64, u64) {
    (held(tag).live, held(tag).blocks)
}

fn blocks_keep_their_tag_as_they_grow_shrink_and_end_anywhere() {
    let (parse, render) = (Tag::named("parse"), Tag::named("render"));
    let before = stats();
    let mut list = tagged(parse, || Vec::<u8>::with_capacity(1000));
    assert_eq!(bytes_and_blocks(parse), (1000, 1));
    tagged(render, || list.reserve_exact(5000));
    assert_eq!((bytes_and_blocks(parse), bytes_and_blocks(render)), ((5000, 1), (0, 0)));
    list.extend_from_slice(&[1; 300]);
    thread::scope(|threads| threads.spawn(|| list.shrink_to_fit()).join().unwrap());
    assert_eq!(bytes_and_blocks(parse), (300, 1));
    assert_eq!(stats().live - before.live, 300, "notes are not the program's bytes");
    let boxed = list.into_boxed_slice();
    thread::spawn(move || tagged(render, || drop(boxed))).join().unwrap();
    assert_eq!((bytes_and_blocks(parse), bytes_and_blocks(render)), ((0, 0), (0, 0)));
    assert_eq!((allocated_under(parse).bytes, allocated_under(parse).allocations), (5000, 1));
    assert_eq!(stats().live, before.live);
}

fn every_alignment_and_size_has_room_for_its_note() {
    let tag = Tag::named("aligned");
    let mut blocks = Vec::new();
    let (mut bytes, below) = (0, stats().live);
    blocks.reserve(14 * 40);
    let own = stats().live - below;
    let lower = LIVE.load(Ordering::Relaxed);
    for shift in 0..14 {
        for size in 1..=40usize {
            let layout = Layout::from_size_align(size * 7, 1 << shift).unwrap();
            // SAFETY: the layout has a size.
            let block = tagged(tag, || unsafe { std::alloc::alloc(layout) });
            assert!(!block.is_null() && block.addr().is_multiple_of(layout.align()));
            // SAFETY: the block has that many bytes.
            unsafe { block.write_bytes(0xFF, layout.size()) };
            bytes += layout.size() as u64;
            blocks.push((block, layout));
        }
    }
    assert_eq!(bytes_and_blocks(tag), (bytes, blocks.len() as u64));
    assert_eq!(stats().live - below - own, bytes);
    assert_eq!(
        LIVE.load(Ordering::Relaxed) - lower,
        bytes + 2 * blocks.len() as u64,
        "two bytes behind each"
    );
    for (block, layout) in blocks {
        // SAFETY: the block is live, and of this layout.
        unsafe { std::alloc::dealloc(block, layout) };
    }
    assert_eq!(bytes_and_blocks(tag), (0, 0));
    // No room for the note, where there is none.
    let layout = Layout::from_size_align(isize::MAX as usize, 1).unwrap();
    // SAFETY: the layout has a size.
    assert!(black_box(unsafe { std::alloc::alloc(black_box(layout)) }).is_null());
}

fn what_is_refused_changes_nothing() {
    let tag = Tag::named("refused");
    let mut list = tagged(tag, || vec![7u8; 100]);
    // The first cap allocates, to see whether it holds.
    set_cap(u64::MAX - 1);
    set_cap(u64::MAX);
    let before = (held(tag), stats().live, stats().allocations);
    FAIL.store(true, Ordering::Relaxed);
    let below =
        (tagged(tag, || Vec::<u8>::new().try_reserve_exact(50)), list.try_reserve_exact(1000));
    FAIL.store(false, Ordering::Relaxed);
    set_cap(stats().live + 100);
    let above = (
        tagged(tag, || Vec::<u8>::new().try_reserve_exact(1 << 20)),
        list.try_reserve_exact(1 << 20),
    );
    set_cap(u64::MAX);
    assert!(below.0.is_err() && below.1.is_err() && above.0.is_err() && above.1.is_err());
    assert_eq!((held(tag).live, held(tag).blocks), (before.0.live, before.0.blocks));
    assert_eq!((stats().live, stats().allocations), (before.1, before.2));
    assert!(list.iter().all(|&byte| byte == 7));
    drop(list);
    assert_eq!(bytes_and_blocks(tag), (0, 0));
}

fn zeroed_and_realloc_are_forwarded() {
    let before = (ZEROED.load(Ordering::Relaxed), REALLOCATED.load(Ordering::Relaxed));
    let mut zeroed = black_box(vec![0u8; 100_000]);
    assert_eq!(ZEROED.load(Ordering::Relaxed), before.0 + 1);
    assert!(zeroed.iter().all(|&byte| byte == 0));
    zeroed.reserve_exact(200_000);
    zeroed.shrink_to_fit();
    assert_eq!(REALLOCATED.load(Ordering::Relaxed), before.1 + 2);
    assert!(zeroed.iter().all(|&byte| byte == 0));
}

fn more_tags_than_cells_are_exact_over_threads() {
    const THREADS: usize = 6;
    let tags: Vec<_> = (0..40).map(|n| Tag::named(&format!("many {n}"))).collect();
    let exchange: Vec<Mutex<Vec<Vec<u8>>>> = (0..THREADS).map(|_| Mutex::default()).collect();
    thread::scope(|threads| {
        let running = (0..THREADS).map(|seed| {
            let (tags, exchange) = (&tags, &exchange);
            threads.spawn(move || {
                let mut state = seed as u64 * 2654435761 + 1;
                for _ in 0..4000 {
                    state =
                        state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let tag = tags[(state >> 33) as usize % tags.len()];
                    let size = (state >> 40) as usize % 3000 + 1;
                    let mut block = tagged(tag, || vec![1u8; size]);
                    if state >> 60 & 1 == 0 {
                        block.reserve_exact(size * 2);
                    }
                    let to = (state >> 50) as usize % THREADS;
                    let mut queue = exchange[to].lock().unwrap();
                    queue.push(block);
                    let taken =
                        if queue.len() > 20 { queue.drain(..10).collect() } else { Vec::new() };
                    drop(queue);
                    drop(taken);
                }
            })
        });
        // The end of a scope alone waits for the work, and not for what the standard library frees
        // behind it.
        let running: Vec<_> = running.collect();
        running.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let left: u64 = exchange.iter().map(|queue| queue.lock().unwrap().len() as u64).sum();
    let bytes: u64 = exchange
        .iter()
        .flat_map(|queue| {
            queue.lock().unwrap().iter().map(|b| b.capacity() as u64).collect::<Vec<_>>()
        })
        .sum();
    let total = |what: fn(&Held) -> u64| tags.iter().map(|&tag| what(&held(tag))).sum::<u64>();
    assert_eq!((total(|held| held.blocks), total(|held| held.live)), (left, bytes));
    assert_eq!(
        tags.iter().map(|&tag| allocated_under(tag).allocations).sum::<u64>(),
        THREADS as u64 * 4000
    );
    drop(exchange);
    assert!(tags.iter().all(|&tag| bytes_and_blocks(tag) == (0, 0)));
}

static LEFT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

struct Late(RefCell<Vec<u8>>);

impl Drop for Late {
    fn drop(&mut self) {
        let tag = Tag::named("late");
        tagged(tag, || self.0.borrow_mut().resize(10_000, 1));
        LEFT.lock().unwrap().push(tagged(tag, || vec![3u8; 500]));
    }
}

thread_local! {
    static EARLY: Late = const { Late(RefCell::new(Vec::new())) };
}

fn thread_local_destructors_count_under_the_right_tag() {
    let tag = Tag::named("late");
    LEFT.lock().unwrap().reserve(16);
    for _ in 0..4 {
        thread::spawn(|| {
            EARLY.with(|early| drop(early.0.borrow_mut()));
            drop(black_box(vec![0u8; 100]));
        })
        .join()
        .unwrap();
    }
    assert_eq!(bytes_and_blocks(tag), (4 * 500, 4));
    LEFT.lock().unwrap().clear();
    assert_eq!(bytes_and_blocks(tag), (0, 0));
}

/// Serves from its own bytes, upwards, and counts what is live.
struct Strip {
    start: NonNull<u8>,
    used: Mutex<(usize, u64)>,
}

const STRIP: usize = 1 << 20;

// SAFETY: the bytes behind the pointer belong to the caller that requested them.
unsafe impl Send for Strip {}
// SAFETY: the rest is a lock.
unsafe impl Sync for Strip {}

impl_allocator! {
    // SAFETY: blocks are cut off one after another.
    unsafe impl ['s] for &'s Strip {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let mut used = self.used.lock().map_err(|_| AllocError)?;
            let at = used.0.next_multiple_of(layout.align());
            if at + layout.size() > STRIP {
                return Err(AllocError);
            }
            *used = (at + layout.size(), used.1 + layout.size() as u64);
            // SAFETY: the offset lies in the strip.
            Ok(NonNull::slice_from_raw_parts(unsafe { self.start.add(at) }, layout.size()))
        }

        unsafe fn deallocate(&self, _block: NonNull<u8>, layout: Layout) {
            if let Ok(mut used) = self.used.lock() {
                used.1 -= layout.size() as u64;
            }
        }
    }
}

fn strip() -> (&'static Strip, aquifer_global::RouteId) {
    let start = NonNull::from(vec![0xEEu8; STRIP].leak()).cast();
    let strip: &'static Strip = Box::leak(Box::new(Strip { start, used: Mutex::default() }));
    let window = strip.start.addr().get()..strip.start.addr().get() + STRIP;
    // SAFETY: 1. The strip's blocks lie in its window and no other allocator's do. 2. A lock works
    // at any time.
    let over = Box::leak(Box::new(unsafe { Over::new(strip, window) }));
    (strip, register(over).unwrap())
}

fn routed_blocks_count_too() {
    let (strip, to) = strip();
    let tag = Tag::named("routed");
    let before = stats();
    let mut list = tagged(tag, || route(to, 1000, || vec![5u8; 2000]));
    assert_eq!((bytes_and_blocks(tag), stats().routed), ((2000, 1), 2000));
    assert_eq!(strip.used.lock().unwrap().1, 2002, "with its note");
    // Through, in no scope.
    list.reserve_exact(8000);
    assert_eq!((bytes_and_blocks(tag), stats().routed), ((10_000, 1), 10_000));
    // Out: the strip cannot hold it any more.
    list.reserve_exact(2 * STRIP);
    let large = list.capacity() as u64;
    assert_eq!((bytes_and_blocks(tag), stats().routed), ((large, 1), 0));
    assert_eq!(stats().live - before.live, large);
    assert!(list.len() == 2000 && list.iter().all(|&byte| byte == 5));
    list.shrink_to_fit();
    // In: a scope without a tag.
    route(to, 1000, || list.reserve_exact(3000));
    assert_eq!((bytes_and_blocks(tag), stats().routed), ((5000, 1), 5000));
    assert!(list.iter().all(|&byte| byte == 5));
    drop(list);
    assert_eq!((bytes_and_blocks(tag), stats().routed, stats().live), ((0, 0), 0, before.live));
    assert_eq!(strip.used.lock().unwrap().1, 0);
}

fn peaks_are_never_below_the_truth_and_little_above() {
    let (small, large) = (Tag::named("small"), Tag::named("large"));
    reset_peak();
    let few = tagged(small, || vec![1u8; 500]);
    assert!((500..500 + 2048).contains(&held(small).peak), "{:?}", held(small));
    drop(few);
    tagged(large, || drop(black_box(vec![1u8; 50 << 20])));
    let peak = held(large).peak;
    assert!((50 << 20..(50 << 20) + (128 << 10)).contains(&peak), "{peak}");
    tagged(large, || drop(black_box(vec![1u8; 10 << 20])));
    assert_eq!(held(large).peak, peak);
    reset_peak();
    assert!(held(large).peak <= 128 << 10);
}

fn the_largest_come_first() {
    let [a, b, c] = ["top a", "top b", "top c"].map(Tag::named);
    let blocks = [(a, 2 << 20), (b, 8 << 20), (c, 4 << 20)]
        .map(|(tag, size)| tagged(tag, || vec![1u8; size]));
    let largest: Vec<_> =
        top(3).iter().map(|consumer| (consumer.tag, consumer.held.map(|held| held.live))).collect();
    assert_eq!(largest, [(b, Some(8 << 20)), (c, Some(4 << 20)), (a, Some(2 << 20))]);
    let report = aquifer_global::report().to_string();
    assert!(report.contains("top b: live 8.00 MiB in 1 blocks"), "{report}");
    drop(blocks);
    assert!(top(2).iter().all(|consumer| ![a, b, c].contains(&consumer.tag)));
}

fn a_context_carries_tags_and_routes_to_other_threads() {
    let (strip, to) = strip();
    let tag = Tag::named("carried");
    let (context, job) =
        tagged(tag, || route(to, 1000, || (capture(), capture().bind(|| vec![1u8; 5000]))));
    assert_eq!((context.tag(), Tag::current()), (tag, Tag::NONE));
    let (made, after) = thread::spawn(move || (job(), vec![1u8; 5000])).join().unwrap();
    let window = strip.start.addr().get()..strip.start.addr().get() + STRIP;
    assert!(window.contains(&made.as_ptr().addr()) && !window.contains(&after.as_ptr().addr()));
    assert_eq!(bytes_and_blocks(tag), (5000, 1));
    // Inside another scope it takes its place, and gives it back, on unwind too.
    tagged(Tag::named("parse"), || {
        let unwound = std::panic::catch_unwind(|| {
            context.run(|| {
                assert_eq!(Tag::current(), tag);
                std::panic::resume_unwind(Box::new(()))
            })
        });
        assert!(unwound.is_err() && Tag::current() == Tag::named("parse"));
    });
    drop((made, after));
    assert_eq!(bytes_and_blocks(tag), (0, 0));
}

fn the_sum_over_all_tags_is_the_whole() {
    let all = top(usize::MAX);
    let now = stats();
    let live: u64 = all.iter().filter_map(|consumer| consumer.held).map(|held| held.live).sum();
    // The list itself came in between.
    let list = all.capacity() * size_of::<aquifer_global::Consumer>();
    assert_eq!(now.live + now.routed - list as u64, live);
}
