//! Giving handles back to the driver: on request, and at the end.
#![expect(unsafe_code, reason = "unmaps")]

use super::{Mapped, handles::Stolen};
use crate::{home::Home, physical::slots::runs};
use aquifer_core::Result;
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::{
    mem::ManuallyDrop,
    sync::{Arc, PoisonError, atomic::Ordering},
};

impl Mapped {
    /// Work may still run on what a cache held, and nobody can wait for it: what is mapped stays for good.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Gives handles that are mapped nowhere back to the driver.
    pub(crate) fn drop_spare(&self) {
        let spare = std::mem::take(&mut self.slots().spare);
        drop(spare);
    }

    /// Gives handles back to the driver until no more than `keep` bytes are held, as far as free slots whose work is
    /// known to be done allow. Long stretches first. Answers with the bytes.
    pub(crate) fn trim(&self, givers: &[&'static Home], keep: u64) -> Result<u64> {
        self.reap_zombies()?;
        let before = self.held.now();
        loop {
            let over = self.held.now().saturating_sub(keep).div_ceil(self.slot) as usize;
            if over == 0 {
                break;
            }
            let spare = {
                let mut slots = self.slots();
                let at = slots.spare.len().saturating_sub(over);
                slots.spare.split_off(at)
            };
            if !spare.is_empty() {
                drop(spare);
                continue;
            }
            let Some((home, first, count)) = self.longest_done(givers) else { break };
            let count = count.min(over as u64);
            let range = self.range(first, count);
            let Ok(stamp) = home.with(|s| s.heap.remove(range)) else { continue };
            let timeline = home.timeline();
            let handles: Vec<Stolen> = {
                let mut slots = self.slots();
                let done = timeline.is_done(stamp);
                (first..first + count)
                    .filter_map(|slot| {
                        let (from, timeline) = (home, timeline.clone());
                        slots.unmap(slot).map(|handle| Stolen { slot, handle, from, timeline, stamp, done })
                    })
                    .collect()
            };
            if handles.iter().any(|s| !s.done) {
                self.give_back(handles);
                continue;
            }
            let (loose, outcome) = self.unmap_known_done(handles);
            drop(loose);
            outcome?;
        }
        Ok(before.saturating_sub(self.held.now()))
    }

    pub(super) fn longest_done(&self, givers: &[&'static Home]) -> Option<(&'static Home, u64, u64)> {
        let mut longest: Option<(&'static Home, u64, u64)> = None;
        for &home in givers {
            home.with(|s| {
                let Some(timeline) = s.timeline() else { return };
                for extent in s.heap.free_extents().filter(|e| timeline.is_done(e.stamp)) {
                    let (first, count) = self.whole_slots(extent.range);
                    if count > longest.map_or(0, |(_, _, most)| most) {
                        longest = Some((home, first, count));
                    }
                }
            });
        }
        longest
    }

    /// Unmaps what a retired cache held. All of its stream's work has been waited for.
    pub(crate) fn take_back(&self, ranges: impl Iterator<Item = Range>, timeline: &Arc<Timeline>) {
        for range in ranges {
            let (first, count) = self.whole_slots(range);
            let mapped: Vec<u64> = {
                let slots = self.slots();
                (first..first + count).filter(|&slot| slots.at(slot).is_some()).collect()
            };
            for (first, count) in runs(&mapped) {
                let handles: Vec<_> = {
                    let mut slots = self.slots();
                    (first..first + count).filter_map(|slot| slots.unmap(slot)).collect()
                };
                if self.unmap_run(first, count).is_err() {
                    self.unmap_later((first..first + count).zip(handles).collect(), timeline);
                }
            }
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        let kept = self.kept.load(Ordering::Relaxed);
        // What the driver will not unmap is still taken, so its handles stay, and stay charged.
        for zombie in std::mem::take(&mut slots.zombies) {
            let (timeline, epoch) = &zombie.until;
            let address = self.base + zombie.slot * self.slot;
            // SAFETY: 1. the wait just before it.
            let gone = timeline.wait(*epoch, None).is_ok()
                && unsafe { self.driver.unmap(self.device, address, self.slot) }.is_ok();
            if !gone && !timeline.is_retired() {
                let _kept = ManuallyDrop::new(zombie);
            }
        }
        let left: Vec<u64> = slots.mapped().collect();
        for (first, count) in runs(&left) {
            let handles: Vec<_> = (first..first + count).filter_map(|slot| slots.unmap(slot)).collect();
            let address = self.base + first * self.slot;
            // SAFETY: 1. every cache has been retired and its stream waited for, or `kept` says otherwise.
            if kept || unsafe { self.driver.unmap(self.device, address, count * self.slot) }.is_err() {
                let _kept = ManuallyDrop::new(handles);
            }
        }
        slots.spare.clear();
        // SAFETY: 1. reserved in `open`, and everything in it has been unmapped; a refusal above makes this one refuse.
        let _ = unsafe { self.driver.address_free(self.device, self.base, self.bytes) };
    }
}
