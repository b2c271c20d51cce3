//! Freed blocks of a plan.

use super::{
    leftovers::Leftovers,
    memory::{PlannedMemory, State},
};
use crate::{
    backing::handle::Handle,
    base::{
        driver::owner_of_freed,
        extent::PackedRequest,
        pending::{DeferredFree, PendingUses},
        released::Released,
    },
    block::{DriverBlock, ReleaseBlock},
};
use aquifer_core::{Action, Result, Tag};
use aquifer_plan::PlanCursor;
use aquifer_stream::Timeline;
use std::sync::Arc;

impl ReleaseBlock for PlannedMemory {
    fn release_idle(&self, block: &DriverBlock, request: PackedRequest) -> bool {
        // Only pools without a recorder and an observer have blocks without extras.
        if block.timeline.fences_at_once() || self.dedicated.is_recorded() {
            return false;
        }
        let mut left = Leftovers::new();
        {
            let mut guard = self.state();
            let state = &mut *guard;
            let number = block.key as usize;
            state.places[number].epoch = block.timeline.open();
            state.count_free(block.bytes, request.bytes(), request.tag());
            state.cursor.free(block.key as u32);
            self.retire_if_unused(state, &mut left);
        }
        self.finish(left);
        true
    }

    fn release(&self, block: DeferredFree) {
        let users = block.users();
        let stream = block.timeline.number();
        block.work.fence_at_once();
        let mut left = Leftovers::new();
        {
            let mut guard = self.state();
            let state = &mut *guard;
            let owner = owner_of_freed(&users);
            self.dedicated.notify_observer(block.generation, block.address, block.bytes, owner);
            let requested = block.requested;
            state.count_free(block.bytes, requested, block.tag);
            self.note(&mut left, Action::Free, stream, block.address, requested, block.tag);
            let mut block = block;
            if is_complete(&state.cursor, &mut block) {
                self.complete(state, block, &mut left);
            } else {
                state.pending += block.bytes;
                state.held.push(block);
            }
            self.retire_if_unused(state, &mut left);
        }
        self.finish(left);
    }

    fn handles(&self, address: u64, bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        self.span.handles(address, bytes)
    }
}

impl PlannedMemory {
    /// Frees the place of a block. A later block there follows the work that is not done.
    fn complete(&self, state: &mut State, mut block: DeferredFree, left: &mut Leftovers) {
        let place = &mut state.places[block.key as usize];
        let own = block.work.own.iter().find(|(on, _)| Arc::ptr_eq(on, &block.timeline));
        place.epoch = own.map_or(0, |(_, epoch)| *epoch);
        let mut more = std::mem::take(&mut block.work).into_parts();
        more.own.clear();
        place.more = (!more.uses.is_empty()).then(|| Box::new(more));
        state.cursor.free(block.key as u32);
        let (stream, address) = (block.timeline.number(), block.address);
        self.note(left, Action::Complete, stream, address, block.requested, block.tag);
        left.add_free(block);
    }

    /// Frees the places of held blocks whose uses are over. Makes no driver call.
    pub(super) fn collect_held(&self, state: &mut State, left: &mut Leftovers) {
        let mut over = Vec::new();
        over.extend(state.held.extract_if(.., |block| is_complete(&state.cursor, block)));
        for block in over {
            state.pending -= block.bytes;
            self.complete(state, block, left);
        }
    }

    /// Polls the uses of held blocks, and frees the places of those that are over.
    ///
    /// # Errors
    /// The driver's first. All have been polled.
    pub(super) fn poll(&self) -> Result<()> {
        let mut outcome = Ok(());
        for (timeline, epoch) in self.held_work() {
            outcome = outcome.and(timeline.fence(epoch).and_then(|_| timeline.poll()));
        }
        let mut left = Leftovers::new();
        {
            let mut guard = self.state();
            let state = &mut *guard;
            self.collect_held(state, &mut left);
            self.retire_if_unused(state, &mut left);
        }
        self.finish(left);
        outcome
    }

    /// Returns the work that held blocks wait for, except for open uses.
    pub(super) fn held_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let state = self.state();
        let work = state.held.iter().flat_map(|block| block.work.uses.queued());
        work.filter(|(timeline, epoch)| !timeline.is_done(*epoch)).collect()
    }

    /// Polls held blocks, and gives the range back to the driver if the plan is dropped and no
    /// block lives in it.
    pub(super) fn release_unused(&self) -> Released {
        // Held blocks stay held after an error, and the next attempt meets it again.
        let _ = self.poll();
        if self.retire() { self.dedicated.reap_span(&self.span) } else { Released::default() }
    }
}

/// Returns whether the place of a freed block can be taken again: its uses are over, or the plan
/// knows of them, and a later block can wait for them.
fn is_complete(cursor: &PlanCursor, block: &mut DeferredFree) -> bool {
    let is_shared = cursor.plan().blocks()[block.key as usize].shared;
    let uses = &mut block.work.uses;
    uses.are_over() || is_shared && !uses.has_open() && block.until_free.is_none()
}

impl State {
    fn count_free(&mut self, bytes: u64, requested: u64, tag: Tag) {
        self.usage.record_free(bytes, requested);
        let holding = self.by_tag.of_mut(tag);
        holding.bytes -= requested;
        holding.blocks -= 1;
    }
}
