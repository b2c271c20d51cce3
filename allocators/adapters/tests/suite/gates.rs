//! Tests that bytes that a device may still read do not change.
//!
//! - An arena allocates nothing below the end of a deferred block before the gate is open. This
//!   holds after a scope, after a rewind, and after the block is freed or shrunk.
//! - A reset waits for gates. If it cannot, it changes nothing.
//! - A dropped or forgotten arena passes the deferral to the upstream allocator.

use crate::support::{Gated, Latch};
use allocator_api2::{alloc::Global, vec::Vec};
use aquifer_adapters::{Arena, ArenaSettings, CountingAllocator, Fallback, Frames, Limit, Tagged};
use aquifer_core::{Budget, DeferReuse, MemoryError, Tag};
use std::{
    ptr::NonNull,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const SETTINGS: ArenaSettings = ArenaSettings::new().first_chunk(256).max_chunk(256);

fn address<T>(of: &[T]) -> NonNull<u8> {
    NonNull::from(of).cast()
}

#[test]
fn a_scope_gives_back_all_but_what_is_held() {
    let pool = Gated::default();
    let mut arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    let start = std::ptr::from_ref(arena.alloc(0u8)).addr();
    let after = arena.scope(|scope| {
        let held = scope.alloc_slice_copy(&[1u8; 100]);
        assert_eq!((&&*scope).defer(address(held), latch.clone()), Ok(()));
        scope.alloc_slice_copy(&[2u8; 100]).as_ptr().addr()
    });
    assert_eq!(
        arena.stats().allocated,
        101,
        "the scope is over, and what it deferred is still taken"
    );
    for _ in 0..3 {
        let next = arena.scope(|scope| std::ptr::from_ref(scope.alloc(0u8)).addr());
        assert_eq!(next, after, "what came after the deferral is free");
    }
    latch.open();
    assert_eq!(arena.reset(), Ok(()));
    assert_eq!(std::ptr::from_ref(arena.alloc(0u8)).addr(), start);
}

#[test]
fn a_scope_in_which_a_gate_opened_ends_where_it_began() {
    let pool = Gated::default();
    let mut arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    arena.alloc(0u8);
    arena.scope(|scope| {
        let sent = scope.alloc_slice_copy(&[1u8; 100]);
        assert_eq!((&&*scope).defer(address(sent), latch.clone()), Ok(()));
        latch.open();
    });
    assert_eq!(arena.stats().allocated, 1);
}

#[test]
fn freeing_or_shrinking_a_held_block_hands_nothing_out() {
    let pool = Gated::default();
    let arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    let mut sent: Vec<u8, _> = Vec::new_in(&arena);
    sent.resize(64, 7);
    assert_eq!((&arena).defer(address(&sent), latch.clone()), Ok(()));
    let end = sent.as_ptr().addr() + sent.capacity();
    sent.truncate(3);
    sent.shrink_to_fit();
    assert!((arena.alloc(0u8) as *const u8).addr() >= end);
    drop(sent);
    assert!((arena.alloc(0u8) as *const u8).addr() >= end);
    latch.open();
}

#[test]
fn a_spare_chunk_is_entered_above_what_is_held_in_it() {
    let pool = Gated::default();
    let mut arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    let held = arena.scope(|scope| {
        scope.alloc([0u8; 256]);
        let held = scope.alloc_slice_copy(&[1u8; 100]);
        assert_eq!((&&*scope).defer(address(held), latch.clone()), Ok(()));
        scope.alloc([0u8; 256]);
        held.as_ptr().addr()..held.as_ptr().addr() + 100
    });
    for _ in 0..20 {
        let filled = arena.alloc_slice_fill_with(50, |_| 0xEEu8).as_ptr().addr();
        assert!(filled + 50 <= held.start || filled >= held.end, "a held byte was handed out");
    }
    latch.open();
}

#[test]
fn the_same_chunk_serves_again_from_its_start_when_the_gate_is_open() {
    let pool = Gated::default();
    let mut arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    let place =
        |arena: &mut Arena<Gated>| arena.scope(|scope| scope.alloc([0u8; 200]) as *const [u8; 200]);
    let first = arena.scope(|scope| {
        let held = scope.alloc([0u8; 200]);
        assert_eq!((&&*scope).defer(NonNull::from(&*held).cast(), latch.clone()), Ok(()));
        std::ptr::from_ref(held)
    });
    assert_ne!(place(&mut arena), first);
    latch.open();
    assert_eq!(arena.reset(), Ok(()));
    assert_eq!(arena.stats().chunks, 1);
}

#[test]
fn reset_waits_for_the_gate() {
    let pool = Gated::default();
    let mut arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    let sent = arena.alloc_slice_copy(&[1u8; 10]);
    assert_eq!((&arena).defer(address(sent), latch.clone()), Ok(()));
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(arena.reset_before(soon), Err(MemoryError::TimedOut));
    assert_eq!(arena.stats().allocated, 10, "a reset that fails changes nothing");
    thread::scope(|threads| {
        threads.spawn(|| {
            thread::sleep(Duration::from_millis(5));
            latch.open();
        });
        assert_eq!(arena.reset(), Ok(()));
        assert!(aquifer_core::Gate::is_open(&*latch));
    });
    assert_eq!(arena.stats().allocated, 0);
}

#[test]
fn a_reset_that_the_device_fails_changes_nothing_and_the_arena_can_be_dropped() {
    let pool = Gated::default();
    let mut arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let latch = Latch::closed();
    let sent = arena.alloc_slice_copy(&[1u8; 10]);
    assert_eq!((&arena).defer(address(sent), latch.clone()), Ok(()));
    latch.lose();
    assert!(matches!(arena.reset(), Err(MemoryError::Driver(_))));
    assert_eq!(arena.stats().allocated, 10);
    drop(arena);
    assert_eq!(pool.reap(), (0, 1));
    latch.open();
    assert_eq!(pool.reap(), (0, 0));
}

#[test]
fn a_dropped_arena_leaves_its_held_chunk_with_the_allocator_below() {
    let pool = Gated::default();
    let latch = Latch::closed();
    let arena = Arena::with_settings_in(SETTINGS, pool.clone());
    arena.alloc([0u8; 256]);
    let sent = arena.alloc_slice_copy(&[9u8; 200]);
    let start = address(sent);
    assert_eq!((&arena).defer(start, latch.clone()), Ok(()));
    drop(arena);
    assert_eq!(pool.reap(), (0, 1), "one chunk came back at once, the other is held");
    assert!(read(start, 200).iter().all(|&byte| byte == 9), "as a device would still read it");
    latch.open();
    assert_eq!(pool.reap(), (0, 0));
}

#[test]
fn a_forgotten_arena_keeps_the_promise() {
    let pool = Gated::default();
    let latch = Latch::closed();
    let arena = Box::leak(Box::new(Arena::with_settings_in(SETTINGS, pool.clone())));
    let sent = arena.alloc_slice_copy(&[9u8; 200]);
    let start = address(sent);
    assert_eq!((&*arena).defer(start, latch.clone()), Ok(()));
    let busy = Arena::with_settings_in(SETTINGS, pool.clone());
    busy.alloc_slice_fill_with(1000, |_| 0xEEu8);
    assert!(read(start, 200).iter().all(|&byte| byte == 9));
    // Freed so that the test ends cleanly; nothing else may hold it.
    latch.open();
    take_back(arena);
}

#[test]
fn an_unallocated_address_is_refused_and_holds_nothing() {
    let pool = Gated::default();
    let arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let other = [0u8; 4];
    let latch = Latch::closed();
    let foreign =
        |address: NonNull<u8>| MemoryError::ForeignBlock { address: address.addr().get() as u64 };
    assert_eq!((&arena).defer(address(&other), latch.clone()), Err(foreign(address(&other))));
    let block = arena.alloc_slice_copy(&[0u8; 8]);
    let beyond = address(block).map_addr(|a| a.checked_add(8).unwrap());
    assert_eq!(
        (&arena).defer(beyond, latch.clone()),
        Err(foreign(beyond)),
        "its chunk's, but nobody's block"
    );
    assert_eq!(Arc::strong_count(&latch), 1);
}

#[test]
fn gates_that_have_opened_do_not_pile_up() {
    let pool = Gated::default();
    let arena = Arena::with_settings_in(SETTINGS, pool.clone());
    let sent = arena.alloc_slice_copy(&[0u8; 8]);
    let latches: std::vec::Vec<_> = (0..100).map(|_| Latch::closed()).collect();
    for latch in &latches {
        assert_eq!((&arena).defer(address(sent), latch.clone()), Ok(()));
        latch.open();
    }
    // One handle here and one in the upstream allocator. The arena keeps at most the last one.
    assert!(latches[..99].iter().all(|latch| Arc::strong_count(latch) == 2));
}

#[test]
fn the_promise_reaches_through_a_stack() {
    let pool = Gated::default();
    let budget = Budget::new("stack", 1 << 20);
    let stack = Limit::new(CountingAllocator::new(Tagged::new(pool.clone(), Tag::NONE)), budget);
    let latch = Latch::closed();
    let arena = Arena::with_settings_in(SETTINGS, stack.clone());
    let sent = arena.alloc_slice_copy(&[5u8; 100]);
    assert_eq!((&arena).defer(address(sent), latch.clone()), Ok(()));
    drop(arena);
    assert_eq!(pool.reap(), (0, 1));
    let direct = stack.clone();
    let mut vector = Vec::new_in(&direct);
    vector.push(1u8);
    assert_eq!(direct.defer(address(&vector), latch.clone()), Ok(()));
    drop(vector);
    assert_eq!(pool.reap(), (0, 2));
    latch.open();
    assert_eq!(pool.reap(), (0, 0));
}

#[test]
fn a_fallback_asks_the_owner() {
    let (first, second) = (Gated::default(), Gated::default());
    let arena = Arena::with_settings_in(SETTINGS.limit(256), first.clone());
    let both = Fallback::new(&arena, second.clone());
    let latch = Latch::closed();
    let mut small = Vec::new_in(&both);
    small.extend([1u8; 100]);
    let mut large = Vec::new_in(&both);
    large.extend([2u8; 1000]);
    let by_ref: &Fallback<_, _> = &both;
    assert_eq!(by_ref.defer(address(&small), latch.clone()), Ok(()));
    assert_eq!(by_ref.defer(address(&large), latch.clone()), Ok(()));
    drop((small, large));
    drop(arena);
    assert_eq!((first.reap(), second.reap()), ((0, 1), (0, 1)));
    latch.open();
    assert_eq!((first.reap(), second.reap()), ((0, 0), (0, 0)));
}

#[test]
fn a_frame_waits_for_the_step_that_used_it() {
    let pool = Gated::default();
    let mut frames = Frames::with_settings_in(2, SETTINGS, pool.clone());
    let latches = [Latch::closed(), Latch::closed()];
    for latch in &latches {
        let frame = frames.next().unwrap();
        let sent = frame.arena().alloc_slice_copy(&[1u8; 32]);
        assert_eq!(frame.arena().defer_in(address(sent), latch), Ok(()));
    }
    thread::scope(|threads| {
        threads.spawn(|| {
            thread::sleep(Duration::from_millis(5));
            latches[0].open();
        });
        let frame = frames.next().unwrap();
        assert_eq!(frame.arena().stats().allocated, 0);
        assert!(
            aquifer_core::Gate::is_open(&*latches[0]) && !aquifer_core::Gate::is_open(&*latches[1])
        );
    });
    latches[1].open();
    assert!(frames.next().is_ok());
}

#[test]
fn an_arena_over_an_allocator_without_gates_never_waits() {
    let mut arena = Arena::with_settings_in(SETTINGS, Global);
    arena.alloc([0u8; 1000]);
    assert_eq!(arena.reset(), Ok(()));
}

trait DeferIn {
    fn defer_in(&self, address: NonNull<u8>, latch: &Arc<Latch>) -> aquifer_core::Result<()>;
}

impl DeferIn for Arena<Gated> {
    fn defer_in(&self, address: NonNull<u8>, latch: &Arc<Latch>) -> aquifer_core::Result<()> {
        self.defer(address, latch.clone())
    }
}

/// Reads as a device would, without ownership.
#[expect(unsafe_code, reason = "reads a block that was dropped but is held")]
fn read<'a>(start: NonNull<u8>, len: usize) -> &'a [u8] {
    // SAFETY: a closed gate keeps the bytes allocated and unchanged, which is what is tested.
    unsafe { NonNull::slice_from_raw_parts(start, len).as_ref() }
}

#[expect(unsafe_code, reason = "ends a leak")]
fn take_back<T>(leaked: *mut T) {
    // SAFETY: it came from `Box::leak` and is not used any more.
    drop(unsafe { Box::from_raw(leaked) });
}
