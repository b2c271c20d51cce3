//! Statistics of memory that several parkable blocks share.
//!
//! ```text
//!   nothing ──backed──▶ cached ──allocated──▶ live
//!      ▲                 │  ▲                   │
//!      │                 │  └──collected── pending ◀──freed
//!      └── unmapped ──── pending ◀──retired
//! ```
//!
//! Pending memory is of two kinds: freed blocks that other streams still use, and retiring slots.

use super::DedicatedPool;
use crate::base::pending::DeferredFree;
use aquifer_core::{
    Action, Tag,
    event::{BlockKind, Event, EventTicket},
};

impl DedicatedPool {
    /// Counts slots that get memory: `new` bytes from the driver, and `again` bytes that were
    /// retiring.
    pub(crate) fn slot_pool_backed(&self, new: u64, again: u64) {
        self.update_usage(|a| {
            a.cached += new + again;
            a.pending -= again;
            a.growths += u64::from(new > 0);
        });
    }

    /// Counts empty slots that become retiring.
    pub(crate) fn slot_pool_retired(&self, bytes: u64) {
        self.update_usage(|a| {
            a.cached -= bytes;
            a.pending += bytes;
        });
    }

    /// Counts an allocated block.
    pub(crate) fn slot_pool_allocated(&self, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.cached -= bytes;
            a.record_alloc(bytes, requested, tag);
            a.by_tag.of_mut(tag).blocks += 1;
            a.live.add_block();
        });
    }

    /// Counts a freed block, whose memory, if any, is pending.
    pub(crate) fn slot_pool_freed(&self, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.record_free(bytes, requested, tag);
            a.by_tag.of_mut(tag).blocks -= 1;
            a.live.remove_block();
        });
    }

    /// Makes the events of blocks that have become free. Called under the lock under which their
    /// memory becomes free, so that they precede the events of the next blocks there.
    pub(crate) fn completion_events(
        &self,
        kind: BlockKind,
        over: &[DeferredFree],
        tag: Tag,
    ) -> Vec<(EventTicket, Event)> {
        let event = |block: &DeferredFree| {
            let stream = block.timeline.number();
            self.event(kind, Action::Complete, stream, block.address, block.bytes, tag)
        };
        over.iter().filter_map(event).collect()
    }

    /// Counts pending memory that has become free.
    pub(crate) fn slot_pool_collected(&self, kind: BlockKind, bytes: u64) {
        self.update_usage(|a| {
            a.pending -= bytes;
            a.cached += bytes;
            if kind == BlockKind::Graph {
                a.free_of_graphs += bytes;
            }
        });
    }

    /// Drops what was kept until blocks are free. Called with no lock held.
    pub(crate) fn complete(&self, over: Vec<DeferredFree>) {
        for DeferredFree { until_free, .. } in over {
            if until_free.is_some() {
                drop(until_free);
                self.count_completion();
            }
        }
    }

    /// Counts live blocks that lose their memory when they are parked.
    pub(crate) fn slot_pool_parked(&self, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.record_free(bytes, requested, tag);
            a.pending -= bytes;
            a.cached += bytes;
        });
    }

    /// Counts live blocks that get memory again.
    pub(crate) fn slot_pool_resumed(&self, bytes: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.cached -= bytes;
            a.record_alloc(bytes, requested, tag);
        });
    }
}
