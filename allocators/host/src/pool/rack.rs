//! Free blocks of one class, the one that came last first.
//!
//! A rack is behind a [door](super::door), or behind the lock of a [depot](super::depot)'s shelf. Its methods are for
//! whoever is inside; how many blocks there are may be asked by all. Everything in it is atomic, so whatever happens no
//! memory is torn; what keeps two threads from having one block is the door.
#![expect(unsafe_code, reason = "keeps pointers to what is never freed")]

use super::span::Slot;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

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

    /// The block, which is its taker's from now on.
    ///
    /// # Safety
    /// Something has been [put](Entry::put) in.
    #[inline(always)]
    pub(super) unsafe fn take(&self) -> u64 {
        // SAFETY: 1. by the caller's word.
        unsafe { self.state() }.store(Slot::Live as u8, Relaxed);
        self.address()
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

/// The blocks of one class.
#[derive(Debug)]
pub(super) struct Rack {
    /// How many there are: at most `most`.
    len: AtomicU32,
    /// How many entries there are room for.
    most: AtomicU32,
    /// A boxed slice of `most`; dangling when that is zero.
    entries: AtomicPtr<Entry>,
}

impl Rack {
    pub(super) fn empty() -> Self {
        Self { len: AtomicU32::new(0), most: AtomicU32::new(0), entries: AtomicPtr::new(ptr::dangling_mut()) }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> u32 {
        self.len.load(Relaxed)
    }

    #[inline(always)]
    pub(super) fn most(&self) -> u32 {
        self.most.load(Relaxed)
    }

    /// # Safety
    /// 1. `place` is below `most`. 2. The caller is inside.
    #[inline(always)]
    unsafe fn entry(&self, place: u32) -> &Entry {
        // SAFETY: 1. the slice has `most` entries. 2. who is inside alone replaces it.
        unsafe { &*self.entries.load(Relaxed).add(place as usize) }
    }

    /// Takes the block out that came last.
    #[inline(always)]
    pub(super) fn pop(&self) -> Option<u64> {
        let last = self.len().checked_sub(1)?;
        // SAFETY: 1. below `len`, and so `most`. 2. by the caller's word. 3. of `take`: entries below `len` have been put in.
        let address = unsafe { self.entry(last).take() };
        self.len.store(last, Relaxed);
        Some(address)
    }

    /// Puts a block in if there is room.
    #[inline(always)]
    pub(super) fn push(&self, address: u64, state: &'static AtomicU8) -> bool {
        let len = self.len();
        if len >= self.most() {
            return false;
        }
        // SAFETY: 1. just seen. 2. by the caller's word.
        unsafe { self.entry(len) }.put(address, state);
        self.len.store(len + 1, Relaxed);
        true
    }

    /// Gives blocks away, the one that came last first, until so many are left.
    pub(super) fn shed(&self, keep: u32, mut give: impl FnMut(u64)) {
        let len = self.len();
        for place in (keep..len).rev() {
            // SAFETY: 1. below `len`, and so `most`. 2. by the caller's word.
            give(unsafe { self.entry(place) }.address());
        }
        self.len.store(len.min(keep), Relaxed);
    }

    /// Makes it as large as that, which holds what is in it.
    pub(super) fn set_most(&self, most: u32) {
        let next: Box<[Entry]> = (0..most).map(|_| Entry::empty()).collect();
        for (place, to) in next.iter().enumerate().take(self.len().min(most) as usize) {
            // SAFETY: 1. below `len`, which is at most `most`. 2. by the caller's word.
            let from = unsafe { self.entry(place as u32) };
            to.address.store(from.address(), Relaxed);
            to.state.store(from.state.load(Relaxed), Relaxed);
        }
        let next = Box::into_raw(next).cast::<Entry>();
        let (old, count) = (self.entries.swap(next, Relaxed), self.most.swap(most, Relaxed));
        // SAFETY: 1. made here with so many entries, or dangling for none. 2. nobody has a reference into it: those are for
        // whoever is inside, which is the caller.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(old, count as usize)) });
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        self.set_most(0);
    }
}
