//! The parts of slots that are in no live block.
//!
//! ```text
//!   slot without memory ──claimed, backed──▶ free ──cut──▶ block
//!                                             ▲              │ freed
//!                                             │              ▼
//!                                             └── collected ─ pending, while other streams use it
//! ```

use crate::{
    backing::{shared_free::SharedFreeList, window::Grid},
    base::{
        extent::AttachedValue,
        pending::{self, DeferredFree, PartsWork, PendingUses, StreamDeps},
    },
};
use aquifer_core::{MemoryError, Result};
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::{collections::BTreeSet, sync::Arc};

/// A capture of an announcement, or the work of an announcement that is not captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Capture {
    /// The announcement's number; 0 for blocks that belong to none.
    pub(crate) announced: u64,
    /// The driver's number of the capture, or [`Capture::EAGER`].
    pub(crate) id: u64,
}

impl Capture {
    /// Stands for work that is not captured. No driver numbers a capture so.
    pub(crate) const EAGER: u64 = 0;
    /// Stands for eager work that no announcement covers.
    pub(crate) const UNANNOUNCED: Self = Self { announced: 0, id: Self::EAGER };

    pub(crate) fn is_eager(self) -> bool {
        self.id == Self::EAGER
    }

    /// Returns whether its work on `timeline` may use memory with these dependencies. Work that is
    /// not captured follows all earlier work of its stream. Captured work runs at any later time,
    /// on any stream.
    pub(crate) fn may_use(self, timeline: &Arc<Timeline>, deps: &StreamDeps) -> bool {
        pending::is_done_except(deps, self.is_eager().then_some(timeline))
    }
}

/// The ranges of memory in slots that are in no live block.
#[derive(Default)]
pub(crate) struct SlotRanges {
    /// Free ranges in claimed slots, with their dependencies.
    pub(crate) free: SharedFreeList,
    /// Slots that have memory, are getting it, or had it when they were parked.
    pub(crate) claimed: BTreeSet<u64>,
    /// Freed blocks that other streams still use.
    pending: Vec<DeferredFree>,
}

impl SlotRanges {
    /// Keeps a freed block until its uses are done.
    pub(crate) fn defer(&mut self, block: DeferredFree) {
        self.pending.push(block);
    }

    /// Moves freed blocks whose uses are done to the free ranges, and counts their bytes. With
    /// `all`, the host has seen all uses done. Returns what is to be dropped outside the lock.
    pub(crate) fn collect(&mut self, all: bool, count: impl Fn(u64)) -> Vec<DeferredFree> {
        let mut over = Vec::new();
        for block in self.pending.extract_if(.., |block| block.work.uses.are_over() || all) {
            count(block.bytes);
            let range = Range { start: block.address, len: block.bytes };
            self.free.add(range, block.work.own.clone());
            over.push(block);
        }
        debug_assert!(!all || self.pending.is_empty(), "a block is pending after its uses");
        over
    }

    /// Returns an error if a use of a freed block is open.
    pub(crate) fn check_closed(&self) -> Result<()> {
        match self.pending.iter().find(|block| block.work.uses.has_open()) {
            Some(open) => Err(MemoryError::Busy { address: open.address }),
            None => Ok(()),
        }
    }

    /// An iterator over the work that free ranges depend on.
    pub(crate) fn free_work(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> {
        self.free.iter().flat_map(|(_, deps)| deps.iter().cloned())
    }

    /// An iterator over the work that freed blocks depend on, except for open uses.
    pub(crate) fn pending_work(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> {
        self.pending.iter().flat_map(|block| block.work.queued())
    }

    /// Returns the bytes of freed blocks that other streams still use.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.iter().map(|block| block.bytes).sum()
    }

    /// Returns the slot behind the last one that is claimed.
    pub(crate) fn next_slot(&self) -> u64 {
        self.claimed.last().map_or(0, |last| last + 1)
    }

    /// Returns the first of `count` consecutive slots that are not claimed.
    pub(crate) fn find_gap(&self, count: u64) -> u64 {
        let mut first = 0;
        for &slot in &self.claimed {
            if slot - first >= count {
                break;
            }
            first = slot + 1;
        }
        first
    }

    /// Claims slots that are getting memory. Returns their numbers.
    pub(crate) fn claim(&mut self, first: u64, count: u64) -> Vec<u64> {
        debug_assert!(
            self.claimed.range(first..first + count).next().is_none(),
            "claims slots twice"
        );
        self.claimed.extend(first..first + count);
        (first..first + count).collect()
    }

    /// Releases slots that have no memory.
    pub(crate) fn unclaim(&mut self, slots: &[u64]) {
        slots.iter().for_each(|slot| {
            let was_claimed = self.claimed.remove(slot);
            debug_assert!(was_claimed, "gives up a slot that is not claimed");
        });
    }

    /// Cuts a block of `bytes` out of memory that begins at `start` and ends at `end`. What is left
    /// is new and free.
    pub(crate) fn cut(&mut self, start: u64, bytes: u64, end: u64) -> Range {
        let range = Range { start, len: bytes };
        debug_assert!(range.end() <= end, "a block does not fit into its memory");
        if range.end() < end {
            let rest = Range { start: range.end(), len: end - range.end() };
            self.free.add(rest, StreamDeps::new());
        }
        range
    }

    /// An iterator over the slots that are wholly free, with what they depend on.
    pub(crate) fn empty_slots(&self, grid: Grid) -> impl Iterator<Item = (u64, &StreamDeps)> {
        let slots = move |range| grid.slots_within(range);
        self.free.iter().flat_map(move |(range, deps)| slots(range).map(move |slot| (slot, deps)))
    }

    /// Releases those of `slots` that are wholly free and whose dependencies are `ready`. Returns
    /// them.
    pub(crate) fn remove_free_slots(
        &mut self,
        slots: &[u64],
        grid: Grid,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> Vec<u64> {
        let mut removed = Vec::new();
        for &slot in slots {
            let range = grid.slot_range(slot);
            // Taken to inspect it, and added back if it is to stay. The lock keeps other threads
            // from seeing this.
            let Some(deps) = self.free.take(range) else { continue };
            if ready(&deps) {
                let was_claimed = self.claimed.remove(&slot);
                debug_assert!(was_claimed, "free memory in a slot without any");
                removed.push(slot);
            } else {
                self.free.add(range, deps);
            }
        }
        removed
    }

    /// Ends the freed blocks when the memory ends, and counts their bytes. Returns their work, and
    /// the values to be dropped when the memory is really free.
    pub(crate) fn end(&mut self, count: impl Fn(u64)) -> (PartsWork, Vec<AttachedValue>) {
        let (mut work, mut until_free) = (PartsWork::default(), Vec::new());
        for block in self.pending.drain(..) {
            count(block.bytes);
            let parts = block.work.into_parts();
            work.own.extend(parts.own);
            work.uses.extend(parts.uses);
            until_free.extend(block.until_free.map(|all| *all).unwrap_or_default());
        }
        (work, until_free)
    }
}
