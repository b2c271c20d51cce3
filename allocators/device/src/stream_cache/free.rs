//! Returning blocks to a cache.

use super::{
    BlockToken, CacheRef, CacheState, PendingFree, StreamCache, events::FreeEvents,
    retire::RetiredCache,
};
use crate::base::{
    driver::notify_observer,
    extent::{BlockExtent, BlockMeta, LazyBox},
};
use aquifer_driver::{DeviceRange, Ownership, RawStream};
use aquifer_stream::{Timeline, UseList};
use std::sync::Arc;

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
        let uses = uses.take(&timeline);
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
