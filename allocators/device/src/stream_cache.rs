//! A stream's cache: its heap, its pending frees, and the recycling of caches.
//!
//! - Each stream has a cache of its own, so its allocations and frees touch no memory that another
//!   stream uses.
//! - Caches are allocated once, never freed, and recycled. When the last block of a closed pool's
//!   cache is returned, the cache can serve another stream. A block can therefore store a plain
//!   `&'static StreamCache` instead of a reference count.
//! - **Memory in a cache's heap is ordered on its stream.** If only the owner stream used a block,
//!   its free returns the block to the heap at once, and the stream can reuse it at once. If other
//!   streams used it too, the block stays pending outside the heap until their uses are done, or
//!   until the owner stream has been made to wait for them.
//! - Each free range carries the epoch of the stream that covers its last use. Another stream needs
//!   that epoch to take the range over.
//!
//! ```text
//!   block ──drop──▶ other uses done? ──yes──▶ heap (epoch e of this stream)
//!                        │ no                   ▲
//!                        ▼                      │ all done, or this stream waits for them
//!                     pending ──────────────────┘
//! ```
//!
//! # The block that was freed last
//!
//! The last freed block stays in front of the heap as a token. The next allocation with the same
//! size, tag and default alignment takes it without a heap operation, so a loop over one block does
//! not split and merge extents each time. The heap and the counters count this block as live.
//! [`StreamCache::with`] first returns it to the heap, so every other use of the cache sees it as
//! free.
//!
//! Only one block is kept: keeping more of them is faster, but fragments memory.

pub(crate) mod recycle;
mod stats;

use crate::{
    BLOCK_ALIGN, Block, Request,
    base::{
        dependencies::StreamDeps,
        driver::notify_observer,
        extent::{BlockExtent, BlockMeta, PackedRequest, UntilFree},
        lazy_box::LazyBox,
    },
    block::{BlockToken, CacheRef},
    pool::PoolCore,
};
use aquifer_core::{Action, MemoryError, Tag, budget::Holding, event::EventTicket};
use aquifer_driver::{DeviceRange, Ownership, RawStream};
use aquifer_heap::{Config, Heap, Key, Range};
use aquifer_stream::{LastUse, Noted, Spin, StreamPool, Timeline, UseList, Uses};
use crossbeam_utils::CachePadded;
use std::{
    fmt, mem,
    sync::{Arc, Mutex, PoisonError},
};

/// A stream's cache. Its address is valid for the life of the process.
pub(crate) struct StreamCache {
    state: CachePadded<Spin<CacheState>>,
}

/// The contents of a cache. All of it is protected by the cache's lock.
pub(crate) struct CacheState {
    pub(crate) heap: Heap,
    /// Freed blocks that other streams still use.
    pub(crate) pending: Vec<PendingFree>,
    /// Number of threads that have removed the pending blocks from the list to collect them.
    collecting: u32,
    /// Calls of [`StreamCache::collect_throttled`] still to be skipped.
    skip_collects: usize,
    pub(crate) usage: CacheUsage,
    /// The epoch of the last free, including frees of pending blocks. It must be fenced before
    /// other streams can take free memory from this cache.
    pub(crate) last_free: u64,
    /// The current binding; `None` while the cache is idle.
    binding: Option<Binding>,
    /// The block that was freed last.
    last: Option<BlockToken>,
    /// Whether `last` is free and ready for the next allocation. The heap and the counters still
    /// count it as live.
    last_is_free: bool,
    /// Whether a free has more to do than to return its bytes: report an event, retire the cache
    /// of a closed pool, or fence the stream at once.
    needs_follow_up: bool,
    /// Blocks that were converted into raw addresses.
    pub(crate) raw: crate::raw::CacheRawTable,
}

/// What a cache is bound to.
struct Binding {
    pool: Arc<PoolCore>,
    /// The index of the cache in its pool.
    number: usize,
    timeline: Arc<Timeline>,
    /// Whether the pool is open. The cache of a closed pool is retired with its last block.
    open: bool,
}

/// Counters beside those of the heap. They are plain integers, since they change under the cache's
/// lock.
///
/// To keep the cost for a block at one or two additions, derived numbers are not stored, and peaks
/// are updated only where a number grows.
#[derive(Default)]
pub(crate) struct CacheUsage {
    /// Bytes that the live blocks were requested with.
    pub(crate) requested: u64,
    peak_live: u64,
    peak_requested: u64,
    allocations: u64,
    /// Bytes of pending blocks. The heap still counts them as live.
    pub(crate) pending: u64,
    pending_blocks: u64,
    /// Holdings of every tag but [`Tag::NONE`], which has the remainder.
    tagged: Vec<Holding>,
    /// Index in `tagged` of the last block's tag. The next block usually has the same tag.
    last: usize,
}

/// A freed block that other streams still use.
pub(crate) struct PendingFree {
    pub(crate) token: BlockToken,
    /// Bytes of the heap that it occupies.
    bytes: u64,
    /// As [`BlockMeta::generation`].
    generation: u64,
    /// The epoch of the owner stream that covers the block's own work.
    epoch: u64,
    /// Uses that were not known to be done when last polled.
    pub(crate) uses: Uses,
    until_free: UntilFree,
}

/// Number of pending blocks that one call may examine without releasing any, averaged over many
/// calls.
const PENDING_PER_SKIPPED_CALL: usize = 256;

/// How pending blocks are released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CollectMode {
    /// Release blocks whose uses are known to be done.
    Completed,
    /// Also make the owner stream wait on the device for stamped uses.
    WaitOnDevice,
}

/// Idle caches that any pool can take.
static UNBOUND: Mutex<Vec<&'static StreamCache>> = Mutex::new(Vec::new());

/// The remaining steps of closing a cache, kept because the driver refused to wait. Within a host
/// callback the driver refuses every call.
enum DeferredTeardown {
    Close(&'static StreamCache, Arc<PoolCore>),
    Finish(&'static StreamCache, Box<RetiredCache>),
}

static DEFERRED: Mutex<Vec<DeferredTeardown>> = Mutex::new(Vec::new());

fn defer_teardown(deferred: DeferredTeardown) {
    DEFERRED.lock().unwrap_or_else(PoisonError::into_inner).push(deferred);
}

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

/// Work to be done after the lock is released.
pub(crate) struct FreeFollowUp {
    /// An epoch that has to be fenced now, since no event can be recorded for it later.
    fence: Option<(Arc<Timeline>, u64)>,
    token: BlockToken,
    events: Option<FreeEvents>,
    retired: Option<RetiredCache>,
}

/// Recorder events with their tickets. The pool is stored, since the cache may serve another stream
/// by the time they are reported.
struct FreeEvents {
    pool: Arc<PoolCore>,
    /// The stream's number.
    stream: u32,
    free_ticket: Option<EventTicket>,
    complete_ticket: Option<EventTicket>,
}

impl FreeEvents {
    fn record(self, token: &BlockToken) {
        let Self { pool, stream, .. } = self;
        let BlockExtent { address, request } = token.extent;
        for (ticket, action) in
            [(self.free_ticket, Action::Free), (self.complete_ticket, Action::Complete)]
        {
            pool.report(ticket, action, stream, address, request.bytes(), request.tag());
        }
    }
}

/// A cache of a closed pool, registered to be notified when a use of a pending block ends.
struct CloseOnLastUse(&'static StreamCache, Arc<PoolCore>);

impl LastUse for CloseOnLastUse {
    fn ended(&self) {
        self.0.close(&self.1);
    }
}

/// What a retired cache held. It must be dropped after the lock is released.
pub(crate) struct RetiredCache {
    heap: Heap,
    binding: Option<Binding>,
}

impl StreamCache {
    /// Returns a cache bound to `timeline` for `pool`, recycled or new.
    pub(crate) fn open(
        pool: Arc<PoolCore>,
        timeline: Arc<Timeline>,
        number: usize,
    ) -> &'static StreamCache {
        let old = UNBOUND.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let cache = old.unwrap_or_else(|| {
            Box::leak(Box::new(StreamCache {
                state: CachePadded::new(Spin::new(CacheState {
                    heap: Heap::new(Config::device()),
                    pending: Vec::new(),
                    collecting: 0,
                    skip_collects: 0,
                    usage: CacheUsage::default(),
                    last_free: 0,
                    binding: None,
                    last: None,
                    last_is_free: false,
                    needs_follow_up: false,
                    raw: crate::raw::CacheRawTable::default(),
                })),
            }))
        });
        cache.bind(pool, timeline, number);
        cache
    }

    /// Binds the cache to `timeline`. No other thread may have a reference to it yet.
    fn bind(&'static self, pool: Arc<PoolCore>, timeline: Arc<Timeline>, number: usize) {
        self.state.with(|s| {
            s.needs_follow_up = pool.is_recorded() || timeline.fences_at_once();
            s.binding = Some(Binding { pool, number, timeline, open: true });
        });
    }

    /// Runs `work` under the lock, after the last freed block has been returned to the heap. `work`
    /// must not call the driver.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut CacheState) -> R) -> R {
        self.state.with(|s| {
            s.flush_last();
            work(s)
        })
    }

    /// As [`StreamCache::with`], but leaves the last freed block where it is. `work` must use
    /// neither the heap nor the counters.
    #[inline]
    pub(crate) fn with_unflushed<R>(&self, work: impl FnOnce(&mut CacheState) -> R) -> R {
        self.state.with(work)
    }

    /// Returns the stream of this cache.
    pub(crate) fn timeline(&self) -> Arc<Timeline> {
        // A cache stays bound while a block or an open pool refers to it, and only those call this.
        self.with_unflushed(|s| s.binding.as_ref().map(|binding| binding.timeline.clone()))
            .unwrap_or_else(|| unreachable!("a block outlived its shell's service"))
    }

    /// Returns the stream pool of this cache's pool.
    pub(crate) fn streams(&self) -> Option<StreamPool> {
        self.with_unflushed(|s| s.binding.as_ref().map(|binding| binding.pool.streams().clone()))
    }

    /// Allocates a block from the cache, or returns `None` if it has no room. The hot path, for
    /// pools without recorder and observer.
    #[inline]
    pub(crate) fn fast_alloc(&'static self, request: &Request) -> Option<Block> {
        self.state.with(|s| s.allocate_token(self, request).map(Block::from_token))
    }

    /// As [`StreamCache::fast_alloc`], and reports the block to the recorder and the observer.
    /// Returns `None` if the request is to be served from the ranges that streams share.
    pub(crate) fn try_alloc(&'static self, pool: &PoolCore, request: &Request) -> Option<Block> {
        if pool.sharing_policy.prefers_shared(request.size()) {
            return None;
        }
        let (token, ticket) = self.state.with(|s| {
            let token = *s.allocate_token(self, request)?;
            Some((token, pool.ticket()))
        })?;
        Some(pool.make_block(self, &token, ticket))
    }

    /// Returns the bytes that a block of this cache occupies.
    pub(crate) fn size_of(&self, address: u64, key: Key) -> u64 {
        self.with(|s| s.heap.size_of_keyed(address, key)).unwrap_or(0)
    }

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
        if let Some((timeline, epoch)) = after.fence {
            // After a refusal the range has no proof of completion, so no other stream can take it
            // until a later event covers it.
            let _ = timeline.fence_at_once(epoch);
        }
        if let Some(events) = after.events {
            events.record(&after.token);
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
            let users: Vec<RawStream> = uses.iter().map(|u| u.on().raw()).collect();
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
            // The block's own work ends in this epoch, so the next fence of this stream has to
            // cover it.
            s.last_free = s.last_free.max(epoch);
            s.pending.push(PendingFree { token, bytes, generation, epoch, uses, until_free });
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

    /// Calls [`StreamCache::collect_pending`] with [`CollectMode::Completed`], at a cost a call
    /// that does not grow with the number of pending blocks: after a walk that released nothing,
    /// one call is skipped for each [`PENDING_PER_SKIPPED_CALL`] blocks that the walk examined.
    /// Returns the bytes released.
    pub(crate) fn collect_throttled(&'static self) -> aquifer_core::Result<u64> {
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
    pub(crate) fn collect_pending(
        &'static self,
        mode: CollectMode,
    ) -> aquifer_core::Result<(u64, u64)> {
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
            entry.uses.forget_done();
            let waited_for =
                |u: Noted| u.epoch().is_some_and(|epoch| u.on().is_waited_for_unasked(epoch));
            if may_wait && outcome.is_ok() && entry.uses.iter().all(waited_for) {
                for noted in entry.uses.iter() {
                    match noted
                        .epoch()
                        .map_or(Ok(false), |epoch| timeline.wait_for(noted.on(), epoch))
                    {
                        Ok(waited) => waits += u64::from(waited),
                        Err(error) => {
                            outcome = Err(error);
                            break;
                        }
                    }
                }
                if outcome.is_ok() {
                    entry.uses.clear();
                    // The waits are queued, and belong to the epoch that is open now.
                    entry.epoch = timeline.open();
                }
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
                binding.pool.dedicated.count_completion();
            }
            s.usage.pending -= bytes;
            s.usage.pending_blocks -= 1;
            let events = s.free_events(false, true);
            s.free_to_heap(&token, epoch);
            events
        });
        if let Some(events) = events {
            events.record(&token);
        }
    }

    /// Closes the cache if it is still bound to `pool`: it retires when its last block has been
    /// returned, perhaps now.
    pub(crate) fn close(&'static self, pool: &Arc<PoolCore>) {
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

    /// Waits for the stamped uses of the first pending block that has no open use, then collects
    /// pending frees. Returns whether there was such a use. Blocks until `deadline`.
    pub(crate) fn wait_for_pending(
        &'static self,
        deadline: Option<std::time::Instant>,
    ) -> aquifer_core::Result<bool> {
        let oldest: StreamDeps = self.with(|s| {
            let first = s.pending.iter().find(|p| !p.uses.is_open());
            first.into_iter().flat_map(|p| p.uses.stamped()).collect()
        });
        for (timeline, epoch) in &oldest {
            timeline.wait(*epoch, deadline)?;
        }
        if !oldest.is_empty() {
            self.collect_pending(CollectMode::Completed)?;
        }
        Ok(!oldest.is_empty())
    }

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
    /// Takes the last freed block if it fits `request`, or allocates from the heap. For a loop that
    /// allocates and frees one block this avoids a split and a merge each time.
    #[inline]
    pub(crate) fn allocate_token(
        &mut self,
        cache: &'static StreamCache,
        request: &Request,
    ) -> Option<&BlockToken> {
        let fits = |last: &BlockToken| {
            last.extent.request == PackedRequest::new(request.size(), request.owner())
                && request.alignment() == BLOCK_ALIGN
        };
        if self.last_is_free && self.last.as_ref().is_some_and(fits) {
            // The block was never counted as freed, so only the number of allocations changes.
            self.usage.allocations += 1;
        } else {
            self.find_token(cache, request)?;
        }
        self.last_is_free = false;
        self.last.as_ref()
    }

    /// Allocates from the heap for `request`, and stores the block's token in `last`.
    #[inline(never)]
    fn find_token(&mut self, cache: &'static StreamCache, request: &Request) -> Option<()> {
        self.flush_last();
        let found = self.allocate(request)?;
        self.last = Some(BlockToken::new(cache, &found, request));
        Some(())
    }

    /// Returns the last freed block to the heap and the counters, if it is free.
    #[inline]
    fn flush_last(&mut self) {
        if mem::take(&mut self.last_is_free) {
            self.flush_to_heap();
        }
    }

    #[inline(never)]
    fn flush_to_heap(&mut self) {
        if let Some(last) = self.last {
            self.usage.record_free(last.extent.request);
            // No free has come since, so this is the block's own epoch, or a later one.
            self.free_to_heap(&last, self.last_free);
        }
    }

    /// Allocates a range for `request` from the heap, and counts it.
    #[inline]
    pub(crate) fn allocate(&mut self, request: &Request) -> Option<aquifer_heap::HeapBlock> {
        let block = self.heap.alloc(request.size(), request.alignment())?;
        self.count(request);
        Some(block)
    }

    /// As [`CacheState::allocate`], in exactly this free range.
    pub(crate) fn allocate_at(
        &mut self,
        range: Range,
        request: &Request,
    ) -> Option<aquifer_heap::HeapBlock> {
        let block = self.heap.alloc_at(range).ok()?;
        self.count(request);
        Some(block)
    }

    /// Counts a block that the heap has just allocated.
    #[inline]
    fn count(&mut self, request: &Request) {
        let live = self.live();
        let usage = &mut self.usage;
        usage.peak_live = usage.peak_live.max(live);
        usage.allocations += 1;
        usage.requested += request.size();
        usage.peak_requested = usage.peak_requested.max(usage.requested);
        if request.owner() != Tag::NONE {
            let holding = usage.holding(request.owner());
            holding.bytes += request.size();
            holding.blocks += 1;
        }
    }

    /// Returns the open epoch of the stream.
    #[inline]
    fn open_epoch(&self) -> u64 {
        self.binding.as_ref().map_or(0, |binding| binding.timeline.open())
    }

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

    /// Registers in the pool's directory that a block of this cache has become a raw address.
    pub(crate) fn record_raw(&self, address: u64) {
        if let Some(binding) = &self.binding {
            binding.pool.directory.record(address, binding.number);
        }
    }

    #[inline]
    fn free_to_heap(&mut self, token: &BlockToken, epoch: u64) {
        self.last_free = self.last_free.max(epoch);
        // A block is freed once, by the only token that owns it. If the heap refuses nevertheless,
        // the bytes stay unused, so nothing is corrupted.
        let outcome = self.heap.free_keyed(token.extent.address, token.cache_ref.key, epoch);
        debug_assert!(outcome.is_ok(), "the heap refused a block's only token: {outcome:?}");
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

    /// Takes tickets for a free, for its completion, or for both, if the pool has a recorder.
    fn free_events(&self, free: bool, complete: bool) -> Option<FreeEvents> {
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

    fn is_bound_to(&self, pool: &Arc<PoolCore>) -> bool {
        self.binding.as_ref().is_some_and(|binding| Arc::ptr_eq(&binding.pool, pool))
    }

    /// Returns the stream that the cache is bound to, if any.
    pub(crate) fn timeline(&self) -> Option<&Arc<Timeline>> {
        self.binding.as_ref().map(|binding| &binding.timeline)
    }

    /// Adds memory that is ordered on the stream from `stamp` on. The caller makes sure that the
    /// memory has no other owner.
    pub(crate) fn add(&mut self, range: Range, stamp: u64) {
        let added = self.heap.add(range, stamp);
        debug_assert!(added.is_ok(), "a range that was nobody's is in the heap: {added:?}");
    }

    /// As [`CacheState::add`], for memory whose ends no block may cross.
    pub(crate) fn add_segment(&mut self, range: Range, stamp: u64) {
        let added = self.heap.add_segment(range, stamp);
        debug_assert!(added.is_ok(), "a range that was nobody's is in the heap: {added:?}");
    }

    fn retire_if_done(&mut self) -> Option<RetiredCache> {
        let over = self.binding.as_ref().is_some_and(|v| !v.open);
        if !over || self.blocks() > 0 || !self.pending.is_empty() || self.collecting > 0 {
            return None;
        }
        self.usage = CacheUsage::default();
        self.last_free = 0;
        self.skip_collects = 0;
        self.needs_follow_up = false;
        let heap = mem::replace(&mut self.heap, Heap::new(Config::device()));
        Some(RetiredCache { heap, binding: self.binding.take() })
    }
}

impl CacheUsage {
    #[inline]
    fn record_free(&mut self, request: PackedRequest) {
        self.requested -= request.bytes();
        if request.tag() != Tag::NONE {
            let holding = self.holding(request.tag());
            holding.bytes -= request.bytes();
            holding.blocks -= 1;
        }
    }

    #[inline]
    fn holding(&mut self, tag: Tag) -> &mut Holding {
        if self.tagged.get(self.last).is_none_or(|h| h.tag != tag) {
            self.last = self.find(tag);
        }
        &mut self.tagged[self.last]
    }

    /// Searches from the front, since there are few tags.
    #[inline(never)]
    fn find(&mut self, tag: Tag) -> usize {
        self.tagged.iter().position(|h| h.tag == tag).unwrap_or_else(|| {
            self.tagged.push(Holding { tag, bytes: 0, blocks: 0 });
            self.tagged.len() - 1
        })
    }
}

impl fmt::Debug for StreamCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|s| {
            f.debug_struct("StreamCache")
                .field("live", &s.live())
                .field("pending", &s.usage.pending)
                .field("stream", &s.timeline().map(|t| t.number()))
                .finish_non_exhaustive()
        })
    }
}
