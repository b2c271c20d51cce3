//! Per-thread slots of the account.
//!
//! - Only one thread at a time writes a slot, with plain loads and stores. Any thread may read it
//!   for totals.
//! - A slot belongs to a thread from its first allocation to its end. After that another thread can
//!   claim it.
//! - Slots are never freed, so totals are computed without a lock.
//! - A thread that cannot get a slot, because it is ending or there is no memory for more, counts
//!   in the shared slot with atomic additions.
//! - A thread without a slot points to the shared one. That has no credit and accepts none, so the
//!   comparison of the fast path fails and leads to the slow path. The fast path needs no other
//!   check.
#![expect(unsafe_code, reason = "leaks chunks of slots that come from the system")]

use super::{
    charged::{BATCH, MAX_CREDIT, charge_account, count_refusal, uncharge},
    tag_cells::TagCells,
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
    owned: AtomicBool,
    /// Bytes that are charged but not in a live block. Written only by the owner. 0 without an
    /// owner.
    credit: AtomicU64,
    /// The maximum of the credit: [`MAX_CREDIT`], or 0 in the shared slot.
    max_credit: u64,
    /// The minimum of the credit after a debit: 0, or [`RECALL_FLOOR`]. Set by any thread, cleared
    /// by the owner. Signed, so that one comparison also detects an insufficient credit.
    floor: AtomicI64,
    /// Allocations of all owners. Written only by the current owner.
    pub(crate) allocations: AtomicU64,
    /// Frees of all owners. Written only by the current owner.
    pub(crate) frees: AtomicU64,
    /// The counts by tag. Without an owner the cells belong to no tag.
    pub(crate) cells: TagCells,
}

impl Slot {
    const fn new(max_credit: u64) -> Self {
        Self {
            owned: AtomicBool::new(false),
            credit: AtomicU64::new(0),
            max_credit,
            floor: AtomicI64::new(0),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            cells: TagCells::new(),
        }
    }

    /// Adds `more` to a counter. The caller must be its only writer.
    #[inline]
    pub(crate) fn add(counter: &AtomicU64, more: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// Debits a nonzero number of bytes from the credit, if it is sufficient.
    #[inline]
    pub(crate) fn try_debit(&self, bytes: u64) -> bool {
        // Cannot overflow: the credit is small, and no block is larger than `i64::MAX`.
        let rest = (self.credit.load(Ordering::Relaxed) as i64).wrapping_sub(bytes as i64);
        if rest < self.floor.load(Ordering::Relaxed) {
            return false;
        }
        self.credit.store(rest as u64, Ordering::Relaxed);
        true
    }

    /// Debits the bytes of an allocation, and counts it, if the credit is sufficient.
    #[inline]
    pub(crate) fn try_debit_allocation(&self, bytes: usize) -> bool {
        let debited = self.try_debit(bytes as u64);
        if debited {
            Self::add(&self.allocations, 1);
        }
        debited
    }

    pub(crate) fn refill_and_debit(&self, bytes: u64) -> bool {
        // The credit may come from an earlier cap, or from frees while the cap was exceeded.
        // Acquire: sees the new cap, if this reads the value that its setter wrote.
        if self.floor.swap(0, Ordering::Acquire) != 0 {
            uncharge(self.credit.swap(0, Ordering::Relaxed));
        }
        let need = bytes.saturating_sub(self.credit.load(Ordering::Relaxed));
        match charge_account(need, BATCH) {
            Some(charged) => {
                self.credit.store(
                    self.credit.load(Ordering::Relaxed) + charged - bytes,
                    Ordering::Relaxed,
                );
                true
            }
            None => {
                // Bytes that are freed from now on must be compared with the cap before they are
                // reused.
                self.floor.store(RECALL_FLOOR, Ordering::Relaxed);
                count_refusal();
                false
            }
        }
    }

    /// Adds `bytes` to the credit, if that stays within the maximum.
    #[inline]
    pub(crate) fn try_add_credit(&self, bytes: u64) -> bool {
        let credit = self.credit.load(Ordering::Relaxed).wrapping_add(bytes);
        if credit > self.max_credit {
            return false;
        }
        self.credit.store(credit, Ordering::Relaxed);
        true
    }

    /// Credits `bytes`, and returns all of the credit except one batch to the account.
    pub(crate) fn add_credit_and_trim(&self, bytes: u64) {
        let credit = self.credit.load(Ordering::Relaxed) + bytes;
        self.credit.store(BATCH, Ordering::Relaxed);
        uncharge(credit - BATCH);
    }

    /// Releases the slot for another thread.
    pub(crate) fn release(&self) {
        uncharge(self.credit.swap(0, Ordering::Relaxed));
        self.cells.flush();
        self.owned.store(false, Ordering::Release);
    }
}

/// The floor of a credit that must be returned before the next debit. It applies after the cap
/// was set or has refused an allocation, and for a new owner.
const RECALL_FLOOR: i64 = i64::MAX;

/// Slots per chunk.
pub(crate) const SLOTS: usize = 64;

/// A chunk of slots. The first one is static, further ones are leaked.
struct SlotChunk {
    slots: [Slot; SLOTS],
    next: AtomicPtr<SlotChunk>,
}

impl SlotChunk {
    const fn new() -> Self {
        Self {
            slots: [const { Slot::new(MAX_CREDIT) }; SLOTS],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static SlotChunk> {
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: 1. A pointer that is not null comes from `append`, which leaked and initialised a
        // chunk before it published the pointer (Acquire here, Release there). 2. No `&mut` of it
        // is created.
        unsafe { next.as_ref() }
    }

    /// Appends a chunk to this one, which is the last. Returns `None` if the system has no memory.
    fn append(&self) -> Option<&'static SlotChunk> {
        let layout = Layout::new::<SlotChunk>();
        // SAFETY: the layout has a nonzero size. The system allocator is used, not the wrapped one,
        // because this runs inside a call of the wrapper.
        let fresh = unsafe { System.alloc(layout) }.cast::<SlotChunk>();
        if fresh.is_null() {
            return None;
        }
        // SAFETY: 1. `fresh` is a block of the layout of `SlotChunk`. 2. No other thread has its
        // address yet.
        unsafe { fresh.write(SlotChunk::new()) };
        match self.next.compare_exchange(
            ptr::null_mut(),
            fresh,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            // The next chunk is this one, or that of a faster thread.
            Ok(_) => {}
            // SAFETY: 1. `fresh` was allocated by the system with this layout. 2. It was not
            // published, so no other thread has its address.
            Err(_) => unsafe { System.dealloc(fresh.cast(), layout) },
        }
        self.next()
    }
}

static FIRST: SlotChunk = SlotChunk::new();
/// The slot of all threads without their own: atomic additions, and no credit.
pub(crate) static SHARED: Slot = Slot::new(0);

/// Claims a slot without an owner.
pub(crate) fn claim() -> Option<&'static Slot> {
    let mut next = Some(&FIRST);
    while let Some(chunk) = next {
        for slot in &chunk.slots {
            if !slot.owned.load(Ordering::Relaxed)
                && slot
                    .owned
                    .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                slot.floor.store(RECALL_FLOOR, Ordering::Relaxed);
                return Some(slot);
            }
        }
        next = chunk.next().or_else(|| chunk.append());
    }
    None
}

/// Sums over all slots.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) credit: u64,
    pub(crate) allocations: u64,
    pub(crate) frees: u64,
}

pub(crate) fn slots() -> impl Iterator<Item = &'static Slot> {
    std::iter::successors(Some(&FIRST), |chunk| chunk.next()).flat_map(|chunk| &chunk.slots)
}

pub(crate) fn totals() -> Totals {
    let mut totals = Totals::default();
    for slot in slots().chain([&SHARED]) {
        totals.credit = totals.credit.wrapping_add(slot.credit.load(Ordering::Relaxed));
        totals.allocations =
            totals.allocations.wrapping_add(slot.allocations.load(Ordering::Relaxed));
        totals.frees = totals.frees.wrapping_add(slot.frees.load(Ordering::Relaxed));
    }
    totals
}

/// Makes every thread return its credit before its next debit.
pub(crate) fn recall() {
    // Release: a thread that sees the floor also sees the new cap.
    slots().for_each(|slot| slot.floor.store(RECALL_FLOOR, Ordering::Release));
}
