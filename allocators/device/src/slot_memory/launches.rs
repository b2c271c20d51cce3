//! Announced captures of graphs over memory in slots, and launches of these graphs.

use super::{SlotMemory, blocks::SlotBlock, captures::record_launch};
use crate::base::pending::{latest, raise};
use aquifer_core::{MemoryError, Result};
use aquifer_stream::Timeline;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// The exclusive right to queue a launch.
pub(super) struct LaunchGuard<'a>(&'a AtomicBool);

impl Drop for LaunchGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl SlotMemory {
    /// Counts an announcement that begins or ends.
    pub(crate) fn count_announcement(&self, opens: bool) {
        if opens {
            self.announcements.fetch_add(1, Ordering::AcqRel);
        } else {
            self.announcements.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Called when an announcement begins or ends. What was freed within it becomes usable by every
    /// later one, as soon as it is known to be done. Never blocks.
    pub(crate) fn end_announcement(&self, announced: u64) {
        let over: Vec<_> = {
            let mut state = self.state();
            state.close_captures(|capture| capture.announced == announced);
            state.fenced.extract_if(.., |(other, ..)| *other == announced).collect()
        };
        drop(over);
        // What cannot be fenced or polled now counts as not done.
        let _ = self.poll_fences();
    }

    /// Records that `epoch` of a stream has been fenced. All work that the stream is about to
    /// capture is in later epochs.
    pub(crate) fn record_fence(&self, announced: u64, timeline: &Arc<Timeline>, epoch: u64) {
        self.state().fenced.push((announced, timeline.clone(), epoch));
    }

    /// Returns the fenced epoch that covers all uncaptured work of a stream, if its open epoch
    /// contains only captured work.
    fn fenced_epoch(&self, timeline: &Arc<Timeline>) -> Option<u64> {
        let state = self.state();
        let fenced = state.fenced.iter().filter(|(_, other, _)| Arc::ptr_eq(other, timeline));
        let last = fenced.map(|(_, _, epoch)| *epoch).max();
        last.filter(|epoch| epoch + 1 == timeline.open())
    }

    pub(super) fn lock_launches(&self) -> LaunchGuard<'_> {
        while self.launching.swap(true, Ordering::Acquire) {
            // The wait is only as long as a few driver calls.
            std::thread::yield_now();
        }
        LaunchGuard(&self.launching)
    }

    /// Orders a launch on `on` after all work that touches the memory, queues it, and records it.
    /// The host waits only while another launch of the same memory is being queued.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; [`MemoryError::Busy`] if a prepared use of a block is not
    /// finished; [`MemoryError::Parked`]; the driver's.
    pub(crate) fn launch(
        &self,
        on: &Arc<Timeline>,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _launch = self.lock_launches();
        self.check_resident()?;
        if on.is_capturing()? {
            return Err(MemoryError::Capturing { stream: on.raw().handle() });
        }
        // Copied first: no lock is held during a driver call.
        let work = self.state().all_work()?;
        for (other, epoch) in latest(work) {
            match (on.wait_for(&other, epoch), self.fenced_epoch(&other)) {
                (Err(MemoryError::Capturing { .. }), Some(ran)) => drop(on.wait_for(&other, ran)?),
                (waited, _) => drop(waited?),
            }
            // Polled so that events of finished launches do not accumulate.
            other.poll()?;
        }
        queue()?;
        self.launched(on)
    }

    /// Records a launch queued on `on`, which touches all of the memory.
    pub(crate) fn launched(&self, on: &Arc<Timeline>) -> Result<()> {
        let epoch = on.open();
        // Dropped after the lock is released: it may be the last reference to a stream.
        let _over: Vec<_> = {
            let mut state = self.state();
            if !raise(&mut state.launches, on, epoch) {
                state.launches.push((on.clone(), epoch));
            }
            let state = &mut *state;
            let captured = |live: &SlotBlock| {
                !live.capture.is_eager()
                    && state.capture_lists.iter().any(|list| list.capture == live.capture)
            };
            // Captured work does not wait for a launch. The launch of its own graph will.
            state
                .slots
                .blocks
                .values()
                .filter(|live| !captured(live))
                .for_each(|live| record_launch(live, on, epoch));
            state.launches.extract_if(.., |(other, epoch)| other.is_done(*epoch)).collect()
        };
        on.fence_at_once(epoch)
    }

    /// Records that a graph exists whose launches are not reported.
    pub(crate) fn mark_untracked(&self) {
        self.state().has_untracked_launches = true;
    }
}
