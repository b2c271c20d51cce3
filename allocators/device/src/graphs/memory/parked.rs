//! Parking the memory of graphs: its handles are released, and its addresses stay.
//!
//! - The contents of live blocks are saved. Free memory is not: a graph writes its temporaries
//!   before it reads them.
//! - No slot is given up, also no empty one, since launches after the resume may use it.
//! - While an announcement is open, nothing is parked. While parked, blocks and launches are
//!   refused. Launches that are not reported cannot be seen: the caller guarantees that there are
//!   none.

use super::{GraphBlock, GraphMemory, State, record_collected};
use crate::{
    base::{dependencies::latest, pending::PartsWork},
    dedicated::Span,
    park::{
        Park, ParkReport, Phase, QUIESCE_POLL, ResumeReport,
        saved::{self, RestoredContents, SavedContents, SavedPiece},
        tagged::{ParkedContents, TaggedMemory},
    },
    pool_core::PoolCore,
};
use aquifer_core::{
    Action, Event, MemoryError, Result, Tag,
    event::{BlockKind, EventTicket},
};
use aquifer_driver::Ownership;
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline, Watch};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

/// Marks a thread that takes memory for blocks. Parking waits until it has finished.
pub(super) struct PlacingGuard<'a>(Option<&'a GraphMemory>);

impl Drop for PlacingGuard<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.0 {
            memory.state().operations -= 1;
        }
    }
}

impl State {
    /// Returns the ranges of the live blocks by address, adjacent ones merged.
    fn live_ranges(&self) -> Vec<Range> {
        saved::merged(self.blocks.iter().map(|(&start, live)| Range { start, len: live.bytes }))
    }

    fn has_live_in(&self, range: Range) -> bool {
        let below = self.blocks.range(..range.end()).next_back();
        below.is_some_and(|(start, live)| start + live.bytes > range.start)
    }

    /// Keeps those of `pieces` that hold contents of a live block. Returns the others.
    fn retain_saved(&mut self, pieces: Vec<SavedPiece>) -> Vec<SavedPiece> {
        let (kept, over) =
            pieces.into_iter().partition(|piece| piece.ranges().any(|r| self.has_live_in(r)));
        self.saved = kept;
        over
    }

    /// Removes the saved contents of a freed range, unless they share a piece with those of a live
    /// block.
    pub(super) fn drop_saved(&mut self, range: Range) -> Vec<SavedPiece> {
        let saved = std::mem::take(&mut self.saved);
        let (kept, over) = saved.into_iter().partition(|piece| {
            !piece.touches(range) || piece.ranges().any(|r| self.has_live_in(r))
        });
        self.saved = kept;
        over
    }

    /// Refuses uses of all blocks, unless one is open. Returns all work that may be queued for the
    /// memory.
    fn quiesce_blocks(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>> {
        self.ranges.check_closed()?;
        let mut work = self.freed_work();
        for (&address, live) in &self.blocks {
            if let Some(watch) = &live.watch {
                work.extend(watch.park(address, tag)?);
            }
            work.push((live.owner_stream.clone(), live.owner_stream.open()));
        }
        work.extend(self.launches.iter().cloned());
        Ok(work)
    }
}

impl GraphMemory {
    /// Returns an error while it is not resident.
    pub(super) fn check_resident(&self) -> Result<()> {
        match self.state().phase {
            Phase::Resident => Ok(()),
            Phase::Parking | Phase::Parked | Phase::Resuming => {
                Err(MemoryError::Parked { tag: self.tag })
            }
        }
    }

    /// Begins to take memory for a block. Parking waits until the returned value is dropped.
    pub(super) fn begin_operation(&self) -> Result<PlacingGuard<'_>> {
        if self.tag == Tag::NONE {
            return Ok(PlacingGuard(None));
        }
        let mut state = self.state();
        if state.phase != Phase::Resident {
            return Err(MemoryError::Parked { tag: self.tag });
        }
        state.operations += 1;
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

    /// Returns the address range, which parkable memory has.
    fn parkable_span(&self) -> Result<&Arc<Span>> {
        self.span.as_ref().ok_or(MemoryError::Unsupported {
            feature: "parking: virtual memory management (cuMemMap)",
        })
    }

    /// Refuses new blocks, launches, and every use of existing blocks from now on. Returns the work
    /// that must be over before nothing uses the memory any more.
    fn quiesce(&self, until: Option<Instant>) -> Result<Vec<(Arc<Timeline>, u64)>> {
        {
            let _launch = self.lock_launches();
            let mut state = self.state();
            if state.phase != Phase::Resident {
                return Err(MemoryError::Parked { tag: self.tag });
            }
            state.phase = Phase::Parking;
        }
        let quiesced = loop {
            if self.announcements.load(Ordering::Acquire) > 0 {
                break Err(MemoryError::Capturing { stream: 0 });
            }
            let state = self.state();
            // A block without a watch is being dropped.
            if state.operations == 0 && state.blocks.values().all(|live| live.watch.is_some()) {
                break state.quiesce_blocks(self.tag);
            }
            drop(state);
            if until.is_some_and(|until| Instant::now() >= until) {
                break Err(MemoryError::TimedOut);
            }
            std::thread::sleep(QUIESCE_POLL);
        };
        quiesced.map(latest).inspect_err(|_| self.reopen())
    }

    /// Allows uses again.
    fn reopen(&self) {
        let mut state = self.state();
        self.report_pending(&mut state);
        state.phase = Phase::Resident;
        state.blocks.values().filter_map(|live| live.watch.as_ref()).for_each(Watch::resume);
    }

    /// Reports to a validating driver the blocks that were freed while being parked or resumed.
    fn report_pending(&self, state: &mut State) {
        for (generation, range) in std::mem::take(&mut state.unreported) {
            self.dedicated.notify_observer(generation, range.start, range.len, Ownership::Free);
        }
    }

    /// Reports to a validating driver who owns the live blocks.
    fn notify_blocks(&self, state: &State, owner: impl Fn(&GraphBlock) -> Ownership<'_>) {
        for (&address, live) in &state.blocks {
            self.dedicated.notify_observer(live.generation, address, live.bytes, owner(live));
        }
    }

    /// Accounts memory that is mapped, or no longer mapped, and reports it to a validating driver.
    /// `free` bytes of it are in no live block.
    fn record_mapped(&self, ranges: &[(u64, u64)], bytes: u64, free: u64, mapped: bool) {
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
        for &(start, len) in ranges {
            let range = self.device_range(Range { start, len });
            if mapped {
                observer.kept_for_graphs(range, self.number);
            } else {
                observer.let_go_by_graphs(range);
            }
        }
    }

    /// Returns an event of each action for each live block, to be sent without the lock.
    fn events(&self, state: &State, actions: &[Action]) -> Vec<(EventTicket, Event)> {
        let of = |(&address, live): (&u64, &GraphBlock)| {
            let (stream, requested, tag) = (live.owner_stream.number(), live.requested, live.tag);
            let event = move |&action: &Action| {
                self.dedicated.event(BlockKind::Graph, action, stream, address, requested, tag)
            };
            actions.iter().filter_map(event)
        };
        state.blocks.iter().flat_map(of).collect()
    }

    /// Reports that the live blocks have memory again, and which stream may write them: `on`, or
    /// their own if it is `None`.
    fn notify_resident(&self, state: &State, on: Option<&Stream>) {
        self.notify_blocks(state, |live| Ownership::Live {
            stream: on.map_or(live.owner_stream.noted(), Stream::raw),
            generation: live.generation,
        });
    }
}

impl TaggedMemory for GraphMemory {
    fn tag(&self) -> Tag {
        self.tag
    }

    fn is_parked(&self) -> bool {
        self.check_resident().is_err()
    }

    fn charged_bytes(&self) -> u64 {
        self.span.as_ref().map_or(0, |span| span.charged_bytes())
    }

    fn begin_park(
        &self,
        pool: &PoolCore,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<SavedContents> {
        self.parkable_span()?;
        let work = self.quiesce(until)?;
        // Launches that are not reported are covered by a wait for the device alone.
        let how = if self.state().has_untracked_launches {
            how.clone().after_all_work()
        } else {
            how.clone()
        };
        let ranges = || self.state().live_ranges();
        saved::wait_and_save(pool, &how, &work, until, ranges).inspect_err(|_| self.reopen())
    }

    fn abort_park(&self) {
        self.reopen();
    }

    fn finish_park(&self, _pool: &PoolCore, contents: SavedContents, report: &mut ParkReport) {
        let Some(span) = &self.span else { return };
        report.copying += contents.took;
        let (over, dropped, held, events) = {
            let mut state = self.state();
            let over = state.ranges.collect(true, |bytes| record_collected(&self.dedicated, bytes));
            let mut events = self.dedicated.completion_events(BlockKind::Graph, &over, Tag::NONE);
            events.extend(self.events(&state, &[Action::Free, Action::Complete]));
            let mut live = 0;
            for block in state.blocks.values() {
                self.dedicated.slot_pool_parked(block.bytes, block.requested, block.tag);
                live += block.bytes;
            }
            report.blocks += state.blocks.len() as u64;
            report.parked += live;
            self.notify_blocks(&state, |_| Ownership::Free);
            self.report_pending(&mut state);
            let held = span.charged_bytes();
            self.record_mapped(&span.ranges(), state.physical, state.physical - live, false);
            let dropped = state.retain_saved(contents.pieces);
            report.saved += state.saved.iter().map(SavedPiece::bytes).sum::<u64>();
            self.dedicated.slot_pool_retired(held);
            span.retire(0..u64::MAX, PartsWork::default(), None);
            state.physical = 0;
            state.phase = Phase::Parked;
            (over, dropped, held, events)
        };
        self.dedicated.send(events);
        drop((over, dropped));
        self.dedicated.release_parked_span(span, held, report);
    }

    fn start_resume(&self) -> Result<Option<ParkedContents>> {
        let mut state = self.state();
        if !state.phase.begin_resume(self.tag)? {
            return Ok(None);
        }
        let slots: Vec<u64> = state.ranges.claimed.iter().copied().collect();
        let (ranges, pieces) = (state.live_ranges(), std::mem::take(&mut state.saved));
        Ok(Some(ParkedContents { slots, slot: self.grid().slot, ranges, pieces }))
    }

    fn restore_resident(
        &self,
        pool: &PoolCore,
        slots: &[u64],
        ranges: &[Range],
        until: Option<Instant>,
        restored: &mut RestoredContents,
    ) -> Result<()> {
        let (span, stream) = (self.parkable_span()?, pool.streams().lease()?);
        let new = pool.back_slots_until(span, &stream, self.tag, slots, until)?;
        let taken = restored.taken;
        self.dedicated.slot_pool_backed(new, taken - new);
        self.record_mapped(&span.ranges(), taken, taken, true);
        if !restored.pieces.is_empty() {
            self.notify_resident(&self.state(), Some(&stream));
        }
        let began = Instant::now();
        let copied = saved::restore(&stream, &restored.pieces, ranges)
            .inspect_err(|_| self.unmap_again(taken))?;
        (restored.copied, restored.took) = (copied, began.elapsed());
        Ok(())
    }

    fn unmap_again(&self, taken: u64) {
        let Some(span) = &self.span else { return };
        self.notify_blocks(&self.state(), |_| Ownership::Free);
        self.record_mapped(&span.ranges(), taken, taken, false);
        self.dedicated.slot_pool_retired(taken);
        span.retire(0..u64::MAX, PartsWork::default(), None);
        // A refusal is retried by the next caller that reaps. Otherwise the next resume uses what
        // is still mapped.
        let _ = self.dedicated.reap_span(span);
    }

    fn park_again(&self, pieces: Vec<SavedPiece>) {
        let dropped = {
            let mut state = self.state();
            self.report_pending(&mut state);
            state.phase = Phase::Parked;
            state.retain_saved(pieces)
        };
        drop(dropped);
    }

    fn finish_resume(&self, restored: RestoredContents, report: &mut ResumeReport) {
        let events = {
            let mut state = self.state();
            let mut live = 0;
            for block in state.blocks.values() {
                self.dedicated.slot_pool_resumed(block.bytes, block.requested, block.tag);
                live += block.bytes;
            }
            self.dedicated.update_usage(|usage| usage.free_of_graphs -= live);
            report.blocks += state.blocks.len() as u64;
            if restored.pieces.is_empty() {
                // Not before, as with parkable blocks.
                self.notify_resident(&state, None);
            }
            restored.add_to(report);
            state.physical = restored.taken;
            let events = self.events(&state, &[Action::Allocate]);
            self.report_pending(&mut state);
            state.phase = Phase::Resident;
            state.blocks.values().filter_map(|live| live.watch.as_ref()).for_each(Watch::resume);
            events
        };
        self.dedicated.send(events);
    }
}
