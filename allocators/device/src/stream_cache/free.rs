//! Returning blocks to a cache: at once, or when other streams have finished with them.

use super::{
    Binding, BlockToken, CacheHost, CacheRef, CacheState, CollectMode, PendingFree, StreamCache,
    close::RetiredCache,
};
use crate::base::{
    driver::notify_observer,
    extent::{BlockExtent, BlockMeta, LazyBox},
    pending::{PendingUses, StreamDeps},
    waits::wait_for_epoch,
};
use aquifer_core::{Action, Result, event::EventTicket};
use aquifer_driver::{DeviceRange, Ownership, RawStream};
use aquifer_stream::{Noted, Timeline, UseList};
use std::{mem, sync::Arc, time::Instant};

/// Work to be done after the lock is released.
pub(crate) struct FreeFollowUp {
    /// An epoch that has to be fenced now, since no event can be recorded for it later.
    fence: Option<(Arc<Timeline>, u64)>,
    token: BlockToken,
    events: Option<FreeEvents>,
    retired: Option<RetiredCache>,
}

impl StreamCache {
    /// Returns a block to the cache. No other stream may use it. The hot path.
    #[inline]
    pub(crate) fn deallocate(&'static self, cache_ref: &CacheRef, extent: &BlockExtent) {
        let after = self.state.with(|s| s.deallocate(cache_ref, extent));
        self.follow_up(after);
    }

    /// Does what remains to be done after a free.
    #[inline]
    pub(crate) fn follow_up(&'static self, after: Option<Box<FreeFollowUp>>) {
        if let Some(after) = after {
            self.run_follow_up(after);
        }
    }

    #[cold]
    fn run_follow_up(&'static self, after: Box<FreeFollowUp>) {
        // First, since other threads may wait for these tickets.
        if let Some(events) = after.events {
            events.record(&after.token);
        }
        if let Some((timeline, epoch)) = after.fence {
            // After a refusal the range has no proof of completion, so no other stream can take it
            // until a later event covers it.
            let _ = timeline.fence_at_once(epoch);
        }
        if let Some(retired) = after.retired {
            self.finish(retired);
        }
    }

    /// Returns a block that other streams may use, or that has extra metadata.
    #[cold]
    pub(crate) fn deallocate_with_meta(
        &'static self,
        token: BlockToken,
        uses: &mut UseList,
        meta: LazyBox<BlockMeta>,
    ) {
        let timeline = self.timeline();
        let uses = uses.take();
        // The counts of live bytes end when this is dropped, at the end of the function.
        let BlockMeta { generation, until_free, live: _live } = meta.or_default();
        let range = DeviceRange {
            device: timeline.raw().device(),
            address: token.extent.address,
            bytes: if generation == 0 {
                0
            } else {
                self.size_of(token.extent.address, token.cache_ref.key)
            },
        };
        if uses.is_empty() {
            notify_observer(timeline.driver(), generation, range, Ownership::Free);
            drop(until_free);
            return self.deallocate(&token.cache_ref, &token.extent);
        }
        if generation != 0 {
            let users: Vec<RawStream> = uses.iter().map(|u| u.on().noted()).collect();
            notify_observer(
                timeline.driver(),
                generation,
                range,
                Ownership::Pending { users: &users },
            );
        }
        let epoch = timeline.open();
        // After a refusal the range has no proof of completion, so no other stream can take it
        // until a later event covers it.
        let _ = timeline.fence_at_once(epoch);
        let (events, closed) = self.with(|s| {
            let bytes =
                s.heap.size_of_keyed(token.extent.address, token.cache_ref.key).unwrap_or(0);
            s.usage.record_free(token.extent.request);
            s.usage.pending += bytes;
            s.usage.pending_blocks += 1;
            s.pending.push(PendingFree { token, bytes, generation, epoch, uses, until_free });
            s.write_line();
            let closed = s.binding.as_ref().filter(|binding| !binding.open);
            (s.free_events(true, false), closed.map(|binding| binding.pool.clone()))
        });
        if let Some(events) = events {
            events.record(&token);
        }
        if let Some(pool) = closed {
            // The pool no longer polls this cache.
            self.close(&pool);
        }
    }
}

impl CacheState {
    /// Takes a block back. The caller must pass the result to [`StreamCache::follow_up`] after it
    /// has released the lock.
    #[inline]
    pub(crate) fn deallocate(
        &mut self,
        cache_ref: &CacheRef,
        extent: &BlockExtent,
    ) -> Option<Box<FreeFollowUp>> {
        self.flush_last();
        self.last = Some(BlockToken { cache_ref: *cache_ref, extent: *extent });
        self.last_free = self.last_free.max(self.open_epoch());
        self.last_is_free = true;
        if self.needs_follow_up { self.follow_up_of_free() } else { None }
    }

    /// Collects what a free has to do beyond returning the block. Boxed, since few frees need it.
    #[cold]
    fn follow_up_of_free(&mut self) -> Option<Box<FreeFollowUp>> {
        self.flush_last();
        let token = self.last?;
        let events = self.free_events(true, true);
        let fence =
            self.timeline().filter(|t| t.fences_at_once()).map(|t| (t.clone(), self.last_free));
        Some(Box::new(FreeFollowUp { fence, token, events, retired: self.retire_if_done() }))
    }
}

/// Number of pending blocks that one call may examine without releasing any, averaged over many
/// calls.
const PENDING_PER_SKIPPED_CALL: usize = 16;

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

/// Recorder events with their tickets. The pool is stored, since the cache may serve another stream
/// by the time they are reported.
pub(super) struct FreeEvents {
    pool: Arc<dyn CacheHost>,
    /// The stream's number.
    stream: u32,
    free_ticket: Option<EventTicket>,
    complete_ticket: Option<EventTicket>,
}

impl FreeEvents {
    pub(super) fn record(self, token: &BlockToken) {
        let Self { pool, stream, .. } = self;
        for (ticket, action) in
            [(self.free_ticket, Action::Free), (self.complete_ticket, Action::Complete)]
        {
            pool.report(ticket, action, stream, &token.extent);
        }
    }
}

impl CacheState {
    /// Takes tickets for a free, for its completion, or for both, if the pool has a recorder.
    pub(super) fn free_events(&self, free: bool, complete: bool) -> Option<FreeEvents> {
        let Binding { pool, timeline, .. } = self.binding.as_ref()?;
        if !pool.is_recorded() {
            return None;
        }
        let ticket = |wanted: bool| if wanted { pool.ticket() } else { None };
        let (free_ticket, complete_ticket) = (ticket(free), ticket(complete));
        Some(FreeEvents {
            pool: pool.clone(),
            stream: timeline.number(),
            free_ticket,
            complete_ticket,
        })
    }
}
