//! A cache of free blocks from 64 KiB to 1 MiB that all threads of a pool share.
//!
//! There are 128 classes of such blocks, too many for each magazine to keep several blocks of each.
//! A magazine therefore keeps only the last freed block of each of eight residues of the class
//! number, which serves a thread that frees and allocates one size. The rest goes to the depot,
//! whose demand per class varies far less than that of one thread. The depot has a bin for each
//! class, with a lock that is held for about ten nanoseconds.
//!
//! # How much it holds
//! - A full bin grows by a quarter, as long as the capacity of all bins is at most four times the
//!   free bytes in the pool's heap. Otherwise one block of the bin returns to the heap for each
//!   block that arrives.
//! - The depot is emptied into the heap before a request is refused, and before the pool grows, is
//!   trimmed or closed. This needs only the locks of the bins. All bins then start again with no
//!   capacity.
//! - The depot is also emptied when more growths were refused than it has places, because the
//!   capacity may belong to classes that are no longer used.

use super::{
    cache_bin::CacheBin,
    classes::{self, SHARED},
    stats::Tally,
};
use aquifer_stream::Spin;
use crossbeam_utils::CachePadded;
use std::{ptr::NonNull, sync::atomic::AtomicU8};

/// Maximum capacity of all bins in bytes, for each byte that is free in the pool's heap.
const BYTES_PER_FREE_BYTE: u64 = 4;

/// The shared cache of one pool.
///
/// Lock order: the pool's lock first, then a bin's lock.
pub(super) struct Depot {
    /// By class, starting with the first class that has no slabs.
    bins: Box<[CachePadded<Spin<CacheBin>>]>,
}

/// The capacity of a depot, guarded by the pool's lock.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct DepotCapacity {
    /// Capacity of all bins in bytes.
    bytes: u64,
    /// Capacity of all bins in blocks.
    blocks: u64,
    /// Refused growths since the depot was last emptied.
    refused: u64,
}

impl Depot {
    pub(super) fn new() -> Self {
        Self { bins: SHARED.map(|_| CachePadded::new(Spin::new(CacheBin::empty()))).collect() }
    }

    fn bin(&self, class: usize) -> Option<&Spin<CacheBin>> {
        self.bins.get(class.checked_sub(SHARED.start)?).map(|bin| &**bin)
    }

    /// Removes a block of the class. The caller owns it.
    pub(super) fn pop(&self, class: usize) -> Option<NonNull<u8>> {
        self.bin(class)?.with(|bin| bin.pop())
    }

    /// Inserts a block that the caller frees. Returns whether there was room.
    pub(super) fn push(&self, class: usize, address: u64, state: &'static AtomicU8) -> bool {
        self.bin(class).is_some_and(|bin| bin.with(|bin| bin.push(address, state)))
    }

    /// Makes room for one more block of the class, where `free` bytes are free in the pool's heap.
    /// Grows the bin, or passes blocks to `release`.
    pub(super) fn make_room(
        &self,
        class: usize,
        capacity: &mut DepotCapacity,
        free: u64,
        mut release: impl FnMut(u64),
    ) {
        let Some(bin) = self.bin(class) else { return };
        let grown = bin.with(|bin| {
            let old = bin.capacity();
            if bin.len() < old {
                return true;
            }
            let more = old / 4 + 2;
            let bytes = capacity.bytes + u64::from(more) * classes::bytes_of(class) as u64;
            if bytes > BYTES_PER_FREE_BYTE * free {
                bin.truncate(old.saturating_sub(1), &mut release);
                return false;
            }
            debug_assert!(bytes >= capacity.bytes, "the capacity shrinks");
            (capacity.bytes, capacity.blocks) = (bytes, capacity.blocks + u64::from(more));
            bin.set_capacity(old + more);
            true
        });
        if !grown {
            capacity.refused += 1;
            if capacity.refused > capacity.blocks {
                self.drain(capacity, release);
            }
        }
    }

    /// Passes all blocks to `release` and resets all capacities. Returns whether there were any
    /// blocks.
    pub(super) fn drain(&self, capacity: &mut DepotCapacity, mut release: impl FnMut(u64)) -> bool {
        let mut any = false;
        for bin in &self.bins {
            bin.with(|bin| {
                any |= bin.len() > 0;
                bin.truncate(0, &mut release);
                if bin.capacity() > 0 {
                    bin.set_capacity(0);
                }
            });
        }
        *capacity = DepotCapacity::default();
        any
    }

    /// Returns the number and bytes of the blocks that it holds.
    pub(super) fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for (class, bin) in SHARED.zip(&self.bins) {
            let len = u64::from(bin.with(|bin| bin.len()));
            tally.blocks += len;
            tally.cached += len * classes::bytes_of(class) as u64;
        }
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::{super::span::SlabSpan, *};

    /// Returns a block of the class, without memory.
    fn block(class: usize, number: u64) -> (u64, &'static AtomicU8) {
        let span: &'static SlabSpan = Box::leak(Box::new(SlabSpan::vacant(0)));
        span.init_single(1, number << 20, classes::bytes_of(class) as u64);
        (number << 20, span.state(0))
    }

    #[test]
    fn bins_grow_with_free_bytes_and_then_release_a_block_for_each_new_one() {
        let (depot, mut capacity, class) =
            (Depot::new(), DepotCapacity::default(), SHARED.start + 7);
        let bytes = classes::bytes_of(class) as u64;
        let put = |number| {
            let (address, state) = block(class, number);
            depot.push(class, address, state)
        };
        assert!(!put(1), "it begins with no room");
        let mut released = Vec::new();
        // The limit is eight blocks, so the capacity becomes two, four and then seven.
        for number in 1..=7 {
            while !put(number) {
                depot.make_room(class, &mut capacity, 2 * bytes, |address| released.push(address));
                assert!(released.is_empty(), "there was room at {number}");
            }
        }
        assert_eq!((depot.tally().blocks, depot.tally().cached), (7, 7 * bytes));
        depot.make_room(class, &mut capacity, 2 * bytes, |address| released.push(address));
        assert_eq!((released.as_slice(), depot.tally().blocks), (&[7 << 20][..], 6));
        assert!(put(9));
        assert_eq!(
            (depot.pop(class), depot.pop(class + 1)),
            (crate::kernel::pointer(9 << 20), None)
        );
        // Classes that have no bin.
        assert!(
            !depot.push(SHARED.start - 1, 0, block(class, 10).1) && depot.pop(SHARED.end).is_none()
        );
    }

    #[test]
    fn repeated_refusals_reset_the_capacities_of_unused_bins() {
        let (depot, mut capacity) = (Depot::new(), DepotCapacity::default());
        let [old, new] = [SHARED.start, SHARED.start + 1];
        let free = classes::bytes_of(new) as u64;
        for number in 1..=4 {
            let (address, state) = block(old, number);
            while !depot.push(old, address, state) {
                depot.make_room(old, &mut capacity, free, |_| panic!("nothing has to go"));
            }
        }
        let (mut released, mut refused) = (Vec::new(), 0);
        let (address, state) = block(new, 5);
        while !depot.push(new, address, state) {
            depot.make_room(new, &mut capacity, free, |address| released.push(address));
            refused += 1;
        }
        assert_eq!((released.len(), depot.tally().blocks), (4, 1));
        assert!(refused <= 6, "refused {refused} times for four blocks");
    }
}
