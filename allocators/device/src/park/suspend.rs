//! Suspending and resuming the blocks of a tag.

use super::{
    Elsewhere, Park, ParkReport, ResumeReport,
    parkable::{ParkablePool, ParkableState, Phase},
    saved::{self, SavedPiece},
};
use crate::{
    base::{pending::PartsWork, waits::deadline},
    pool_core::PoolCore,
};
use aquifer_core::{Action, MemoryError, Result, event::BlockKind};
use aquifer_driver::Ownership;
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline};
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// The result of the copies.
struct SavedContents {
    pieces: Vec<SavedPiece>,
    took: Duration,
}

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
        let lives = |slot: &u64| {
            self.has_live_in(Range { start: grid.base + slot * grid.slot, len: grid.slot })
        };
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
            let (generation, owner_stream) = (live.generation, live.owner_stream.raw());
            let owner =
                Ownership::Live { stream: on.map_or(owner_stream, Stream::raw), generation };
            parkable.dedicated.notify_observer(generation, address, live.bytes, owner);
        }
    }
}

impl ParkablePool {
    /// Releases the memory of all blocks and saves its contents as `how` specifies.
    pub(super) fn park(&self, how: &Park) -> Result<ParkReport> {
        let began = Instant::now();
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        let until = how.deadline.or_else(|| deadline(pool.config.wait));
        let work = self.quiesce(until)?;
        match self.save(&pool, how, &work, until) {
            Ok(copied) => Ok(self.release_parked(&pool, copied, began)),
            Err(error) => {
                self.reopen();
                Err(error)
            }
        }
    }

    /// Waits for all work on the blocks, and copies their contents.
    fn save(
        &self,
        pool: &PoolCore,
        how: &Park,
        work: &[(Arc<Timeline>, u64)],
        until: Option<Instant>,
    ) -> Result<SavedContents> {
        for (timeline, epoch) in work {
            if !timeline.wait(*epoch, until)? {
                return Err(MemoryError::TimedOut);
            }
        }
        let began = Instant::now();
        let ranges = self.state().live_ranges();
        let pieces = match &how.host {
            Some(host) if !ranges.is_empty() => {
                saved::save(&pool.streams().lease()?, host, &ranges)?
            }
            _ => Vec::new(),
        };
        Ok(SavedContents { pieces, took: began.elapsed() })
    }

    /// Returns the memory to the driver. Nothing uses it now or later. Mappings that the driver
    /// refuses to unmap stay, and do no harm.
    fn release_parked(&self, pool: &PoolCore, copied: SavedContents, began: Instant) -> ParkReport {
        let mut report = ParkReport::of(self.tag);
        report.copying = copied.took;
        let (over, dropped, held, events) = {
            let mut state = self.state();
            let over = state.collect_pending(&self.dedicated, true);
            let mut events = self.dedicated.completion_events(BlockKind::Parkable, &over, self.tag);
            let (bytes, requested) = state.live();
            self.dedicated.slot_pool_parked(bytes, requested, self.tag);
            (report.blocks, report.parked) = (state.blocks.len() as u64, bytes);
            let actions = [Action::Free, Action::Complete];
            events.extend(state.events(&self.dedicated, self.tag, &actions));
            state.notify_parked(self);
            state.report_pending(&self.dedicated);
            state.remove_empty_slots(self);
            let dropped = state.retain_saved(copied.pieces);
            report.saved = state.saved.iter().map(SavedPiece::bytes).sum();
            let held = self.span.charged_bytes();
            self.dedicated.slot_pool_retired(held);
            self.span.retire(0..u64::MAX, PartsWork::default());
            state.phase = Phase::Parked;
            (over, dropped, held, events)
        };
        self.dedicated.send(events);
        drop(dropped);
        self.complete(over);
        let before = self.dedicated.held().stuck();
        let reaped = self.dedicated.reap_span(&self.span);
        // Another thread may have unmapped some of it concurrently. So the report counts what is
        // left, including what was unmapped but not released.
        let unreleased = self.dedicated.held().stuck().saturating_sub(before);
        let stuck = self.span.retiring_bytes() + unreleased;
        report.released = held.saturating_sub(stuck);
        report.kept =
            Elsewhere { refused: stuck, refusal: reaped.refused, shared: pool.held_by(self.tag) };
        report.took = began.elapsed();
        report
    }

    /// Restores the memory of all blocks with its contents. Does nothing for blocks that are
    /// resident.
    pub(super) fn resume(&self, until: Option<Instant>) -> Result<ResumeReport> {
        let began = Instant::now();
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        let mut report = ResumeReport::of(self.tag);
        let (slots, ranges, pieces) = {
            let mut state = self.state();
            match state.phase {
                Phase::Resident => return Ok(report),
                Phase::Parking | Phase::Resuming => {
                    return Err(MemoryError::Parked { tag: self.tag });
                }
                Phase::Parked => state.phase = Phase::Resuming,
            }
            state.remove_empty_slots(self);
            let slots: Vec<u64> = state.ranges.claimed.iter().copied().collect();
            (slots, state.live_ranges(), std::mem::take(&mut state.saved))
        };
        report.taken = slots.len() as u64 * self.span.slot;
        match self.restore_resident(&pool, &slots, &ranges, &pieces, until, &mut report) {
            Ok(()) => {
                let mut state = self.state();
                let (bytes, requested) = state.live();
                self.dedicated.slot_pool_resumed(bytes, requested, self.tag);
                report.blocks = state.blocks.len() as u64;
                let events = state.events(&self.dedicated, self.tag, &[Action::Allocate]);
                state.make_resident(&self.dedicated);
                drop(state);
                self.dedicated.send(events);
                report.took = began.elapsed();
                Ok(report)
            }
            Err(error) => {
                let dropped = {
                    let mut state = self.state();
                    state.report_pending(&self.dedicated);
                    state.phase = Phase::Parked;
                    state.retain_saved(pieces)
                };
                drop(dropped);
                Err(error)
            }
        }
    }

    fn restore_resident(
        &self,
        pool: &PoolCore,
        slots: &[u64],
        ranges: &[Range],
        pieces: &[SavedPiece],
        until: Option<Instant>,
        report: &mut ResumeReport,
    ) -> Result<()> {
        let stream = pool.streams().lease()?;
        let new = self.back_slots_until(pool, &stream, slots, until)?;
        let bytes = slots.len() as u64 * self.span.slot;
        self.dedicated.slot_pool_backed(BlockKind::Parkable, new, bytes - new);
        self.state().notify_resident(self, (!pieces.is_empty()).then_some(&stream));
        let began = Instant::now();
        match saved::restore(&stream, pieces, ranges) {
            Ok(copied) => {
                (report.restored, report.copying) = (copied, began.elapsed());
                Ok(())
            }
            Err(error) => {
                self.state().notify_parked(self);
                self.dedicated.slot_pool_retired(bytes);
                self.span.retire(0..u64::MAX, PartsWork::default());
                // A refusal is retried by the next caller that reaps. Otherwise the next resume
                // uses what is still mapped.
                let _ = self.dedicated.reap_span(&self.span);
                Err(error)
            }
        }
    }

    /// Maps memory for all of `slots`, or for none. If there is a deadline and nothing else makes
    /// room, waits for the budget until then.
    fn back_slots_until(
        &self,
        pool: &PoolCore,
        stream: &Stream,
        slots: &[u64],
        until: Option<Instant>,
    ) -> Result<u64> {
        let back =
            |reserved| pool.back_slots(&self.span, stream.timeline(), self.tag, slots, reserved);
        match back(None) {
            Err(MemoryError::OutOfMemory(refused))
                if until.is_some() && refused.refused.is_some() =>
            {
                let bytes = slots.len() as u64 * self.span.slot;
                match pool.budget().reserve_by(bytes, until) {
                    Ok(reserved) => back(Some(&Mutex::new(reserved))),
                    Err(_) => Err(MemoryError::OutOfMemory(refused)),
                }
            }
            outcome => outcome,
        }
    }
}
