//! Per-thread slots of the account.
//!
//! - Only one thread at a time writes a slot, with plain loads and stores. Any thread may read it
//!   for totals.
//! - A slot belongs to a thread from its first allocation to its end. After that another thread can
//!   claim it.
//! - Slots are never freed, so totals are computed without a lock.
//! - A thread that cannot get a slot, because it is ending or there is no memory for more, counts
//!   in the shared slot with atomic additions.
//! - A thread without a slot points to the shared one. That has no change and accepts none, so the
//!   comparison of the fast path fails and leads to the slow path. The fast path needs no other
//!   check.
#![expect(unsafe_code, reason = "leaks blocks of slots that come from the system")]

use super::{BATCH, MOST_CHANGE, put_back, refused, tags::Cells, take};
use crate::{
    here::{HERE, Here},
    report,
    sample::Clock,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr,
    sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU64, Ordering},
};

/// The part of one thread in the account. Aligned so that it also shares no pair of cache lines
/// that the prefetcher fetches together.
#[repr(align(128))]
pub(crate) struct Slot {
    /// Whether a thread owns the slot. Acquired and released, so that the next owner sees the
    /// writes of the last one.
    taken: AtomicBool,
    /// Bytes that are charged but not in a live block. Written only by the owner. 0 without an
    /// owner.
    change: AtomicU64,
    /// The maximum of the change: [`MOST_CHANGE`], or 0 in the shared slot.
    most: u64,
    /// The minimum of the change after a payment: 0, or [`RECALLED`]. Set by any thread, cleared by
    /// the owner. Signed, so that one comparison also detects an insufficient change.
    floor: AtomicI64,
    /// Allocations of all owners. Written only by the current owner.
    allocations: AtomicU64,
    /// Frees of all owners. Written only by the current owner.
    frees: AtomicU64,
    /// The counts by tag. Without an owner the cells belong to no tag.
    pub(super) cells: Cells,
    /// When the next call stack of this thread is due.
    pub(crate) clock: Clock,
}

impl Slot {
    const fn new(most: u64) -> Self {
        Self {
            taken: AtomicBool::new(false),
            change: AtomicU64::new(0),
            most,
            floor: AtomicI64::new(0),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            cells: Cells::new(),
            clock: Clock::new(),
        }
    }

    /// Adds `more` to a counter. The caller must be its only writer.
    #[inline]
    fn add(counter: &AtomicU64, more: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// Pays a nonzero number of bytes from the change, if it is sufficient.
    #[inline]
    fn pays(&self, bytes: u64) -> bool {
        // Cannot overflow: the change is small, and no block is larger than `i64::MAX`.
        let rest = (self.change.load(Ordering::Relaxed) as i64).wrapping_sub(bytes as i64);
        if rest < self.floor.load(Ordering::Relaxed) {
            return false;
        }
        self.change.store(rest as u64, Ordering::Relaxed);
        true
    }

    /// Pays for an allocation of `bytes` bytes, and counts it, if the change is sufficient.
    #[inline]
    fn pays_for_one(&self, bytes: usize) -> bool {
        let paid = self.pays(bytes as u64);
        if paid {
            Self::add(&self.allocations, 1);
        }
        paid
    }

    fn pay_by_taking(&self, bytes: u64) -> bool {
        // The change may come from an earlier cap, or from frees while the cap was exceeded.
        // Acquire: sees the new cap, if this reads the value that its setter wrote.
        if self.floor.swap(0, Ordering::Acquire) != 0 {
            put_back(self.change.swap(0, Ordering::Relaxed));
        }
        let need = bytes.saturating_sub(self.change.load(Ordering::Relaxed));
        match take(need, BATCH) {
            Some(taken) => {
                self.change
                    .store(self.change.load(Ordering::Relaxed) + taken - bytes, Ordering::Relaxed);
                true
            }
            None => {
                // Bytes that are freed from now on must be compared with the cap before they are
                // reused.
                self.floor.store(RECALLED, Ordering::Relaxed);
                refused();
                false
            }
        }
    }

    /// Adds `bytes` to the change, if that stays within the maximum.
    #[inline]
    fn receives(&self, bytes: u64) -> bool {
        let change = self.change.load(Ordering::Relaxed).wrapping_add(bytes);
        if change > self.most {
            return false;
        }
        self.change.store(change, Ordering::Relaxed);
        true
    }

    /// Takes back `bytes`, and gives all of the change except one batch back to the account.
    fn receive_and_return(&self, bytes: u64) {
        let change = self.change.load(Ordering::Relaxed) + bytes;
        self.change.store(BATCH, Ordering::Relaxed);
        put_back(change - BATCH);
    }

    /// Releases the slot for another thread.
    fn retire(&self) {
        put_back(self.change.swap(0, Ordering::Relaxed));
        self.cells.leave();
        self.taken.store(false, Ordering::Release);
    }
}

/// The floor of a change that must be returned before the next payment. It applies after the cap
/// was set or has refused an allocation, and for a new owner.
const RECALLED: i64 = i64::MAX;

/// Slots per block.
const SLOTS: usize = 64;

/// A block of slots. The first one is static, further ones are leaked.
struct Block {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Self {
            slots: [const { Slot::new(MOST_CHANGE) }; SLOTS],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Block> {
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: 1. A pointer that is not null comes from `extend`, which leaked and initialised a
        // block before it published the pointer (Acquire here, Release there). 2. No `&mut` of it
        // is created.
        unsafe { next.as_ref() }
    }

    /// Appends a block to this one, which is the last. Returns `None` if the system has no memory.
    fn extend(&self) -> Option<&'static Block> {
        let layout = Layout::new::<Block>();
        // SAFETY: the layout has a nonzero size. The system allocator is used, not the wrapped one,
        // because this runs inside a call of the wrapper.
        let fresh = unsafe { System.alloc(layout) }.cast::<Block>();
        if fresh.is_null() {
            return None;
        }
        // SAFETY: 1. `fresh` is a block of the layout of `Block`. 2. No other thread has its
        // address yet.
        unsafe { fresh.write(Block::new()) };
        match self.next.compare_exchange(
            ptr::null_mut(),
            fresh,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            // The next block is this one, or that of a faster thread.
            Ok(_) => {}
            // SAFETY: 1. `fresh` was allocated by the system with this layout. 2. It was not
            // published, so no other thread has its address.
            Err(_) => unsafe { System.dealloc(fresh.cast(), layout) },
        }
        self.next()
    }
}

static FIRST: Block = Block::new();
/// The slot of all threads without their own: atomic additions, and no change.
pub(crate) static SHARED: Slot = Slot::new(0);

/// Claims a slot without an owner.
fn claim() -> Option<&'static Slot> {
    let mut block = Some(&FIRST);
    while let Some(here) = block {
        for slot in &here.slots {
            if !slot.taken.load(Ordering::Relaxed)
                && slot
                    .taken
                    .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                slot.floor.store(RECALLED, Ordering::Relaxed);
                return Some(slot);
            }
        }
        block = here.next().or_else(|| here.extend());
    }
    None
}

/// Releases the slot of a thread when the thread ends.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        HERE.with(|here| {
            here.ending.set(true);
            if let Some(slot) = here.leave() {
                slot.retire();
            }
        });
    }
}

thread_local! {
    static LEAVE: Leave = const { Leave };
}

/// Assigns a slot to this thread, if possible.
#[cold]
#[inline(never)]
fn arrive(here: &Here) -> Option<&'static Slot> {
    if here.ending.get() {
        return None;
    }
    let slot = claim()?;
    report::request();
    // First, so that an allocation inside the next call finds the slot.
    here.count_in(slot);
    Here::follow_tags();
    // Registers the destructor. This fails only if it has already run.
    if LEAVE.try_with(|_| ()).is_err() {
        here.ending.set(true);
        here.leave();
        slot.retire();
        return None;
    }
    Some(slot)
}

/// Returns the calling thread's slot, or `None` if it counts in the shared one.
#[inline]
pub(crate) fn mine(here: &Here) -> Option<&'static Slot> {
    here.own().or_else(|| arrive(here))
}

/// Pays for `bytes` bytes and counts an allocation, if this thread is in no scope and its change is
/// sufficient. This is the complete fast path of most allocations.
#[inline]
pub(crate) fn charge_plainly(bytes: usize) -> bool {
    HERE.with(|here| here.plain().pays_for_one(bytes))
}

/// Pays and counts as [`charge_plainly`] does, also in a scope of a tag.
#[inline]
pub(crate) fn charge_unrouted(bytes: usize) -> bool {
    HERE.with(|here| here.unrouted().pays_for_one(bytes))
}

/// Pays for `bytes` bytes and counts an allocation. Returns `false` and changes nothing if the cap
/// refuses.
#[cold]
#[inline(never)]
pub(crate) fn charge(bytes: usize) -> bool {
    HERE.with(|here| pay(here, bytes as u64, 1))
}

/// Pays for the growth of a block by `bytes` bytes.
#[inline]
pub(crate) fn charge_growth(bytes: usize) -> bool {
    let bytes = bytes as u64;
    HERE.with(|here| here.slot().pays(bytes) || pay_slowly(here, bytes))
}

#[cold]
#[inline(never)]
fn pay_slowly(here: &Here, bytes: u64) -> bool {
    pay(here, bytes, 0)
}

fn pay(here: &Here, bytes: u64, allocations: u64) -> bool {
    let Some(slot) = mine(here) else { return charge_shared(bytes, allocations) };
    let paid = slot.pays(bytes) || slot.pay_by_taking(bytes);
    if paid {
        Slot::add(&slot.allocations, allocations);
    }
    paid
}

fn charge_shared(bytes: u64, allocations: u64) -> bool {
    let paid = take(bytes, 0).is_some();
    if paid {
        SHARED.allocations.fetch_add(allocations, Ordering::Relaxed);
    } else {
        refused();
    }
    paid
}

/// Undoes [`charge`], because the wrapped allocator had no memory.
#[cold]
pub(crate) fn refund(bytes: usize) {
    HERE.with(|here| {
        match mine(here) {
            Some(slot) => Slot::add(&slot.allocations, 1u64.wrapping_neg()),
            None => _ = SHARED.allocations.fetch_sub(1, Ordering::Relaxed),
        }
        receive(here, bytes as u64, 0);
    });
}

/// Takes back the `bytes` of a block that this thread is about to free, and counts the free, if its
/// change has room. The bytes stay charged, so no other thread can use them before the block is
/// really free.
#[inline]
pub(crate) fn frees_plainly(bytes: usize) -> bool {
    HERE.with(|here| {
        let slot = here.slot();
        let received = slot.receives(bytes as u64);
        if received {
            Slot::add(&slot.frees, 1);
        }
        received
    })
}

/// Takes back the `bytes` of a freed block, and counts the free.
pub(crate) fn freed(bytes: usize) {
    HERE.with(|here| receive(here, bytes as u64, 1));
}

/// Takes back `bytes` by which a block has shrunk, or could not grow.
#[inline]
pub(crate) fn release(bytes: usize) {
    let bytes = bytes as u64;
    HERE.with(|here| {
        if bytes > 0 && !here.slot().receives(bytes) {
            receive(here, bytes, 0);
        }
    });
}

#[cold]
#[inline(never)]
fn receive(here: &Here, bytes: u64, frees: u64) {
    match mine(here) {
        Some(slot) => {
            Slot::add(&slot.frees, frees);
            if !slot.receives(bytes) {
                slot.receive_and_return(bytes);
            }
        }
        None => {
            SHARED.frees.fetch_add(frees, Ordering::Relaxed);
            put_back(bytes);
        }
    }
}

/// Sums over all slots.
#[derive(Default)]
pub(super) struct Totals {
    pub(super) change: u64,
    pub(super) allocations: u64,
    pub(super) frees: u64,
}

pub(super) fn slots() -> impl Iterator<Item = &'static Slot> {
    std::iter::successors(Some(&FIRST), |block| block.next()).flat_map(|block| &block.slots)
}

pub(super) fn totals() -> Totals {
    let mut totals = Totals::default();
    for slot in slots().chain([&SHARED]) {
        totals.change = totals.change.wrapping_add(slot.change.load(Ordering::Relaxed));
        totals.allocations =
            totals.allocations.wrapping_add(slot.allocations.load(Ordering::Relaxed));
        totals.frees = totals.frees.wrapping_add(slot.frees.load(Ordering::Relaxed));
    }
    totals
}

/// Makes every thread return its change before its next payment.
pub(super) fn recall() {
    // Release: a thread that sees the floor also sees the new cap.
    slots().for_each(|slot| slot.floor.store(RECALLED, Ordering::Release));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, thread};

    /// A single test, since slots are global to the process.
    #[test]
    fn slots_are_given_to_one_thread_at_a_time_extended_when_all_are_taken_and_given_again() {
        let address = |slot: &'static Slot| ptr::from_ref(slot).addr();
        let first: Vec<_> = (0..3 * SLOTS).map_while(|_| claim()).collect();
        let distinct: BTreeSet<_> = first.iter().map(|slot| address(slot)).collect();
        assert_eq!(distinct.len(), 3 * SLOTS);
        first.iter().for_each(|slot| slot.retire());
        let again: BTreeSet<_> = (0..3 * SLOTS).filter_map(|_| claim()).map(address).collect();
        assert_eq!(again, distinct);
        slots().for_each(|slot| {
            if distinct.contains(&address(slot)) {
                slot.retire();
            }
        });

        // A thread that ends releases its slot and returns its change.
        let used = move || HERE.with(|here| mine(here).map(address));
        let (one, charged) = (thread::spawn(used).join().unwrap(), crate::stats().live);
        let other = thread::spawn(move || {
            assert!(charge(1000));
            freed(1000);
            used()
        });
        other.join().unwrap();
        assert!(one.is_some());
        assert_eq!(crate::stats().live, charged);
        assert_eq!(totals().change, 0);
    }
}
