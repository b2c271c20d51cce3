//! Parking the memory of graphs: its handles are released, and its addresses stay.
//!
//! - The contents of live blocks are saved. Free memory is not: a graph writes its temporaries
//!   before it reads them.
//! - No slot is given up, also no empty one, since launches after the resume may use it.
//! - While an announcement is open, nothing is parked. While parked, blocks and launches are
//!   refused. Launches that are not reported cannot be seen: the caller guarantees that there are
//!   none.

use super::{GraphMemory, State};
use crate::{
    dedicated::{DedicatedPool, Span},
    park::{
        Phase,
        tagged::{SlotBlocks, TaggedMemory},
    },
};
use aquifer_core::{MemoryError, Result, Tag, event::BlockKind};
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::{
    mem,
    ops::{Deref, DerefMut},
    sync::{Arc, MutexGuard, atomic::Ordering},
};

/// Marks a thread that takes memory for blocks. Parking waits until it has finished.
pub(super) struct PlacingGuard<'a>(Option<&'a GraphMemory>);

impl Drop for PlacingGuard<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.0 {
            memory.state().slots.operations -= 1;
        }
    }
}

/// The blocks under the lock of the memory.
struct LockedSlots<'a>(MutexGuard<'a, State>);

impl Deref for LockedSlots<'_> {
    type Target = SlotBlocks;

    fn deref(&self) -> &SlotBlocks {
        &self.0.slots
    }
}

impl DerefMut for LockedSlots<'_> {
    fn deref_mut(&mut self) -> &mut SlotBlocks {
        &mut self.0.slots
    }
}

impl GraphMemory {
    /// Returns an error while it is not resident.
    pub(super) fn check_resident(&self) -> Result<()> {
        self.state().slots.check_resident(self.tag)
    }

    /// Begins to take memory for a block. Parking waits until the returned value is dropped.
    pub(super) fn begin_operation(&self) -> Result<PlacingGuard<'_>> {
        if self.tag == Tag::NONE {
            return Ok(PlacingGuard(None));
        }
        let mut state = self.state();
        state.slots.check_resident(self.tag)?;
        state.slots.operations += 1;
        Ok(PlacingGuard(Some(self)))
    }

    /// Counts an announcement that begins or ends.
    pub(in crate::graphs) fn count_announcement(&self, opens: bool) {
        if opens {
            self.announcements.fetch_add(1, Ordering::AcqRel);
        } else {
            self.announcements.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Accounts memory that is mapped, or no longer mapped, and reports it to a validating driver.
    /// `free` bytes of it are in no live block.
    fn record_mapping(&self, bytes: u64, free: u64, mapped: bool) {
        self.dedicated.update_usage(|usage| {
            if mapped {
                usage.graphs += bytes;
                usage.free_of_graphs += free;
            } else {
                usage.graphs -= bytes;
                usage.free_of_graphs -= free;
            }
        });
        let Some(observer) = self.dedicated.driver.observer() else { return };
        for (start, len) in self.span.iter().flat_map(|span| span.ranges()) {
            let range = self.device_range(Range { start, len });
            if mapped {
                observer.kept_for_graphs(range, self.number);
            } else {
                observer.let_go_by_graphs(range);
            }
        }
    }
}

impl TaggedMemory for GraphMemory {
    fn tag(&self) -> Tag {
        self.tag
    }

    fn kind(&self) -> BlockKind {
        BlockKind::Graph
    }

    fn dedicated(&self) -> &DedicatedPool {
        &self.dedicated
    }

    fn span(&self) -> Result<&Arc<Span>> {
        self.span.as_ref().ok_or(MemoryError::Unsupported {
            feature: "parking: virtual memory management (cuMemMap)",
        })
    }

    fn slots(&self) -> Box<dyn DerefMut<Target = SlotBlocks> + '_> {
        Box::new(LockedSlots(self.state()))
    }

    fn queued_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let state = self.state();
        let mut work = state.freed_work();
        work.extend(state.launches.iter().cloned());
        work
    }

    /// Also refuses launches.
    fn begin_phase(&self) -> Result<()> {
        let _launch = self.lock_launches();
        let slots = &mut self.state().slots;
        slots.check_resident(self.tag)?;
        slots.phase = Phase::Parking;
        Ok(())
    }

    fn check_parkable(&self) -> Result<()> {
        if self.announcements.load(Ordering::Acquire) > 0 {
            return Err(MemoryError::Capturing { stream: 0 });
        }
        Ok(())
    }

    /// Launches that are not reported are covered by a wait for the device alone.
    fn needs_synchronize(&self) -> bool {
        self.state().has_untracked_launches
    }

    fn gives_up_empty_slots(&self) -> bool {
        false
    }

    fn record_parked(&self, slots: &mut SlotBlocks, live: u64) {
        let bytes = mem::take(&mut slots.of_graphs);
        self.record_mapping(bytes, bytes - live, false);
    }

    fn record_mapped(&self, bytes: u64, mapped: bool) {
        self.record_mapping(bytes, bytes, mapped);
    }

    fn record_resumed(&self, slots: &mut SlotBlocks, taken: u64, live: u64) {
        slots.of_graphs = taken;
        self.dedicated.update_usage(|usage| usage.free_of_graphs -= live);
    }
}
