//! Where handles come from and where they go: out of stock, from the driver, from under free slots.
#![expect(unsafe_code, reason = "maps and unmaps")]

use super::{Effort, Mapped, Reach};
use crate::{
    home::Home,
    physical::{
        handle::{Funds, Handle},
        slots::{Zombie, runs},
    },
};
use allocator_api2::vec::Vec as ScratchVec;
use aquifer_core::Result;
use aquifer_stream::Timeline;
use bumpalo::Bump;
use std::sync::Arc;

/// A slot taken out of a cache, with its handle.
pub(super) struct Stolen {
    pub(super) slot: u64,
    pub(super) handle: Arc<Handle>,
    pub(super) from: &'static Home,
    pub(super) timeline: Arc<Timeline>,
    pub(super) stamp: u64,
    pub(super) done: bool,
}

impl Mapped {
    /// Up to `needed` handles that are mapped nowhere, spare ones first, then new ones; how many are new.
    pub(super) fn stock(&self, needed: usize, effort: &mut Effort<'_>) -> Result<(Vec<Arc<Handle>>, usize)> {
        let mut stock = {
            let mut slots = self.slots();
            let keep = slots.spare.len().saturating_sub(needed);
            slots.spare.split_off(keep)
        };
        let mut grown = 0;
        let funds = Funds { budget: &self.budget, reserved: effort.reserved };
        while stock.len() < needed {
            match Handle::create(&self.driver, self.device, self.slot, funds, &self.held) {
                Ok(handle) => {
                    stock.push(handle);
                    grown += 1;
                }
                Err(refused) if refused.is_out_of_memory() => {
                    // In figures of the whole need, before this call took its part.
                    let taken = grown as u64 * self.slot;
                    let wanted = (needed - stock.len()) as u64 * self.slot + taken;
                    effort.refused = Some(refused.of(wanted, taken));
                    break;
                }
                Err(refused) => {
                    self.put_aside(stock, grown);
                    return Err(refused.into_error(self.device));
                }
            }
        }
        Ok((stock, grown))
    }

    /// Spare handles stay; the last `grown` of them, which are new, go back to the driver.
    pub(super) fn put_aside(&self, mut stock: Vec<Arc<Handle>>, grown: usize) {
        let new = stock.split_off(stock.len() - grown);
        self.slots().spare.append(&mut stock);
        drop(new);
    }

    /// Takes `needed` whole free slots with their handles out of the caches of `givers`, or none. Those whose work is
    /// done come first, and among them the shortest stretches, so that long ones stay whole.
    pub(super) fn steal(&self, givers: &[&'static Home], needed: usize, reach: Reach) -> Option<Vec<Stolen>> {
        if needed == 0 {
            return Some(Vec::new());
        }
        // Collected, sorted and thrown away: one chunk instead of a list that grows.
        let scratch = Bump::new();
        let mut offers = ScratchVec::new_in(&scratch);
        for &home in givers {
            home.with(|s| {
                let Some(timeline) = s.timeline().cloned() else { return };
                for extent in s.heap.free_extents() {
                    let (first, count) = self.whole_slots(extent.range);
                    let done = timeline.is_done(extent.stamp);
                    if count > 0 && (done || reach == Reach::Wait) {
                        offers.push((!done, count, first, home, timeline.clone()));
                    }
                }
            });
        }
        if offers.iter().map(|o| o.1 as usize).sum::<usize>() < needed {
            return None;
        }
        offers.sort_unstable_by_key(|&(busy, count, first, ..)| (busy, count, first));
        let mut stolen = Vec::with_capacity(needed);
        for (_, count, first, home, timeline) in offers {
            if stolen.len() == needed {
                break;
            }
            let count = count.min((needed - stolen.len()) as u64);
            let range = self.range(first, count);
            // Another thread of that stream may have been faster.
            let Ok(stamp) = home.with(|s| s.heap.remove(range)) else { continue };
            let done = timeline.is_done(stamp);
            let mut slots = self.slots();
            for slot in first..first + count {
                if let Some(handle) = slots.unmap(slot) {
                    stolen.push(Stolen { slot, handle, from: home, timeline: timeline.clone(), stamp, done });
                }
            }
        }
        if stolen.len() < needed || (reach == Reach::Done && stolen.iter().any(|s| !s.done)) {
            self.give_back(stolen);
            return None;
        }
        Some(stolen)
    }

    /// Puts stolen slots back as they were.
    pub(super) fn give_back(&self, stolen: impl IntoIterator<Item = Stolen>) {
        for Stolen { slot, handle, from, stamp, .. } in stolen {
            self.slots().map(slot, handle);
            from.with(|s| s.add(self.range(slot, 1), stamp));
        }
    }

    /// Unmaps slots that are in nobody's cache and whose work the host has seen done, makes them nobody's, and answers
    /// with their handles. If a call fails, the slots not unmapped by then are back in their caches.
    pub(super) fn unmap_known_done(&self, mut stolen: Vec<Stolen>) -> (Vec<Arc<Handle>>, Result<()>) {
        stolen.sort_unstable_by_key(|s| s.slot);
        let slots: Vec<u64> = stolen.iter().map(|s| s.slot).collect();
        let mut stolen = stolen.into_iter();
        let mut loose = Vec::with_capacity(slots.len());
        for (first, count) in runs(&slots) {
            if let Err(error) = self.unmap_run(first, count) {
                self.give_back(stolen);
                return (loose, Err(error));
            }
            loose.extend(stolen.by_ref().take(count as usize).map(|s| s.handle));
        }
        (loose, Ok(()))
    }

    /// Unmaps a run of slots for which nothing is queued any more, and makes it nobody's.
    pub(super) fn unmap_run(&self, first: u64, count: u64) -> Result<()> {
        // SAFETY: 1. the callers' slots are in no cache, so nothing is queued for them any more, and the host has seen
        // the epoch done that covers their last use.
        let unmapped = unsafe { self.driver.unmap(self.device, self.address(first), count * self.slot) };
        unmapped.map_err(|e| self.lost(e))?;
        self.slots().release(first, count);
        Ok(())
    }

    /// Maps a handle of `stock` at each of `missing` and lets the device at it. If that fails, nothing is mapped and
    /// the stock is whole, but for what the driver would not unmap again, which is `stuck`.
    pub(super) fn map_all(
        &self,
        missing: &[u64],
        stock: &mut Vec<Arc<Handle>>,
        stuck: &mut Vec<(u64, Arc<Handle>)>,
    ) -> Result<()> {
        let mut mapped: Vec<(u64, Arc<Handle>)> = Vec::with_capacity(missing.len());
        let mut map = || -> Result<()> {
            for (first, count) in runs(missing) {
                for slot in first..first + count {
                    let Some(handle) = stock.pop() else { break };
                    // SAFETY: 1. the slot is claimed by this call: nothing is mapped there and nobody knows it.
                    let done = unsafe { self.driver.map(self.address(slot), self.slot, handle.raw()) };
                    if let Err(error) = done {
                        stock.push(handle);
                        return Err(self.lost(error));
                    }
                    mapped.push((slot, handle));
                }
                self.driver
                    .set_access(self.address(first), count * self.slot, &[self.device])
                    .map_err(|e| self.lost(e))?;
            }
            Ok(())
        };
        let outcome = map();
        if outcome.is_err() {
            for (slot, handle) in mapped {
                // SAFETY: 1. mapped above, and handed to nobody.
                match unsafe { self.driver.unmap(self.device, self.address(slot), self.slot) } {
                    Ok(()) => stock.push(handle),
                    Err(_) => stuck.push((slot, handle)),
                }
            }
            return outcome;
        }
        let mut slots = self.slots();
        for (slot, handle) in mapped {
            slots.map(slot, handle);
        }
        Ok(())
    }

    /// Keeps mappings that nothing uses and that the driver would not take away, to be tried again. Their memory stays
    /// charged.
    pub(super) fn unmap_later(&self, stuck: Vec<(u64, Arc<Handle>)>, timeline: &Arc<Timeline>) {
        // No work is behind epoch 0.
        let zombies =
            stuck.into_iter().map(|(slot, handle)| Zombie { slot, handle, until: (timeline.clone(), 0) });
        self.slots().zombies.extend(zombies);
    }

    /// Unmaps zombies whose streams are done with them. Never blocks.
    pub(crate) fn reap_zombies(&self) -> Result<()> {
        let (over, rest): (Vec<_>, Vec<_>) = {
            let mut slots = self.slots();
            if slots.zombies.is_empty() {
                return Ok(());
            }
            std::mem::take(&mut slots.zombies).into_iter().partition(|z| {
                let (timeline, epoch) = &z.until;
                timeline.is_done(*epoch)
            })
        };
        self.slots().zombies.extend(rest);
        let mut over = over.into_iter();
        while let Some(zombie) = over.next() {
            if let Err(error) = self.unmap_run(zombie.slot, 1) {
                self.slots().zombies.push(zombie);
                self.slots().zombies.extend(over);
                return Err(error);
            }
        }
        Ok(())
    }

    /// The streams and epochs that zombies wait for.
    pub(crate) fn zombie_fences(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.slots().zombies.iter().map(|z| z.until.clone()).collect()
    }
}
