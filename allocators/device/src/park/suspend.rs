//! Suspending and resuming the blocks of a tag.

use super::{
    parkable::{ParkablePool, ParkableState},
    saved::{self, RestoredContents, SavedContents, SavedPiece},
    settings::{Park, ParkReport, Phase, ResumeReport},
    tagged::{ParkedContents, TaggedMemory},
};
use crate::{
    base::pending::PartsWork,
    dedicated::{DedicatedPool, Span},
    pool_core::PoolCore,
};
use aquifer_core::{Action, MemoryError, Result, Tag, event::BlockKind};
use aquifer_driver::Ownership;
use aquifer_heap::Range;
use aquifer_stream::Stream;
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

impl ParkableState {
    /// Returns the bytes of the live blocks: allocated and requested.
    fn live(&self) -> (u64, u64) {
        self.blocks.values().fold((0, 0), |(bytes, requested), live| {
            (bytes + live.bytes, requested + live.requested)
        })
    }

    /// Releases claimed slots that contain no live block.
    fn remove_empty_slots(&mut self, parkable: &ParkablePool) {
        let grid = parkable.grid();
        let lives = |slot: &u64| self.has_live_in(grid.slot_range(*slot));
        let empty: Vec<u64> =
            self.ranges.claimed.iter().copied().filter(|slot| !lives(slot)).collect();
        let _ = self.ranges.remove_free_slots(&empty, grid, |_| true);
    }

    /// Keeps those of `pieces` that hold contents of a live block. Returns the others.
    fn retain_saved(&mut self, pieces: Vec<SavedPiece>) -> Vec<SavedPiece> {
        let (kept, over) =
            pieces.into_iter().partition(|piece| piece.ranges().any(|r| self.has_live_in(r)));
        self.saved = kept;
        over
    }

    /// Reports to a validating driver that nothing may touch the live blocks.
    fn notify_parked(&self, parkable: &ParkablePool) {
        for (&address, live) in &self.blocks {
            parkable.dedicated.notify_observer(
                live.generation,
                address,
                live.bytes,
                Ownership::Free,
            );
        }
    }

    /// Reports to a validating driver that the live blocks have memory again, and which stream may
    /// write them: `on`, or their own if it is `None`.
    fn notify_resident(&self, parkable: &ParkablePool, on: Option<&Stream>) {
        for (&address, live) in &self.blocks {
            let (generation, owner_stream) = (live.generation, live.owner_stream.noted());
            let owner =
                Ownership::Live { stream: on.map_or(owner_stream, Stream::raw), generation };
            parkable.dedicated.notify_observer(generation, address, live.bytes, owner);
        }
    }
}

impl TaggedMemory for ParkablePool {
    fn tag(&self) -> Tag {
        self.tag
    }

    fn is_parked(&self) -> bool {
        self.is_parked()
    }

    fn charged_bytes(&self) -> u64 {
        self.span.charged_bytes()
    }

    fn begin_park(
        &self,
        pool: &PoolCore,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<SavedContents> {
        let work = self.quiesce(until)?;
        let ranges = || self.state().live_ranges();
        saved::wait_and_save(pool, how, &work, until, ranges).inspect_err(|_| self.reopen())
    }

    fn abort_park(&self) {
        self.reopen();
    }

    /// Nothing uses the memory now or later. Mappings that the driver refuses to unmap stay, and do
    /// no harm.
    fn finish_park(&self, _pool: &PoolCore, contents: SavedContents, report: &mut ParkReport) {
        report.copying += contents.took;
        let (over, dropped, held, events) = {
            let mut state = self.state();
            let over = state.collect_pending(&self.dedicated, true);
            let mut events = self.dedicated.completion_events(BlockKind::Parkable, &over, self.tag);
            let (bytes, requested) = state.live();
            self.dedicated.slot_pool_parked(bytes, requested, self.tag);
            report.blocks += state.blocks.len() as u64;
            report.parked += bytes;
            let actions = [Action::Free, Action::Complete];
            events.extend(state.events(&self.dedicated, self.tag, &actions));
            state.notify_parked(self);
            state.report_pending(&self.dedicated);
            state.remove_empty_slots(self);
            let dropped = state.retain_saved(contents.pieces);
            report.saved += state.saved.iter().map(SavedPiece::bytes).sum::<u64>();
            let held = self.span.charged_bytes();
            self.dedicated.slot_pool_retired(held);
            self.span.retire(0..u64::MAX, PartsWork::default(), None);
            state.phase = Phase::Parked;
            (over, dropped, held, events)
        };
        self.dedicated.send(events);
        drop(dropped);
        self.complete(over);
        self.dedicated.release_parked_span(&self.span, held, report);
    }

    fn start_resume(&self) -> Result<Option<ParkedContents>> {
        let mut state = self.state();
        if !state.phase.begin_resume(self.tag)? {
            return Ok(None);
        }
        state.remove_empty_slots(self);
        let slots: Vec<u64> = state.ranges.claimed.iter().copied().collect();
        let (ranges, pieces) = (state.live_ranges(), std::mem::take(&mut state.saved));
        Ok(Some(ParkedContents { slots, slot: self.span.slot, ranges, pieces }))
    }

    fn restore_resident(
        &self,
        pool: &PoolCore,
        slots: &[u64],
        ranges: &[Range],
        until: Option<Instant>,
        restored: &mut RestoredContents,
    ) -> Result<()> {
        let stream = pool.streams().lease()?;
        let new = pool.back_slots_until(&self.span, &stream, self.tag, slots, until)?;
        self.dedicated.slot_pool_backed(new, restored.taken - new);
        if !restored.pieces.is_empty() {
            self.state().notify_resident(self, Some(&stream));
        }
        let began = Instant::now();
        let copied = saved::restore(&stream, &restored.pieces, ranges)
            .inspect_err(|_| self.unmap_again(restored.taken))?;
        (restored.copied, restored.took) = (copied, began.elapsed());
        Ok(())
    }

    fn unmap_again(&self, taken: u64) {
        self.state().notify_parked(self);
        self.dedicated.slot_pool_retired(taken);
        self.span.retire(0..u64::MAX, PartsWork::default(), None);
        // A refusal is retried by the next caller that reaps. Otherwise the next resume uses what
        // is still mapped.
        let _ = self.dedicated.reap_span(&self.span);
    }

    fn park_again(&self, pieces: Vec<SavedPiece>) {
        let dropped = {
            let mut state = self.state();
            state.report_pending(&self.dedicated);
            state.phase = Phase::Parked;
            state.retain_saved(pieces)
        };
        drop(dropped);
    }

    fn finish_resume(&self, restored: RestoredContents, report: &mut ResumeReport) {
        let mut state = self.state();
        let (bytes, requested) = state.live();
        self.dedicated.slot_pool_resumed(bytes, requested, self.tag);
        report.blocks += state.blocks.len() as u64;
        if restored.pieces.is_empty() {
            // Not before: no stream may use blocks whose resume is undone, and nothing would order
            // the next owners of their bytes behind it.
            state.notify_resident(self, None);
        }
        restored.add_to(report);
        let events = state.events(&self.dedicated, self.tag, &[Action::Allocate]);
        state.make_resident(&self.dedicated);
        drop(state);
        self.dedicated.send(events);
    }
}

impl DedicatedPool {
    /// Releases the slots of a parked span, which are retiring. `held` bytes of it were charged.
    pub(crate) fn release_parked_span(&self, span: &Arc<Span>, held: u64, report: &mut ParkReport) {
        let before = self.held().stuck();
        let reaped = self.reap_span(span);
        // Another thread may have unmapped some of it concurrently. So the report counts what is
        // left, including what was unmapped but not released.
        let unreleased = self.held().stuck().saturating_sub(before);
        let stuck = span.retiring_bytes() + unreleased;
        report.released += held.saturating_sub(stuck);
        report.kept.refused += stuck;
        report.kept.refusal = report.kept.refusal.take().or(reaped.refused);
    }
}

impl PoolCore {
    /// Maps memory for all of `slots`, or for none. If there is a deadline and nothing else makes
    /// room, waits for the budget until then. Returns the bytes that are new.
    pub(crate) fn back_slots_until(
        &self,
        span: &Arc<Span>,
        stream: &Stream,
        tag: Tag,
        slots: &[u64],
        until: Option<Instant>,
    ) -> Result<u64> {
        let back = |reserved| self.back_slots(span, stream.timeline(), tag, slots, reserved);
        match back(None) {
            Err(MemoryError::OutOfMemory(refused))
                if until.is_some() && refused.refused.is_some() =>
            {
                let bytes = slots.len() as u64 * span.slot;
                match self.budget().reserve_by(bytes, until) {
                    Ok(reserved) => back(Some(&Mutex::new(reserved))),
                    Err(_) => Err(MemoryError::OutOfMemory(refused)),
                }
            }
            outcome => outcome,
        }
    }
}
