//! Freed blocks of graph memory, and the end of the memory.

use super::{GraphMemory, Range, record_collected};
use crate::{
    backing::handle::Handle,
    base::{
        dependencies::{StreamDeps, latest},
        driver::owner_of_freed,
        pending::{DeferredFree, PartsWork},
    },
    block::ReleaseBlock,
    graphs::range_release::GraphRangeRelease,
    park::Phase,
};
use aquifer_core::{Action, Tag, event::BlockKind, panics::Contained};
use std::sync::{Arc, PoisonError};

impl ReleaseBlock for GraphMemory {
    fn before_release(&self, address: u64) {
        // Cleared before the block's uses are taken, which invalidates the watch.
        let watch = self.state().blocks.get_mut(&address).and_then(|live| live.watch.take());
        if let Some(watch) = watch {
            // Of parked memory. The block's uses can be taken again.
            watch.resume();
        }
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
        let users = block.users();
        let stream = block.timeline.number();
        block.work.fence_at_once();
        let owner = owner_of_freed(&users);
        let (over, pieces, events) = {
            let mut state = self.state();
            let Some(live) = state.blocks.remove(&block.address) else { return };
            let phase = state.phase;
            let (bytes, requested) =
                if phase.has_memory() { (range.len, live.requested) } else { (0, 0) };
            self.dedicated.slot_pool_freed(bytes, requested, live.tag);
            let mut pieces = Vec::new();
            match phase {
                Phase::Resident => {
                    self.dedicated.notify_observer(block.generation, range.start, range.len, owner);
                }
                Phase::Parking | Phase::Resuming => {
                    state.unreported.push((block.generation, range));
                }
                Phase::Parked => pieces = state.drop_saved(range),
            }
            // Made under the lock: as soon as it is released, the range may become another block.
            let (kind, requested, tag) = (BlockKind::Graph, live.requested, live.tag);
            // A parked block was already accounted as freed when it was parked.
            let freed = phase.has_memory().then(|| {
                self.dedicated.event(kind, Action::Free, stream, range.start, requested, tag)
            });
            let freed = freed.flatten();
            let over = if !phase.has_memory() {
                state.ranges.free.add(range, StreamDeps::new());
                Some(block)
            } else if users.is_empty() && phase == Phase::Resident {
                record_collected(&self.dedicated, range.len);
                let own = block.work.own.clone();
                state.add_free(range, &block.timeline, own, live.capture);
                Some(block)
            } else {
                state.ranges.defer(block);
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
        let mut left = state.ranges.end(|bytes| record_collected(&self.dedicated, bytes));
        self.dedicated.slot_pool_retired(state.physical);
        self.dedicated.update_usage(|usage| {
            usage.graphs -= state.physical;
            usage.free_of_graphs -= state.physical;
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
