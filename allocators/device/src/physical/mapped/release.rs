//! Giving handles back to the driver: on request, and at the end.
#![expect(unsafe_code, reason = "unmaps")]

use super::{Mapped, Reach, offers::Candidate};
use crate::{
    home::Home,
    physical::{
        commons::{Past, is_done},
        slots::{Mapping, runs},
    },
};
use aquifer_core::{
    DriverError, Result,
    scratch::{List, list},
};
use aquifer_driver::leftovers;
use aquifer_heap::Range;
use std::{
    cmp::Reverse,
    iter,
    mem::ManuallyDrop,
    sync::{PoisonError, atomic::Ordering},
};

impl Mapped {
    /// Work may still run on what a cache held, and nobody can wait for it: what is mapped stays
    /// for good.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Gives handles that are mapped nowhere back to the driver.
    pub(crate) fn drop_spare(&self) {
        let mut slots = self.slots();
        if slots.spare.is_empty() {
            return;
        }
        let _transit = self.transit();
        let pass = self.scratch.begin();
        let spare = list(&pass, slots.spare.drain(..));
        drop(slots);
        drop(spare);
    }

    /// Gives handles back to the driver until no more than `keep` bytes are held, as far as free
    /// memory whose work is known to be done allows. Long stretches first, and of each the large
    /// handles, which cost the driver as much as small ones, from the high end. Answers with the
    /// bytes.
    pub(crate) fn trim(&self, givers: &[&'static Home], keep: u64) -> Result<u64> {
        let pass = self.scratch.begin();
        self.reap_zombies(&pass)?;
        let before = self.held.now();
        let over = || self.held.now().saturating_sub(keep);
        if over() == 0 {
            return Ok(before.saturating_sub(self.held.now()));
        }
        // What is charged and in nobody's cache is not lost to others: they may have it as soon as
        // it has been given back.
        let _transit = self.transit();
        while over() > 0 {
            let spare = self.slots().spare.pop();
            if spare.is_none() {
                break;
            }
        }
        if over() > 0 {
            let offers = self.offers(&pass, givers, None, Reach::Done);
            let mut candidates = self.candidates(&offers);
            let (mut left, mut taken) = (over(), List::new_in(&*pass));
            let mut give = |candidates: &[Candidate], beyond: bool| {
                for candidate in candidates {
                    if left == 0 || (candidate.count * self.slot > left && !beyond) {
                        continue;
                    }
                    let Some(stolen) = self.take(candidate, &offers, Reach::Done) else { continue };
                    left = left.saturating_sub(stolen.mapping.handle.bytes());
                    taken.push(stolen);
                }
            };
            candidates.sort_unstable_by_key(|c| Reverse((c.stretch, c.count, c.first)));
            give(&candidates, false);
            // Less is left than any of the others has.
            candidates.sort_unstable_by_key(|c| (c.count, Reverse((c.stretch, c.first))));
            give(&candidates, true);
            let (loose, outcome) = self.unmap_done(taken);
            drop(loose);
            outcome?;
        }
        Ok(before.saturating_sub(self.held.now()))
    }

    /// Bytes of handles that a trim could give back now.
    pub(crate) fn idle(&self, givers: &[&'static Home]) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        let pass = self.scratch.begin();
        let candidates = self.candidates(&self.offers(&pass, givers, None, Reach::Done));
        spare + candidates.iter().filter(|c| !c.busy).map(|c| c.count * self.slot).sum::<u64>()
    }

    /// Bytes of a handle, in the mean over those that are held.
    pub(crate) fn mean_handle(&self) -> u64 {
        let count = self.slots().count();
        self.held.now().checked_div(count).unwrap_or(0).max(self.slot)
    }

    /// Bytes of handles that make room for any block of `bytes` where nothing is mapped.
    pub(crate) fn whole(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.slot)
    }

    /// What a retired cache held. All of its stream's work has been waited for.
    pub(crate) fn take_back(&self, ranges: impl Iterator<Item = Range>) {
        let pass = self.scratch.begin();
        let whole = {
            let mut commons = self.commons();
            ranges.for_each(|range| commons.add(range, Past::new()));
            list(&pass, commons.iter().filter(|(_, past)| is_done(past)).map(|(range, _)| range))
        };
        // A handle goes when the last of the caches that shared it has left its part.
        for range in whole {
            let (first, count) = self.whole_slots(range);
            let mappings = {
                let mut slots = self.slots();
                let inside = list(&pass, slots.inside(first, count).map(|mapping| mapping.first));
                list(&pass, inside.into_iter().filter_map(|first| slots.unmap(first)))
            };
            for mapping in mappings {
                // Nobody else is there to take it: the pool is closed.
                let _over = self.commons().take(self.range(mapping.first, mapping.count));
                if self.unmap_run(mapping.first, mapping.count).is_err() {
                    self.zombify_mappings([mapping]);
                }
            }
        }
    }
}

/// Whether a mapping is no more: taken away, or lost with its device.
fn is_gone(unmapped: Result<(), DriverError>) -> bool {
    unmapped.map_or_else(|error| error.is_device_lost(), |()| true)
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        let kept = self.kept.load(Ordering::Relaxed);
        // Work that cannot be waited for may run on some of it, which stays mapped, and charged,
        // for good.
        let mut for_good = false;
        let mut mapped = Vec::new();
        for zombie in std::mem::take(&mut slots.zombies) {
            let over = zombie.until.iter().all(|(timeline, epoch)| {
                timeline.wait(*epoch, None).is_ok() || timeline.is_retired()
            });
            if over {
                mapped.push(zombie.mapping);
            } else {
                for_good = true;
                let _kept = ManuallyDrop::new(zombie);
            }
        }
        let firsts: Vec<u64> = slots.mapped().map(|mapping| mapping.first).collect();
        let rest = firsts.into_iter().filter_map(|first| slots.unmap(first));
        if kept {
            let _kept = ManuallyDrop::new(rest.collect::<Vec<_>>());
            for_good = true;
        } else {
            mapped.extend(rest);
        }
        slots.spare.clear();
        mapped.sort_unstable_by_key(|mapping| mapping.first);
        let together: Vec<_> =
            runs(mapped.iter().map(|mapping| (mapping.first, mapping.count))).collect();
        let mut mapped = mapped.into_iter().peekable();
        let mut left: Vec<(u64, u64, Vec<Mapping>)> = Vec::with_capacity(together.len());
        for (first, count) in together {
            let these =
                iter::from_fn(|| mapped.next_if(|mapping| mapping.first < first + count)).collect();
            left.push((self.base + first * self.slot, count * self.slot, these));
        }
        let (driver, device, base, bytes) =
            (self.driver.clone(), self.device, self.base, self.bytes);
        // What the driver refuses to unmap is still taken, so its handles stay, and stay charged,
        // until a later sweep.
        leftovers::release(&self.driver, move || {
            let mut refused = None;
            left.retain(|(address, bytes, _)| {
                // SAFETY: 1. every cache has been retired and its stream waited for, and what
                // zombies wait for as well.
                let unmapped = unsafe { driver.unmap(device, *address, *bytes) };
                let gone = is_gone(unmapped);
                refused = refused.or(unmapped.err().filter(|_| !gone));
                !gone
            });
            match refused {
                Some(refused) => Err(refused),
                None if for_good => Ok(()),
                // SAFETY: 1. reserved in `open`, and everything in it has been unmapped.
                None => unsafe { driver.address_free(device, base, bytes) },
            }
        });
    }
}
