//! The account of memory that several blocks share: what parkable blocks lie in.
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
    /// Slots have memory: `new` bytes of it from the driver, `again` that were about to leave.
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

    /// Slots that nobody lives in leave.
    pub(crate) fn lodged_left(&self, bytes: u64) {
        self.count(|a| {
            a.cached -= bytes;
            a.pending += bytes;
        });
    }

    /// A block is given out.
    pub(crate) fn lodged_took(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.cached -= bytes;
            a.took(bytes, requested, tag);
            a.holder(tag).blocks += 1;
            a.blocks += 1;
            a.allocations += 1;
        });
    }

    /// A block is freed, whose memory, if it has any, is not free yet.
    pub(crate) fn lodged_freed(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.let_go(bytes, requested, tag);
            a.holder(tag).blocks -= 1;
            a.blocks -= 1;
            a.frees += 1;
        });
    }

    /// It is free.
    pub(crate) fn lodged_settled(&self, bytes: u64) {
        self.count(|a| {
            a.pending -= bytes;
            a.cached += bytes;
        });
    }

    /// Blocks that live on have no memory from here on.
    pub(crate) fn lodged_parked(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.let_go(bytes, requested, tag);
            a.pending -= bytes;
            a.cached += bytes;
        });
    }

    /// And have it again.
    pub(crate) fn lodged_resumed(&self, bytes: u64, requested: u64, tag: Tag) {
        self.count(|a| {
            a.cached -= bytes;
            a.took(bytes, requested, tag);
        });
    }
}
