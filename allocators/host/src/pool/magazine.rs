//! A thread's cache of free blocks of one pool.
//!
//! The owner thread accesses it by plain loads and stores, under an owner-biased lock
//! ([`OwnerBiasedLock`]).
//!
//! # How much it holds
//! - Of each class up to 64 KiB, about 64 KiB but at least four blocks. A full bin doubles as long
//!   as the pool's heap has as many free bytes as the magazine may hold beyond its initial size. A
//!   thread that allocates and frees many blocks at a time thus soon has them in its magazine.
//!   Otherwise half of the bin would go to the heap and back each time, under the lock. A magazine
//!   that is drained returns to its initial size.
//! - Of the classes above, the last freed block of each of eight residues: a block replaces one
//!   whose class is equal modulo 8. That is at most 8 MiB. The [depot] has the rest.
//! - Above the classes, four blocks of at most 64 MiB each.
//!
//! [depot]: super::depot
#![expect(unsafe_code, reason = "keeps pointers to what is never freed")]

use super::{
    cache_bin::{CacheBin, Entry},
    classes,
    depot::Depot,
    owner_biased_lock::OwnerBiasedLock,
    span::SlabSpan,
    stats::Tally,
};
use std::{
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
};

/// Maximum number of blocks above the classes in a magazine, and their maximum size.
const LARGE: usize = 4;
pub(super) const LARGE_MAX: u64 = 64 << 20;
/// One for each value of a byte, including [`NO_BIN`](super::span::NO_BIN).
const BINS: usize = 1 << u8::BITS;
/// Maximum capacity of a bin in blocks.
const BIN_MAX: u32 = 1 << 16;
/// Maximum number of blocks of classes with a depot in a magazine.
const RECENT: usize = 8;
/// Number of allocations between two polls of the gates while blocks are pending.
const POLL_EVERY: u64 = 64;

/// The most recently freed block of those classes with a depot that are equal modulo [`RECENT`].
#[derive(Debug)]
struct RecentBlock {
    /// Zero if there is no block.
    class: AtomicU32,
    entry: Entry,
}

/// A free block above the classes.
#[derive(Debug)]
struct LargeBlock {
    /// Zero if there is no block.
    bytes: AtomicU64,
    entry: Entry,
}

/// The free blocks and the counts of one thread.
///
/// Aligned to a pair of cache lines, so that no other thread writes to the owner's lines.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Magazine {
    pub(super) lock: OwnerBiasedLock,
    /// The shard whose slabs its slots are taken from.
    shard: u32,
    /// Operations of the owner without the lock. The pool counts the others.
    allocations: AtomicU64,
    frees: AtomicU64,
    /// Bytes requested, and bytes freed. Both only grow, so that a free does not depend on the
    /// store of the allocation before it.
    requested: AtomicU64,
    freed: AtomicU64,
    /// Allocations while blocks were pending.
    pending_allocations: AtomicU64,
    /// Bytes that its bins may hold beyond their initial capacity.
    extra_bytes: AtomicU64,
    /// By class. There is a bin for every value of a byte, so that no index needs a check. The
    /// extra bins never have room.
    bins: [CacheBin; BINS],
    /// By class modulo the length.
    recent: [RecentBlock; RECENT],
    large: [LargeBlock; LARGE],
}

/// Returns the initial capacity of a bin in blocks: about 64 KiB, but between 4 and 32 blocks.
const fn initial_capacity(class: usize) -> u32 {
    let fit = (64 << 10) / classes::bytes_of(class);
    if fit > 32 {
        32
    } else if fit < 4 {
        4
    } else {
        fit as u32
    }
}

impl Magazine {
    pub(super) fn new(shard: usize) -> Self {
        Self {
            lock: OwnerBiasedLock::new(),
            shard: shard as u32,
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            requested: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            pending_allocations: AtomicU64::new(0),
            extra_bytes: AtomicU64::new(0),
            bins: std::array::from_fn(|_| CacheBin::empty()),
            recent: [const { RecentBlock { class: AtomicU32::new(0), entry: Entry::empty() } };
                RECENT],
            large: [const { LargeBlock { bytes: AtomicU64::new(0), entry: Entry::empty() } };
                LARGE],
        }
    }

    pub(super) fn shard(&self) -> usize {
        self.shard as usize
    }

    /// Removes a block of the class for the owner, which requested `bytes`. Also returns `None`
    /// every 64th call while blocks are pending, so that the caller polls their gates.
    #[inline(always)]
    pub(super) fn pop(
        &self,
        generation: u64,
        class: usize,
        bytes: u64,
        must_poll: &AtomicBool,
    ) -> Option<NonNull<u8>> {
        let _inside = self.lock.enter(generation)?;
        if self.should_poll(must_poll) {
            return None;
        }
        let address = self.bins.get(class)?.pop()?;
        self.count_allocation(bytes);
        Some(address)
    }

    /// Returns whether the owner should poll gates now: at every 64th call while blocks are
    /// pending.
    ///
    /// Inlined, because a call in the middle of the fast path would save and restore seven
    /// registers.
    #[inline(always)]
    fn should_poll(&self, must_poll: &AtomicBool) -> bool {
        if !must_poll.load(Relaxed) {
            return false;
        }
        let pending_allocations = self.pending_allocations.load(Relaxed);
        self.pending_allocations.store(pending_allocations.wrapping_add(1), Relaxed);
        pending_allocations.is_multiple_of(POLL_EVERY)
    }

    #[inline(always)]
    fn count_allocation(&self, bytes: u64) {
        self.allocations.store(self.allocations.load(Relaxed) + 1, Relaxed);
        self.requested.store(self.requested.load(Relaxed).wrapping_add(bytes), Relaxed);
    }

    #[inline(always)]
    fn count_free(&self, bytes: u64) {
        self.frees.store(self.frees.load(Relaxed) + 1, Relaxed);
        self.freed.store(self.freed.load(Relaxed).wrapping_add(bytes), Relaxed);
    }

    /// Inserts the block at `address`, which the owner frees. `bytes` is the size that was
    /// requested. Returns whether there was room.
    ///
    /// The address is the slot's, and is passed so that it need not be computed again. That
    /// computation would make each operation of a loop wait for the one before.
    #[inline(always)]
    pub(super) fn push(
        &self,
        address: u64,
        (span, slot): (&'static SlabSpan, usize),
        bytes: u64,
        generation: u64,
    ) -> bool {
        let Some(_inside) = self.lock.enter(generation) else { return false };
        let put = self.bins[usize::from(span.bin())].push(address, span.state(slot));
        if put {
            self.count_free(bytes);
        }
        put
    }

    /// As [`Magazine::pop`], for a class with a depot.
    #[inline]
    pub(super) fn pop_shared(
        &self,
        generation: u64,
        class: usize,
        bytes: u64,
        must_poll: &AtomicBool,
        depot: &Depot,
    ) -> Option<NonNull<u8>> {
        let _inside = self.lock.enter(generation)?;
        if self.should_poll(must_poll) {
            return None;
        }
        let recent = &self.recent[class % RECENT];
        let address = if recent.class.load(Relaxed) == class as u32 {
            recent.class.store(0, Relaxed);
            recent.entry.take()?
        } else {
            depot.pop(class)?
        };
        self.count_allocation(bytes);
        Some(address)
    }

    /// As [`Magazine::push`], for a class with a depot: keeps the block, and moves the one before
    /// of a class that is equal modulo [`RECENT`] into the depot.
    #[inline]
    pub(super) fn push_shared(
        &self,
        address: u64,
        span: &'static SlabSpan,
        bytes: u64,
        generation: u64,
        depot: &Depot,
    ) -> bool {
        let (class, state) = (span.class(), span.state(0));
        if !classes::SHARED.contains(&(class as usize)) {
            return false;
        }
        let Some(_inside) = self.lock.enter(generation) else { return false };
        let recent = &self.recent[class as usize % RECENT];
        let before = recent.class.load(Relaxed);
        // SAFETY: 1. a class other than zero is stored only together with a block.
        let room = before == 0
            || depot.push(before as usize, recent.entry.address(), unsafe { recent.entry.state() });
        if room {
            recent.class.store(class, Relaxed);
            recent.entry.put(address, state);
        }
        let put = room || depot.push(class as usize, address, state);
        if put {
            self.count_free(bytes);
        }
        put
    }

    /// Removes a block of exactly `wanted` bytes, above the classes.
    #[inline]
    pub(super) fn pop_large(
        &self,
        generation: u64,
        wanted: u64,
        bytes: u64,
        must_poll: &AtomicBool,
    ) -> Option<NonNull<u8>> {
        let _inside = self.lock.enter(generation)?;
        if self.should_poll(must_poll) {
            return None;
        }
        let large = self.large.iter().find(|large| large.bytes.load(Relaxed) == wanted)?;
        large.bytes.store(0, Relaxed);
        let address = large.entry.take()?;
        self.count_allocation(bytes);
        Some(address)
    }

    /// As [`Magazine::push`], for a block above the classes.
    #[inline]
    pub(super) fn push_large(
        &self,
        address: u64,
        span: &'static SlabSpan,
        bytes: u64,
        generation: u64,
    ) -> bool {
        let Some(_inside) = self.lock.enter(generation) else { return false };
        let len = span.slot_bytes();
        if len > LARGE_MAX {
            return false;
        }
        let Some(large) = self.large.iter().find(|large| large.bytes.load(Relaxed) == 0) else {
            return false;
        };
        large.bytes.store(len, Relaxed);
        large.entry.put(address, span.state(0));
        self.count_free(bytes);
        true
    }

    /// Counts that the owner has resized a block in place. Returns whether the magazine serves this
    /// pool.
    #[inline]
    pub(super) fn count_resize(&self, old: u64, new: u64, generation: u64) -> bool {
        let Some(_inside) = self.lock.enter(generation) else { return false };
        self.requested
            .store(self.requested.load(Relaxed).wrapping_sub(old).wrapping_add(new), Relaxed);
        true
    }

    /// Returns the free places for blocks of a class. The caller must be inside.
    pub(super) fn free_entries(&self, class: usize) -> usize {
        let bin = &self.bins[class];
        if bin.capacity() == 0 {
            bin.set_capacity(initial_capacity(class));
        }
        bin.capacity().saturating_sub(bin.len()) as usize
    }

    /// Doubles the capacity for blocks of a class, if `free` bytes of the pool allow it. Returns
    /// whether they did. The caller must be inside.
    pub(super) fn grow_bin(&self, class: usize, free: u64) -> bool {
        let bin = &self.bins[class];
        let capacity = bin.capacity();
        let extra_bytes =
            self.extra_bytes.load(Relaxed) + u64::from(capacity) * classes::bytes_of(class) as u64;
        let fits = extra_bytes <= free && capacity < BIN_MAX;
        if fits {
            self.extra_bytes.store(extra_bytes, Relaxed);
            bin.set_capacity(2 * capacity);
        }
        fits
    }

    /// Inserts a block of the pool. The caller must be inside, and must have checked that there is
    /// room.
    pub(super) fn insert(&self, span: &'static SlabSpan, slot: usize) {
        let put = self.bins[usize::from(span.bin())].push(span.address(slot), span.state(slot));
        debug_assert!(put, "the caller has checked that there is room");
    }

    /// Removes blocks of a full bin until it is half full. The caller must be inside.
    pub(super) fn halve_bin(&self, class: usize, release: impl FnMut(u64)) {
        let bin = &self.bins[class];
        bin.truncate(bin.capacity() / 2, release);
    }

    /// Removes all blocks above the classes. The caller must be inside.
    pub(super) fn release_large(&self, mut release: impl FnMut(u64)) {
        for large in &self.large {
            if large.bytes.swap(0, Relaxed) > 0 {
                release(large.entry.address());
            }
        }
    }

    /// Removes all blocks, and restores the initial capacities. The caller must be inside.
    pub(super) fn drain(&self, mut release: impl FnMut(u64)) {
        for (class, bin) in self.bins.iter().enumerate().take(classes::SLOTTED) {
            bin.truncate(0, &mut release);
            if bin.capacity() > initial_capacity(class) {
                bin.set_capacity(initial_capacity(class));
            }
        }
        self.extra_bytes.store(0, Relaxed);
        for recent in self.recent.iter().filter(|recent| recent.class.swap(0, Relaxed) > 0) {
            release(recent.entry.address());
        }
        self.release_large(release);
    }

    /// Returns its counts and contents. They are exact while the owner is idle. The caller must
    /// hold the pool's lock.
    pub(super) fn tally(&self) -> Tally {
        let mut tally = Tally {
            allocations: self.allocations.load(Relaxed),
            frees: self.frees.load(Relaxed),
            requested: self.requested.load(Relaxed).wrapping_sub(self.freed.load(Relaxed)),
            cached: 0,
            blocks: 0,
        };
        for (class, bin) in self.bins.iter().enumerate().take(classes::SLOTTED) {
            let len = u64::from(bin.len());
            tally.blocks += len;
            tally.cached += len * classes::bytes_of(class) as u64;
        }
        for class in
            self.recent.iter().map(|recent| recent.class.load(Relaxed)).filter(|&class| class > 0)
        {
            tally.blocks += 1;
            tally.cached += classes::bytes_of(class as usize) as u64;
        }
        for bytes in self.large.iter().map(|large| large.bytes.load(Relaxed)) {
            tally.blocks += u64::from(bytes > 0);
            tally.cached += bytes;
        }
        tally
    }

    /// Resets the counts. The caller must be inside, and must have emptied the magazine.
    pub(super) fn reset_counts(&self) {
        debug_assert_eq!(self.tally().blocks, 0, "its blocks would be lost");
        for count in [&self.allocations, &self.frees, &self.requested, &self.freed] {
            count.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{owner_biased_lock::LockProof, span::SlotState},
        *,
    };

    fn pointer(address: u64) -> Option<NonNull<u8>> {
        crate::kernel::pointer(address as usize)
    }

    fn slab(class: usize) -> &'static SlabSpan {
        let span = Box::leak(Box::new(SlabSpan::vacant(0)));
        span.init_slab(1, 1 << 20, class, 64);
        while span.take_slot().is_some() {}
        span
    }

    #[test]
    fn blocks_are_popped_last_in_first_out_and_counted() {
        let (magazine, span, must_poll) = (Magazine::new(0), slab(0), AtomicBool::new(false));
        magazine.lock.assign(&mut LockProof::new(), 1);
        assert_eq!(magazine.free_entries(0), 32);
        assert!((0..32).all(|slot| magazine.push(span.address(slot), (span, slot), 60, 1)));
        assert!(!magazine.push(span.address(32), (span, 32), 60, 1), "it is full");
        assert!(!magazine.push(span.address(32), (span, 32), 60, 2), "another pool's");
        assert_eq!(
            magazine.tally(),
            Tally {
                allocations: 0,
                frees: 32,
                requested: 0u64.wrapping_sub(32 * 60),
                cached: 32 * 64,
                blocks: 32
            }
        );
        assert_eq!((span.get(31), magazine.pop(2, 0, 60, &must_poll)), (SlotState::Cached, None));
        assert_eq!(magazine.pop(1, 0, 60, &must_poll), pointer(span.address(31)));
        assert_eq!(span.get(31), SlotState::Live);
        let mut released = Vec::new();
        magazine.drain(|address| released.push(address));
        assert_eq!((released.len(), magazine.tally().cached), (31, 0));
    }

    #[test]
    fn owner_cannot_enter_a_revoked_magazine() {
        let (magazine, span, must_poll) = (Magazine::new(0), slab(0), AtomicBool::new(false));
        magazine.lock.assign(&mut LockProof::new(), 1);
        assert_eq!(magazine.free_entries(0), 32);
        assert!(magazine.push(span.address(0), (span, 0), 64, 1));
        magazine.lock.begin_revocation(&mut LockProof::new());
        magazine.lock.wait_for_owner();
        assert_eq!(
            (magazine.pop(1, 0, 64, &must_poll), magazine.push(span.address(1), (span, 1), 64, 1)),
            (None, false)
        );
        magazine.lock.end_revocation(&mut LockProof::new(), 1);
        assert_eq!(magazine.pop(1, 0, 64, &must_poll), pointer(span.address(0)));
    }

    #[test]
    fn single_blocks_are_cached_by_exact_size() {
        let (magazine, must_poll) = (Magazine::new(0), AtomicBool::new(false));
        magazine.lock.assign(&mut LockProof::new(), 1);
        for n in 1..=5u64 {
            let span: &'static SlabSpan = Box::leak(Box::new(SlabSpan::vacant(0)));
            span.init_single(1, n << 20, (2 << 20) + n * 64);
            assert_eq!(magazine.push_large(n << 20, span, 2 << 20, 1), n < 5, "four of them");
        }
        let single: &'static SlabSpan = Box::leak(Box::new(SlabSpan::vacant(0)));
        single.init_single(1, 9 << 20, classes::bytes_of(classes::SLOTTED) as u64);
        assert!(!magazine.push(9 << 20, (single, 0), 1, 1), "it is no slot");
        assert_eq!(magazine.pop_large(1, 2 << 20, 1, &must_poll), None);
        assert_eq!(magazine.pop_large(1, (2 << 20) + 128, 1, &must_poll), pointer(2 << 20));
    }

    #[test]
    fn bin_grows_with_free_bytes_and_shrinks_when_drained() {
        let (magazine, span, must_poll) = (Magazine::new(0), slab(0), AtomicBool::new(false));
        magazine.lock.assign(&mut LockProof::new(), 1);
        assert_eq!(magazine.free_entries(0), 32);
        let put = |from: usize, to: usize| {
            (from..to)
                .filter(|&slot| magazine.push(span.address(slot), (span, slot), 64, 1))
                .count()
        };
        assert_eq!(put(0, 40), 32);
        assert!(!magazine.grow_bin(0, 32 * 64 - 1), "that would be more than is free");
        assert!(magazine.grow_bin(0, 32 * 64));
        assert_eq!(put(32, 64), 32);
        assert_eq!(
            magazine.pop(1, 0, 64, &must_poll),
            pointer(span.address(63)),
            "what was there stays"
        );
        assert!(!magazine.grow_bin(0, 64 * 64), "a half of it counts already");
        magazine.halve_bin(0, |_| ());
        assert_eq!((magazine.free_entries(0), magazine.tally().blocks), (32, 32));
        magazine.drain(|_| ());
        assert_eq!((magazine.free_entries(0), put(0, 64)), (32, 32));
        magazine.drain(|_| ());
    }
}
