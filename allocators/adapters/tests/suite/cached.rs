//! Tests of which blocks a cache keeps, and which callers they serve.

use crate::support::{Latch, Owned};
use allocator_api2::{
    alloc::{Allocator, Global},
    boxed::Box,
    vec::Vec,
};
use aquifer_adapters::{Cached, CountingAllocator, Limit};
use aquifer_core::{Budget, DeferReuse, Gate, impl_allocator};
use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::{Arc, Barrier},
    thread,
};

#[test]
fn a_loop_of_the_same_sizes_settles() {
    let below = CountingAllocator::new(Global);
    let cached = Cached::new(&below);
    for _ in 0..if cfg!(miri) { 4 } else { 50 } {
        let mut lists = std::vec::Vec::new();
        for size in [10, 300, 20, 900, 30] {
            lists.push(Vec::<u8, _>::with_capacity_in(size, &cached));
        }
        drop(Box::new_in([0u64; 9], &cached));
    }
    assert_eq!((below.stats().allocations, below.stats().frees), (6, 0));
    assert_eq!((cached.stats().blocks, cached.stats().bytes), (6, 10 + 300 + 20 + 900 + 30 + 72));
}

#[test]
fn a_cache_keeps_no_more_than_its_capacity_and_returns_all() {
    let below = Owned::with_room(usize::MAX);
    let cached = Cached::with_room(below.clone(), 1000);
    let lists: std::vec::Vec<_> =
        (0..20).map(|_| Vec::<u8, _>::with_capacity_in(300, &cached)).collect();
    drop(Vec::<u8, _>::with_capacity_in(1001, &cached));
    assert_eq!(below.live(), 20);
    drop(lists);
    assert_eq!((cached.stats().blocks, cached.stats().bytes, below.live()), (3, 900, 3));
    cached.trim();
    assert_eq!((cached.stats().blocks, cached.stats().bytes, below.live()), (0, 0, 0));
    drop(Box::new_in(1, &cached));
    assert_eq!(below.live(), 1);
    drop(cached);
    assert_eq!(below.live(), 0);
}

#[test]
fn a_layout_no_longer_requested_is_evicted() {
    let below = Owned::with_room(usize::MAX);
    let cached = Cached::new(below.clone());
    // More sizes than slots, several for each: the oldest cached block is returned.
    let most = if cfg!(miri) { 80 } else { 399 };
    for size in 1..=most {
        for _ in 0..if cfg!(miri) { 3 } else { 20 } {
            drop(Vec::<u8, _>::with_capacity_in(size, &cached));
        }
    }
    assert_eq!(below.live(), cached.stats().blocks);
    assert!(cached.stats().blocks <= 64);
    let before = cached.stats();
    drop(Vec::<u8, _>::with_capacity_in(most, &cached));
    assert_eq!(cached.stats(), before, "the last one was kept");
}

#[test]
fn cached_blocks_are_returned_first_when_the_upstream_is_short() {
    let budget = Budget::new("cached", 1000);
    let cached = Cached::new(Limit::new(Global, budget.clone()));
    drop(Vec::<u8, _>::with_capacity_in(900, &cached));
    assert_eq!(budget.used(), 900);
    let mut list: Vec<u8, _> = Vec::new_in(&cached);
    assert!(list.try_reserve_exact(500).is_ok());
    drop(Vec::<u8, _>::with_capacity_in(400, &cached));
    assert!(list.try_reserve_exact(900).is_ok(), "a growth as well");
    assert!(list.try_reserve_exact(1001).is_err());
    assert_eq!(budget.used(), 900);
}

#[test]
fn zeroed_memory_is_zero_when_it_was_kept() {
    let cached = Cached::new(Global);
    let layout = Layout::new::<[u8; 100]>();
    drop(Box::new_in([0xFFu8; 100], &cached));
    let zeroed = cached.allocate_zeroed(layout).unwrap();
    assert!(all_zero(zeroed));
    release(&cached, zeroed.cast(), layout);
    assert_eq!(cached.stats().blocks, 1);
}

#[test]
fn blocks_travel_between_threads_and_none_is_lost() {
    let below = CountingAllocator::new(Global);
    let cached = Cached::with_room(below.clone(), 10_000);
    let rounds = if cfg!(miri) { 20 } else { 3000 };
    let (give, take) =
        std::sync::mpsc::sync_channel::<Box<[u64; 8], Cached<CountingAllocator<Global>>>>(32);
    thread::scope(|threads| {
        let cached = &cached;
        threads.spawn(move || {
            (0..rounds).for_each(|at| give.send(Box::new_in([at; 8], cached.clone())).unwrap());
        });
        threads
            .spawn(move || take.iter().zip(0..).for_each(|(held, at)| assert_eq!(*held, [at; 8])));
        for seed in 0..3u64 {
            threads.spawn(move || {
                for round in 0..rounds {
                    let mut list: Vec<u64, _> =
                        Vec::with_capacity_in(((seed + round) % 7) as usize + 1, cached);
                    list.push(seed << 32 | round);
                    thread::yield_now();
                    assert_eq!(list[0], seed << 32 | round);
                }
            });
        }
    });
    let stats = below.stats();
    assert_eq!(stats.blocks as usize, cached.stats().blocks);
    assert_eq!(stats.live as usize, cached.stats().bytes);
    drop(cached);
    assert_eq!(below.stats().live, 0);
}

/// Several threads share a slot if there are more threads than slots. A thread that finds its slot
/// taken bypasses it.
#[test]
fn many_threads_at_a_time() {
    let cached = Cached::new(CountingAllocator::new(Global));
    let threads = if cfg!(miri) { 4 } else { 70 };
    let start = Barrier::new(threads);
    thread::scope(|scope| {
        for at in 0..threads {
            let (cached, start) = (&cached, &start);
            scope.spawn(move || {
                start.wait();
                for _ in 0..if cfg!(miri) { 5 } else { 200 } {
                    let held = Box::new_in([at; 4], cached);
                    assert_eq!(*held, [at; 4]);
                }
            });
        }
    });
    assert_eq!(cached.inner().stats().blocks as usize, cached.stats().blocks);
}

/// Allocates from the cache above it during a call, as the tables of a global allocator do.
struct Reentrant;

#[expect(unsafe_code, reason = "implements the allocator traits")]
mod reentrant {
    use super::*;
    use allocator_api2::alloc::Allocator as Below;
    use std::cell::RefCell;

    thread_local!(pub(super) static ABOVE: RefCell<Option<Cached<Reentrant>>> = const { RefCell::new(None) });

    impl_allocator! {
        // SAFETY: blocks are the global allocator's.
        unsafe impl [] for Reentrant {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                if layout.size() > 100 {
                    ABOVE.with_borrow(|above| above.iter().for_each(|above| drop(Box::new_in(1u64, above))));
                }
                Below::allocate(&Global, layout).map_err(|_| AllocError)
            }

            unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                ABOVE.with_borrow(|above| above.iter().for_each(|above| drop(Box::new_in(1u64, above))));
                // SAFETY: guaranteed by the caller.
                unsafe { Below::deallocate(&Global, block, layout) };
            }
        }
    }
}

#[test]
fn a_reentrant_upstream_is_served() {
    let cached = Cached::with_room(Reentrant, 200);
    reentrant::ABOVE.set(Some(cached.clone()));
    for size in [8, 150, 300, 150, 8, 400] {
        let lists = [(); 3].map(|()| Vec::<u8, _>::with_capacity_in(size, &cached));
        drop(lists);
    }
    cached.trim();
    assert!(reentrant::ABOVE.take().is_some());
}

#[expect(unsafe_code, reason = "reads a block")]
fn all_zero(block: NonNull<[u8]>) -> bool {
    // SAFETY: a live block, zeroed.
    unsafe { block.as_ref() }.iter().all(|&byte| byte == 0)
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn release<A: Allocator>(allocator: &A, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the tests pass a live block of this layout and forget it.
    unsafe { allocator.deallocate(block, layout) };
}

/// Four slots of 64 bytes, of which the lowest free one is used. A growth moves a block and a
/// shrink keeps it in place. Between the two a hook may act as another thread does before the call
/// that moved the block returns.
#[expect(unsafe_code, reason = "implements the allocator traits")]
#[expect(clippy::unwrap_used, reason = "a helper of a test that fails is a failed test")]
mod places {
    use super::*;
    use aquifer_core::{MemoryError, Result as MemoryResult};
    use std::cell::{Cell, RefCell};

    const BYTES: usize = 64;
    type Hook = std::boxed::Box<dyn FnOnce()>;

    pub(super) struct Places {
        memory: NonNull<u8>,
        taken: RefCell<[bool; 4]>,
        gates: RefCell<std::vec::Vec<(usize, Arc<dyn Gate>)>>,
        refuses: Cell<bool>,
        moved: RefCell<Option<Hook>>,
    }

    fn memory() -> Layout {
        Layout::new::<[[u64; BYTES / 8]; 4]>()
    }

    impl Places {
        pub(super) fn new() -> Self {
            let memory = Global.allocate(memory()).unwrap().cast();
            let (taken, gates) = (RefCell::default(), RefCell::default());
            Self { memory, taken, gates, refuses: Cell::new(false), moved: RefCell::new(None) }
        }

        /// Runs `hook` once, when a growth has freed the old slot and has not returned yet.
        pub(super) fn when_moved(&self, hook: impl FnOnce() + 'static) {
            *self.moved.borrow_mut() = Some(std::boxed::Box::new(hook));
        }

        /// Refuses growths from now on.
        pub(super) fn refuse(&self) {
            self.refuses.set(true);
        }

        fn acquire(&self, layout: Layout) -> Option<NonNull<[u8]>> {
            let mut taken = self.taken.borrow_mut();
            let free = (0..4).find(|&place| !taken[place] && !self.is_held(place))?;
            assert!(layout.size() <= BYTES && layout.align() <= 8);
            taken[free] = true;
            // SAFETY: the place lies in the memory.
            let start = unsafe { self.memory.add(free * BYTES) };
            Some(NonNull::slice_from_raw_parts(start, layout.size()))
        }

        fn release(&self, block: NonNull<u8>) {
            self.taken.borrow_mut()[self.place(block)] = false;
        }

        fn place(&self, address: NonNull<u8>) -> usize {
            (address.addr().get() - self.memory.addr().get()) / BYTES
        }

        fn is_held(&self, place: usize) -> bool {
            self.gates.borrow().iter().any(|(held, gate)| *held == place && !gate.is_open())
        }
    }

    impl Drop for Places {
        fn drop(&mut self) {
            // SAFETY: it came from `Global` with this layout.
            unsafe { Global.deallocate(self.memory, memory()) };
        }
    }

    impl_allocator! {
        // SAFETY: a place is handed out once at a time, and not while one of its gates is closed;
        // it lives as long as all do.
        unsafe impl [] for Places {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                self.acquire(layout).ok_or(AllocError)
            }

            unsafe fn deallocate(&self, block: NonNull<u8>, _layout: Layout) {
                self.release(block);
            }

            unsafe fn grow(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                if self.refuses.get() {
                    return Err(AllocError);
                }
                let moved = self.acquire(new).ok_or(AllocError)?;
                // SAFETY: both are places of at least as many bytes.
                unsafe { moved.cast::<u8>().copy_from_nonoverlapping(block, old.size()) };
                self.release(block);
                let hook = self.moved.take();
                hook.into_iter().for_each(|hook| hook());
                Ok(moved)
            }

            unsafe fn shrink(
                &self,
                block: NonNull<u8>,
                _old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                Ok(NonNull::slice_from_raw_parts(block, new.size()))
            }
        }
    }

    // SAFETY: a place with a closed gate is not handed out.
    unsafe impl DeferReuse for Places {
        fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
            let place = self.place(address);
            let foreign = MemoryError::ForeignBlock { address: address.addr().get() as u64 };
            self.taken.borrow().get(place).filter(|taken| **taken).ok_or(foreign)?;
            self.gates.borrow_mut().push((place, until));
            Ok(())
        }
    }
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn grow<A: Allocator>(
    allocator: &A,
    block: NonNull<u8>,
    old: Layout,
    new: Layout,
) -> Result<NonNull<u8>, allocator_api2::alloc::AllocError> {
    // SAFETY: the tests pass a live block of the layout `old`.
    unsafe { allocator.grow(block, old, new) }.map(NonNull::cast)
}

#[test]
fn a_deferral_by_the_next_owner_of_a_moved_block_stays() {
    let cached = Cached::new(places::Places::new());
    let (small, large) = (Layout::new::<[u64; 2]>(), Layout::new::<[u64; 4]>());
    let first: NonNull<u8> = cached.allocate(small).unwrap().cast();
    let latch = Latch::closed();
    let (other, gate) = (cached.clone(), latch.clone());
    cached.inner().when_moved(move || {
        let next: NonNull<u8> = other.allocate(small).unwrap().cast();
        assert_eq!(next, first, "the place that was given up");
        other.defer(next, gate).unwrap();
    });
    let moved = grow(&cached, first, small, large).unwrap();
    assert_ne!(moved, first);
    // The next owner frees its block while a device still reads it.
    release(&cached, first, small);
    let another: NonNull<u8> = cached.allocate(small).unwrap().cast();
    assert_ne!(another, first, "handed out while its gate is shut");
    latch.open();
    release(&cached, another, small);
    release(&cached, moved, large);
}

#[test]
fn a_deferral_outlives_a_refused_growth_and_a_shrinkage_in_place() {
    let (small, large) = (Layout::new::<[u64; 2]>(), Layout::new::<[u64; 4]>());
    let cached = Cached::new(places::Places::new());
    let latch = Latch::closed();

    let block: NonNull<u8> = cached.allocate(small).unwrap().cast();
    cached.defer(block, latch.clone()).unwrap();
    cached.inner().refuse();
    assert!(grow(&cached, block, small, large).is_err());
    release(&cached, block, small);
    assert_ne!(cached.allocate(small).unwrap().cast(), block, "handed out while its gate is shut");

    let block: NonNull<u8> = cached.allocate(large).unwrap().cast();
    let last = NonNull::new(block.as_ptr().wrapping_add(large.size() - 1)).unwrap();
    cached.defer(last, latch.clone()).unwrap();
    assert_eq!(shrink(&cached, block, large, small), Ok(block));
    release(&cached, block, small);
    assert_ne!(cached.allocate(small).unwrap().cast(), block, "its deferral went with the tail");
}

#[expect(unsafe_code, reason = "calls the allocator's unsafe methods")]
fn shrink<A: Allocator>(
    allocator: &A,
    block: NonNull<u8>,
    old: Layout,
    new: Layout,
) -> Result<NonNull<u8>, allocator_api2::alloc::AllocError> {
    // SAFETY: the tests pass a live block of the layout `old`.
    unsafe { allocator.shrink(block, old, new) }.map(NonNull::cast)
}
