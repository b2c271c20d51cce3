//! Where each thread counts.
//!
//! A slot is written by one thread at a time with plain loads and stores, and read by whoever asks
//! for totals. It belongs to a thread from its first allocation to its end and then waits for
//! another; it never goes away, so a total is a walk over slots without a lock. A thread that
//! cannot have one (it is ending, or there is no memory for more) counts in the shared slot by
//! atomic additions.
//!
//! A thread without a slot points at the shared one. That has no change to pay from and may keep
//! none, so whoever comes with a block turns into the slow path by the comparison that everybody
//! makes, and the quick one asks nothing more.
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

/// A thread's part of the account. Apart from its neighbours, also where lines are fetched in
/// pairs.
#[repr(align(128))]
pub(crate) struct Slot {
    /// Whether a thread counts here. Acquired and released, so that the next owner sees what the
    /// last one wrote.
    taken: AtomicBool,
    /// Bytes that are charged and in no live block. Written by the owner alone; 0 while nobody
    /// owns it.
    change: AtomicU64,
    /// The most that the change may become: [`MOST_CHANGE`], or none in the shared slot.
    most: u64,
    /// What the change must not fall below: nothing, or [`RECALLED`]. Set by anybody, cleared by
    /// the owner. Signed, so that one comparison answers for a change that is too small as well.
    floor: AtomicI64,
    /// Allocations of all owners. Written by the owner alone.
    allocations: AtomicU64,
    /// Frees of all owners. Written by the owner alone.
    frees: AtomicU64,
    /// The same by tag. They count for nobody while nobody owns the slot.
    pub(super) cells: Cells,
    /// When this thread's next call stack is due.
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

    /// Counts `more`, as its only writer.
    #[inline]
    fn add(counter: &AtomicU64, more: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// Pays `bytes`, which are some, out of the change, if it has them.
    #[inline]
    fn pays(&self, bytes: u64) -> bool {
        // Neither wraps: the change is small, and no block is larger than `i64::MAX`.
        let rest = (self.change.load(Ordering::Relaxed) as i64).wrapping_sub(bytes as i64);
        if rest < self.floor.load(Ordering::Relaxed) {
            return false;
        }
        self.change.store(rest as u64, Ordering::Relaxed);
        true
    }

    /// Pays for an allocation of `bytes`, and counts it, if the change has them.
    #[inline]
    fn pays_for_one(&self, bytes: usize) -> bool {
        let paid = self.pays(bytes as u64);
        if paid {
            Self::add(&self.allocations, 1);
        }
        paid
    }

    fn pay_by_taking(&self, bytes: u64) -> bool {
        // The change may have been taken under an earlier cap, or freed while the cap was exceeded.
        // Acquire: the new cap, if this reads what its setter wrote.
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
                // What is freed from here on is not to be had before it has been compared with the
                // cap.
                self.floor.store(RECALLED, Ordering::Relaxed);
                refused();
                false
            }
        }
    }

    /// Takes `bytes` back into the change, if there is room.
    #[inline]
    fn receives(&self, bytes: u64) -> bool {
        let change = self.change.load(Ordering::Relaxed).wrapping_add(bytes);
        if change > self.most {
            return false;
        }
        self.change.store(change, Ordering::Relaxed);
        true
    }

    /// Takes `bytes` back, and returns all of the change but one batch.
    fn receive_and_return(&self, bytes: u64) {
        let change = self.change.load(Ordering::Relaxed) + bytes;
        self.change.store(BATCH, Ordering::Relaxed);
        put_back(change - BATCH);
    }

    /// Leaves the slot to another thread.
    fn retire(&self) {
        put_back(self.change.swap(0, Ordering::Relaxed));
        self.cells.leave();
        self.taken.store(false, Ordering::Release);
    }
}

/// The floor of a change that has to go back before the next payment: the cap was set, or has
/// refused, since the last one, or the owner is new.
const RECALLED: i64 = i64::MAX;

/// Slots in one block.
const SLOTS: usize = 64;

/// Slots that are made at once. The first block is there from the start, further ones are leaked.
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
        // SAFETY: 1. A pointer that is not null came from `extend`, which leaked a block and
        // initialised it before this pointer was published (Acquire here, Release there). 2. Nobody
        // makes a `&mut` of it.
        unsafe { next.as_ref() }
    }

    /// Adds a block behind this one, the last. `None` if the system has no memory.
    fn extend(&self) -> Option<&'static Block> {
        let layout = Layout::new::<Block>();
        // SAFETY: the layout has a size. From the system and not from the allocator that is being
        // wrapped: this runs inside a call of it.
        let fresh = unsafe { System.alloc(layout) }.cast::<Block>();
        if fresh.is_null() {
            return None;
        }
        // SAFETY: 1. `fresh` is a block of the layout of `Block`. 2. Nobody else has it yet.
        unsafe { fresh.write(Block::new()) };
        match self.next.compare_exchange(
            ptr::null_mut(),
            fresh,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            // Ours, or that of a thread that was faster.
            Ok(_) => {}
            // SAFETY: 1. `fresh` came from the system with this layout. 2. It was not published, so
            // nobody has it.
            Err(_) => unsafe { System.dealloc(fresh.cast(), layout) },
        }
        self.next()
    }
}

static FIRST: Block = Block::new();
/// Where threads count that have no slot of their own: by atomic additions, and without change.
pub(crate) static SHARED: Slot = Slot::new(0);

/// Finds a slot that nobody owns, and takes it.
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

/// Ends a thread's part when the thread ends.
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

/// Gives this thread a slot, if it can have one.
#[cold]
#[inline(never)]
fn arrive(here: &Here) -> Option<&'static Slot> {
    if here.ending.get() {
        return None;
    }
    let slot = claim()?;
    report::request();
    // First, so that an allocation from within the next line finds it.
    here.count_in(slot);
    Here::follow_tags();
    // Asks for the destructor. It is refused only if it has run.
    if LEAVE.try_with(|_| ()).is_err() {
        here.ending.set(true);
        here.leave();
        slot.retire();
        return None;
    }
    Some(slot)
}

/// The calling thread's slot; `None` if it counts in the shared one.
#[inline]
pub(crate) fn mine(here: &Here) -> Option<&'static Slot> {
    here.own().or_else(|| arrive(here))
}

/// Pays for `bytes` and counts an allocation, if this thread is in no scope and its change has
/// them. What most allocations do, and all that they do.
#[inline]
pub(crate) fn charge_plainly(bytes: usize) -> bool {
    HERE.with(|here| here.plain().pays_for_one(bytes))
}

/// The same in a scope of a tag.
#[inline]
pub(crate) fn charge_unrouted(bytes: usize) -> bool {
    HERE.with(|here| here.unrouted().pays_for_one(bytes))
}

/// Pays for `bytes` and counts an allocation. False, and nothing has changed, if the cap refuses.
#[cold]
#[inline(never)]
pub(crate) fn charge(bytes: usize) -> bool {
    HERE.with(|here| pay(here, bytes as u64, 1))
}

/// Pays for `bytes` by which a block grows.
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

/// Undoes [`charge`]: the allocator below had no memory.
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

/// Takes back `bytes` of a block that this thread is about to free, and counts the free, if its
/// change has room. Until the thread allocates again they are nobody's, so whoever else allocates
/// still finds them charged.
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

/// Takes back `bytes` of a block that was freed, and counts the free.
pub(crate) fn freed(bytes: usize) {
    HERE.with(|here| receive(here, bytes as u64, 1));
}

/// Takes back `bytes` by which a block shrank, or did not grow after all.
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

/// Has every thread return its change before it pays the next time.
pub(super) fn recall() {
    // Release: whoever sees it sees the cap that was set before.
    slots().for_each(|slot| slot.floor.store(RECALLED, Ordering::Release));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, thread};

    /// One after another: slots are the process's.
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

        // A thread that ends leaves its slot and its change.
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
