//! Closing gaps: bare addresses below the last mapping, which moves leave behind.
//!
//! On both sides of a gap, blocks end within a handle, whose rest is lost. Near a limit a program
//! moves a few handles in each round, so without this each round would lose more than the one
//! before.

use super::{Mapped, claim::Claim, plan::MappingPlan};
use crate::{
    base::policy_params::policy,
    physical::{
        options::{GapOutcome, PlaceOutcome, Readiness},
        window::Window,
    },
    stream_cache::StreamCache,
};
use aquifer_core::{
    MemoryError, Result,
    scratch::{List, list},
};
use std::cmp::Reverse;

impl Mapped {
    /// Maps handles from under free memory into the lowest gap, whose memory `cache` then gets.
    /// They are those at the highest addresses whose work is known to be done. `cuMemUnmap`,
    /// `cuMemMap` and `cuMemSetAccess`; never blocks.
    ///
    /// # Errors
    /// The driver's. What it refuses to unmap stays where it was, and handles that are not mapped
    /// are spare then.
    pub(crate) fn close_gap(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<GapOutcome> {
        let most = policy().gap_max / self.slot;
        let Some((first, count)) = self.slots().lowest_gap(most) else {
            return Ok(GapOutcome::NoGap);
        };
        let pass = self.scratch.begin();
        let free_ranges = self.free_ranges(&pass, donors, None, Readiness::Completed);
        let mut candidates = self.candidates(&free_ranges);
        candidates.retain(|candidate| !candidate.busy && candidate.first > first);
        candidates.sort_unstable_by_key(|candidate| Reverse(candidate.first));
        let mut left = count;
        candidates.retain(|candidate| {
            let fits = candidate.count <= left;
            left -= if fits { candidate.count } else { 0 };
            fits
        });
        let count = count - left;
        if count == 0 {
            return Ok(GapOutcome::NoHandle);
        }
        let claim = {
            let mut slots = self.slots();
            // Another thread may have used the gap.
            if slots.lowest_gap(most).is_none_or(|(start, len)| start != first || len < count) {
                return Ok(GapOutcome::NoHandle);
            }
            slots.claim(first, count);
            Claim {
                window: Window {
                    block: self.range(first, count),
                    missing: list(&pass, [(first, count)]),
                },
                pieces: List::new_in(&pass),
                largest: 1,
                _move: self.begin_move(),
            }
        };
        let mut done = List::new_in(&pass);
        for candidate in &candidates {
            done.extend(self.reclaim_mapping(candidate, &free_ranges, Readiness::Completed));
        }
        let (unmapped, unmapping) = self.unmap_done(done);
        let (mut plan, mut end) = (MappingPlan::new(&pass), first);
        for handle in unmapped {
            outcome.count_move(&handle);
            end += plan.map_at(end, handle.into(), self.slot);
        }
        let mapped = match unmapping {
            Ok(()) | Err(MemoryError::Driver(_)) => self.map_all(&mut plan),
            lost => lost,
        };
        if let Err(error) = mapped {
            self.abandon(claim, plan);
            return Err(error);
        }
        if end < first + count {
            self.slots().release(end, first + count - end);
        }
        if end == first {
            return Ok(GapOutcome::NoHandle);
        }
        // All work on the handles is done.
        cache.with(|s| s.add(self.range(first, end - first), 0));
        Ok(GapOutcome::Closed)
    }
}
