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
        self.state().close_captures(|capture| capture.announced == announced);
        // What cannot be fenced or polled now counts as not done.
        let _ = self.poll_fences();
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
    /// [`MemoryError::Capturing`], also if another stream that has used the memory captures;
    /// [`MemoryError::Busy`] if a prepared use of a block is not finished; [`MemoryError::Parked`];
    /// the driver's.
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
            on.wait_for(&other, epoch)?;
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
