//! The caches of a pool's streams: opened at a stream's first request, recycled when it is gone.

use super::PoolCore;
use crate::{
    Request,
    base::{driver::check_stream_device, extent::BlockExtent, usage::PeakRoom},
    request::ValidateRequest,
    stream_cache::{CacheHost, StreamCache, close::IdleCache},
};
use aquifer_core::{
    Action, Result,
    event::EventTicket,
    scratch::{Bump, List, list},
};
use aquifer_heap::Heap;
use aquifer_stream::{Stream, StreamPool, Timeline};
use std::sync::{Arc, MutexGuard, PoisonError, atomic::Ordering};

impl PoolCore {
    /// Returns the stream's cache if the fast path may serve the request from it.
    ///
    /// Returns `None`, so that the request takes the full path, in these cases:
    ///
    /// - The request is invalid, or its alignment is not the default one.
    /// - There is a [full-path reason](PoolCore::add_full_path_reason).
    /// - The request [prefers shared memory](crate::sharing_policy::SharingPolicy::prefers_shared):
    ///   more than 64 KiB while all free memory is shared.
    /// - The stream has no cache yet.
    ///
    /// The full path tries the cache as well, with the block that was freed last, except for a
    /// request that prefers shared memory. Such a request never takes the last freed block from the
    /// cache. The slow path first moves that block to the shared free list with the other free
    /// memory, and then takes a ready range of the list.
    #[inline]
    pub(crate) fn fast_cache(
        &self,
        stream: &Stream,
        request: &Request,
    ) -> Option<&'static StreamCache> {
        let quick = request.is_plain()
            && self.full_path_reasons.load(Ordering::Relaxed) == 0
            && !self.sharing_policy.prefers_shared(request.size());
        if quick { self.known_cache(stream) } else { None }
    }

    /// Returns the cache of a stream, and creates it at its first use.
    pub(crate) fn cache_for(self: &Arc<Self>, stream: &Stream) -> Result<&'static StreamCache> {
        match self.known_cache(stream) {
            Some(cache) => Ok(cache),
            None => self.open_cache(stream),
        }
    }

    /// Returns the cache of a stream that has one already.
    #[inline]
    fn known_cache(&self, stream: &Stream) -> Option<&'static StreamCache> {
        let number = stream.timeline().attachment(self.key)? as usize;
        self.numbered_cache(number).or_else(|| self.cache_beyond_table(number))
    }

    /// Returns the cache of this number, if the directory has its number.
    #[inline]
    pub(crate) fn numbered_cache(&self, number: usize) -> Option<&'static StreamCache> {
        self.numbered_caches.get(number)?.get().copied()
    }

    /// Returns a cache whose number exceeds the directory. The list is ordered by number.
    #[cold]
    fn cache_beyond_table(&self, number: usize) -> Option<&'static StreamCache> {
        self.caches.read().unwrap_or_else(PoisonError::into_inner).get(number).copied()
    }

    #[cold]
    fn open_cache(self: &Arc<Self>, stream: &Stream) -> Result<&'static StreamCache> {
        check_stream_device(&*self.driver, self.info.device, stream.timeline())?;
        self.recycle_caches();
        // The lock prevents two threads from creating a cache for one stream. No driver call is
        // made under it.
        let mut caches = self.caches.write().unwrap_or_else(PoisonError::into_inner);
        let known = stream.timeline().attachment(self.key);
        if let Some(&cache) = known.and_then(|number| caches.get(number as usize)) {
            return Ok(cache);
        }
        let (cache, number) = match self.idle_caches().pop() {
            Some(idle) => {
                let number = idle.number;
                (idle.bind(self.clone(), self.directory.clone(), stream.timeline()), number)
            }
            None => {
                // Caches leave the list only when the pool closes, and none is created then, so a
                // number is never reused.
                let number = caches.len();
                let (pool, directory) = (self.clone(), self.directory.clone());
                let cache = StreamCache::open(pool, directory, stream.timeline().clone(), number);
                if let Some(slot) = self.numbered_caches.get(number) {
                    let _only_once = slot.set(cache);
                }
                caches.push(cache);
                (cache, number)
            }
        };
        stream.timeline().attach(self.key, number as u32);
        Ok(cache)
    }

    pub(crate) fn idle_caches(&self) -> MutexGuard<'_, Vec<IdleCache>> {
        self.idle_caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists all caches of the pool.
    pub(crate) fn caches<'s>(&self, bump: &'s Bump) -> List<'s, &'static StreamCache> {
        list(bump, self.caches.read().unwrap_or_else(PoisonError::into_inner).iter().copied())
    }

    pub(crate) fn unregister_cache(&self, cache: &'static StreamCache) {
        self.caches
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !std::ptr::eq(*other, cache));
    }

    /// Unbinds caches from streams that have no lease and whose work is known to be done, so that
    /// there are never more caches than streams at one time. Destroys their events, and the streams
    /// that the pool owns.
    pub(crate) fn recycle_caches(&self) {
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        if caches.is_empty() {
            return;
        }
        self.memory.share_free(&abandoned(&pass, &caches), 0);
        self.memory.forget_done();
        for cache in caches {
            if let Some((idle, timeline)) = cache.unbind_if_idle() {
                self.idle_caches().push(idle);
                drop(timeline);
            }
        }
    }

    /// Moves the free memory in the caches of streams without a lease to the shared free list.
    /// Returns the number of transfers begun. Makes no driver call.
    pub(crate) fn share_abandoned(&self, bump: &Bump, caches: &[&'static StreamCache]) -> u64 {
        let abandoned = abandoned(bump, caches);
        if abandoned.is_empty() {
            return 0;
        }
        self.memory.share_free(&abandoned, 0);
        1
    }
}

impl CacheHost for PoolCore {
    fn streams(&self) -> &StreamPool {
        &self.streams
    }

    fn is_recorded(&self) -> bool {
        self.config.recorder.is_some()
    }

    fn status_id(&self) -> u64 {
        self.status.slot().id()
    }

    fn peak_room(&self) -> &PeakRoom {
        self.peaks.room()
    }

    fn ticket(&self) -> Option<EventTicket> {
        self.ticket()
    }

    fn report(
        &self,
        ticket: Option<EventTicket>,
        action: Action,
        stream: u32,
        extent: &BlockExtent,
    ) {
        let BlockExtent { address, request } = extent;
        self.report(ticket, action, stream, *address, request.bytes(), request.tag());
    }

    fn count_completion(&self) {
        self.dedicated.count_completion();
    }

    fn reclaim_cache(&self, cache: &'static StreamCache, timeline: &Timeline, heap: &Heap) {
        timeline.detach(self.key);
        self.unregister_cache(cache);
        self.memory.take_back(heap.free_extents().map(|e| e.range));
    }

    fn leak_cache(&self, cache: &'static StreamCache, timeline: &Timeline) {
        self.memory.leak();
        timeline.detach(self.key);
        self.unregister_cache(cache);
    }
}

fn abandoned<'s>(
    bump: &'s Bump,
    caches: &[&'static StreamCache],
) -> List<'s, &'static StreamCache> {
    list(bump, caches.iter().copied().filter(|cache| cache.is_abandoned()))
}
