//! A bin: the free blocks of one class, last in, first out.
//!
//! A bin is guarded by the owner-biased lock of a magazine
//! ([`OwnerBiasedLock`](super::owner_biased_lock::OwnerBiasedLock)), or by the lock of a bin of a
//! [depot](super::depot). The caller of a method must be inside. Only `len` and `capacity` may be
//! called by all holders of the lock under which the capacity changes. All fields are atomic, so no
//! race tears memory. Exclusive access keeps two threads from taking one block.
#![expect(unsafe_code, reason = "keeps pointers to what is never freed")]

use super::span::SlotState;
use crate::kernel::pointer;
use std::{
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering::Relaxed},
};

/// A free block.
#[derive(Debug)]
pub(super) struct Entry {
    address: AtomicU64,
    /// The state of its slot, which is [`SlotState::Cached`] while the block is here.
    state: AtomicPtr<AtomicU8>,
}

impl Entry {
    pub(super) const fn empty() -> Self {
        Self { address: AtomicU64::new(0), state: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Takes the block, which the caller then owns. Returns `None` if no block has been
    /// [put](Entry::put) in.
    #[inline(always)]
    pub(super) fn take(&self) -> Option<NonNull<u8>> {
        let block = pointer(self.address() as usize)?;
        // SAFETY: 1. an address is stored only together with a block's state.
        unsafe { self.state() }.store(SlotState::Live as u8, Relaxed);
        Some(block)
    }

    #[inline(always)]
    pub(super) fn put(&self, address: u64, state: &'static AtomicU8) {
        state.store(SlotState::Cached as u8, Relaxed);
        self.address.store(address, Relaxed);
        self.state.store(ptr::from_ref(state).cast_mut(), Relaxed);
    }

    #[inline(always)]
    pub(super) fn address(&self) -> u64 {
        self.address.load(Relaxed)
    }

    /// Returns the state of the block's slot.
    ///
    /// # Safety
    /// A block has been [put](Entry::put) in.
    #[inline(always)]
    pub(super) unsafe fn state(&self) -> &'static AtomicU8 {
        // SAFETY: 1. `put` stored it: a state of a span, and spans are never freed.
        unsafe { &*self.state.load(Relaxed) }
    }
}

/// The only entry of bins without capacity.
static EMPTY_ENTRY: Entry = Entry::empty();

/// The free blocks of one class.
///
/// ```text
///   first       top         end
///     │ 0 │ block │ block │     │     │      an entry without a block below the first, so that
///     └──────────────┘                       who takes one sees by it that there is none
/// ```
///
/// Its size is a power of two, so that indexing is a shift.
#[derive(Debug)]
#[repr(align(32))]
pub(super) struct CacheBin {
    /// The entry of the last block, or `first` if there is none.
    top: AtomicPtr<Entry>,
    /// The last entry. The bin is full when `top` is equal to it.
    end: AtomicPtr<Entry>,
    /// An entry without a block, and the start of the boxed slice of entries. [`EMPTY_ENTRY`] if
    /// there is no capacity.
    first: AtomicPtr<Entry>,
}

impl CacheBin {
    pub(super) fn empty() -> Self {
        let empty_entry = || AtomicPtr::new(ptr::from_ref(&EMPTY_ENTRY).cast_mut());
        Self { top: empty_entry(), end: empty_entry(), first: empty_entry() }
    }

    /// Returns the number of entries from the first one to `to`.
    fn count(&self, to: &AtomicPtr<Entry>) -> u32 {
        (to.load(Relaxed).addr().wrapping_sub(self.first.load(Relaxed).addr()) / size_of::<Entry>())
            as u32
    }

    /// Returns the number of blocks, at most `capacity`.
    pub(super) fn len(&self) -> u32 {
        self.count(&self.top)
    }

    /// Returns the capacity in blocks.
    pub(super) fn capacity(&self) -> u32 {
        self.count(&self.end)
    }

    /// Removes the block that was inserted last.
    #[inline(always)]
    pub(super) fn pop(&self) -> Option<NonNull<u8>> {
        let top = self.top.load(Relaxed);
        // SAFETY: 1. one of the entries, or the first. Only a thread inside replaces entries, and
        // that is the caller.
        let block = unsafe { &*top }.take()?;
        debug_assert!(self.len() > 0, "a block below the first entry");
        self.top.store(top.wrapping_sub(1), Relaxed);
        Some(block)
    }

    /// Inserts a block. Returns whether there was room.
    #[inline(always)]
    pub(super) fn push(&self, address: u64, state: &'static AtomicU8) -> bool {
        let top = self.top.load(Relaxed);
        if top == self.end.load(Relaxed) {
            return false;
        }
        let next = top.wrapping_add(1);
        // SAFETY: 1. at most `end`, which is an entry. 2. only a thread inside replaces entries,
        // and that is the caller.
        unsafe { &*next }.put(address, state);
        self.top.store(next, Relaxed);
        true
    }

    /// Removes blocks, last in first out, until `keep` are left.
    pub(super) fn truncate(&self, keep: u32, mut release: impl FnMut(u64)) {
        for _ in keep..self.len() {
            let top = self.top.load(Relaxed);
            // SAFETY: 1. one of the entries. Only a thread inside replaces entries, and that is the
            // caller.
            release(unsafe { &*top }.address());
            self.top.store(top.wrapping_sub(1), Relaxed);
        }
    }

    /// Sets the capacity. Keeps its blocks as far as they fit.
    pub(super) fn set_capacity(&self, capacity: u32) {
        let (old, len, count) =
            (self.first.load(Relaxed), self.len().min(capacity), self.capacity());
        let next = if capacity == 0 {
            ptr::from_ref(&EMPTY_ENTRY).cast_mut()
        } else {
            let next: Box<[Entry]> = (0..=capacity).map(|_| Entry::empty()).collect();
            for (index, to) in next.iter().enumerate().take(len as usize + 1) {
                // SAFETY: 1. there are `capacity` entries above the first. 2. only a thread inside
                // replaces entries, and that is the caller.
                let from = unsafe { &*old.add(index) };
                to.address.store(from.address(), Relaxed);
                to.state.store(from.state.load(Relaxed), Relaxed);
            }
            Box::into_raw(next).cast::<Entry>()
        };
        self.first.store(next, Relaxed);
        self.top.store(next.wrapping_add(len as usize), Relaxed);
        self.end.store(next.wrapping_add(capacity as usize), Relaxed);
        debug_assert_eq!((self.len(), self.capacity()), (len, capacity), "blocks were lost");
        if count > 0 {
            // SAFETY: 1. allocated here with one entry more than the capacity. 2. there are no
            // references into it: only a thread inside has them, and that is the caller.
            drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(old, count as usize + 1)) });
        }
    }
}

impl Drop for CacheBin {
    fn drop(&mut self) {
        self.set_capacity(0);
    }
}
