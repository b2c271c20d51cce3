//! Statistics of memory that several parkable blocks share.
//!
//! ```text
//!   nothing ──backed──▶ cached ──took──▶ live
//!      ▲                 │  ▲              │
//!      │                 │  └──settled── pending ◀──freed
//!      └── taken down ── pending ◀──left
//! ```

use super::Apart;
use aquifer_core::{Action, Tag, event::BlockKind};

impl Apart {
    /// Counts slots that get memory: `new` bytes from the driver, and `again` bytes that were
    /// leaving.
    pub(crate) fn lodged_backed(&self, kind: BlockKind, new: u64, again: u64) {
        self.count(|a| {
            a.cached += new + again;
            a.pending -= again;
            a.growths += u64::from(new > 0);
        });
        if new > 0 {
            self.report(kind, Action::Grow, 0, 0, new, Tag::NONE);
        }
    }

    /// Counts empty slots that become leaving.
    pub(crate) fn lodged_left(&self, bytes: u64) {
        self.count(|a| {
            a.cached -= bytes;
            a.pending += bytes;
        });
    }

    /// Counts an allocated block.
    pub(crate) fn lodged_took(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.cached -= bytes;
            a.took(bytes, requested, tag);
            a.holder(tag).blocks += 1;
            a.blocks += 1;
            a.allocations += 1;
        });
    }

    /// Counts a freed block, whose memory, if any, is pending.
    pub(crate) fn lodged_freed(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.let_go(bytes, requested, tag);
            a.holder(tag).blocks -= 1;
            a.blocks -= 1;
            a.frees += 1;
        });
    }

    /// Counts pending memory that has become free.
    pub(crate) fn lodged_settled(&self, bytes: u64) {
        self.count(|a| {
            a.pending -= bytes;
            a.cached += bytes;
        });
    }

    /// Counts live blocks that lose their memory when they are parked.
    pub(crate) fn lodged_parked(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.let_go(bytes, requested, tag);
            a.pending -= bytes;
            a.cached += bytes;
        });
    }

    /// Counts live blocks that get memory again.
    pub(crate) fn lodged_resumed(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.cached -= bytes;
            a.took(bytes, requested, tag);
        });
    }
}
