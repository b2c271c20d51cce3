//! Free blocks from 64 KiB to 1 MiB on their way between threads.
//!
//! There are 128 classes of such blocks. Magazines that kept a few of each held up to 184 MiB a
//! thread, and still a thread with some hundred blocks of random sizes went through the pool's lock
//! for one operation in eleven, since what it has of a class comes and goes. What many threads have
//! of a class together changes far less. So a magazine keeps the few blocks that were freed last,
//! which serves those who free and take one size, and the rest goes by the depot: a shelf
//! for each class, behind a lock of its own that is held for some ten nanoseconds.
//!
//! Trips to the pool's lock for an operation, of threads that play the benchmark's random sizes in
//! step:
//!
//! | threads, live together, in a pool of | with racks of each | with the depot |
//! |---|---|---|
//! | 16, 1 GiB, 2.1 GiB | 0.242 | 0.000 |
//! | 16, 512 MiB, 1.1 GiB | 0.341 | 0.009 |
//! | 8, 128 MiB, 319 MiB | 0.393 | 0.105 |
//!
//! # How much it holds
//! A shelf that is full grows by a quarter, as long as all shelves together have room for at most
//! four times what is free in the pool's books. Where they have not, a block goes to the books for
//! each that comes. What lies here is taken into the books before a request is refused, the pool
//! grows, is trimmed or closed, and it takes the locks of the shelves and nobody's leave. Then
//! shelves begin anew with no room. So they do when growth has been refused as often as there are
//! places: those may be of classes that nobody asks for any more.

use super::{
    classes::{self, SHARED},
    magazine::Tally,
    rack::Rack,
};
use aquifer_stream::Spin;
use crossbeam_utils::CachePadded;
use std::{ptr::NonNull, sync::atomic::AtomicU8};

/// For each byte that is free in the books, shelves may have room for so many.
const FOR_FREE: u64 = 4;

/// What lies between the threads of one pool.
///
/// Its locks are taken inside the pool's, never the other way.
pub(super) struct Depot {
    /// By class, from the first that has no slots in slabs.
    shelves: Box<[CachePadded<Spin<Rack>>]>,
}

/// What is kept about a depot under the pool's lock.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Room {
    /// Bytes that all shelves have room for.
    bytes: u64,
    /// How many blocks that may be.
    places: u64,
    /// How often a shelf has not been let grow since the depot began anew.
    refused: u64,
}

impl Depot {
    pub(super) fn new() -> Self {
        Self { shelves: SHARED.map(|_| CachePadded::new(Spin::new(Rack::empty()))).collect() }
    }

    fn shelf(&self, class: usize) -> Option<&Spin<Rack>> {
        self.shelves.get(class.checked_sub(SHARED.start)?).map(|shelf| &**shelf)
    }

    /// A block of the class, which is its taker's from now on.
    pub(super) fn take(&self, class: usize) -> Option<NonNull<u8>> {
        self.shelf(class)?.with(|rack| rack.pop())
    }

    /// Puts a block in, which its owner frees, if there is room.
    pub(super) fn put(&self, class: usize, address: u64, state: &'static AtomicU8) -> bool {
        self.shelf(class).is_some_and(|shelf| shelf.with(|rack| rack.push(address, state)))
    }

    /// Makes room for one more block of the class, where so many bytes are free in the books: by a
    /// larger shelf, or by what is given away.
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

    /// Gives everything away, and begins anew; says whether there was anything.
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

    /// What it holds.
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

    /// A block of the class, which nothing stands behind.
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
        // Room for eight, and so for two, four and seven.
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
        // What fits none of its classes.
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
