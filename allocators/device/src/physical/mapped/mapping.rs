//! Mapping and unmapping of handles.
#![expect(unsafe_code, reason = "maps and unmaps")]

use super::{Mapped, Stock, offers::Stolen};
use crate::physical::{
    handle::Handle,
    slots::{Mapping, Zombie, runs},
};
use aquifer_core::{
    Result,
    scratch::{Bump, List, list},
};
use aquifer_stream::Timeline;
use std::sync::Arc;

impl Mapped {
    /// Maps the planned handles and grants access to the device and its peers. If that fails, no
    /// new mapping remains and the stock is complete, except for mappings that the driver refused
    /// to remove, which are in `stuck`.
    pub(super) fn map_all(&self, stock: &mut Stock<'_>) -> Result<()> {
        let mut mapped = 0;
        let outcome = self.map_planned(stock, &mut mapped);
        if outcome.is_err() {
            for planned in &stock.planned[..mapped] {
                let (address, bytes) = (self.address(planned.first), planned.count * self.slot);
                // SAFETY: 1. mapped above, and not handed out.
                if unsafe { self.driver.unmap(self.device, address, bytes) }.is_err() {
                    stock.stuck.push(planned.mapping());
                }
            }
            let stuck = &stock.stuck;
            stock
                .planned
                .retain(|planned| stuck.iter().all(|mapping| mapping.first != planned.first));
            return outcome;
        }
        let mut slots = self.slots();
        for planned in stock.planned.drain(..) {
            slots.map(planned.mapping());
        }
        Ok(())
    }

    fn map_planned(&self, stock: &Stock<'_>, mapped: &mut usize) -> Result<()> {
        for planned in &stock.planned {
            let mapping = planned.mapping();
            let (address, bytes) = (self.address(planned.first), planned.count * self.slot);
            // SAFETY: 1. this attempt has claimed the slots: nothing is mapped there, and no other
            // code uses them.
            let done = unsafe { self.driver.map(address, bytes, mapping.handle.raw()) };
            done.map_err(|e| self.lost(e))?;
            *mapped += 1;
        }
        for (first, count) in
            runs(stock.planned.iter().map(|planned| (planned.first, planned.count)))
        {
            self.driver
                .set_access(self.address(first), count * self.slot, &self.reach)
                .map_err(|e| self.lost(e))?;
        }
        Ok(())
    }

    /// Unmaps reclaimed mappings whose work the host has seen done, releases their slots, and
    /// returns the handles. If a call fails, mappings that are not yet unmapped are returned to
    /// their caches.
    pub(super) fn unmap_done<'s>(
        &self,
        mut stolen: List<'s, Stolen<'s>>,
    ) -> (List<'s, Arc<Handle>>, Result<()>) {
        stolen.sort_unstable_by_key(|s| s.mapping.first);
        let bump = *stolen.allocator();
        let together = list(bump, runs(stolen.iter().map(|s| (s.mapping.first, s.mapping.count))));
        let mut loose = List::with_capacity_in(stolen.len(), bump);
        let mut stolen = stolen.into_iter().peekable();
        for (first, count) in together {
            if let Err(error) = self.unmap_run(first, count) {
                self.give_back(stolen);
                return (loose, Err(error));
            }
            while let Some(s) = stolen.next_if(|s| s.mapping.first < first + count) {
                loose.push(s.mapping.handle);
            }
        }
        (loose, Ok(()))
    }

    /// Unmaps a run of slots that no queued work uses, and releases the slots.
    pub(super) fn unmap_run(&self, first: u64, count: u64) -> Result<()> {
        // SAFETY: 1. the caller's slots are in no cache, so nothing is queued for them any more,
        // and the host has seen the epochs done that cover their last use.
        let unmapped =
            unsafe { self.driver.unmap(self.device, self.address(first), count * self.slot) };
        unmapped.map_err(|e| self.lost(e))?;
        self.slots().release(first, count);
        Ok(())
    }

    /// Keeps the old mappings of handles that have been mapped a second time until their work is
    /// done.
    pub(super) fn zombify(&self, busy: List<'_, Stolen<'_>>) {
        let zombies = busy.into_iter().map(|Stolen { mapping, pieces }| {
            let until = pieces.into_iter().flat_map(|piece| piece.past).collect();
            Zombie { mapping, until }
        });
        self.slots().zombies.extend(zombies);
    }

    /// Keeps unused mappings whose removal the driver has refused, to be retried. Their memory
    /// stays charged.
    pub(super) fn zombify_mappings(&self, stuck: impl IntoIterator<Item = Mapping>) {
        let zombies = stuck.into_iter().map(|mapping| Zombie { mapping, until: Vec::new() });
        self.slots().zombies.extend(zombies);
    }

    /// Unmaps zombies whose streams are done with them. Never blocks.
    pub(super) fn reap_zombies(&self, bump: &Bump) -> Result<()> {
        let over = list(bump, self.slots().zombies.extract_if(.., |zombie| zombie.is_over()));
        let mut over = over.into_iter();
        while let Some(zombie) = over.next() {
            if let Err(error) = self.unmap_run(zombie.mapping.first, zombie.mapping.count) {
                self.slots().zombies.extend(std::iter::once(zombie).chain(over));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the streams and epochs that zombies wait for.
    pub(crate) fn zombie_fences<'s>(&self, bump: &'s Bump) -> List<'s, (Arc<Timeline>, u64)> {
        list(bump, self.slots().zombies.iter().flat_map(|zombie| zombie.until.iter().cloned()))
    }
}
