//! Placing blocks: in the shared free list, or in a window that is claimed and backed for them.
//! Memory that is mapped ahead of need gets a window of its own.

use super::{
    HEAP, MappedMemory,
    free_ranges::{FreeRanges, RangePiece, Reach},
    intersection,
    plan::MappingPlan,
    search::{Claim, PlaceOutcome, Supply},
};
use crate::{
    Request,
    backing::{slots::Mapping, window},
    base::{
        pending::{StreamDeps, is_done_except},
        policy_params::policy,
    },
    sharing_policy::steps::{GROW, PlaceOptions},
    stream_cache::StreamCache,
};
use aquifer_core::{MemoryError, Result, scratch::List};
use aquifer_heap::{HeapBlock, Range};

/// The most calls that one search makes to remove old mappings. The next ones remove the rest.
const MOST_UNMAPS: usize = 64;

/// Only new memory.
const NEW: PlaceOptions = PlaceOptions { apart: true, ..GROW };

/// Another thread has changed a cache since it was read: the search retries with new free ranges.
struct Raced;

impl MappedMemory {
    /// Finds room for `request` in the free ranges that `supply` has and in unclaimed slots, and
    /// maps what is missing, as far as its options allow. The module's documentation has the driver
    /// calls in order. Returns `None` if there is not enough: the handles that this call has
    /// unmapped or created are spare then, still charged, for the next attempt ([`stash_spare`]).
    ///
    /// # Errors
    /// The driver's, but not a lack of memory in `cuMemCreate`. The handles that this call has
    /// created are released to the driver ([`forget_new`]), except for those whose new mapping the
    /// driver refuses to remove. All others that it has unmapped, or found spare, are spare.
    ///
    /// [`stash_spare`]: MappedMemory::stash_spare
    /// [`forget_new`]: MappingPlan::forget_new
    pub(crate) fn place(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        supply: &Supply<'_>,
        outcome: &mut PlaceOutcome,
    ) -> Result<Option<HeapBlock>> {
        let options = supply.options;
        let pass = self.scratch.begin();
        // What the driver refuses to unmap has nothing to do with this request.
        let _refused = self.reap_zombies(&pass, MOST_UNMAPS);
        // A small block comes from a page, or from what is left of one.
        let blocks = [(HEAP.page, HEAP.page), (request.size(), request.alignment())];
        let reach = if options.apart {
            // No free range serves it.
            Reach { least: u64::MAX, ..Reach::default() }
        } else {
            Reach {
                least: self.slot,
                blocks: if request.size() <= HEAP.small_max { &blocks } else { &blocks[1..] },
                beside_bare: options.grow || options.move_handles,
            }
        };
        // A failed race is retried: another thread has made progress, so this terminates.
        let mut claim = loop {
            let free_ranges =
                self.free_ranges(&pass, supply.donors, Some(cache), options.may_wait, reach);
            match self.claim(cache, &free_ranges, request, options, outcome) {
                Ok(Some(claim)) => break claim,
                Ok(None) => return Ok(None),
                Err(Raced) => std::thread::yield_now(),
            }
        };
        let mut plan = MappingPlan::new(&pass);
        match self.back_window(cache, &claim, supply, &mut plan, outcome) {
            Ok(true) => {
                if plan.unused > 0 {
                    self.shorten(&mut claim, plan.unused);
                }
                let (used, unused) = plan.split_busy();
                self.zombify(used);
                self.restore_mappings(unused);
                self.stash_spare(&mut plan);
                let foreign = claim.pieces.iter().filter(|piece| !piece.is_from(cache));
                outcome.adopted += foreign.map(|piece| piece.range.len).sum::<u64>();
                let window = claim.window.block;
                let block = self.commit_claim(cache, claim, request);
                debug_assert!(block.is_some(), "{window:?} was taken for {request:?}");
                Ok(block)
            }
            Ok(false) => {
                self.restore_mappings(plan.busy.drain(..));
                self.stash_spare(&mut plan);
                self.unclaim(claim);
                Ok(None)
            }
            Err(error) => {
                self.abandon(claim, plan);
                Err(error)
            }
        }
    }

    /// Allocates a block from the shared free list, at the lowest place that is ready for its
    /// stream. Makes no driver call.
    pub(crate) fn allocate_shared(
        &self,
        cache: &'static StreamCache,
        request: &Request,
    ) -> Option<HeapBlock> {
        let bytes = request.size().checked_next_multiple_of(HEAP.unit)?;
        let small = bytes <= HEAP.small_max;
        let (len, align) = (if small { HEAP.page } else { bytes }, request.alignment());
        let own = cache.timeline();
        let (range, deps) = {
            let mut shared_free = self.shared_free();
            let range = shared_free.find(len, align, |deps| is_done_except(deps, Some(&own)))?;
            (range, shared_free.take(range)?)
        };
        // Dependencies that are not done belong to the stream itself.
        let stamp = deps.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0).min(own.open());
        debug_assert!(range.len >= bytes && range.start.is_multiple_of(align), "{range:?}");
        cache.with(|s| {
            s.add(range, stamp);
            let block = Range { len: bytes, ..range };
            if small { s.allocate(request) } else { s.allocate_at(block, request) }
        })
    }

    /// Maps what is missing in a claim, and makes the stream of `cache` wait for the work on the
    /// memory it takes over. Returns whether there was enough.
    fn back_window(
        &self,
        cache: &'static StreamCache,
        claim: &Claim<'_>,
        supply: &Supply<'_>,
        plan: &mut MappingPlan<'_>,
        outcome: &mut PlaceOutcome,
    ) -> Result<bool> {
        if !self.gather_handles(claim, supply, plan, outcome)? {
            return Ok(false);
        }
        let taker = cache.timeline();
        let in_use = plan.busy.iter().flat_map(|taken| &taken.pieces).chain(&claim.pieces);
        for (stream, epoch) in in_use.flat_map(|piece| &piece.deps) {
            outcome.waits += u64::from(taker.wait_for(stream, *epoch)?);
        }
        self.map_all(plan)?;
        Ok(true)
    }

    /// Adds a claimed and backed window to the cache and allocates from it.
    fn commit_claim(
        &self,
        cache: &'static StreamCache,
        mut claim: Claim<'_>,
        request: &Request,
    ) -> Option<HeapBlock> {
        cache.with(|s| {
            // In its open epoch, the stream has waited for all earlier uses of this memory.
            let epoch = s.timeline().map_or(0, |t| t.open());
            for &(first, count) in &claim.window.missing {
                s.add(self.range(first, count), epoch);
            }
            for piece in claim.pieces.drain(..) {
                let stamp = if piece.is_from(cache) {
                    piece.deps.iter().map(|(_, epoch)| *epoch).max()
                } else {
                    None
                };
                s.add(piece.range, stamp.unwrap_or(epoch));
            }
            if request.size() <= HEAP.small_max {
                s.allocate(request)
            } else {
                s.allocate_at(claim.window.block, request)
            }
        })
    }

    /// Picks the window among the free ranges and takes it: its unclaimed slots, and its backed
    /// parts from their owners. Returns `None` if nothing that may be used is large enough. Without
    /// a claim, nothing has changed.
    fn claim<'a>(
        &'a self,
        cache: &'static StreamCache,
        free_ranges: &FreeRanges<'a>,
        request: &Request,
        options: PlaceOptions,
        outcome: &mut PlaceOutcome,
    ) -> Result<Option<Claim<'a>>, Raced> {
        let bump = free_ranges.bump();
        let small = request.size() <= HEAP.small_max;
        let Some(exact) = request.size().checked_next_multiple_of(HEAP.unit) else {
            return Ok(None);
        };
        let overhang = if options.apart && options.move_handles {
            policy().largest_handle / self.slot
        } else {
            0
        };
        let mut claim = None;
        // Small blocks come from pages of the heap. A whole free slot gives it room for many.
        let sizes = [(self.slot, self.slot), (HEAP.page, HEAP.page), (exact, 1)];
        for &(bytes, align) in if small { &sizes[..] } else { &sizes[2..] } {
            let align = align.max(request.alignment());
            let ranges = free_ranges.all.iter().map(|free_range| free_range.range);
            let mut slots = self.slots();
            let backs = options.grow || options.move_handles;
            let bare = slots.free_runs().filter(|_| backs);
            let around = bytes.saturating_add(overhang * self.slot);
            let window = window::best(bump, ranges, bare, self.grid(), around, align);
            let Some(mut window) = window else { continue };
            if small && bytes == self.slot && !window.missing.is_empty() {
                continue;
            }
            window.block.len = bytes;
            let guard = self.begin_transfer();
            outcome.own_transfers += 1;
            for &(first, count) in &window.missing {
                slots.claim(first, count);
            }
            drop(slots);
            let typical = free_ranges.typical_block(request.size());
            let largest = self.largest_handle(self.held.now(), free_ranges.live, typical);
            claim = Some(Claim {
                window,
                pieces: List::new_in(bump),
                largest,
                overhang,
                _transfer: guard,
            });
            break;
        }
        let Some(mut claim) = claim else { return Ok(None) };
        let block = claim.window.block;
        let taker = cache.timeline();
        for free_range in free_ranges.touching(block) {
            let Some(range) = intersection(free_range.range, block) else { continue };
            // Another thread may have taken or used it in the meantime.
            let piece = self.take_piece(free_ranges, free_range, range);
            let ready = |piece: &RangePiece| options.may_wait || piece.is_done_except(Some(&taker));
            let ready = piece.as_ref().is_some_and(ready);
            claim.pieces.extend(piece);
            if !ready {
                self.unclaim(claim);
                return Err(Raced);
            }
        }
        Ok(Some(claim))
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

    /// Takes memory from the driver until `bytes` are held, rounded up to slots, and adds it to the
    /// shared free list. Returns the bytes taken. If it fails, no more is held than before.
    pub(crate) fn warm(&self, bytes: u64) -> Result<u64> {
        let need = bytes.saturating_sub(self.held.now()).div_ceil(self.slot) * self.slot;
        if need == 0 {
            return Ok(0);
        }
        let pass = self.scratch.begin();
        let claim = {
            let mut slots = self.slots();
            let window = window::best(
                &pass,
                std::iter::empty(),
                slots.free_runs(),
                self.grid(),
                need,
                self.slot,
            );
            let window =
                window.ok_or(MemoryError::TooLarge { requested: bytes, limit: self.bytes })?;
            for &(first, count) in &window.missing {
                slots.claim(first, count);
            }
            Claim {
                window,
                pieces: List::new_in(&pass),
                largest: self.largest_handle(bytes, 0, 0),
                overhang: 0,
                _transfer: self.begin_transfer(),
            }
        };
        let (mut plan, mut outcome) = (MappingPlan::new(&pass), PlaceOutcome::default());
        let supply = Supply { donors: &[], options: NEW, reserved: None, max_growth: u64::MAX };
        let backed = self.gather_handles(&claim, &supply, &mut plan, &mut outcome);
        let backed = backed.and_then(|enough| {
            if enough {
                self.map_all(&mut plan)?;
            }
            Ok(enough)
        });
        match backed {
            Ok(true) => {
                self.stash_spare(&mut plan);
                let mut shared_free = self.shared_free();
                for &(first, count) in &claim.window.missing {
                    shared_free.add(self.range(first, count), StreamDeps::new());
                }
                Ok(outcome.grown)
            }
            Ok(false) => {
                plan.forget_new();
                self.stash_spare(&mut plan);
                let Range { len, .. } = claim.window.block;
                self.unclaim(claim);
                Err(match outcome.refused {
                    Some(refused) => refused.into_error(self.device),
                    None => MemoryError::TooLarge { requested: len, limit: self.bytes },
                })
            }
            Err(error) => {
                self.abandon(claim, plan);
                Err(error)
            }
        }
    }
}
