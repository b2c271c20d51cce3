//! The end of a cache's service: with its pool, or for another stream of the same pool.
//!
//! A cache can serve another stream when nothing refers to its last one any more:
//!
//! - all blocks have been returned, and the cache holds no memory;
//! - the [`Timeline`] has no other owner. A lease owns a reference to it. So does each shared free
//!   range whose work is not known to be done, each wait, and each walk over the cache that is
//!   under way.
//!
//! It is therefore enough to be the last owner of the timeline. A thread that still has the cache
//! from the pool's list finds it empty, or bound to another stream of the same pool. Both are
//! correct.

use super::{Binding, CacheHost, CacheState, CacheUsage, CollectMode, StreamCache, UNBOUND};
use crate::base::{addresses::AddressDirectory, usage::LiveBytes};
use aquifer_core::MemoryError;
use aquifer_heap::{Config, Heap};
use aquifer_stream::{LastUse, Timeline};
use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

/// Retries the closing of caches that the driver refused. What it refuses again is kept for the
/// next call.
pub(crate) fn retry_teardowns() {
    let deferred = mem::take(&mut *DEFERRED.lock().unwrap_or_else(PoisonError::into_inner));
    for one in deferred {
        match one {
            DeferredTeardown::Close(cache, pool) => cache.close(&pool),
            DeferredTeardown::Finish(cache, retired) => cache.finish(*retired),
        }
    }
}

/// A cache of a closed pool, registered to be notified when a use of a pending block ends.
struct CloseOnLastUse(&'static StreamCache, Arc<dyn CacheHost>);

impl LastUse for CloseOnLastUse {
    fn ended(&self) {
        self.0.close(&self.1);
    }
}

impl StreamCache {
    /// Closes the cache if it is still bound to `pool`: it retires when its last block has been
    /// returned, perhaps now.
    pub(crate) fn close(&'static self, pool: &Arc<dyn CacheHost>) {
        // Open uses cannot be waited for. Their blocks and this cache stay until the last open use
        // ends and notifies this object. By then another use's end may have recycled the cache for
        // another pool, hence the check.
        let listener: Arc<dyn LastUse> = Arc::new(CloseOnLastUse(self, pool.clone()));
        let serves = self.with(|s| {
            let serves = s.is_bound_to(pool);
            for pending in s.pending.iter().filter(|_| serves) {
                let _open = pending.uses.tell(&listener);
            }
            serves
        });
        if !serves {
            return;
        }
        // The memory of a pending block cannot be released while other streams use it, so their
        // uses are waited for.
        loop {
            match self.wait_for_pending(None) {
                Ok(true) => {}
                Ok(false) => break,
                Err(MemoryError::DeviceLost { .. }) => {
                    // After the loss of the device no work runs on it.
                    let users: Vec<Arc<Timeline>> = self.with(|s| {
                        s.pending
                            .iter()
                            .flat_map(|p| p.uses.iter())
                            .map(|u| u.on().clone())
                            .collect()
                    });
                    users.iter().for_each(|user| user.abandon());
                    let _ = self.collect_pending(CollectMode::Completed);
                    break;
                }
                Err(MemoryError::Driver(_)) => {
                    defer_teardown(DeferredTeardown::Close(self, pool.clone()));
                    break;
                }
                Err(_) => break,
            }
        }
        let retired = self.with(|s| {
            if !s.is_bound_to(pool) {
                return None;
            }
            if let Some(binding) = &mut s.binding {
                binding.open = false;
            }
            s.needs_follow_up = true;
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
    }
}

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
        debug_assert!(self.raw.is_empty(), "a block outlives its cache");
        self.usage = CacheUsage::default();
        self.highest = LiveBytes::default();
        self.last_free = 0;
        self.skip_collects = 0;
        self.needs_follow_up = false;
        let heap = mem::replace(&mut self.heap, Heap::new(Config::device()));
        self.line_owner = 0;
        self.write_line();
        Some(RetiredCache { heap, binding: self.binding.take() })
    }
}

/// An idle cache, and its index in its pool.
pub(crate) struct IdleCache {
    pub(crate) cache: &'static StreamCache,
    pub(crate) number: usize,
}

impl StreamCache {
    /// Returns whether the stream has no lease while the cache has free memory.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.with(|s| s.timeline().is_some_and(|t| !t.is_leased()) && s.heap.free_bytes() > 0)
    }

    /// Unbinds the cache from its stream if nothing refers to the stream any more. Returns the
    /// timeline, to be dropped where driver calls are allowed: the drop destroys its events, and
    /// the stream if the pool owns it.
    pub(crate) fn unbind_if_idle(&'static self) -> Option<(IdleCache, Timeline)> {
        let (number, timeline, binding) = self.with(|s| {
            let unleased = s.binding.as_ref().is_some_and(|v| v.open && !v.timeline.is_leased());
            if !unleased || s.heap.managed_bytes() > 0 || !s.pending.is_empty() || s.collecting > 0
            {
                return None;
            }
            debug_assert_eq!(s.blocks(), 0, "blocks without memory");
            debug_assert!(s.raw.is_empty(), "a block outlives its cache");
            let Binding { pool, directory, number, timeline, open } = s.binding.take()?;
            match Arc::try_unwrap(timeline) {
                Ok(timeline) => {
                    (s.last_free, s.needs_follow_up) = (0, false);
                    Some((number, timeline, (pool, directory)))
                }
                Err(timeline) => {
                    s.binding = Some(Binding { pool, directory, number, timeline, open });
                    None
                }
            }
        })?;
        drop(binding);
        Some((IdleCache { cache: self, number }, timeline))
    }
}

impl IdleCache {
    /// Binds the cache to another stream of the same pool. Its counters are kept.
    pub(crate) fn bind(
        self,
        pool: Arc<dyn CacheHost>,
        directory: Arc<AddressDirectory>,
        timeline: &Arc<Timeline>,
    ) -> &'static StreamCache {
        self.cache.bind(pool, directory, timeline.clone(), self.number);
        self.cache
    }

    /// Makes the cache available to all pools, after its own pool was closed.
    pub(crate) fn retire(self) {
        self.cache.with(|s| {
            s.usage = CacheUsage::default();
            s.highest = LiveBytes::default();
            s.line_owner = 0;
            s.write_line();
        });
        UNBOUND.lock().unwrap_or_else(PoisonError::into_inner).push(self.cache);
    }
}
