//! Unmapping handles, at once or when the work on them is done, and releasing them to the driver, by
//! a trim and at the end.
#![expect(unsafe_code, reason = "unmaps")]

use super::{
    MappedMemory,
    free_ranges::{FreeRanges, MappingCandidate, Reach, TakenMapping},
};
use crate::{
    backing::{
        handle::Handle,
        slots::{Mapping, Zombie, runs},
    },
    base::{
        pending::{StreamDeps, is_done},
        released::{Released, release_or_strand},
    },
    stream_cache::StreamCache,
};
use aquifer_core::{
    DriverError, Result,
    budget::StrandedCount,
    scratch::{Bump, List, list},
};
use aquifer_heap::Range;
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    iter,
    mem::ManuallyDrop,
    sync::{Arc, PoisonError, atomic::Ordering},
};

impl MappedMemory {
    /// Releases handles to the driver until at most `keep` bytes are held, as far as free memory
    /// whose work is known to be done allows. Long stretches come first. Within a stretch, large
    /// handles are released first, since each costs the driver as much as a small one, and from the
    /// high end.
    pub(crate) fn trim(&self, donors: &[&'static StreamCache], keep: u64) -> Released {
        let (before, mut released) = (self.held.now(), Released::default());
        released.add_refusal(self.release_down_to(donors, keep));
        released.bytes = before.saturating_sub(self.held.now());
        released
    }

    /// As [`MappedMemory::trim`]. Returns the driver's first refusal, after all other memory has been
    /// tried.
    fn release_down_to(&self, donors: &[&'static StreamCache], keep: u64) -> Result<()> {
        let pass = self.scratch.begin();
        let reaped = self.reap_zombies(&pass, usize::MAX);
        let over = || self.held.now().saturating_sub(keep);
        if over() == 0 {
            return reaped;
        }
        // Until the memory is released, a concurrent caller that finds nothing retries, since it
        // can then use the budget.
        let _transfer = self.begin_transfer();
        while over() > 0 {
            let spare = self.slots().spare.pop();
            if spare.is_none() {
                break;
            }
        }
        let mut trimmed = Ok(());
        if over() > 0 {
            let free_ranges = self.releasable(&pass, donors);
            let mut candidates = self.candidates(&free_ranges);
            let (mut left, mut taken) = (over(), List::new_in(&*pass));
            let mut give = |candidates: &[MappingCandidate], beyond: bool| {
                for candidate in candidates {
                    if left == 0 || (candidate.count * self.slot > left && !beyond) {
                        continue;
                    }
                    let Some(mapping) = self.take_mapping(candidate, &free_ranges, false) else {
                        continue;
                    };
                    left = left.saturating_sub(mapping.mapping.handle.bytes());
                    taken.push(mapping);
                }
            };
            candidates.sort_unstable_by_key(|c| Reverse((c.stretch, c.count, c.first)));
            give(&candidates, false);
            // Every remaining handle is larger than what is left.
            candidates.sort_unstable_by_key(|c| (c.count, Reverse((c.stretch, c.first))));
            give(&candidates, true);
            let (unmapped, outcome) = self.unmap_done(taken);
            drop(unmapped);
            trimmed = outcome;
        }
        reaped.and(trimmed)
    }

    /// Returns the bytes of handles that a trim could release now.
    pub(crate) fn idle(&self, donors: &[&'static StreamCache]) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        let pass = self.scratch.begin();
        let candidates = self.candidates(&self.releasable(&pass, donors));
        spare + candidates.iter().filter(|c| !c.busy).map(|c| c.count * self.slot).sum::<u64>()
    }

    /// Returns the free ranges in which a handle may lie that nothing uses. Only where several
    /// lists have free memory can short ranges of theirs make up a handle.
    fn releasable<'s>(&self, bump: &'s Bump, donors: &[&'static StreamCache]) -> FreeRanges<'s> {
        let with_free = donors.iter().filter(|donor| donor.with(|s| s.heap.free_bytes() > 0));
        let lists = with_free.count() + usize::from(self.shared_free().bytes() > 0);
        let least = if lists > 1 { 1 } else { self.slot };
        self.free_ranges(bump, donors, None, false, Reach { least, ..Reach::default() })
    }

    /// Takes the ranges of a retired cache. All work of its stream has been waited for.
    pub(crate) fn take_back(&self, ranges: impl Iterator<Item = Range>) {
        let pass = self.scratch.begin();
        let whole = {
            let mut shared_free = self.shared_free();
            ranges.for_each(|range| shared_free.add(range, StreamDeps::new()));
            list(
                &pass,
                shared_free.iter().filter(|(_, deps)| is_done(deps)).map(|(range, _)| range),
            )
        };
        // A handle is released when the last of the caches that shared it has returned its part.
        for range in whole {
            let (first, count) = self.whole_slots(range);
            let mappings = {
                let mut slots = self.slots();
                let inside = list(&pass, slots.inside(first, count).map(|mapping| mapping.first));
                list(&pass, inside.into_iter().filter_map(|first| slots.unmap(first)))
            };
            for mapping in mappings {
                // No other code can take it: the pool is closed.
                let _over = self.shared_free().take(self.range(mapping.first, mapping.count));
                if self.unmap_run(mapping.first, mapping.count).is_err() {
                    self.zombify_mappings([mapping]);
                }
            }
        }
    }

    /// Unmaps taken mappings whose work the host has seen done, releases their slots, and
    /// returns the handles. Mappings that the driver refuses to unmap are returned to their caches.
    /// The error is the first refusal, after all others have been tried. The caller has checked
    /// [`TakenMapping::is_done`] for each.
    pub(super) fn unmap_done<'s>(
        &self,
        taken: List<'s, TakenMapping<'s>>,
    ) -> (List<'s, Arc<Handle>>, Result<()>) {
        let mut unmapped = List::with_capacity_in(taken.len(), *taken.allocator());
        let outcome = self.unmap_each(
            taken,
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
    /// [`TakenMapping`] that [is done](TakenMapping::is_done), a zombie that [is
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
    pub(super) fn zombify(&self, busy: List<'_, TakenMapping<'_>>) {
        let zombies = busy.into_iter().map(|TakenMapping { mapping, pieces }| {
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

/// Returns whether a mapping no longer exists: removed, or lost with its device.
fn is_gone(unmapped: Result<(), DriverError>) -> bool {
    unmapped.map_or_else(|error| error.is_device_lost(), |()| true)
}

/// Counts the handles of `mappings` as stranded, each of them once.
fn count_stranded<'a>(mappings: impl Iterator<Item = &'a Mapping>) -> Vec<StrandedCount> {
    let handles: BTreeMap<_, _> = mappings.map(|m| (Arc::as_ptr(&m.handle), &m.handle)).collect();
    handles.values().filter_map(|handle| handle.count_stranded()).collect()
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        let leaked = self.leaked.load(Ordering::Relaxed);
        // Work that cannot be waited for may use some of it. That part stays mapped and charged for
        // good.
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
        if leaked {
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
        // Ranges that the driver refuses to unmap are still mapped. Their handles stay, and stay
        // charged, as stranded, until a later sweep.
        let release = move |left: &mut Vec<(u64, u64, Vec<Mapping>)>| {
            let mut refused = None;
            left.retain(|(address, bytes, _)| {
                // SAFETY: 1. every cache has been retired and its stream waited for, and so has the
                // work that zombies wait for.
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
        };
        release_or_strand(&self.driver, left, release, |left| {
            count_stranded(left.iter().flat_map(|(.., mappings)| mappings))
        });
    }
}
