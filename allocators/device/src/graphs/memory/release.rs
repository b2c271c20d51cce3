//! Freed blocks of graph memory, and the end of the memory.

use super::{GraphMemory, Range};
use crate::{
    backing::handle::Handle,
    base::pending::{DeferredFree, PartsWork, StreamDeps, latest},
    block::ReleaseBlock,
    dedicated::DedicatedPool,
    park::Phase,
};
use aquifer_core::{Action, Tag, event::BlockKind, panics::Contained};
use aquifer_driver::DeviceRange;
use std::sync::{Arc, PoisonError, Weak};

impl ReleaseBlock for GraphMemory {
    fn before_release(&self, address: u64) {
        self.state().slots.begin_release(address);
    }

    /// None of memory that is parked with a tag: its handles change.
    fn handles(&self, address: u64, bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        if self.tag != Tag::NONE {
            return None;
        }
        self.span.as_ref()?.handles(address, bytes)
    }

    fn release(&self, block: DeferredFree) {
        let range = Range { start: block.address, len: block.bytes };
        let stream = block.timeline.number();
        block.work.fence_at_once();
        let (over, pieces, events) = {
            let mut state = self.state();
            let taken = state.slots.take_back(&self.dedicated, &block);
            let Some((live, pieces)) = taken else { return };
            let phase = state.slots.phase;
            // Made under the lock: as soon as it is released, the range may become another block.
            let (kind, requested, tag) = (BlockKind::Graph, live.requested, live.tag);
            // A parked block was already accounted as freed when it was parked.
            let freed = phase.has_memory().then(|| {
                self.dedicated.event(kind, Action::Free, stream, range.start, requested, tag)
            });
            let freed = freed.flatten();
            let over = if !phase.has_memory() {
                state.slots.ranges.free.add(range, StreamDeps::new());
                Some(block)
            } else if block.work.uses.is_empty() && phase == Phase::Resident {
                self.dedicated.slot_pool_collected(BlockKind::Graph, range.len);
                let own = block.work.own.clone();
                state.add_free(range, &block.timeline, own, live.capture);
                Some(block)
            } else {
                state.slots.ranges.defer(block);
                None
            };
            let completed = freed
                .is_some()
                .then(|| self.dedicated.completion_events(kind, over.as_slice(), Tag::NONE));
            (over, pieces, freed.into_iter().chain(completed.unwrap_or_default()))
        };
        self.dedicated.send(events);
        drop((over, pieces));
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let mut state =
            std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        // No block is live, but launches and work on freed blocks may still run.
        let mut work = state.freed_work();
        work.extend(state.launches);
        let until: StreamDeps = latest(work).into();
        let collected = |bytes| self.dedicated.slot_pool_collected(BlockKind::Graph, bytes);
        let mut left = state.slots.ranges.end(collected);
        self.dedicated.slot_pool_retired(state.slots.of_graphs);
        self.dedicated.update_usage(|usage| {
            usage.graphs -= state.slots.of_graphs;
            usage.free_of_graphs -= state.slots.of_graphs;
        });
        for span in self.span.iter().chain(&state.segments) {
            if self.dedicated.driver.observer().is_some() {
                let dedicated = Arc::downgrade(&self.dedicated);
                let range = self.device_range(Range { start: span.address, len: span.bytes });
                left.until_free
                    .push(Contained::new(Box::new(GraphRangeRelease { dedicated, range })));
            }
            if state.has_untracked_launches {
                span.require_synchronize();
            }
            let work = PartsWork { own: until.clone(), uses: left.work.uses.clone() };
            span.retire_whole(work, left.take_until_free());
            self.dedicated.enqueue_retiring(span);
        }
    }
}

/// Reports to a validating driver, when dropped, that a range is no longer kept for graphs.
pub(super) struct GraphRangeRelease {
    pub(super) dedicated: Weak<DedicatedPool>,
    pub(super) range: DeviceRange,
}

impl Drop for GraphRangeRelease {
    fn drop(&mut self) {
        if let Some(observer) =
            self.dedicated.upgrade().as_ref().and_then(|dedicated| dedicated.driver.observer())
        {
            observer.let_go_by_graphs(self.range);
        }
    }
}
