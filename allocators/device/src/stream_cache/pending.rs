//! Freed blocks of a cache that other streams still use.

use super::{PendingFree, StreamCache};
use crate::base::{
    driver::notify_observer,
    pending::{PendingUses, StreamDeps},
    waits::wait_for_epoch,
};
use aquifer_core::Result;
use aquifer_driver::{DeviceRange, Ownership};
use aquifer_stream::{Noted, Timeline};
use std::{mem, sync::Arc, time::Instant};

/// Number of pending blocks that one call may examine without releasing any, averaged over many
/// calls.
const PENDING_PER_SKIPPED_CALL: usize = 16;

/// How pending blocks are released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CollectMode {
    /// Release blocks whose uses are known to be done.
    Completed,
    /// Also make the owner stream wait on the device for stamped uses.
    WaitOnDevice,
}

impl StreamCache {
    /// Calls [`StreamCache::collect_pending`] with [`CollectMode::Completed`], at a cost a call
    /// that does not grow with the number of pending blocks: after a walk that released nothing,
    /// one call is skipped for each [`PENDING_PER_SKIPPED_CALL`] blocks that the walk examined.
    /// Returns the bytes released.
    pub(crate) fn collect_throttled(&'static self) -> Result<u64> {
        let due = self.with(|s| {
            let due = s.skip_collects == 0;
            s.skip_collects = s.skip_collects.saturating_sub(1);
            due.then_some(s.pending.len())
        });
        let Some(pending) = due else { return Ok(0) };
        let (bytes, _) = self.collect_pending(CollectMode::Completed)?;
        if bytes == 0 {
            self.with(|s| s.skip_collects = pending / PENDING_PER_SKIPPED_CALL);
        }
        Ok(bytes)
    }

    /// Moves pending blocks to the heap whose other uses are over. Returns the bytes released, and
    /// the number of stream waits queued. Calls the driver, but never under the lock.
    pub(crate) fn collect_pending(&'static self, mode: CollectMode) -> Result<(u64, u64)> {
        let (mut pending, timeline) = {
            let taken = self.with(|s| {
                let binding = s.binding.as_ref()?;
                if s.pending.is_empty() {
                    return None;
                }
                let timeline = binding.timeline.clone();
                s.collecting += 1;
                Some((mem::take(&mut s.pending), timeline))
            });
            let Some(taken) = taken else { return Ok((0, 0)) };
            taken
        };
        // A stream that is fenced at once may have been destroyed already, so no wait is queued on
        // it.
        let may_wait = mode == CollectMode::WaitOnDevice
            && !timeline.fences_at_once()
            && timeline.waits_unasked();
        // The blocks are in no list now, so no other thread can collect them a second time.
        let (mut waits, mut bytes) = (0, 0);
        let mut outcome = Ok(());
        let over = pending.extract_if(.., |entry| {
            let over = entry.uses.are_over();
            let waited_for =
                |u: Noted| u.epoch().is_some_and(|epoch| u.on().is_waited_for_unasked(epoch));
            if over || !may_wait || outcome.is_err() || !entry.uses.iter().all(waited_for) {
                return over;
            }
            match entry.uses.order_before(&timeline, entry.token.extent.address) {
                Ok(queued) => {
                    waits += queued;
                    entry.uses.clear();
                    // The waits are queued, and belong to the epoch that is open now.
                    entry.epoch = timeline.open();
                }
                Err(error) => outcome = Err(error),
            }
            entry.uses.is_empty()
        });
        for entry in over {
            bytes += entry.bytes;
            self.complete(&timeline, entry);
        }
        let retired = self.with(|s| {
            if s.pending.is_empty() {
                // Keeps the vector's allocation for the next pending block.
                mem::swap(&mut s.pending, &mut pending);
            } else {
                s.pending.append(&mut pending);
            }
            s.collecting -= 1;
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
        outcome.map(|()| (bytes, waits))
    }

    /// Returns whether another stream may be made to wait for the free memory of this cache: see
    /// [`Timeline::is_waited_for_unasked`].
    pub(crate) fn is_waited_for(&self) -> bool {
        let (timeline, last_free) = self.with(|s| (s.timeline().cloned(), s.last_free));
        timeline.is_some_and(|timeline| timeline.is_waited_for_unasked(last_free))
    }

    /// Moves a pending block whose last use is over to the heap.
    fn complete(&'static self, timeline: &Arc<Timeline>, entry: PendingFree) {
        let PendingFree { token, bytes, generation, epoch, until_free, .. } = entry;
        let range =
            DeviceRange { device: timeline.raw().device(), address: token.extent.address, bytes };
        notify_observer(timeline.driver(), generation, range, Ownership::Free);
        let kept = until_free.is_some();
        drop(until_free);
        let events = self.with(|s| {
            if let Some(binding) = s.binding.as_ref().filter(|_| kept) {
                binding.pool.count_completion();
            }
            s.usage.pending -= bytes;
            s.usage.pending_blocks -= 1;
            let events = s.free_events(false, true);
            s.free_to_heap(&token, epoch);
            s.write_line();
            events
        });
        if let Some(events) = events {
            events.record(&token);
        }
    }

    /// Waits for the stamped uses of the first pending block that has no open use, then collects
    /// pending frees. Returns whether there was such a use. Blocks until `deadline`.
    pub(crate) fn wait_for_pending(&'static self, deadline: Option<Instant>) -> Result<bool> {
        let oldest: StreamDeps = self.with(|s| {
            let first = s.pending.iter().find(|p| !p.uses.is_open());
            first.into_iter().flat_map(|p| p.uses.stamped()).collect()
        });
        for (timeline, epoch) in &oldest {
            wait_for_epoch(timeline, *epoch, deadline)?;
        }
        if !oldest.is_empty() {
            self.collect_pending(CollectMode::Completed)?;
        }
        Ok(!oldest.is_empty())
    }
}
