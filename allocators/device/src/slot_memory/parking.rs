//! Parking memory in slots, in two steps either way. The first does what can fail, and can be
//! undone. The second cannot fail. So several tags, also of several devices, can be parked or
//! resumed as one.
//!
//! - The contents of live blocks are saved. Free memory of graphs is not: a graph writes its
//!   temporaries before it reads them.
//! - Graphs give up no slot, also no empty one, since launches after the resume may use it.
//! - While an announcement is open, nothing is parked. While parked, blocks and launches are
//!   refused. Launches that are not reported cannot be seen: the caller guarantees that there are
//!   none.

use super::{
    SlotMemory,
    saved::{self, RestoredContents, SavedBlock},
    settings::{Park, ParkReport, Phase, QUIESCE_POLL, ResumeReport},
};
use crate::{
    base::pending::{PartsWork, latest},
    pool_core::PoolCore,
};
use aquifer_core::{Action, MemoryError, Result};
use aquifer_driver::Ownership;
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline};
use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    thread,
    time::Instant,
};

impl SlotMemory {
    /// Returns an error while it is not resident.
    pub(super) fn check_resident(&self) -> Result<()> {
        self.state().slots.check_resident(self.tag())
    }

    /// Returns whether uses are refused.
    pub(crate) fn is_parked(&self) -> bool {
        self.check_resident().is_err()
    }

    /// Returns the bytes of physical memory that are charged for it.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.span.charged_bytes()
    }

    pub(super) fn saved_at(&self, address: u64, bytes: u64) -> Option<(Arc<SavedBlock>, u64)> {
        self.state().slots.saved_at(address, bytes)
    }

    fn mapped_ranges(&self) -> impl Iterator<Item = Range> {
        self.span.ranges().into_iter().map(|(start, len)| Range { start, len })
    }

    /// Refuses further uses, waits until `until` for those that are queued, and saves the contents.
    /// On failure nothing has changed.
    pub(crate) fn begin_park(
        &self,
        pool: &PoolCore,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<Vec<SavedBlock>> {
        let work = self.quiesce(until)?;
        let mut how = how.clone();
        // Launches that are not reported are covered by a wait for the device alone.
        how.synchronizes |= self.state().has_untracked_launches;
        let ranges = || {
            // Not before: until now the park could be refused. Its contents may need the memory.
            let kept = self.state().slots.take_saved();
            drop(kept);
            self.state().slots.live_ranges()
        };
        saved::wait_and_save(pool, &how, &work, until, ranges).inspect_err(|_| self.abort_park())
    }

    /// Refuses launches, new blocks and every use of existing ones from now on. Returns the work
    /// that must be over before nothing uses the memory any more. While other threads take memory
    /// for blocks, waits until the deadline.
    ///
    /// # Errors
    /// [`MemoryError::Parked`]; [`MemoryError::Capturing`] while an announcement is open;
    /// [`MemoryError::Busy`] if a use is open; [`MemoryError::TimedOut`]. In each case nothing has
    /// changed.
    fn quiesce(&self, until: Option<Instant>) -> Result<Vec<(Arc<Timeline>, u64)>> {
        {
            let _launch = self.lock_launches();
            let slots = &mut self.state().slots;
            slots.check_resident(self.tag())?;
            slots.phase = Phase::Parking;
        }
        let quiesced = loop {
            if self.announcements.load(Ordering::Acquire) > 0 {
                break Err(MemoryError::Capturing { stream: 0 });
            }
            let state = self.state();
            if state.slots.operations == 0 {
                break state.slots.quiesce(self.tag());
            }
            drop(state);
            if until.is_some_and(|until| Instant::now() >= until) {
                break Err(MemoryError::TimedOut);
            }
            thread::sleep(QUIESCE_POLL);
        };
        let mut work = quiesced.inspect_err(|_| self.abort_park())?;
        let state = self.state();
        work.extend(state.freed_work());
        work.extend(state.launches.iter().cloned());
        Ok(latest(work))
    }

    /// Allows uses again, after `begin_park`.
    pub(crate) fn abort_park(&self) {
        self.state().slots.reopen(&self.dedicated);
    }

    /// Returns the memory to the driver, after `begin_park`, and adds to the report. Nothing uses
    /// the memory now or later. Mappings that the driver refuses to unmap stay, and do no harm.
    pub(crate) fn finish_park(&self, contents: Vec<SavedBlock>, report: &mut ParkReport) {
        let (span, dedicated, kind) = (&self.span, &*self.dedicated, self.kind);
        let (over, dropped, held, events) = {
            let slots = &mut self.state().slots;
            let over = slots.ranges.collect(true, |bytes| self.count_collected(bytes));
            let mut events = self.completions(&over);
            events.extend(slots.events(dedicated, kind, &[Action::Free, Action::Complete]));
            for block in slots.blocks.values() {
                dedicated.slot_block_parked(kind, block.bytes, block.requested, block.tag);
            }
            report.blocks += slots.blocks.len() as u64;
            report.parked += slots.live().0;
            slots.notify(dedicated, |_| Ownership::Free);
            slots.end_phase(dedicated, Phase::Parked);
            self.observe(self.mapped_ranges(), false);
            if !self.is_of_graphs() {
                slots.remove_empty_slots(span);
            }
            let dropped = slots.keep_saved(contents);
            let saved = slots.blocks.values().filter_map(|live| live.saved.as_ref());
            report.saved += saved.map(|contents| contents.bytes()).sum::<u64>();
            let held = span.charged_bytes();
            dedicated.slots_retired(kind, held);
            span.retire(0..u64::MAX, PartsWork::default(), None);
            debug_assert_eq!(span.charged_bytes(), 0, "parked memory is mapped");
            (over, dropped, held, events)
        };
        dedicated.send(events);
        drop(dropped);
        self.drop_freed(over);
        let before = dedicated.held().stuck();
        let reaped = dedicated.reap_span(span);
        // Another thread may have unmapped some of it concurrently. So the report counts what is
        // left, including what was unmapped but not released.
        let unreleased = dedicated.held().stuck().saturating_sub(before);
        let stuck = span.retiring_bytes() + unreleased;
        report.released += held.saturating_sub(stuck);
        report.refused += stuck;
        report.refusal = report.refusal.take().or(reaped.refused);
    }

    /// Maps memory with the saved contents, or does nothing for memory that is resident. Waits
    /// until `until` for another thread that parks or resumes it, and for the budget. On failure
    /// everything is still parked.
    pub(crate) fn begin_resume(
        &self,
        pool: &PoolCore,
        until: Option<Instant>,
    ) -> Result<Option<RestoredContents>> {
        let mut state = loop {
            let mut state = self.state();
            match state.slots.phase {
                Phase::Resident => return Ok(None),
                Phase::Parked => {
                    state.slots.phase = Phase::Resuming;
                    break state;
                }
                _ if until.is_some_and(|until| Instant::now() < until) => drop(state),
                _ => return Err(MemoryError::Parked { tag: self.tag() }),
            }
            thread::sleep(QUIESCE_POLL);
        };
        let slots = &mut state.slots;
        if !self.is_of_graphs() {
            slots.remove_empty_slots(&self.span);
        }
        debug_assert_eq!(self.charged_bytes(), 0, "parked memory is mapped");
        let claimed: Vec<u64> = slots.ranges.claimed.iter().copied().collect();
        let blocks = slots.blocks.values().filter_map(|live| live.saved.clone()).collect();
        drop(state);
        let taken = claimed.len() as u64 * self.span.slot;
        let mut restored = RestoredContents { blocks, taken, ..RestoredContents::default() };
        let outcome = self.restore(pool, &claimed, until, &mut restored);
        outcome.inspect_err(|_| self.park_again())?;
        Ok(Some(restored))
    }

    /// Maps memory for the slots, and copies the contents back. On failure nothing is mapped.
    fn restore(
        &self,
        pool: &PoolCore,
        claimed: &[u64],
        until: Option<Instant>,
        restored: &mut RestoredContents,
    ) -> Result<()> {
        let stream = pool.streams().lease()?;
        let new = self.back_slots_until(pool, &stream, claimed, until)?;
        debug_assert!(new <= restored.taken, "maps more than it needs");
        debug_assert_eq!(self.charged_bytes(), restored.taken, "a slot has no memory");
        self.dedicated.slots_backed(self.kind, new, restored.taken - new);
        self.observe(self.mapped_ranges(), true);
        if !restored.blocks.is_empty() {
            self.state().slots.notify_resident(&self.dedicated, Some(&stream));
        }
        restored.copied = saved::restore(&stream, &restored.blocks)
            .inspect_err(|_| self.unmap_again(restored.taken))?;
        Ok(())
    }

    /// Maps memory for all of `slots`, or for none. If there is a deadline and nothing else makes
    /// room, waits for the budget until then. Returns the bytes that are new.
    fn back_slots_until(
        &self,
        pool: &PoolCore,
        stream: &Stream,
        slots: &[u64],
        until: Option<Instant>,
    ) -> Result<u64> {
        let (span, tag) = (&self.span, self.tag());
        let back = |reserved| pool.back_slots(span, stream.timeline(), tag, slots, reserved);
        match back(None) {
            Err(MemoryError::OutOfMemory(refused))
                if until.is_some() && refused.refused.is_some() =>
            {
                let bytes = slots.len() as u64 * span.slot;
                match pool.budget().reserve_by(bytes, until) {
                    Ok(reserved) => back(Some(&Mutex::new(reserved))),
                    Err(_) => Err(MemoryError::OutOfMemory(refused)),
                }
            }
            outcome => outcome,
        }
    }

    /// Returns the memory to the driver again, after `begin_resume`.
    pub(crate) fn abort_resume(&self, restored: &RestoredContents) {
        self.unmap_again(restored.taken);
        self.park_again();
    }

    /// Returns the memory that a resume has mapped to the driver.
    fn unmap_again(&self, taken: u64) {
        self.state().slots.notify(&self.dedicated, |_| Ownership::Free);
        self.observe(self.mapped_ranges(), false);
        self.dedicated.slots_retired(self.kind, taken);
        self.span.retire(0..u64::MAX, PartsWork::default(), None);
        // A refusal is retried by the next caller that reaps. Otherwise the next resume uses what
        // is still mapped.
        let _ = self.dedicated.reap_span(&self.span);
    }

    /// Ends a resume that has no memory, with the contents as they were saved.
    fn park_again(&self) {
        self.state().slots.end_phase(&self.dedicated, Phase::Parked);
    }

    /// Allows uses again, after `begin_resume`, and adds to the report.
    /// With `keeps` the blocks keep their saved contents.
    pub(crate) fn finish_resume(
        &self,
        restored: &RestoredContents,
        keeps: bool,
        report: &mut ResumeReport,
    ) {
        let (dedicated, kind) = (&*self.dedicated, self.kind);
        let (events, over) = {
            let slots = &mut self.state().slots;
            debug_assert_eq!(slots.phase, Phase::Resuming, "resumes what is not parked");
            debug_assert!(slots.live().0 <= restored.taken, "live blocks have no memory");
            for block in slots.blocks.values() {
                dedicated.slot_block_resumed(kind, block.bytes, block.requested, block.tag);
            }
            report.blocks += slots.blocks.len() as u64;
            if restored.blocks.is_empty() {
                // Not before: no stream may use blocks whose resume is undone, and nothing would
                // order the next owners of their bytes behind it.
                slots.notify_resident(dedicated, None);
            }
            report.taken += restored.taken;
            report.restored += restored.copied;
            let events = slots.events(dedicated, kind, &[Action::Allocate]);
            slots.reopen(dedicated);
            // Dropped after the lock is released, by an allocator of the caller.
            let over = if keeps { Vec::new() } else { slots.take_saved() };
            (events, over)
        };
        dedicated.send(events);
        drop(over);
    }
}
