//! What holds over every allocator.

use aquifer_core::{Tag, impl_allocator, tagged};
use aquifer_global::{Over, held_under, is_installed, register, route, set_cap, stats};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    ops::Range,
    ptr::NonNull,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

/// The system's blocks, in a window of their own: it lies in what was mapped at once, and cut off
/// from its start.
struct Apart {
    window: Range<usize>,
    start: NonNull<u8>,
    used: AtomicUsize,
    live: AtomicUsize,
}

// SAFETY: the bytes behind the pointer belong to the caller that requested them.
unsafe impl Send for Apart {}
// SAFETY: the rest is atomics.
unsafe impl Sync for Apart {}

const ROOM: usize = 256 << 20;

impl_allocator! {
    // SAFETY: blocks are cut off one after another.
    unsafe impl ['s] for &'s Apart {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let bytes = layout.size().next_multiple_of(64);
            let at = self.used.fetch_add(bytes, Ordering::Relaxed);
            if layout.align() > 64 || at + bytes > ROOM {
                return Err(AllocError);
            }
            self.live.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the offset lies in the window.
            Ok(NonNull::slice_from_raw_parts(unsafe { self.start.add(at) }, layout.size()))
        }

        unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {
            self.live.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

pub(crate) fn run() {
    assert!(is_installed());
    let _warm = thread::spawn(|| black_box(vec![0u8; 10]).len()).join();
    totals_and_tags_are_exact_over_threads_and_routes();
    alignment_zeroes_and_contents_survive();
    the_cap_holds();
}

fn totals_and_tags_are_exact_over_threads_and_routes() {
    let start = Layout::from_size_align(ROOM, 64).ok().and_then(|layout| {
        // SAFETY: the layout has a size.
        NonNull::new(unsafe { System.alloc(layout) })
    });
    let Some(start) = start else { panic!("no memory") };
    let window = start.addr().get()..start.addr().get() + ROOM;
    let apart: &'static Apart = Box::leak(Box::new(Apart {
        window,
        start,
        used: AtomicUsize::new(0),
        live: AtomicUsize::new(0),
    }));
    // SAFETY: 1. Its blocks lie in its window and no other allocator's do. 2. Atomics work at any
    // time.
    let over = Box::leak(Box::new(unsafe { Over::new(apart, apart.window.clone()) }));
    let Ok(to) = register(over) else { panic!("no route") };
    let tags = [Tag::named("a"), Tag::named("b"), Tag::named("c")];
    let before = stats();
    let (send, receive) = mpsc::channel::<Vec<u8>>();
    let receive = Mutex::new(receive);
    thread::scope(|threads| {
        let running = (0..4usize).map(|seed| {
            let (send, receive) = (send.clone(), &receive);
            threads.spawn(move || {
                let mut random = seed as u64 + 1;
                let mut next = move |of: usize| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 33) as usize % of
                };
                for _ in 0..3000 {
                    let (size, tag, routed) = (next(20_000) + 1, tags[next(3)], next(3) == 0);
                    let more = next(2) * 9000;
                    let make = || {
                        let mut block = vec![size as u8; size];
                        block.reserve_exact(more);
                        block
                    };
                    let block = tagged(tag, || if routed { route(to, 512, make) } else { make() });
                    let routed = routed && block.capacity() >= 512;
                    assert_eq!(apart.window.contains(&block.as_ptr().addr()), routed);
                    let _ = send.send(block);
                    let other = receive.lock().ok().and_then(|receive| receive.try_recv().ok());
                    if let Some(mut other) = other {
                        let (size, first) = (other.len(), other[0]);
                        assert!(first == size as u8 && other.iter().all(|&byte| byte == first));
                        if next(2) == 0 {
                            other.truncate(size / 2 + 1);
                            other.shrink_to_fit();
                            assert!(other.iter().all(|&byte| byte == first));
                        }
                    }
                }
            })
        });
        // The end of a scope alone waits for the work, and not for what the standard library frees
        // behind it.
        let running: Vec<_> = running.collect();
        assert!(running.into_iter().all(|thread| thread.join().is_ok()));
    });
    drop(send);
    if let Ok(receive) = receive.into_inner() {
        receive.iter().for_each(drop);
    }
    assert_eq!(apart.live.load(Ordering::Relaxed), 0);
    let after = stats();
    assert_eq!((after.live, after.routed), (before.live, 0));
    for tag in tags {
        assert_eq!(held_under(tag).map(|held| (held.live, held.blocks)), Some((0, 0)));
    }
}

fn alignment_zeroes_and_contents_survive() {
    for shift in 0..16 {
        let Ok(layout) = Layout::from_size_align(1000, 1 << shift) else { continue };
        // SAFETY: the layouts have a size; the block is live and of the layout it is freed with.
        unsafe {
            let block = std::alloc::alloc_zeroed(layout);
            assert!(!block.is_null() && block.addr().is_multiple_of(layout.align()));
            assert!((0..1000).all(|at| block.add(at).read() == 0));
            block.write_bytes(9, 1000);
            let grown = std::alloc::realloc(block, layout, 100_000);
            assert!(!grown.is_null() && grown.addr().is_multiple_of(layout.align()));
            assert!((0..1000).all(|at| grown.add(at).read() == 9));
            let Ok(large) = Layout::from_size_align(100_000, 1 << shift) else { continue };
            let shrunk = std::alloc::realloc(grown, large, 10);
            assert!((0..10).all(|at| shrunk.add(at).read() == 9));
            let Ok(small) = Layout::from_size_align(10, 1 << shift) else { continue };
            std::alloc::dealloc(shrunk, small);
        }
    }
}

fn the_cap_holds() {
    let live = stats().live;
    set_cap(live + (1 << 20));
    let (within, beyond) = (
        Vec::<u8>::new().try_reserve_exact(1 << 20),
        Vec::<u8>::new().try_reserve_exact((1 << 20) + 1),
    );
    set_cap(u64::MAX);
    assert!(within.is_ok() && beyond.is_err());
    assert_eq!(stats().live, live);
}
