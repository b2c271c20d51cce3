//! Suspending and resuming the blocks of a tag.

use super::{
    Elsewhere, Park, ParkReport, ResumeReport,
    lodging::{Lodging, Phase, State},
    saved::{self, Piece},
};
use crate::{
    physical::commons::Past,
    pool::{Inner, deadline},
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
struct Copied {
    pieces: Vec<Piece>,
    took: Duration,
}

impl State {
    /// Returns the bytes of the live blocks: allocated and requested.
    fn live(&self) -> (u64, u64) {
        self.blocks.values().fold((0, 0), |(bytes, requested), lodger| {
            (bytes + lodger.bytes, requested + lodger.requested)
        })
    }

    /// Releases claimed slots that contain no live block.
    fn vacate_empty(&mut self, lodging: &Lodging) {
        let grid = lodging.grid();
        let lives = |slot: &u64| {
            self.lives_in(Range { start: grid.base + slot * grid.slot, len: grid.slot })
        };
        let empty: Vec<u64> = self.claimed.iter().copied().filter(|slot| !lives(slot)).collect();
        let _ = self.vacate(&empty, grid, |_| true);
    }

    /// Keeps those of `pieces` that hold contents of a live block. Returns the others.
    fn keep(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        let (kept, over) =
            pieces.into_iter().partition(|piece| piece.ranges().any(|r| self.lives_in(r)));
        self.saved = kept;
        over
    }

    /// Reports to a validating driver that nothing may touch the live blocks.
    fn note_parked(&self, lodging: &Lodging) {
        for (&address, lodger) in &self.blocks {
            lodging.apart.note(lodger.generation, address, lodger.bytes, Ownership::Free);
        }
    }

    /// Reports to a validating driver that the live blocks have memory again, and which stream may
    /// write them: `on`, or their own if it is `None`.
    fn note_backed(&self, lodging: &Lodging, on: Option<&Stream>) {
        for (&address, lodger) in &self.blocks {
            let (generation, home) = (lodger.generation, lodger.home.raw());
            let live = Ownership::Live { stream: on.map_or(home, Stream::raw), generation };
            lodging.apart.note(generation, address, lodger.bytes, live);
        }
    }
}

impl Lodging {
    /// Releases the memory of all blocks and saves its contents as `how` says.
    pub(super) fn park(&self, how: &Park) -> Result<ParkReport> {
        let began = Instant::now();
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        let until = how.deadline.or_else(|| deadline(pool.config.wait));
        let work = self.shut(until)?;
        match self.save(&pool, how, &work, until) {
            Ok(copied) => Ok(self.take_away(&pool, copied, began)),
            Err(error) => {
                self.open();
                Err(error)
            }
        }
    }

    /// Waits for all work on the blocks, and copies their contents.
    fn save(
        &self,
        pool: &Inner,
        how: &Park,
        work: &[(Arc<Timeline>, u64)],
        until: Option<Instant>,
    ) -> Result<Copied> {
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
        Ok(Copied { pieces, took: began.elapsed() })
    }

    /// Returns the memory to the driver. Nothing uses it now or later. Mappings that the driver
    /// refuses to unmap stay, and do no harm.
    fn take_away(&self, pool: &Inner, copied: Copied, began: Instant) -> ParkReport {
        let mut report = ParkReport::of(self.tag);
        report.copying = copied.took;
        let (over, dropped, held, events) = {
            let mut state = self.state();
            let over = state.settle(&self.apart, true);
            let (bytes, requested) = state.live();
            self.apart.lodged_parked(bytes, requested, self.tag);
            (report.blocks, report.parked) = (state.blocks.len() as u64, bytes);
            let events = state.events(&self.apart, self.tag, &[Action::Free, Action::Complete]);
            state.note_parked(self);
            state.tell(&self.apart);
            state.vacate_empty(self);
            let dropped = state.keep(copied.pieces);
            report.saved = state.saved.iter().map(Piece::bytes).sum();
            let held = self.span.charged_bytes();
            self.apart.lodged_left(held);
            self.span.leave(0..u64::MAX, Past::new(), Vec::new());
            state.phase = Phase::Parked;
            (over, dropped, held, events)
        };
        drop(dropped);
        self.apart.send(events);
        self.complete(over);
        let before = self.apart.held().stuck();
        let (_, refused) = self.apart.take_down(&self.span);
        // Another thread may have unmapped some of it concurrently. So the report counts what is
        // left, including what was unmapped but not released.
        let unreleased = self.apart.held().stuck().saturating_sub(before);
        let stuck = self.span.leaving_bytes() + unreleased;
        report.released = held.saturating_sub(stuck);
        report.kept =
            Elsewhere { refused: stuck, refusal: refused.err(), shared: pool.held_by(self.tag) };
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
                Phase::Awake => return Ok(report),
                Phase::Parking | Phase::Resuming => {
                    return Err(MemoryError::Parked { tag: self.tag });
                }
                Phase::Parked => state.phase = Phase::Resuming,
            }
            state.vacate_empty(self);
            let slots: Vec<u64> = state.claimed.iter().copied().collect();
            (slots, state.live_ranges(), std::mem::take(&mut state.saved))
        };
        report.taken = slots.len() as u64 * self.span.slot;
        match self.bring_back(&pool, &slots, &ranges, &pieces, until, &mut report) {
            Ok(()) => {
                let mut state = self.state();
                let (bytes, requested) = state.live();
                self.apart.lodged_resumed(bytes, requested, self.tag);
                report.blocks = state.blocks.len() as u64;
                let events = state.events(&self.apart, self.tag, &[Action::Allocate]);
                state.wake(&self.apart);
                drop(state);
                self.apart.send(events);
                report.took = began.elapsed();
                Ok(report)
            }
            Err(error) => {
                let dropped = {
                    let mut state = self.state();
                    state.tell(&self.apart);
                    state.phase = Phase::Parked;
                    state.keep(pieces)
                };
                drop(dropped);
                Err(error)
            }
        }
    }

    fn bring_back(
        &self,
        pool: &Inner,
        slots: &[u64],
        ranges: &[Range],
        pieces: &[Piece],
        until: Option<Instant>,
        report: &mut ResumeReport,
    ) -> Result<()> {
        let stream = pool.streams().lease()?;
        let new = self.back_by(pool, &stream, slots, until)?;
        let bytes = slots.len() as u64 * self.span.slot;
        self.apart.lodged_backed(BlockKind::Parkable, new, bytes - new);
        self.state().note_backed(self, (!pieces.is_empty()).then_some(&stream));
        let began = Instant::now();
        match saved::restore(&stream, pieces, ranges) {
            Ok(copied) => {
                (report.restored, report.copying) = (copied, began.elapsed());
                Ok(())
            }
            Err(error) => {
                self.state().note_parked(self);
                self.apart.lodged_left(bytes);
                self.span.leave(0..u64::MAX, Past::new(), Vec::new());
                // A refusal is retried by the next caller that reaps. Otherwise the next resume
                // uses what is still mapped.
                let _ = self.apart.take_down(&self.span);
                Err(error)
            }
        }
    }

    /// Maps memory for all of `slots`, or for none. If there is a deadline and nothing else makes
    /// room, waits for the budget until then.
    fn back_by(
        &self,
        pool: &Inner,
        stream: &Stream,
        slots: &[u64],
        until: Option<Instant>,
    ) -> Result<u64> {
        let back = |reserved| pool.back(&self.span, stream.timeline(), self.tag, slots, reserved);
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
