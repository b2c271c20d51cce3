//! Memory of graphs that no captured work has used yet, given back to the driver: what programs
//! that run their work once before they capture it leave free.

use super::{GraphMemory, State};
use crate::{
    backing::window::Grid,
    base::{
        lists::WeakList,
        pending::{self, StreamDeps},
        released::Released,
    },
    dedicated::Span,
    park::Phase,
    pool_core::PoolHook,
};
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::sync::{Arc, MutexGuard, atomic::Ordering};

/// The graph memories of a pool, which give back what no captured work has used.
#[derive(Default)]
pub(in crate::graphs) struct GraphMemories(WeakList<GraphMemory>);

impl GraphMemories {
    pub(in crate::graphs) fn add(&self, new: &Arc<GraphMemory>) {
        self.0.add(new);
    }
}

impl PoolHook for GraphMemories {
    fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.0.all().iter().flat_map(|memory| memory.uncaptured_work()).collect()
    }

    fn free_bytes(&self) -> u64 {
        self.0.all().iter().map(|memory| memory.uncaptured_bytes()).sum()
    }

    fn release_before_growth(&self, bytes: u64) {
        let mut missing = bytes;
        for memory in self.0.all() {
            if missing > 0 && memory.uncaptured_bytes() > 0 {
                missing = missing.saturating_sub(memory.release_uncaptured(missing).bytes);
            }
        }
    }

    fn release_free(&self) -> Released {
        let mut released = Released::default();
        self.0.all().iter().for_each(|memory| released += memory.release_uncaptured(u64::MAX));
        released
    }
}

impl GraphMemory {
    pub(in crate::graphs) fn retain_free(&self) {
        self.retains_free.store(true, Ordering::Relaxed);
    }

    /// Returns the state, if there are slots that could be given back.
    fn state_with_uncaptured(&self) -> Option<MutexGuard<'_, State>> {
        let may = self.span.is_some() && !self.retains_free.load(Ordering::Relaxed);
        let state = may.then(|| self.state())?;
        let has = state.slots.ranges.claimed.len() > state.captured.len();
        (has && state.slots.phase == Phase::Resident).then_some(state)
    }

    /// Returns the bytes of the slots that contain no live block and that no captured work has
    /// used. Work may still run in them.
    fn uncaptured_bytes(&self) -> u64 {
        let (state, grid) = (self.state_with_uncaptured(), self.grid());
        state.map_or(0, |state| state.uncaptured_slots(grid).count() as u64 * grid.slot)
    }

    /// Returns the work after which slots that no captured work has used could be given back.
    fn uncaptured_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let Some(state) = self.state_with_uncaptured() else { return Vec::new() };
        let (ranges, grid) = (&state.slots.ranges, self.grid());
        let is_uncaptured =
            |range: Range| grid.slots_within(range).any(|slot| !state.captured.contains(&slot));
        let free = ranges.free.iter().filter(|(range, _)| is_uncaptured(*range));
        free.flat_map(|(_, deps)| deps.iter().cloned()).chain(ranges.pending_work()).collect()
    }

    /// Returns slots to the driver that contain no live block and no running work, and that no
    /// captured work has used: the highest, until there are `wanted` bytes. Their addresses stay
    /// reserved.
    fn release_uncaptured(&self, wanted: u64) -> Released {
        if self.state_with_uncaptured().is_none() {
            return Released::default();
        }
        self.poll_fences();
        let (Some(span), Some(state)) = (&self.span, self.state_with_uncaptured()) else {
            return Released::default();
        };
        let removed = self.retire_uncaptured(span, state, wanted);
        if removed { self.dedicated.reap_span(span) } else { Released::default() }
    }

    /// Makes slots retiring that are wholly free and that no captured work has used: the highest
    /// whose work is done, until there are `wanted` bytes. Returns whether there are any.
    fn retire_uncaptured(
        &self,
        span: &Span,
        mut state: MutexGuard<'_, State>,
        wanted: u64,
    ) -> bool {
        let grid = self.grid();
        let done = state.uncaptured_slots(grid).filter(|(_, deps)| pending::is_done(deps));
        let slots: Vec<u64> = done.map(|(slot, _)| slot).collect();
        let most = usize::try_from(wanted.div_ceil(grid.slot)).unwrap_or(usize::MAX);
        let highest = &slots[slots.len().saturating_sub(most)..];
        let bytes = highest.len() as u64 * grid.slot;
        state.slots.of_graphs -= bytes;
        self.dedicated.update_usage(|usage| {
            usage.graphs -= bytes;
            usage.free_of_graphs -= bytes;
        });
        // Before another thread can unmap them.
        if let Some(observer) = self.dedicated.driver.observer() {
            for &slot in highest {
                observer.let_go_by_graphs(self.device_range(grid.slot_range(slot)));
            }
        }
        // All of them: the lock is held since they were found free, with their work done.
        !self.dedicated.retire_free_slots(&mut state.slots.ranges, span, highest).is_empty()
    }
}

impl State {
    /// An iterator over the slots that are wholly free and that no captured work has used.
    fn uncaptured_slots(&self, grid: Grid) -> impl Iterator<Item = (u64, &StreamDeps)> {
        self.slots.ranges.empty_slots(grid).filter(|(slot, _)| !self.captured.contains(slot))
    }
}
