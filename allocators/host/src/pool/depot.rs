//! A cache of free blocks from 64 KiB to 1 MiB that all threads of a pool share.
//!
//! There are 128 classes of such blocks, too many for each magazine to keep several blocks of each.
//! A magazine therefore keeps only the most recently freed blocks, which serves a thread that frees
//! and allocates one size. The rest goes to the depot, whose demand per class varies far less than
//! that of one thread. The depot has a *shelf* (a bin) for each class, with a lock that is held for
//! about ten nanoseconds.
//!
//! # How much it holds
//! - A full shelf grows by a quarter, as long as the capacity of all shelves is at most four times
//!   the free bytes in the pool's heap. Otherwise one block of the shelf returns to the heap for
//!   each block that arrives.
//! - The depot is emptied into the heap before a request is refused, and before the pool grows, is
//!   trimmed or closed. This needs only the locks of the shelves. All shelves then start again with
//!   no capacity.
//! - The depot is also emptied when more growths were refused than it has places, because the
//!   capacity may belong to classes that are no longer used.

use super::{
    classes::{self, SHARED},
    magazine::Tally,
    rack::Rack,
};
use aquifer_stream::Spin;
use crossbeam_utils::CachePadded;
use std::{ptr::NonNull, sync::atomic::AtomicU8};

/// Maximum capacity of all shelves in bytes, for each byte that is free in the pool's heap.
const FOR_FREE: u64 = 4;

/// The shared cache of one pool.
///
/// Lock order: the pool's lock first, then a shelf's lock.
pub(super) struct Depot {
    /// By class, starting with the first class that has no slabs.
    shelves: Box<[CachePadded<Spin<Rack>>]>,
}

/// The capacity of a depot, guarded by the pool's lock.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Room {
    /// Capacity of all shelves in bytes.
    bytes: u64,
    /// Capacity of all shelves in blocks.
    places: u64,
    /// Refused growths since the depot was last emptied.
    refused: u64,
}

impl Depot {
    pub(super) fn new() -> Self {
        Self { shelves: SHARED.map(|_| CachePadded::new(Spin::new(Rack::empty()))).collect() }
    }

    fn shelf(&self, class: usize) -> Option<&Spin<Rack>> {
        self.shelves.get(class.checked_sub(SHARED.start)?).map(|shelf| &**shelf)
    }

    /// Removes a block of the class. The caller owns it.
    pub(super) fn take(&self, class: usize) -> Option<NonNull<u8>> {
        self.shelf(class)?.with(|rack| rack.pop())
    }

    /// Inserts a block that the caller frees. Returns whether there was room.
    pub(super) fn put(&self, class: usize, address: u64, state: &'static AtomicU8) -> bool {
        self.shelf(class).is_some_and(|shelf| shelf.with(|rack| rack.push(address, state)))
    }

    /// Makes room for one more block of the class, where `free` bytes are free in the pool's heap.
    /// Grows the shelf, or passes blocks to `give`.
    pub(super) fn make_room(
        &self,
        class: usize,
        room: &mut Room,
        free: u64,
        mut give: impl FnMut(u64),
    ) {
        let Some(shelf) = self.shelf(class) else { return };
        let grown = shelf.with(|rack| {
            let most = rack.most();
            if rack.len() < most {
                return true;
            }
            let more = most / 4 + 2;
            let bytes = room.bytes + u64::from(more) * classes::bytes_of(class) as u64;
            if bytes > FOR_FREE * free {
                rack.shed(most.saturating_sub(1), &mut give);
                return false;
            }
            (room.bytes, room.places) = (bytes, room.places + u64::from(more));
            rack.set_most(most + more);
            true
        });
        if !grown {
            room.refused += 1;
            if room.refused > room.places {
                self.empty(room, give);
            }
        }
    }

    /// Passes all blocks to `give` and resets all capacities. Returns whether there were any
    /// blocks.
    pub(super) fn empty(&self, room: &mut Room, mut give: impl FnMut(u64)) -> bool {
        let mut any = false;
        for shelf in &self.shelves {
            shelf.with(|rack| {
                any |= rack.len() > 0;
                rack.shed(0, &mut give);
                if rack.most() > 0 {
                    rack.set_most(0);
                }
            });
        }
        *room = Room::default();
        any
    }

    /// Returns the number and bytes of the blocks that it holds.
    pub(super) fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for (class, shelf) in SHARED.zip(&self.shelves) {
            let len = u64::from(shelf.with(|rack| rack.len()));
            tally.blocks += len;
            tally.cached += len * classes::bytes_of(class) as u64;
        }
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::{super::span::Span, *};

    /// Returns a block of the class, without memory.
    fn block(class: usize, number: u64) -> (u64, &'static AtomicU8) {
        let span: &'static Span = Box::leak(Box::new(Span::vacant(0)));
        span.exact(1, number << 20, classes::bytes_of(class) as u64);
        (number << 20, span.state(0))
    }

    #[test]
    fn shelves_grow_while_enough_is_free_and_then_one_block_goes_for_each_that_comes() {
        let (depot, mut room, class) = (Depot::new(), Room::default(), SHARED.start + 7);
        let bytes = classes::bytes_of(class) as u64;
        let put = |number| {
            let (address, state) = block(class, number);
            depot.put(class, address, state)
        };
        assert!(!put(1), "it begins with no room");
        let mut given = Vec::new();
        // The limit is eight blocks, so the capacity becomes two, four and then seven.
        for number in 1..=7 {
            while !put(number) {
                depot.make_room(class, &mut room, 2 * bytes, |address| given.push(address));
                assert!(given.is_empty(), "there was room at {number}");
            }
        }
        assert_eq!((depot.tally().blocks, depot.tally().cached), (7, 7 * bytes));
        depot.make_room(class, &mut room, 2 * bytes, |address| given.push(address));
        assert_eq!((given.as_slice(), depot.tally().blocks), (&[7 << 20][..], 6));
        assert!(put(9));
        assert_eq!(
            (depot.take(class), depot.take(class + 1)),
            (crate::kernel::pointer(9 << 20), None)
        );
        // Classes that have no shelf.
        assert!(
            !depot.put(SHARED.start - 1, 0, block(class, 10).1) && depot.take(SHARED.end).is_none()
        );
    }

    #[test]
    fn room_for_what_nobody_asks_for_any_more_goes_to_who_is_refused_often() {
        let (depot, mut room) = (Depot::new(), Room::default());
        let [old, new] = [SHARED.start, SHARED.start + 1];
        let free = classes::bytes_of(new) as u64;
        for number in 1..=4 {
            let (address, state) = block(old, number);
            while !depot.put(old, address, state) {
                depot.make_room(old, &mut room, free, |_| panic!("nothing has to go"));
            }
        }
        let (mut given, mut refused) = (Vec::new(), 0);
        let (address, state) = block(new, 5);
        while !depot.put(new, address, state) {
            depot.make_room(new, &mut room, free, |address| given.push(address));
            refused += 1;
        }
        assert_eq!((given.len(), depot.tally().blocks), (4, 1));
        assert!(refused <= 6, "refused {refused} times for four blocks");
    }
}
