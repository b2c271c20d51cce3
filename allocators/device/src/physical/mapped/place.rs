//! Placing blocks: in the shared free list, or in a window that is backed for them.

use super::{
    HEAP, Mapped,
    claim::{Claim, ClaimOutcome},
    free_ranges::Reach,
    plan::MappingPlan,
};
use crate::{
    Request,
    base::dependencies::is_done_except,
    physical::options::{PlaceOptions, PlaceOutcome},
    sharing_policy::{Fit, Granularity},
    stream_cache::StreamCache,
};
use aquifer_core::Result;
use aquifer_heap::Range;

/// The most calls that one search makes to remove old mappings. The next ones remove the rest.
const MOST_UNMAPS: usize = 64;

impl Mapped {
    /// Finds room for `request` in the free ranges of `cache` and `donors` and in unclaimed slots,
    /// and maps what is missing, as far as `options` allows. The module's documentation has the
    /// driver calls in order. Returns `None` if there is not enough: the handles that this call has
    /// unmapped or created are spare then, still charged, for the next attempt ([`stash_spare`]).
    ///
    /// # Errors
    /// The driver's, but not a lack of memory in `cuMemCreate`. The handles that this call has
    /// created are released to the driver ([`forget_new`]), except for those whose new mapping the
    /// driver refuses to remove. All others that it has unmapped, or found spare, are spare.
    ///
    /// [`stash_spare`]: Mapped::stash_spare
    /// [`forget_new`]: MappingPlan::forget_new
    pub(crate) fn place(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        options: PlaceOptions,
        fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<aquifer_heap::HeapBlock>> {
        let pass = self.scratch.begin();
        // What the driver refuses to unmap has nothing to do with this request.
        let _refused = self.reap_zombies(&pass, MOST_UNMAPS);
        // A small block comes from a page, or from what is left of one.
        let blocks = [(HEAP.page, HEAP.page), (request.size(), request.alignment())];
        let reach = Reach {
            all: false,
            blocks: if request.size() <= HEAP.small_max { &blocks } else { &blocks[1..] },
            beside_bare: options.grow || options.move_handles,
            own_parts: options.granularity == Granularity::Slots,
        };
        // A failed race is retried: another thread has made progress, so this terminates.
        let mut claim = loop {
            let free_ranges =
                self.free_ranges(&pass, donors, Some(cache), options.readiness, reach);
            match self.claim(cache, &free_ranges, request, options, fit, outcome) {
                ClaimOutcome::Claimed(claim) => break claim,
                ClaimOutcome::NoWindow => return Ok(None),
                ClaimOutcome::Raced => std::thread::yield_now(),
            }
        };
        let mut plan = MappingPlan::new(&pass);
        match self.back_window(cache, donors, &claim, options, &mut plan, outcome) {
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
                Ok(self.commit_claim(cache, claim, request))
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

    /// Allocates a block from the shared free list, at the best place by `fit` that is ready for
    /// its stream. In whole slots, the cache gets what the block leaves of them. Makes no driver
    /// call.
    pub(crate) fn allocate_shared(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        pieces: Granularity,
        fit: Fit,
    ) -> Option<aquifer_heap::HeapBlock> {
        let bytes = request.size().checked_next_multiple_of(HEAP.unit)?;
        let small = bytes <= HEAP.small_max;
        let (len, align) = match pieces {
            Granularity::Slots => {
                (bytes.checked_next_multiple_of(self.slot)?, request.alignment().max(self.slot))
            }
            Granularity::Units if small => (HEAP.page, request.alignment()),
            Granularity::Units => (bytes, request.alignment()),
        };
        let own = cache.timeline();
        let (range, deps) = {
            let mut shared_free = self.shared_free();
            let range = shared_free
                .find(len, align, fit, self.grid(), |deps| is_done_except(deps, Some(&own)))?;
            (range, shared_free.take(range)?)
        };
        // Dependencies that are not done belong to the stream itself.
        let stamp = deps.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0).min(own.open());
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
        donors: &[&'static StreamCache],
        claim: &Claim<'_>,
        options: PlaceOptions,
        plan: &mut MappingPlan<'_>,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<bool> {
        if !self.gather_handles(donors, claim, options, plan, outcome)? {
            return Ok(false);
        }
        let taker = cache.timeline();
        let in_use = plan.busy.iter().flat_map(|reclaimed| &reclaimed.pieces).chain(&claim.pieces);
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
    ) -> Option<aquifer_heap::HeapBlock> {
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
}
