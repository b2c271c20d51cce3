//! What the pool asks of its mapped memory without a search.

use super::Mapped;
use crate::{
    Request,
    base::reclaim_cost::reclaim_cost,
    physical::handle::{Handle, HeldBytes},
};
use aquifer_core::scratch::{Bump, List, list};
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

impl Mapped {
    /// Returns the counter of bytes held from the driver.
    pub(crate) fn held(&self) -> &HeldBytes {
        &self.held
    }

    /// Returns the bytes of a slot, the least that is released at once.
    pub(crate) fn slot(&self) -> u64 {
        self.slot
    }

    /// Returns the bytes of handles that hold any block of this request.
    pub(crate) fn backing_bytes(&self, request: &Request) -> u64 {
        request.size().next_multiple_of(self.slot)
    }

    /// Returns the cost of releasing `bytes` and taking them again, with `peers` that have access.
    pub(crate) fn reclaim_cost(&self, bytes: u64, peers: u32) -> Duration {
        let handles = bytes.div_ceil(self.mean_handle());
        let each = Duration::from_micros(44) + Duration::from_micros(1000) * peers;
        reclaim_cost(handles, each, bytes, Duration::from_nanos(1300))
    }

    /// Returns the mean size of the held handles in bytes.
    fn mean_handle(&self) -> u64 {
        let count = self.slots().count();
        self.held.now().checked_div(count).unwrap_or(0).max(self.slot)
    }

    /// Marks that queued work which cannot be waited for may still use a cache's memory.
    pub(crate) fn leak(&self) {
        self.leaked.store(true, Ordering::Relaxed);
    }

    /// Drops references to streams whose work is done.
    pub(crate) fn forget_done(&self) {
        self.shared_free().forget_done();
    }

    /// Releases held memory that is mapped nowhere.
    pub(crate) fn drop_spare(&self) {
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

    /// Returns the bytes that are neither in a cache nor in use.
    pub(crate) fn uncached_bytes(&self) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        spare + self.shared_free().bytes()
    }

    /// Returns whether an address is free and in no cache.
    pub(crate) fn is_shared_free(&self, address: u64) -> bool {
        self.shared_free().covers(address)
    }

    /// Returns the handles behind a range of a live block, and the offset of the range in the
    /// first. They stay where they are while the block lives.
    pub(crate) fn handles(&self, range: Range) -> Option<(Vec<Arc<Handle>>, u64)> {
        let around = self.slots_around(range);
        let (first, count) = self.whole_slots(around);
        let slots = self.slots();
        let offset = range.start - self.address(slots.covering(first, count).next()?.first);
        Some((slots.covering(first, count).map(|mapping| mapping.handle.clone()).collect(), offset))
    }

    /// Calls `note` for each free range in no cache that queued work may still use, with the number
    /// of that work's stream and the bytes.
    pub(crate) fn shared_in_use(&self, note: &mut dyn FnMut(u32, u64)) {
        for (range, deps) in self.shared_free().iter() {
            let busy = deps.iter().filter(|(timeline, epoch)| !timeline.is_done(*epoch));
            busy.for_each(|(timeline, _)| note(timeline.number(), range.len));
        }
    }

    /// Returns the number of moves begun and ended. Comparing it with a later result shows whether
    /// memory was being moved.
    ///
    /// A move here is any time in which a thread has memory in hand that is in no list: while it is
    /// transferred between lists, backed, or released, with or without a driver call.
    /// [`PoolStats::moves`](aquifer_core::PoolStats::moves) counts something else: handles.
    pub(crate) fn move_counts(&self) -> (u64, u64) {
        // The end count is read first. Otherwise a move that begins and ends between the two
        // reads would look unfinished.
        let moves_ended = self.moves_ended.load(Ordering::SeqCst);
        (self.moves_begun.load(Ordering::SeqCst), moves_ended)
    }

    /// Returns the epochs that unused mappings wait for.
    pub(crate) fn zombie_fences<'s>(&self, bump: &'s Bump) -> List<'s, (Arc<Timeline>, u64)> {
        list(bump, self.slots().zombies.iter().flat_map(|zombie| zombie.until.iter().cloned()))
    }
}
