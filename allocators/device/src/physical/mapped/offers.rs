//! Candidates for reuse: the free ranges of caches and of the shared free list in one list, by
//! address, and the handles that lie wholly in them. The lists belong to a pass and are partly
//! built under the locks of caches: see [`Scratch`](aquifer_core::scratch::Scratch).

use super::{Mapped, Reach, intersection};
use crate::{
    home::{Home, State},
    physical::{
        commons::{Past, is_done, is_done_but_for},
        slots::Mapping,
    },
};
use aquifer_core::scratch::{Bump, List, list};
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use smallvec::smallvec;
use std::{cmp::Reverse, sync::Arc};

/// The list that a free range is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The cache at this index of [`Offers::homes`].
    Cache(usize),
    Commons,
}

/// A free range.
pub(super) struct Offer {
    pub(super) range: Range,
    owner: Owner,
    done: bool,
}

/// Free ranges, by address. They are only read, not taken: another thread may take one first.
pub(super) struct Offers<'s> {
    homes: List<'s, (&'static Home, Arc<Timeline>)>,
    pub(super) all: List<'s, Offer>,
    /// Bytes of live blocks of these caches.
    pub(super) live: u64,
}

/// A range taken from its list.
pub(super) struct Piece {
    pub(super) range: Range,
    /// `None` for the shared free list.
    pub(super) from: Option<&'static Home>,
    pub(super) past: Past,
}

/// A handle under memory that is wholly free.
pub(super) struct Candidate {
    pub(super) first: u64,
    pub(super) count: u64,
    /// Bytes of the free stretch around it.
    pub(super) stretch: u64,
    /// Whether some of its work is not known to be done.
    pub(super) busy: bool,
}

/// A mapping removed from the table, with the memory over it, which is in no list.
pub(super) struct Stolen<'s> {
    pub(super) mapping: Mapping,
    pub(super) pieces: List<'s, Piece>,
}

impl Piece {
    pub(super) fn is_from(&self, home: &'static Home) -> bool {
        self.from.is_some_and(|from| std::ptr::eq(from, home))
    }

    /// Returns whether the host has seen all work on it done, except for that of `own`.
    pub(super) fn is_done_but_for(&self, own: Option<&Arc<Timeline>>) -> bool {
        is_done_but_for(&self.past, own)
    }
}

impl Stolen<'_> {
    pub(super) fn is_done(&self) -> bool {
        self.pieces.iter().all(|piece| is_done(&piece.past))
    }
}

impl<'s> Offers<'s> {
    /// Returns the allocator of its lists.
    pub(super) fn bump(&self) -> &'s Bump {
        self.all.allocator()
    }

    pub(super) fn home(&self, offer: &Offer) -> Option<&'static Home> {
        match offer.owner {
            Owner::Cache(at) => Some(self.homes[at].0),
            Owner::Commons => None,
        }
    }

    /// Returns the ranges that overlap `range`.
    pub(super) fn touching(&self, range: Range) -> &[Offer] {
        let from = self.all.partition_point(|o| o.range.start + o.range.len <= range.start);
        let to = self.all.partition_point(|o| o.range.start < range.start + range.len);
        &self.all[from..to.max(from)]
    }

    /// An iterator over the stretches without a gap, as slices of ranges.
    fn stretches(&self) -> impl Iterator<Item = &[Offer]> {
        self.all.chunk_by(|a, b| a.range.start + a.range.len == b.range.start)
    }
}

impl Mapped {
    /// Returns the free ranges of `givers` and of the shared free list: those that are done, those
    /// that only `home` itself still uses, and with [`Reach::Wait`] all of them.
    pub(super) fn offers<'s>(
        &self,
        bump: &'s Bump,
        givers: &[&'static Home],
        home: Option<&'static Home>,
        reach: Reach,
    ) -> Offers<'s> {
        let mut offers = Offers { homes: List::new_in(bump), all: List::new_in(bump), live: 0 };
        offers.homes.reserve(givers.len());
        let Offers { homes, all, live } = &mut offers;
        for &giver in givers {
            let owner = Owner::Cache(homes.len());
            let own = home.is_some_and(|home| std::ptr::eq(home, giver));
            giver.with(|s| {
                let Some(timeline) = s.timeline().cloned() else { return };
                *live += s.holds().live;
                for extent in s.heap.free_extents() {
                    let done = timeline.is_done(extent.stamp);
                    if done || own || reach == Reach::Wait {
                        all.push(Offer { range: extent.range, owner, done });
                    }
                }
                homes.push((giver, timeline));
            });
        }
        let own = home.map(Home::timeline);
        let mut in_use = List::new_in(bump);
        for (range, past) in self.commons().iter() {
            let done = is_done(past);
            if done || is_done_but_for(past, own.as_ref()) {
                all.push(Offer { range, owner: Owner::Commons, done });
            } else if reach == Reach::Wait {
                in_use.push((range, past.clone()));
            }
        }
        // This queries the driver, so it runs without the lock. Work of an isolated stream is never
        // waited for.
        let waited_for =
            |past: &Past| past.iter().all(|(t, e)| t.is_done(*e) || t.is_waited_for_unasked(*e));
        for (range, _) in in_use.into_iter().filter(|(_, past)| waited_for(past)) {
            all.push(Offer { range, owner: Owner::Commons, done: false });
        }
        all.sort_unstable_by_key(|offer| offer.range.start);
        offers
    }

    /// Moves free ranges of at least `least` bytes from the caches of `givers` to the shared free
    /// list. The cost grows with the number of ranges moved.
    pub(crate) fn pool_together(&self, givers: &[&'static Home], least: u64) {
        let _transit = self.transit();
        let pass = self.scratch.begin();
        let mut taken = List::new_in(&*pass);
        for &giver in givers {
            let timeline = giver.with(|s| {
                let timeline = s.timeline().filter(|_| s.heap.free_bytes() > 0).cloned()?;
                s.heap.drain(least, |extent| taken.push(extent));
                Some(timeline)
            });
            let Some(timeline) = timeline else { continue };
            let mut commons = self.commons();
            for extent in taken.drain(..) {
                commons.add(extent.range, smallvec![(timeline.clone(), extent.stamp)]);
            }
        }
    }

    /// Moves free ranges whose work is known to be done from the caches of `givers` to the shared
    /// free list, as far as a cache holds more than `cap` free bytes. Takes the high ends of the
    /// longest ranges. Returns the number of transits.
    pub(crate) fn cap(&self, givers: &[&'static Home], cap: u64) -> u64 {
        let mut transits = 0;
        for &giver in givers {
            let over = |s: &State| s.heap.free_bytes().saturating_sub(cap);
            if giver.with(|s| over(s)) == 0 {
                continue;
            }
            let _transit = self.transit();
            let pass = self.scratch.begin();
            transits += 1;
            let (taken, timeline) = giver.with(|s| {
                let timeline = s.timeline().cloned();
                let done =
                    |stamp| timeline.as_ref().is_some_and(|timeline| timeline.is_done(stamp));
                let mut free =
                    list(&pass, s.heap.free_extents().filter(|extent| done(extent.stamp)));
                free.sort_unstable_by_key(|extent| Reverse(extent.range.len));
                let mut taken = List::new_in(&*pass);
                for Range { start, len } in free.into_iter().map(|extent| extent.range) {
                    let over = over(s);
                    if over == 0 {
                        break;
                    }
                    // Cut at a slot border: other streams take whole slots first.
                    let from = start + len.saturating_sub(over);
                    let from = (from - (from - self.base) % self.slot).max(start);
                    let range = Range { start: from, len: start + len - from };
                    taken.extend(s.heap.remove(range).ok().map(|stamp| (range, stamp)));
                }
                (taken, timeline)
            });
            let Some(timeline) = timeline else { continue };
            let mut commons = self.commons();
            for (range, stamp) in taken {
                commons.add(range, smallvec![(timeline.clone(), stamp)]);
            }
        }
        transits
    }

    /// Removes finished dependencies from the shared free list.
    pub(crate) fn forget_done(&self) {
        self.commons().forget_done();
    }

    /// Takes `range` out of an offer. Returns `None` if another thread has taken it.
    pub(super) fn take_piece(
        &self,
        offers: &Offers<'_>,
        offer: &Offer,
        range: Range,
    ) -> Option<Piece> {
        let (from, past) = match offer.owner {
            Owner::Cache(at) => {
                let (home, timeline) = &offers.homes[at];
                let stamp = home.with(|s| s.heap.remove(range)).ok()?;
                (Some(*home), smallvec![(timeline.clone(), stamp)])
            }
            Owner::Commons => (None, self.commons().take(range)?),
        };
        Some(Piece { range, from, past })
    }

    /// Returns the handles that lie wholly in the offered ranges.
    pub(super) fn candidates<'s>(&self, offers: &Offers<'s>) -> List<'s, Candidate> {
        let mut found = List::new_in(offers.bump());
        let slots = self.slots();
        for stretch in offers.stretches() {
            let (Some(lowest), Some(highest)) = (stretch.first(), stretch.last()) else { continue };
            let start = lowest.range.start;
            let whole = Range { start, len: highest.range.start + highest.range.len - start };
            let (first, count) = self.whole_slots(whole);
            for mapping in slots.inside(first, count) {
                let range = self.range(mapping.first, mapping.count);
                let busy = offers.touching(range).iter().any(|offer| !offer.done);
                let (first, count) = (mapping.first, mapping.count);
                found.push(Candidate { first, count, stretch: whole.len, busy });
            }
        }
        found
    }

    /// Takes a candidate: the memory over it from its lists, and the mapping out of the table.
    /// Returns `None` if another thread was faster.
    pub(super) fn take<'s>(
        &self,
        candidate: &Candidate,
        offers: &Offers<'s>,
        reach: Reach,
    ) -> Option<Stolen<'s>> {
        let whole = self.range(candidate.first, candidate.count);
        let mut pieces = List::new_in(offers.bump());
        for offer in offers.touching(whole) {
            let Some(range) = intersection(offer.range, whole) else { continue };
            let Some(piece) = self.take_piece(offers, offer, range) else { break };
            pieces.push(piece);
        }
        let all = pieces.iter().map(|piece| piece.range.len).sum::<u64>() == whole.len;
        // With all of the memory taken, no other thread can unmap the handle. But another handle
        // may have been mapped here before.
        let mapping =
            if all { self.slots().unmap_exactly(candidate.first, candidate.count) } else { None };
        let Some(mapping) = mapping else {
            self.put_back(pieces);
            return None;
        };
        let stolen = Stolen { mapping, pieces };
        if reach == Reach::Done && !stolen.is_done() {
            self.give_back([stolen]);
            return None;
        }
        Some(stolen)
    }

    /// Returns reclaimed mappings to where they were.
    pub(super) fn give_back<'s>(&self, stolen: impl IntoIterator<Item = Stolen<'s>>) {
        for Stolen { mapping, pieces } in stolen {
            self.slots().map(mapping);
            self.put_back(pieces);
        }
    }

    pub(super) fn put_back(&self, pieces: impl IntoIterator<Item = Piece>) {
        for Piece { range, from, past } in pieces {
            match from {
                Some(home) => {
                    let stamp = past.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0);
                    home.with(|s| s.add(range, stamp));
                }
                None => self.commons().add(range, past),
            }
        }
    }
}
