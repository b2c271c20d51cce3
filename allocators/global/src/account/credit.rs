//! Charges and credits of the calling thread, in its slot or in the shared one.

use crate::{
    slots::{
        SHARED, Slot,
        charged::{charge_account, count_refusal, uncharge},
        claim,
    },
    thread_state::{THREAD_STATE, ThreadState},
};
use std::sync::atomic::Ordering;

/// Releases the slot of a thread when the thread ends.
struct ReleaseOnExit;

impl Drop for ReleaseOnExit {
    fn drop(&mut self) {
        THREAD_STATE.with(|state| {
            state.ending.set(true);
            if let Some(slot) = state.clear_slot() {
                slot.release();
            }
        });
    }
}

thread_local! {
    static RELEASE_ON_EXIT: ReleaseOnExit = const { ReleaseOnExit };
}

/// Assigns a slot to this thread, if possible.
#[cold]
#[inline(never)]
fn assign_slot(state: &ThreadState) -> Option<&'static Slot> {
    if state.ending.get() {
        return None;
    }
    let slot = claim()?;
    // First, so that an allocation inside the next call finds the slot.
    state.set_slot(slot);
    ThreadState::observe_tags();
    // Registers the destructor. This fails only if it has already run.
    if RELEASE_ON_EXIT.try_with(|_| ()).is_err() {
        state.ending.set(true);
        state.clear_slot();
        slot.release();
        return None;
    }
    Some(slot)
}

/// Returns the calling thread's slot, or `None` if it counts in the shared one.
#[inline]
pub(crate) fn thread_slot(state: &ThreadState) -> Option<&'static Slot> {
    state.own_slot().or_else(|| assign_slot(state))
}

/// Debits `bytes` bytes and counts an allocation, if this thread is in no scope and its credit is
/// sufficient. This is the complete fast path of most allocations.
#[inline]
pub(crate) fn try_charge_unscoped(bytes: usize) -> bool {
    THREAD_STATE.with(|state| state.unscoped_slot().try_debit_allocation(bytes))
}

/// Debits and counts as [`try_charge_unscoped`] does, also in a scope of a tag.
#[inline]
pub(crate) fn try_charge_unrouted(bytes: usize) -> bool {
    THREAD_STATE.with(|state| state.unrouted_slot().try_debit_allocation(bytes))
}

/// Debits `bytes` bytes and counts an allocation. Returns `false` and changes nothing if the cap
/// refuses.
#[cold]
#[inline(never)]
pub(crate) fn charge(bytes: usize) -> bool {
    THREAD_STATE.with(|state| debit(state, bytes as u64, 1))
}

/// Debits `bytes` bytes for the growth of a block.
#[inline]
pub(crate) fn charge_growth(bytes: usize) -> bool {
    let bytes = bytes as u64;
    THREAD_STATE.with(|state| state.slot().try_debit(bytes) || charge_growth_slowly(state, bytes))
}

#[cold]
#[inline(never)]
fn charge_growth_slowly(state: &ThreadState, bytes: u64) -> bool {
    debit(state, bytes, 0)
}

fn debit(state: &ThreadState, bytes: u64, allocations: u64) -> bool {
    let Some(slot) = thread_slot(state) else { return charge_shared(bytes, allocations) };
    let debited = slot.try_debit(bytes) || slot.refill_and_debit(bytes);
    if debited {
        Slot::add(&slot.allocations, allocations);
    }
    debited
}

fn charge_shared(bytes: u64, allocations: u64) -> bool {
    let debited = charge_account(bytes, 0).is_some();
    if debited {
        SHARED.allocations.fetch_add(allocations, Ordering::Relaxed);
    } else {
        count_refusal();
    }
    debited
}

/// Undoes [`charge`], because the wrapped allocator had no memory.
#[cold]
pub(crate) fn refund(bytes: usize) {
    THREAD_STATE.with(|state| {
        match thread_slot(state) {
            Some(slot) => Slot::add(&slot.allocations, 1u64.wrapping_neg()),
            None => _ = SHARED.allocations.fetch_sub(1, Ordering::Relaxed),
        }
        add_credit(state, bytes as u64, 0);
    });
}

/// Credits the `bytes` of a block that this thread is about to free, and counts the free, if its
/// credit has room. The bytes stay charged, so no other thread can use them before the block is
/// really free.
#[inline]
pub(crate) fn try_credit_free(bytes: usize) -> bool {
    THREAD_STATE.with(|state| {
        let slot = state.slot();
        let credited = slot.try_add_credit(bytes as u64);
        if credited {
            Slot::add(&slot.frees, 1);
        }
        credited
    })
}

/// Credits the `bytes` of a freed block, and counts the free.
pub(crate) fn credit_free(bytes: usize) {
    THREAD_STATE.with(|state| add_credit(state, bytes as u64, 1));
}

/// Credits `bytes` by which a block has shrunk, or could not grow.
#[inline]
pub(crate) fn credit_shrink(bytes: usize) {
    let bytes = bytes as u64;
    THREAD_STATE.with(|state| {
        if bytes > 0 && !state.slot().try_add_credit(bytes) {
            add_credit(state, bytes, 0);
        }
    });
}

#[cold]
#[inline(never)]
fn add_credit(state: &ThreadState, bytes: u64, frees: u64) {
    match thread_slot(state) {
        Some(slot) => {
            Slot::add(&slot.frees, frees);
            if !slot.try_add_credit(bytes) {
                slot.add_credit_and_trim(bytes);
            }
        }
        None => {
            SHARED.frees.fetch_add(frees, Ordering::Relaxed);
            uncharge(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::{SLOTS, slots, totals};
    use std::{collections::BTreeSet, ptr, thread};

    /// A single test, since slots are global to the process.
    #[test]
    fn slots_are_exclusive_reused_and_extended_on_demand() {
        let address = |slot: &'static Slot| ptr::from_ref(slot).addr();
        let first: Vec<_> = (0..3 * SLOTS).map_while(|_| claim()).collect();
        let distinct: BTreeSet<_> = first.iter().map(|slot| address(slot)).collect();
        assert_eq!(distinct.len(), 3 * SLOTS);
        first.iter().for_each(|slot| slot.release());
        let again: BTreeSet<_> = (0..3 * SLOTS).filter_map(|_| claim()).map(address).collect();
        assert_eq!(again, distinct);
        slots().for_each(|slot| {
            if distinct.contains(&address(slot)) {
                slot.release();
            }
        });

        // A thread that ends releases its slot and returns its credit.
        let used = move || THREAD_STATE.with(|state| thread_slot(state).map(address));
        let (one, charged) = (thread::spawn(used).join().unwrap(), crate::stats().live);
        let other = thread::spawn(move || {
            assert!(charge(1000));
            credit_free(1000);
            used()
        });
        other.join().unwrap();
        assert!(one.is_some());
        assert_eq!(crate::stats().live, charged);
        assert_eq!(totals().credit, 0);
    }
}
