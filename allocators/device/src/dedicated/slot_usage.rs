//! The statistics of memory in slots, out of which blocks are cut: that of graphs, and parkable
//! memory. Pending memory is of two kinds: freed blocks that other streams still use, and retiring
//! slots.
//!
//! ```text
//!   nothing ──backed──▶ cached ──allocated──▶ live
//!      ▲                 │  ▲                   │
//!      │                 │  └──collected── pending ◀──freed
//!      └── unmapped ──── pending ◀──retired
//! ```

use super::{DedicatedPool, DedicatedUsage};
use aquifer_core::{Tag, event::BlockKind};

impl DedicatedUsage {
    fn add_free(&mut self, kind: BlockKind, bytes: u64) {
        self.cached += bytes;
        if kind == BlockKind::Graph {
            self.free_of_graphs += bytes;
        }
    }

    fn remove_free(&mut self, kind: BlockKind, bytes: u64) {
        self.cached -= bytes;
        if kind == BlockKind::Graph {
            self.free_of_graphs -= bytes;
        }
    }
}

impl DedicatedPool {
    /// Counts slots that get memory: `new` bytes from the driver, and `again` bytes that were
    /// retiring.
    pub(crate) fn slots_backed(&self, kind: BlockKind, new: u64, again: u64) {
        self.update_usage(|a| {
            a.pending -= again;
            a.growths += u64::from(new > 0);
            if kind == BlockKind::Graph {
                a.graphs += new + again;
            }
            a.add_free(kind, new + again);
        });
    }

    /// Counts empty slots that become retiring.
    pub(crate) fn slots_retired(&self, kind: BlockKind, bytes: u64) {
        self.update_usage(|a| {
            a.remove_free(kind, bytes);
            if kind == BlockKind::Graph {
                a.graphs -= bytes;
            }
            a.pending += bytes;
        });
    }

    /// Counts an allocated block.
    pub(crate) fn slot_block_allocated(
        &self,
        kind: BlockKind,
        bytes: u64,
        requested: u64,
        tag: Tag,
    ) {
        self.update_usage(|a| {
            a.remove_free(kind, bytes);
            a.record_alloc(bytes, requested, tag);
            a.by_tag.of_mut(tag).blocks += 1;
            a.live.add_block();
        });
    }

    /// Counts a freed block, whose memory, if any, is pending.
    pub(crate) fn record_block_free(&self, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.record_free(bytes, requested, tag);
            a.by_tag.of_mut(tag).blocks -= 1;
            a.live.remove_block();
        });
    }

    /// Counts pending memory that has become free.
    pub(crate) fn slot_block_collected(&self, kind: BlockKind, bytes: u64) {
        self.update_usage(|a| {
            a.pending -= bytes;
            a.add_free(kind, bytes);
        });
    }

    /// Counts a live block that loses its memory when it is parked.
    pub(crate) fn slot_block_parked(&self, kind: BlockKind, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.record_free(bytes, requested, tag);
            a.pending -= bytes;
            a.add_free(kind, bytes);
        });
    }

    /// Counts a live block that gets memory again.
    pub(crate) fn slot_block_resumed(&self, kind: BlockKind, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.remove_free(kind, bytes);
            a.record_alloc(bytes, requested, tag);
        });
    }
}
