//! Claims: windows that are taken before they are backed.

use super::{
    HEAP, Mapped, MoveGuard,
    free_ranges::{FreeRanges, RangePiece},
    intersection,
};
use crate::{
    Request,
    base::policy_params::policy,
    physical::{
        options::{PlaceOptions, PlaceOutcome, Readiness},
        slots::Mapping,
        window::{self, Window},
    },
    sharing_policy::{Fit, Granularity},
    stream_cache::StreamCache,
};
use aquifer_core::scratch::List;

/// A window whose slots are claimed and whose backed parts are taken out of their caches.
pub(super) struct Claim<'a> {
    pub(super) window: Window<'a>,
    pub(super) pieces: List<'a, RangePiece>,
    /// The maximum number of slots that one handle may cover.
    pub(super) largest: u64,
    /// The slots at the end of the window that need no handle.
    pub(super) overhang: u64,
    /// Lasts from before anything is taken until all of it is in some list again.
    pub(super) _move: MoveGuard<'a>,
}

/// The outcome of an attempt to take a window.
pub(super) enum ClaimOutcome<'a> {
    Claimed(Claim<'a>),
    /// Nothing that may be used is large enough.
    NoWindow,
    /// Another thread has changed a cache since it was read: retry with new free ranges.
    Raced,
}

impl Mapped {
    /// Picks the window among the free ranges and takes it: its unclaimed slots, and its backed
    /// parts from their owners. If it returns no claim, nothing has changed.
    pub(super) fn claim<'a>(
        &'a self,
        cache: &'static StreamCache,
        free_ranges: &FreeRanges<'a>,
        request: &Request,
        options: PlaceOptions,
        fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> ClaimOutcome<'a> {
        let bump = free_ranges.bump();
        let small = request.size() <= HEAP.small_max;
        let Some(exact) = request.size().checked_next_multiple_of(HEAP.unit) else {
            return ClaimOutcome::NoWindow;
        };
        let overhang = if options.apart && options.move_handles {
            policy().largest_handle / self.slot
        } else {
            0
        };
        let mut claim = None;
        // Small blocks come from slabs of the heap. A whole slot gives the heap room for many
        // blocks, a unit for one.
        let several = if options.granularity == Granularity::Slots { self.slot } else { HEAP.page };
        let sizes = [(several, several.max(request.alignment())), (exact, request.alignment())];
        for &(bytes, align) in if small { &sizes[..] } else { &sizes[1..] } {
            let ranges = free_ranges.all.iter().filter_map(|free_range| {
                let own =
                    free_ranges.cache_of(free_range).is_some_and(|from| std::ptr::eq(from, cache));
                let range = if own || options.granularity == Granularity::Units {
                    free_range.range
                } else {
                    self.whole_range(free_range.range)
                };
                (range.len > 0 && !options.apart).then_some(range)
            });
            let mut slots = self.slots();
            let backs = options.grow || options.move_handles;
            let bare = slots.free_runs().filter(|_| backs);
            let around = bytes.saturating_add(overhang * self.slot);
            let window = window::best(bump, ranges, bare, self.grid(), around, align, fit);
            let Some(mut window) = window else { continue };
            window.block.len = bytes;
            let guard = self.begin_move();
            outcome.own_moves += 1;
            for &(first, count) in &window.missing {
                slots.claim(first, count);
            }
            drop(slots);
            let typical = free_ranges.typical_block(request.size());
            let largest = self.largest_handle(self.held.now(), free_ranges.live, typical);
            claim =
                Some(Claim { window, pieces: List::new_in(bump), largest, overhang, _move: guard });
            break;
        }
        let Some(mut claim) = claim else { return ClaimOutcome::NoWindow };
        let block = claim.window.block;
        let (around, taker) = (self.slots_around(block), cache.timeline());
        for free_range in free_ranges.touching(around) {
            let own =
                free_ranges.cache_of(free_range).is_some_and(|from| std::ptr::eq(from, cache));
            let (range, within) = match options.granularity {
                Granularity::Slots if !own => (self.whole_range(free_range.range), around),
                _ => (free_range.range, block),
            };
            let Some(range) = intersection(range, within) else { continue };
            // Another thread may have taken or used it in the meantime.
            let piece = self.take_piece(free_ranges, free_range, range);
            let ready = |piece: &RangePiece| {
                options.readiness == Readiness::MayWait || piece.is_done_except(Some(&taker))
            };
            let ready = piece.as_ref().is_some_and(ready);
            claim.pieces.extend(piece);
            if !ready {
                self.unclaim(claim);
                return ClaimOutcome::Raced;
            }
        }
        ClaimOutcome::Claimed(claim)
    }

    /// Releases a claim.
    pub(super) fn unclaim(&self, claim: Claim<'_>) {
        self.unclaim_except(claim, &[]);
    }

    /// Releases the last slots of a claim that no handle covers.
    pub(super) fn shorten(&self, claim: &mut Claim<'_>, unused: u64) {
        if let Some((first, count)) = claim.window.missing.last_mut() {
            *count -= unused;
            self.slots().release(*first + *count, unused);
        }
    }

    /// Releases a claim, except for the slots under `stuck`.
    pub(super) fn unclaim_except(&self, mut claim: Claim<'_>, stuck: &[Mapping]) {
        self.return_pieces(claim.pieces.drain(..));
        let mut slots = self.slots();
        for &(first, count) in &claim.window.missing {
            slots.release(first, count);
            for mapping in stuck.iter().filter(|m| first <= m.first && m.first < first + count) {
                slots.claim(mapping.first, mapping.count);
            }
        }
    }
}
