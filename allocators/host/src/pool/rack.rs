//! Free blocks of one class, the one that came last first.
//!
//! A rack is behind a [door](super::door), or behind the lock of a [depot](super::depot)'s shelf.
//! Its methods are for whoever is inside; how many blocks there are may be asked by all who have
//! the lock under which the rack is made larger or smaller. Everything in it is atomic, so whatever
//! happens no memory is torn; what keeps two threads from having one block is the door.
#![expect(unsafe_code, reason = "keeps pointers to what is never freed")]

use super::span::Slot;
use crate::kernel::pointer;
use std::{
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering::Relaxed},
};

/// A free block.
#[derive(Debug)]
pub(super) struct Entry {
    address: AtomicU64,
    /// The state of its slot, which says [`Slot::Cached`] while it is here.
    state: AtomicPtr<AtomicU8>,
}

impl Entry {
    pub(super) const fn empty() -> Self {
        Self { address: AtomicU64::new(0), state: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The block, which is its taker's from now on; `None` where nothing has been [put](Entry::put)
    /// in.
    #[inline(always)]
    pub(super) fn take(&self) -> Option<NonNull<u8>> {
        let block = pointer(self.address() as usize)?;
        // SAFETY: 1. where there is an address a block has been put in.
        unsafe { self.state() }.store(Slot::Live as u8, Relaxed);
        Some(block)
    }

    #[inline(always)]
    pub(super) fn put(&self, address: u64, state: &'static AtomicU8) {
        state.store(Slot::Cached as u8, Relaxed);
        self.address.store(address, Relaxed);
        self.state.store(ptr::from_ref(state).cast_mut(), Relaxed);
    }

    #[inline(always)]
    pub(super) fn address(&self) -> u64 {
        self.address.load(Relaxed)
    }

    /// The state of the block's slot.
    ///
    /// # Safety
    /// Something has been [put](Entry::put) in.
    #[inline(always)]
    pub(super) unsafe fn state(&self) -> &'static AtomicU8 {
        // SAFETY: 1. what `put` stored: a state of a span, which is never freed.
        unsafe { &*self.state.load(Relaxed) }
    }
}

/// Where a rack ends that has never had room.
static NOTHING: Entry = Entry::empty();

/// The blocks of one class.
///
/// ```text
///   first       top         end
///     │ 0 │ block │ block │     │     │      an entry without a block below the first, so that
///     └──────────────┘                       who takes one sees by it that there is none
/// ```
///
/// As long as a power of two, so that an index is a shift.
#[derive(Debug)]
#[repr(align(32))]
pub(super) struct Rack {
    /// The entry of the block that came last: `first` if there is none.
    top: AtomicPtr<Entry>,
    /// The last entry. Where `top` is, it is full.
    end: AtomicPtr<Entry>,
    /// An entry of no block, and the start of a boxed slice of all; [`NOTHING`] where there is no
    /// room.
    first: AtomicPtr<Entry>,
}

impl Rack {
    pub(super) fn empty() -> Self {
        let nothing = || AtomicPtr::new(ptr::from_ref(&NOTHING).cast_mut());
        Self { top: nothing(), end: nothing(), first: nothing() }
    }

    /// How many entries there are from the first one to that.
    fn count(&self, to: &AtomicPtr<Entry>) -> u32 {
        (to.load(Relaxed).addr().wrapping_sub(self.first.load(Relaxed).addr()) / size_of::<Entry>())
            as u32
    }

    /// How many blocks there are: at most `most`.
    pub(super) fn len(&self) -> u32 {
        self.count(&self.top)
    }

    /// How many blocks there is room for.
    pub(super) fn most(&self) -> u32 {
        self.count(&self.end)
    }

    /// Takes the block out that came last.
    #[inline(always)]
    pub(super) fn pop(&self) -> Option<NonNull<u8>> {
        let top = self.top.load(Relaxed);
        // SAFETY: 1. one of the entries, or the first: who is inside alone replaces them, which is
        // the caller.
        let block = unsafe { &*top }.take()?;
        self.top.store(top.wrapping_sub(1), Relaxed);
        Some(block)
    }

    /// Puts a block in if there is room.
    #[inline(always)]
    pub(super) fn push(&self, address: u64, state: &'static AtomicU8) -> bool {
        let top = self.top.load(Relaxed);
        if top == self.end.load(Relaxed) {
            return false;
        }
        let next = top.wrapping_add(1);
        // SAFETY: 1. at most `end`, which is an entry. 2. who is inside alone replaces them, which
        // is the caller.
        unsafe { &*next }.put(address, state);
        self.top.store(next, Relaxed);
        true
    }

    /// Gives blocks away, the one that came last first, until so many are left.
    pub(super) fn shed(&self, keep: u32, mut give: impl FnMut(u64)) {
        for _ in keep..self.len() {
            let top = self.top.load(Relaxed);
            // SAFETY: 1. one of the entries: who is inside alone replaces them, which is the
            // caller.
            give(unsafe { &*top }.address());
            self.top.store(top.wrapping_sub(1), Relaxed);
        }
    }

    /// Makes it as large as that, which holds what is in it.
    pub(super) fn set_most(&self, most: u32) {
        let (old, len, count) = (self.first.load(Relaxed), self.len().min(most), self.most());
        let next = if most == 0 {
            ptr::from_ref(&NOTHING).cast_mut()
        } else {
            let next: Box<[Entry]> = (0..=most).map(|_| Entry::empty()).collect();
            for (place, to) in next.iter().enumerate().take(len as usize + 1) {
                // SAFETY: 1. there are `most` entries above the first. 2. who is inside alone
                // replaces them, which is the caller.
                let from = unsafe { &*old.add(place) };
                to.address.store(from.address(), Relaxed);
                to.state.store(from.state.load(Relaxed), Relaxed);
            }
            Box::into_raw(next).cast::<Entry>()
        };
        self.first.store(next, Relaxed);
        self.top.store(next.wrapping_add(len as usize), Relaxed);
        self.end.store(next.wrapping_add(most as usize), Relaxed);
        if count > 0 {
            // SAFETY: 1. made here with one entry more than there was room for. 2. nobody has a
            // reference into it: those are for whoever is inside, which is the caller.
            drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(old, count as usize + 1)) });
        }
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        self.set_most(0);
    }
}
