//! Unmapping of handles, at once or when the work on them is done.
#![expect(unsafe_code, reason = "unmaps")]

use super::{Mapped, free_ranges::ReclaimedMapping};
use crate::{
    base::dependencies::StreamDeps,
    physical::{
        handle::Handle,
        slots::{Mapping, Zombie, runs},
    },
};
use aquifer_core::{
    Result,
    scratch::{Bump, List, list},
};
use std::sync::Arc;

impl Mapped {
    /// Unmaps reclaimed mappings whose work the host has seen done, releases their slots, and
    /// returns the handles. Mappings that the driver refuses to unmap are returned to their caches.
    /// The error is the first refusal, after all others have been tried. The caller has checked
    /// [`ReclaimedMapping::is_done`] for each.
    pub(super) fn unmap_done<'s>(
        &self,
        reclaimed: List<'s, ReclaimedMapping<'s>>,
    ) -> (List<'s, Arc<Handle>>, Result<()>) {
        let mut unmapped = List::with_capacity_in(reclaimed.len(), *reclaimed.allocator());
        let outcome = self.unmap_each(
            reclaimed,
            |s| &s.mapping,
            usize::MAX,
            |s, gone| {
                if gone { unmapped.push(s.mapping.handle) } else { self.restore_mappings([s]) }
            },
        );
        (unmapped, outcome)
    }

    /// Unmaps the mappings of `items`, adjacent ones in one call, in at most `most` calls, and
    /// passes on each item and whether its mapping is gone. The error is the first refusal.
    fn unmap_each<'s, T>(
        &self,
        mut items: List<'s, T>,
        mapping: impl Fn(&T) -> &Mapping,
        most: usize,
        mut then: impl FnMut(T, bool),
    ) -> Result<()> {
        items.sort_unstable_by_key(|item| mapping(item).first);
        let slots = |item: &T| (mapping(item).first, mapping(item).count);
        let together = list(items.allocator(), runs(items.iter().map(slots)));
        let (mut items, mut outcome) = (items.into_iter().peekable(), Ok(()));
        for (first, count) in together.into_iter().take(most) {
            let gone = self.unmap_run(first, count);
            while let Some(item) = items.next_if(|item| mapping(item).first < first + count) {
                then(item, gone.is_ok());
            }
            outcome = outcome.and(gone);
        }
        items.for_each(|item| then(item, false));
        outcome
    }

    /// Unmaps a run of slots that no queued work uses, and releases the slots.
    ///
    /// Each mapping in the run must be out of the table and out of all lists, and its work done: a
    /// [`ReclaimedMapping`] that [is done](ReclaimedMapping::is_done), a zombie that [is
    /// over](Zombie::is_over), or memory of a closed pool whose streams have been waited for.
    pub(super) fn unmap_run(&self, first: u64, count: u64) -> Result<()> {
        // SAFETY: 1. the caller's slots are in no cache, so nothing is queued for them any more,
        // and the host has seen the epochs done that cover their last use.
        let unmapped =
            unsafe { self.driver.unmap(self.device, self.address(first), count * self.slot) };
        unmapped.map_err(|e| self.driver_error(e))?;
        self.slots().release(first, count);
        Ok(())
    }

    /// Keeps the old mappings of handles that have been mapped a second time until their work is
    /// done.
    pub(super) fn zombify(&self, busy: List<'_, ReclaimedMapping<'_>>) {
        let zombies = busy.into_iter().map(|ReclaimedMapping { mapping, pieces }| {
            let until = pieces.into_iter().flat_map(|piece| piece.deps).collect();
            Zombie { mapping, until }
        });
        self.slots().zombies.extend(zombies);
    }

    /// Keeps unused mappings whose removal the driver has refused, to be retried. Their memory
    /// stays charged.
    pub(super) fn zombify_mappings(&self, stuck: impl IntoIterator<Item = Mapping>) {
        let zombies = stuck.into_iter().map(|mapping| Zombie { mapping, until: StreamDeps::new() });
        self.slots().zombies.extend(zombies);
    }

    /// Unmaps zombies whose streams are done with them, adjacent ones in one call, and releases
    /// their slots, which stay claimed until then. Makes at most `most` calls. Called by each
    /// search for a place and by each trim of the mapped memory: so by slow paths,
    /// [`DevicePool::trim`](crate::DevicePool::trim) and a reclaim.
    /// [`DevicePool::poll`](crate::DevicePool::poll) only polls the work that zombies wait for.
    /// Never blocks.
    ///
    /// # Errors
    /// The driver's first refusal, after all others have been tried. What it refuses stays a
    /// zombie.
    pub(super) fn reap_zombies(&self, bump: &Bump, most: usize) -> Result<()> {
        let over = list(bump, self.slots().zombies.extract_if(.., |zombie| zombie.is_over()));
        self.unmap_each(
            over,
            |zombie| &zombie.mapping,
            most,
            |zombie, gone| {
                if !gone {
                    self.slots().zombies.push(zombie);
                }
            },
        )
    }
}
