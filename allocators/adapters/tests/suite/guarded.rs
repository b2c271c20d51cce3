//! Tests of which faults a guard finds, and which operations it does not affect.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test that fails is a failed test"
)]
#![expect(unsafe_code, reason = "breaks the rules that a guard watches over")]

use allocator_api2::{
    alloc::{AllocError, Allocator, Global},
    vec::Vec,
};
use aquifer_adapters::{CountingAllocator, Guarded, Limit, Owns, wrappers::GuardFinding};
use aquifer_core::Budget;
use std::{alloc::Layout, cell::Cell, ptr::NonNull};

type Guard = Guarded<CountingAllocator<Global>>;

fn guard() -> Guard {
    Guarded::new(CountingAllocator::new(Global))
}

/// Returns a block of `size` bytes whose pointer may also reach the bytes around it.
fn block(guard: &Guard, size: usize, align: usize) -> (NonNull<u8>, Layout) {
    let layout = Layout::from_size_align(size, align).unwrap();
    (guard.allocate(layout).unwrap().cast(), layout)
}

fn release(guard: &Guard, (block, layout): (NonNull<u8>, Layout)) {
    // SAFETY: a live block, or one whose refusal is tested.
    unsafe { guard.deallocate(block, layout) };
}

fn write(block: NonNull<u8>, at: isize) {
    // SAFETY: within the canaries of the block, which are bytes of the block below.
    unsafe { block.offset(at).write(7) };
}

#[test]
fn a_write_behind_a_block_is_found_while_it_lives_and_when_it_goes() {
    for (size, align) in [(1, 1), (10, 2), (64, 64), (100, 4096)] {
        let guard = guard();
        let held = block(&guard, size, align);
        assert_eq!(guard.check(), Ok(()));
        write(held.0, size as isize + 3);
        let finding = GuardFinding::WrittenBehind { address: held.0.addr().get(), size, offset: 3 };
        assert_eq!(guard.check(), Err(finding));
        release(&guard, held);
        assert_eq!(guard.findings(), [finding]);
        assert_eq!((guard.check(), guard.live()), (Ok(()), 0));
    }
}

#[test]
fn a_write_before_a_block_is_found() {
    for align in [1, 16, 512] {
        let guard = guard();
        let held = block(&guard, 40, align);
        write(held.0, -1);
        write(held.0, -9);
        release(&guard, held);
        let finding =
            GuardFinding::WrittenBefore { address: held.0.addr().get(), size: 40, offset: 9 };
        assert_eq!(guard.findings(), [finding]);
    }
}

#[test]
fn growing_and_shrinking_check_the_guards_and_always_move() {
    let guard = guard();
    let mut list: Vec<u8, _> = Vec::with_capacity_in(10, &guard);
    list.extend([1; 10]);
    let before = list.as_ptr();
    write(NonNull::new(list.as_mut_ptr()).unwrap(), 10);
    list.push(2);
    assert_ne!(list.as_ptr(), before);
    assert!(matches!(
        guard.findings()[..],
        [GuardFinding::WrittenBehind { size: 10, offset: 0, .. }]
    ));
    let before = list.as_ptr();
    list.shrink_to_fit();
    assert_ne!(list.as_ptr(), before);
    assert_eq!((list.len(), guard.findings().len()), (11, 1));
}

#[test]
fn a_second_free_and_a_foreign_one_are_refused() {
    let guard = guard();
    let held = block(&guard, 40, 8);
    release(&guard, held);
    release(&guard, held);
    let mut stray = 0u64;
    let stray = NonNull::from(&mut stray).cast::<u8>();
    release(&guard, (stray, Layout::new::<u64>()));
    // SAFETY: deliberately broken: it is no block, and the refusal is what is tested.
    let grown = unsafe { guard.grow(stray, Layout::new::<u64>(), Layout::new::<[u64; 2]>()) };
    assert!(grown.is_err());
    let no_block = |block: NonNull<u8>| GuardFinding::NoBlock { address: block.addr().get() };
    assert_eq!(guard.findings(), [no_block(held.0), no_block(stray), no_block(stray)]);
    let below = guard.inner().stats();
    assert_eq!((below.allocations, below.frees, below.live), (1, 1, 0));
}

#[test]
fn a_wrong_layout_is_reported_and_the_right_one_is_used() {
    let guard = guard();
    let (start, layout) = block(&guard, 40, 8);
    let wrong = Layout::new::<u64>();
    release(&guard, (start, wrong));
    let address = start.addr().get();
    assert_eq!(
        guard.findings(),
        [GuardFinding::WrongLayout { address, asked: layout, given: wrong }]
    );
    assert_eq!(guard.inner().stats().live, 0, "to the byte");
}

#[test]
fn fresh_bytes_are_poison_and_zeroed_ones_are_zero() {
    let guard = guard();
    let fresh = guard.allocate(Layout::new::<[u8; 40]>()).unwrap();
    let zeroed = guard.allocate_zeroed(Layout::new::<[u8; 40]>()).unwrap();
    // SAFETY: live blocks of 40 bytes, which the guard has initialised.
    unsafe {
        assert_eq!(fresh.as_ref(), [Guard::FRESH; 40]);
        assert_eq!(zeroed.as_ref(), [0; 40]);
    }
    release(&guard, (fresh.cast(), Layout::new::<[u8; 40]>()));
    release(&guard, (zeroed.cast(), Layout::new::<[u8; 40]>()));
}

/// Records whether a returned block has 40 consecutive bytes of the freed pattern.
#[derive(Default)]
struct Looks {
    poisoned: Cell<bool>,
}

// SAFETY: 1. blocks are the global allocator's, which all references to this share. 2. nothing
// unwinds.
unsafe impl Allocator for &Looks {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        Global.allocate(layout)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: 1. a live block of that size, which the guard has initialised.
        let bytes = unsafe { NonNull::slice_from_raw_parts(block, layout.size()).as_ref() };
        self.poisoned.set(bytes.windows(40).any(|bytes| bytes == [Guard::FREED; 40]));
        // SAFETY: 1. the caller's conditions, passed on.
        unsafe { Global.deallocate(block, layout) };
    }
}

#[test]
fn bytes_are_poison_when_returned_to_the_upstream() {
    let below = Looks::default();
    let guard = Guarded::new(&below);
    let layout = Layout::new::<[u8; 40]>();
    let block = guard.allocate(layout).unwrap().cast::<u8>();
    // SAFETY: 1. a live block, forgotten here.
    unsafe {
        block.write_bytes(1, 40);
        guard.deallocate(block, layout);
    }
    assert!(below.poisoned.get());
}

#[test]
fn a_refusal_below_leaves_the_block_and_no_record() {
    let budget = Budget::new("guarded", 200);
    let guard = Guarded::new(Limit::new(Global, budget.clone()));
    let mut list: Vec<u8, _> = Vec::with_capacity_in(100, &guard);
    list.extend([9; 100]);
    assert!(list.try_reserve(50).is_err());
    assert_eq!((guard.live(), guard.check(), &list[..]), (1, Ok(()), &[9; 100][..]));
    drop(list);
    assert_eq!((guard.live(), budget.used(), guard.findings().len()), (0, 0, 0));
}

#[test]
fn it_owns_its_blocks_whatever_is_below() {
    let (ours, theirs) = (guard(), guard());
    let held = block(&ours, 40, 8);
    // SAFETY: inside the block.
    let inside = unsafe { held.0.add(39) };
    assert!(ours.owns(held.0) && ours.owns(inside) && !theirs.owns(held.0));
    // SAFETY: a byte of the block below.
    assert!(!ours.owns(unsafe { held.0.add(40) }), "the canary is nobody's");
    release(&ours, held);
    assert!(!ours.owns(held.0));
}
