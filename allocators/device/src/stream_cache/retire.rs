//! The end of a cache's service.

use super::{Binding, CacheHost, CacheState, CacheUsage, StreamCache, UNBOUND};
use crate::base::part_bounds::PartBounds;
use aquifer_core::MemoryError;
use aquifer_heap::{Config, Heap};
use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

/// What a retired cache held. It must be dropped after the lock is released.
pub(crate) struct RetiredCache {
    heap: Heap,
    binding: Option<Binding>,
}

/// The remaining steps of closing a cache, kept because the driver refused to wait. Within a host
/// callback the driver refuses every call.
pub(super) enum DeferredTeardown {
    Close(&'static StreamCache, Arc<dyn CacheHost>),
    Finish(&'static StreamCache, Box<RetiredCache>),
}

pub(super) static DEFERRED: Mutex<Vec<DeferredTeardown>> = Mutex::new(Vec::new());

pub(super) fn defer_teardown(deferred: DeferredTeardown) {
    DEFERRED.lock().unwrap_or_else(PoisonError::into_inner).push(deferred);
}

impl StreamCache {
    /// Ends the service of a retired cache: waits for all work queued on its stream, returns its
    /// ranges to the pool, and adds the cache to the idle ones.
    #[cold]
    pub(crate) fn finish(&'static self, mut retired: RetiredCache) {
        if let Some(binding) = retired.binding.take() {
            let Binding { pool, timeline, .. } = &binding;
            match timeline.quiesce() {
                Ok(()) => pool.reclaim_cache(self, timeline, &retired.heap),
                Err(MemoryError::DeviceLost { .. }) => {
                    // After the loss of the device no work runs on it.
                    timeline.abandon();
                    pool.reclaim_cache(self, timeline, &retired.heap);
                }
                // Work may still run on this memory, so it stays mapped and charged until the
                // driver call succeeds.
                Err(MemoryError::Driver(_)) => {
                    retired.binding = Some(binding);
                    return defer_teardown(DeferredTeardown::Finish(self, Box::new(retired)));
                }
                // The completion of that work can never be proved, so the pool keeps the memory.
                Err(_) => pool.leak_cache(self, timeline),
            }
            let Binding { pool, timeline, .. } = binding;
            drop(timeline);
            drop(pool);
        }
        drop(retired.heap);
        UNBOUND.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }
}

impl CacheState {
    pub(super) fn retire_if_done(&mut self) -> Option<RetiredCache> {
        let over = self.binding.as_ref().is_some_and(|v| !v.open);
        if !over || self.blocks() > 0 || !self.pending.is_empty() || self.collecting > 0 {
            return None;
        }
        debug_assert_eq!(self.usage.requested, 0, "a cache without blocks counts some");
        debug_assert!(
            self.raw.is_empty() && self.unsettled.is_empty(),
            "a block outlives its cache"
        );
        self.usage = CacheUsage::default();
        self.bounds = PartBounds::default();
        self.last_free = 0;
        self.skip_collects = 0;
        self.needs_follow_up = false;
        let heap = mem::replace(&mut self.heap, Heap::new(Config::device()));
        self.line_owner = 0;
        self.write_line();
        Some(RetiredCache { heap, binding: self.binding.take() })
    }
}
