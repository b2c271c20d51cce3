//! Mapped memory as a pool's physical memory.

use super::Mapped;
use crate::{
    Request,
    base::{reclaim_cost::reclaim_cost, released::Released},
    physical::{
        Physical,
        handle::{Handle, HeldBytes},
        options::{PlaceOptions, PlaceOutcome},
    },
    sharing_policy::{Fit, Granularity},
    stream_cache::StreamCache,
};
use aquifer_core::{
    Result,
    scratch::{Bump, List, list},
};
use aquifer_heap::{HeapBlock, Range};
use aquifer_stream::Timeline;
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

impl Physical for Mapped {
    fn held(&self) -> &HeldBytes {
        &self.held
    }

    fn is_mapped(&self) -> bool {
        true
    }

    fn unit(&self) -> u64 {
        self.handle_bytes(1)
    }

    fn backing_bytes(&self, request: &Request) -> u64 {
        self.handle_bytes(request.size())
    }

    fn reclaim_cost(&self, bytes: u64, peers: u32) -> Duration {
        let handles = bytes.div_ceil(self.mean_handle());
        let each = Duration::from_micros(44) + Duration::from_micros(1000) * peers;
        reclaim_cost(handles, each, bytes, Duration::from_nanos(1300))
    }

    fn place(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        options: PlaceOptions,
        fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<HeapBlock>> {
        self.place(cache, donors, request, options, fit, outcome)
    }

    fn idle(&self, caches: &[&'static StreamCache]) -> u64 {
        self.idle(caches)
    }

    fn trim(&self, caches: &[&'static StreamCache], keep: u64) -> Released {
        self.trim(caches, keep)
    }

    fn inherit(
        &self,
        _heir: &'static StreamCache,
        abandoned: &[&'static StreamCache],
    ) -> (u64, u64) {
        self.share_free(abandoned, 0);
        (0, 1)
    }

    fn warm(&self, bytes: u64) -> Result<u64> {
        self.warm(bytes)
    }

    fn allocate_shared(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        pieces: Granularity,
        fit: Fit,
    ) -> Option<HeapBlock> {
        self.allocate_shared(cache, request, pieces, fit)
    }

    fn share_free(&self, caches: &[&'static StreamCache], least: u64) {
        self.share_free(caches, least);
    }

    fn cap_caches(&self, caches: &[&'static StreamCache], cap: u64) -> u64 {
        self.cap_caches(caches, cap)
    }

    fn take_back(&self, ranges: &mut dyn Iterator<Item = Range>) {
        self.take_back(ranges);
    }

    fn leak(&self) {
        self.leaked.store(true, Ordering::Relaxed);
    }

    fn forget_done(&self) {
        self.shared_free().forget_done();
    }

    fn drop_spare(&self) {
        let mut slots = self.slots();
        if slots.spare.is_empty() {
            return;
        }
        let _move = self.begin_move();
        let pass = self.scratch.begin();
        let spare = list(&pass, slots.spare.drain(..));
        drop(slots);
        drop(spare);
    }

    fn uncached_bytes(&self) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        spare + self.shared_free().bytes()
    }

    fn is_shared_free(&self, address: u64) -> bool {
        self.shared_free().covers(address)
    }

    fn handles(&self, range: Range) -> Option<(Vec<Arc<Handle>>, u64)> {
        let around = self.slots_around(range);
        let (first, count) = self.whole_slots(around);
        let slots = self.slots();
        let offset = range.start - self.address(slots.covering(first, count).next()?.first);
        Some((slots.covering(first, count).map(|mapping| mapping.handle.clone()).collect(), offset))
    }

    fn shared_in_use(&self, note: &mut dyn FnMut(u32, u64)) {
        for (range, deps) in self.shared_free().iter() {
            let busy = deps.iter().filter(|(timeline, epoch)| !timeline.is_done(*epoch));
            busy.for_each(|(timeline, _)| note(timeline.number(), range.len));
        }
    }

    fn move_counts(&self) -> (u64, u64) {
        // The end count is read first. Otherwise a move that begins and ends between the two
        // reads would look unfinished.
        let moves_ended = self.moves_ended.load(Ordering::SeqCst);
        (self.moves_begun.load(Ordering::SeqCst), moves_ended)
    }

    fn zombie_fences<'s>(&self, bump: &'s Bump) -> List<'s, (Arc<Timeline>, u64)> {
        list(bump, self.slots().zombies.iter().flat_map(|zombie| zombie.until.iter().cloned()))
    }
}
