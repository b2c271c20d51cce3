//! Routed blocks find their way home from anywhere, and a route is never entered twice by one
//! thread.
//!
//! A binary without a test harness: it counts what the process allocates, so nothing else may.
#![expect(unsafe_code, reason = "allocators to route to")]

use aquifer_core::impl_allocator;
use aquifer_global::{Global, Over, Route, RouteId, register, route, stats, unrouted};
use std::{
    alloc::{Layout, LayoutError},
    cell::Cell,
    hint::black_box,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

#[global_allocator]
static GLOBAL: Global = Global::new();

const BYTES: usize = 8 << 20;

/// First fit over a region of its own, with its bookkeeping in ordinary vectors, under a lock that
/// a thread cannot take twice.
struct Region {
    start: NonNull<u8>,
    live: Mutex<Vec<(usize, usize)>>,
    /// A vector that is dropped under the lock, at the next call.
    scrap: Mutex<Vec<Vec<u8>>>,
    calls: AtomicUsize,
}

// SAFETY: the region behind the pointer is only named here; blocks of it belong to the caller that
// asked for them.
unsafe impl Send for Region {}
// SAFETY: the rest is locks and atomics.
unsafe impl Sync for Region {}

impl Region {
    fn new() -> Region {
        let bytes = NonNull::from(vec![0xEEu8; BYTES].leak()).cast();
        Region {
            start: bytes,
            live: Mutex::default(),
            scrap: Mutex::default(),
            calls: AtomicUsize::new(0),
        }
    }

    fn window(&self) -> Range<usize> {
        self.start.addr().get()..self.start.addr().get() + BYTES
    }

    fn holds<T>(&self, of: &[T]) -> bool {
        self.window().contains(&of.as_ptr().addr())
    }

    fn blocks(&self) -> usize {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Fails instead of blocking: in these tests only a thread that is inside already could hold it
    /// for long.
    fn enter(&self) -> std::sync::MutexGuard<'_, Vec<(usize, usize)>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        thread_local!(static WITHIN: Cell<bool> = const { Cell::new(false) });
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!WITHIN.replace(true), "entered twice");
        // Bookkeeping that allocates and frees while the lock is held.
        drop(black_box(vec![0u8; 100_000]));
        self.scrap.lock().unwrap_or_else(PoisonError::into_inner).clear();
        WITHIN.set(false);
        live
    }

    fn take(&self, layout: Layout) -> Option<NonNull<u8>> {
        let base = self.start.addr().get();
        let mut live = self.enter();
        let mut at = base.next_multiple_of(layout.align()) - base;
        for &(start, bytes) in live.iter() {
            if at + layout.size() <= start {
                break;
            }
            at = at.max((base + start + bytes).next_multiple_of(layout.align()) - base);
        }
        if at + layout.size() > BYTES {
            return None;
        }
        let place = live.partition_point(|&(start, _)| start < at);
        live.insert(place, (at, layout.size()));
        // SAFETY: the offset lies in the region.
        Some(unsafe { self.start.add(at) })
    }

    fn give_back(&self, block: NonNull<u8>, layout: Layout) {
        let at = block.addr().get() - self.start.addr().get();
        let mut live = self.enter();
        let found = live.iter().position(|&live| live == (at, layout.size()));
        assert!(found.is_some(), "no live block of this size");
        live.remove(found.unwrap_or(0));
    }
}

impl_allocator! {
    // SAFETY: blocks are cut from the region where no live one is.
    unsafe impl ['r] for &'r Region {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let block = self.take(layout).ok_or(AllocError)?;
            Ok(NonNull::slice_from_raw_parts(block, layout.size()))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            self.give_back(block, layout);
        }
    }
}

fn leaked() -> (&'static Region, RouteId) {
    let region: &'static Region = Box::leak(Box::new(Region::new()));
    // SAFETY: 1. The region's blocks lie in its window and no other allocator's do. 2. Locks and
    // atomics work at any time.
    let over = Box::leak(Box::new(unsafe { Over::new(region, region.window()) }));
    let id = register(over);
    assert!(id.is_ok());
    assert_eq!(id, register(over), "the same one again");
    (region, id.unwrap_or_else(|_| std::process::abort()))
}

fn main() -> Result<(), LayoutError> {
    let (region, to) = leaked();
    large_allocations_of_a_scope_are_routed_and_no_others(region, to);
    blocks_outlive_the_scope_and_any_thread_frees_them(region, to);
    blocks_keep_their_contents_into_through_and_out_of_a_route(region, to);
    scopes_nest_and_end_on_unwind(region, to);
    a_full_route_leaves_it_to_the_wrapped_allocator(region, to);
    a_route_is_never_entered_twice(region, to);
    threads_share_a_route(region, to);
    thread_local_destructors_free_routed_blocks(region, to);
    zeroed_means_zero(region, to);
    several_routes_each_have_their_own(region, to);
    an_allocator_that_unwinds_refuses()?;
    Ok(())
}

fn large_allocations_of_a_scope_are_routed_and_no_others(region: &Region, to: RouteId) {
    let before = stats();
    let (large, small) = route(to, 1024, || (vec![1u8; 1024], vec![1u8; 1023]));
    let outside = vec![1u8; 4096];
    assert!(region.holds(&large) && !region.holds(&small) && !region.holds(&outside));
    let during = stats();
    assert_eq!(during.routed, 1024);
    assert_eq!(during.routed_allocations - before.routed_allocations, 1);
    assert_eq!(
        during.live - before.live,
        1023 + 4096 + region_bookkeeping(region),
        "the account is the wrapped one's"
    );
    drop((large, small, outside));
    assert_eq!((region.blocks(), stats().routed), (0, 0));
}

/// Bytes of the region's own list, which is not routed.
fn region_bookkeeping(region: &Region) -> u64 {
    (region.live.lock().unwrap_or_else(PoisonError::into_inner).capacity()
        * size_of::<(usize, usize)>()) as u64
}

fn blocks_outlive_the_scope_and_any_thread_frees_them(region: &'static Region, to: RouteId) {
    let vectors: Vec<Vec<u8>> = (0..20).map(|i| route(to, 1024, || vec![i; 2000])).collect();
    assert_eq!(region.blocks(), 20);
    thread::scope(|threads| {
        for mut vector in vectors {
            threads.spawn(move || {
                assert!(region.holds(&vector));
                vector.extend_from_slice(&[9; 3000]);
                assert!(region.holds(&vector), "it grows where it is at home, in no scope");
            });
        }
    });
    assert_eq!((region.blocks(), stats().routed), (0, 0));
}

fn blocks_keep_their_contents_into_through_and_out_of_a_route(region: &Region, to: RouteId) {
    let content = |vector: &[u32]| vector.iter().enumerate().all(|(i, &n)| n == i as u32);
    // In: a vector that was there before the scope grows past the size.
    let mut vector: Vec<u32> = (0..10).collect();
    route(to, 1024, || vector.extend(10..200));
    assert!(!region.holds(&vector), "below the size it stays");
    route(to, 1024, || vector.extend(200..2000));
    assert!(region.holds(&vector) && content(&vector));
    // Through.
    vector.extend(2000..100_000);
    assert!(region.holds(&vector) && content(&vector));
    vector.truncate(50_000);
    vector.shrink_to_fit();
    assert!(region.holds(&vector) && content(&vector));
    // Out: the region cannot hold it any more.
    vector.extend(50_000..3_000_000);
    assert!(!region.holds(&vector) && content(&vector));
    assert_eq!(region.blocks(), 0);
    // And a shrinking one stays where it is, in a scope too.
    route(to, 1024, || {
        vector.truncate(1000);
        vector.shrink_to_fit();
    });
    assert!(!region.holds(&vector) && content(&vector));
}

fn scopes_nest_and_end_on_unwind(region: &Region, to: RouteId) {
    route(to, 1024, || {
        let inner = route(to, 1 << 20, || vec![1u8; 4096]);
        let none = unrouted(|| vec![1u8; 4096]);
        let outer = vec![1u8; 4096];
        assert!(!region.holds(&inner) && !region.holds(&none) && region.holds(&outer));
        let unwound = catch_unwind(|| {
            unrouted(|| route(to, 1, || std::panic::resume_unwind(Box::new(()))));
        });
        assert!(unwound.is_err());
        assert!(region.holds(&vec![1u8; 4096]), "back in the outer scope");
    });
    assert!(!region.holds(&vec![1u8; 4096]));
    assert_eq!(region.blocks(), 0);
}

fn a_full_route_leaves_it_to_the_wrapped_allocator(region: &Region, to: RouteId) {
    let before = stats();
    let (first, second) = route(to, 1024, || (vec![1u8; BYTES - 100], vec![1u8; 1 << 20]));
    assert!(region.holds(&first) && !region.holds(&second));
    assert_eq!(stats().route_refusals - before.route_refusals, 1);
    drop((first, second));
    assert_eq!(region.blocks(), 0);
}

fn a_route_is_never_entered_twice(region: &Region, to: RouteId) {
    // Everything is routed, so what the region does under its lock would come back to it.
    route(to, 1, || {
        let scrap = vec![1u8; 5000];
        assert!(region.holds(&scrap));
        unrouted(|| region.scrap.lock().unwrap_or_else(PoisonError::into_inner).push(scrap));
        // The region drops the scrap, which is its own block, inside this call.
        let block = vec![1u8; 5000];
        assert!(region.holds(&block));
    });
    assert_eq!((region.blocks(), stats().routed), (0, 0), "the inner free was done afterwards");
}

fn threads_share_a_route(region: &'static Region, to: RouteId) {
    thread::scope(|threads| {
        for seed in 0..4usize {
            threads.spawn(move || {
                route(to, 1000, || {
                    let mut live: Vec<Vec<u8>> = unrouted(|| Vec::with_capacity(16));
                    for round in 0..500usize {
                        let size = (round * 7919 + seed * 104_729) % 3000 + 1;
                        live.push(vec![seed as u8; size]);
                        assert_eq!(
                            live.last().is_some_and(|vector| region.holds(vector)),
                            size >= 1000
                        );
                        if live.len() == 16 {
                            assert!(live.iter().flatten().all(|&byte| byte == seed as u8));
                            live.drain(..8 + round % 8);
                        }
                    }
                });
            });
        }
    });
    assert_eq!((region.blocks(), stats().routed), (0, 0));
}

thread_local! {
    static HELD: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

fn thread_local_destructors_free_routed_blocks(region: &'static Region, to: RouteId) {
    let ended = thread::spawn(move || {
        HELD.set(route(to, 1024, || vec![1u8; 4096]));
        region.blocks()
    });
    assert_eq!(ended.join().ok(), Some(1));
    assert_eq!(region.blocks(), 0);
}

fn zeroed_means_zero(region: &Region, to: RouteId) {
    drop(route(to, 1024, || vec![0xFFu8; 100_000]));
    let zeroed = route(to, 1024, || vec![0u8; 100_000]);
    assert!(region.holds(&zeroed) && zeroed.iter().all(|&byte| byte == 0));
}

fn several_routes_each_have_their_own(first: &Region, to_first: RouteId) {
    let (second, to_second) = leaked();
    let (a, b) = (route(to_first, 1, || vec![1u8; 2000]), route(to_second, 1, || vec![2u8; 2000]));
    assert!(first.holds(&a) && second.holds(&b));
    let mut moved = a;
    route(to_second, 1, || moved.extend_from_slice(&[1; 2000]));
    assert!(first.holds(&moved), "a block stays with its route, whatever the scope");
    drop((moved, b));
    assert_eq!((first.blocks(), second.blocks()), (0, 0));
}

/// Unwinds whatever it is asked.
struct Unwinds;

impl_allocator! {
    // SAFETY: it hands out nothing.
    unsafe impl [] for Unwinds {
        fn allocate(&self, _layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            std::panic::resume_unwind(Box::new("on purpose"))
        }

        unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}
    }
}

fn an_allocator_that_unwinds_refuses() -> Result<(), LayoutError> {
    // SAFETY: it has no blocks.
    let over = unsafe { Over::new(Unwinds, 0..0) };
    let layout = Layout::from_size_align(100, 8)?;
    let asked =
        catch_unwind(AssertUnwindSafe(|| (over.allocate(layout), over.allocate_zeroed(layout))));
    assert_eq!(asked.ok(), Some((None, None)));
    Ok(())
}
