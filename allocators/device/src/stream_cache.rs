//! A stream's cache: its heap, its pending frees, and the recycling of caches.
//!
//! - Each stream has a cache of its own, so its allocations and frees touch no memory that another
//!   stream uses.
//! - Caches are allocated once, never freed, and recycled. In an open pool, a cache serves another
//!   stream when its own has no lease, all blocks have been returned, and the cache holds no memory
//!   any more (see [`close`]). The cache of a closed pool can serve any pool once its last block
//!   has been returned. A block can therefore store a plain `&'static StreamCache` instead of a
//!   reference count.
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
//! Only one block is kept: keeping more of them is faster, but fragments memory. Not kept are:
//!
//! - a block that other streams may still use when it is freed: it is pending, and goes to the heap
//!   when those uses are over. Extras alone, such as the charge of a tenant, make no difference;
//! - any block of a pool with a recorder, or of a stream that is fenced at once.
//!
//! A request that [prefers shared memory] does not take the kept block.
//!
//! [prefers shared memory]: crate::sharing_policy::SharingPolicy::prefers_shared

pub(crate) mod close;
pub(crate) mod free;
mod raw;
mod stats;

use crate::{
    BLOCK_ALIGN, Request,
    base::{
        addresses::{AddressDirectory, AddressMap},
        extent::{BlockExtent, BlockMeta, LazyBox, PackedRequest, UntilFree},
        usage::{LiveBytes, PeakRoom, TagHoldings},
    },
};
use aquifer_core::{Action, Tag, event::EventTicket};
use aquifer_heap::{Config, Heap, Key, Range};
use aquifer_status::{CacheLine, claim_line};
use aquifer_stream::{Spin, StreamPool, Timeline, UseList, Uses};
use crossbeam_utils::CachePadded;
use std::{
    any::Any,
    fmt, mem, ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// A cache's contents behind their lock.
pub(crate) type CacheLock = Spin<CacheState>;

/// A stream's cache. Its address is valid for the life of the process.
pub(crate) struct StreamCache {
    state: CachePadded<CacheLock>,
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
    /// The epoch of the last free. It must be fenced before other streams can take free memory
    /// from this cache.
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
    raw: AddressMap<RawBlock>,
    /// The maximum of the live bytes since the pool's peaks were settled last.
    pub(crate) highest: LiveBytes,
    /// Copies of the counters for other processes. Never read.
    line: &'static CacheLine,
    /// The slot of the pool that the line belongs to, or 0.
    line_owner: u64,
}

/// A reference to a stream's cache, and the key of the block in its heap.
#[derive(Clone, Copy)]
pub(crate) struct CacheRef {
    pub(crate) cache: &'static StreamCache,
    pub(crate) key: Key,
}

/// The part of a block that a cache stores and allocates.
#[derive(Clone, Copy)]
pub(crate) struct BlockToken {
    pub(crate) cache_ref: CacheRef,
    pub(crate) extent: BlockExtent,
}

impl BlockToken {
    /// Makes the token of the block that the heap of `cache` allocated for `request`.
    #[inline]
    pub(crate) fn new(
        cache: &'static StreamCache,
        found: &aquifer_heap::HeapBlock,
        request: &Request,
    ) -> Self {
        let request = PackedRequest::new(request.size(), request.owner());
        let extent = BlockExtent { address: found.address, request };
        Self { cache_ref: CacheRef { cache, key: found.key }, extent }
    }
}

/// A block that was released as its raw address.
pub(crate) enum RawBlock {
    /// The contents of its token.
    Unique(RawToken),
    /// The block itself, which is or was shared, and its request. A cache depends on tokens
    /// only.
    Shared { block: Arc<dyn Any + Send + Sync>, request: PackedRequest },
}

/// The contents of a block's token.
pub(crate) struct RawToken {
    pub(crate) token: BlockToken,
    pub(crate) uses: UseList,
    pub(crate) meta: LazyBox<BlockMeta>,
}

/// What a cache needs of its pool. It is called on slow paths only.
pub(crate) trait CacheHost: Send + Sync {
    /// Returns the streams of the pool.
    fn streams(&self) -> &StreamPool;

    /// Returns whether every event is recorded.
    fn is_recorded(&self) -> bool;

    /// Returns the slot that other processes read the pool's figures from, or 0 if caches do not
    /// count for it.
    fn status_id(&self) -> u64;

    /// Returns what caches take the rises of their highest from.
    fn peak_room(&self) -> &PeakRoom;

    /// Takes a ticket in the order of events, if there is a recorder.
    fn ticket(&self) -> Option<EventTicket>;

    /// Records an event under its ticket, if there is one.
    fn report(
        &self,
        ticket: Option<EventTicket>,
        action: Action,
        stream: u32,
        extent: &BlockExtent,
    );

    /// Counts a completed free that may have dropped attached values.
    fn count_completion(&self);

    /// Removes a retired cache whose stream's work is done, and takes back its free ranges.
    fn reclaim_cache(&self, cache: &'static StreamCache, timeline: &Timeline, heap: &Heap);

    /// Removes a retired cache whose stream could not be waited for. Its memory is kept, since work
    /// may still use it.
    fn leak_cache(&self, cache: &'static StreamCache, timeline: &Timeline);
}

/// What a cache is bound to.
struct Binding {
    pool: Arc<dyn CacheHost>,
    /// Where the pool finds the cache of a raw address.
    directory: Arc<AddressDirectory>,
    /// The index of the cache in its pool.
    number: usize,
    timeline: Arc<Timeline>,
    /// Whether the pool is open. The cache of a closed pool is retired with its last block.
    open: bool,
}

/// Counters beside those of the heap. They are plain integers, since they change under the cache's
/// lock.
///
/// To keep the cost for a block at one or two additions, derived numbers are not stored. Peaks are
/// those of the whole pool: see [`crate::peaks`].
#[derive(Default)]
pub(crate) struct CacheUsage {
    /// Bytes that the live blocks were requested with.
    pub(crate) requested: u64,
    allocations: u64,
    /// Bytes of pending blocks. The heap still counts them as live.
    pub(crate) pending: u64,
    pending_blocks: u64,
    /// Holdings of every tag but [`Tag::NONE`], which has the remainder.
    tagged: TagHoldings,
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

impl StreamCache {
    /// Returns a cache bound to `timeline` for `pool`, recycled or new.
    pub(crate) fn open(
        pool: Arc<dyn CacheHost>,
        directory: Arc<AddressDirectory>,
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
                    raw: AddressMap::default(),
                    highest: LiveBytes::default(),
                    line: claim_line(),
                    line_owner: 0,
                })),
            }))
        });
        cache.bind(pool, directory, timeline, number);
        cache
    }

    /// Binds the cache to `timeline`. No other thread may have a reference to it yet.
    fn bind(
        &'static self,
        pool: Arc<dyn CacheHost>,
        directory: Arc<AddressDirectory>,
        timeline: Arc<Timeline>,
        number: usize,
    ) {
        self.state.with(|s| {
            debug_assert!(s.binding.is_none(), "a cache serves two streams");
            debug_assert!(
                s.pending.is_empty() && s.heap.managed_bytes() == 0,
                "an idle cache holds memory"
            );
            s.needs_follow_up = pool.is_recorded() || timeline.fences_at_once();
            s.line_owner = pool.status_id();
            s.write_line();
            s.binding = Some(Binding { pool, directory, number, timeline, open: true });
        });
    }

    /// Runs `work` under the lock, after the last freed block has been returned to the heap. `work`
    /// must not call the driver.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut CacheState) -> R) -> R {
        self.state.with(|s| {
            s.flush_last();
            let result = work(s);
            s.check();
            result
        })
    }

    /// As [`StreamCache::with`], but leaves the last freed block where it is. `work` must use
    /// neither the heap nor the counters.
    #[inline]
    pub(crate) fn with_unflushed<R>(&self, work: impl FnOnce(&mut CacheState) -> R) -> R {
        self.state.with(work)
    }

    /// Returns the lock, to lock several caches at once.
    pub(crate) fn lock(&self) -> &CacheLock {
        &self.state
    }

    /// Returns the stream of this cache.
    pub(crate) fn timeline(&self) -> Arc<Timeline> {
        // A cache stays bound while a block or an open pool refers to it, and only those call this.
        self.with_unflushed(|s| s.binding.as_ref().map(|binding| binding.timeline.clone()))
            .unwrap_or_else(|| unreachable!("a block outlived the binding of its cache"))
    }

    /// Returns the stream pool of this cache's pool.
    pub(crate) fn streams(&self) -> Option<StreamPool> {
        self.with_unflushed(|s| s.binding.as_ref().map(|binding| binding.pool.streams().clone()))
    }

    /// Allocates from the cache, and returns what `make` makes of the token under the lock. Returns
    /// `None` if the cache has no room, or if the pool's peaks have to settle first. The hot path.
    #[inline]
    pub(crate) fn fast_alloc<B>(
        &'static self,
        request: &Request,
        make: impl FnOnce(&BlockToken) -> B,
    ) -> Option<B> {
        self.state.with(|s| s.allocate_token(self, request).map(make))
    }

    /// As [`StreamCache::fast_alloc`], for a caller that can settle. Returns with the result whether
    /// the peaks are settled. If not, the caller must settle them before it hands out the block.
    pub(crate) fn full_alloc<B>(
        &'static self,
        request: &Request,
        make: impl FnOnce(&BlockToken) -> B,
    ) -> Option<(B, bool)> {
        self.with_unflushed(|s| {
            if let Some(token) = s.allocate_token(self, request) {
                return Some((make(token), true));
            }
            // A refused block is kept like one that was just freed.
            let token = s.last.filter(|_| mem::take(&mut s.last_is_free))?;
            s.usage.allocations += 1;
            Some((make(&token), false))
        })
    }

    /// Returns the bytes that a block of this cache occupies.
    pub(crate) fn size_of(&self, address: u64, key: Key) -> u64 {
        self.with(|s| s.heap.size_of_keyed(address, key)).unwrap_or(0)
    }
}

impl CacheState {
    /// Checks what holds between any two operations, in constant time. Only debug builds check.
    fn check(&self) {
        let (usage, listed) = (&self.usage, self.pending.len() as u64);
        debug_assert!(usage.pending <= self.heap.live_bytes(), "more is pending than occupied");
        debug_assert!(
            usage.pending_blocks <= self.heap.live_blocks(),
            "pending blocks have no memory"
        );
        debug_assert!(listed <= usage.pending_blocks, "a pending block is not counted");
        debug_assert!(
            self.collecting > 0 || listed == usage.pending_blocks,
            "a pending block is in no list"
        );
        debug_assert!(usage.requested <= self.live(), "live blocks are smaller than requested");
        debug_assert!(self.blocks() <= usage.allocations, "a block was never allocated");
    }

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

    /// Allocates from the heap for `request`, and stores the block's token in `last`. Returns
    /// `None` if there is no room. Returns `None` and keeps the block as free if it takes the cache
    /// above its highest, and that cannot rise.
    #[inline(never)]
    fn find_token(&mut self, cache: &'static StreamCache, request: &Request) -> Option<()> {
        self.flush_last();
        let found = self.allocate(request)?;
        self.last = Some(BlockToken::new(cache, &found, request));
        if self.live_bytes().is_within(self.highest) { Some(()) } else { self.admit_last() }
    }

    /// Takes what is live now into account. Returns whether the cache is within its highest then.
    /// If not, the pool's peaks must be settled before a block is handed out. One that is not in
    /// use always needs it: see [`crate::peaks`].
    pub(crate) fn admit(&mut self) -> bool {
        let now = self.live_bytes();
        let rises = |binding: &Binding| {
            let room = binding.pool.peak_room();
            self.highest != LiveBytes::default() && room.take(now.above(self.highest))
        };
        let is_admitted = now.is_within(self.highest) || self.binding.as_ref().is_some_and(rises);
        if is_admitted {
            self.highest = self.highest.max(now);
        }
        debug_assert!(
            !is_admitted || self.live_bytes().is_within(self.highest),
            "an admitted cache is above its highest"
        );
        is_admitted
    }

    /// Takes the block in `last` into account, or keeps it as one that was just freed and returns
    /// `None`: the fast path holds the lock of the cache, so it cannot settle. The full path takes
    /// the block from there, and settles. The fast path pays nothing for this.
    #[cold]
    #[inline(never)]
    fn admit_last(&mut self) -> Option<()> {
        if self.admit() {
            return Some(());
        }
        self.usage.allocations -= 1;
        self.last_free = self.last_free.max(self.open_epoch());
        self.last_is_free = true;
        None
    }

    /// Returns the epoch of the last free, pending blocks included.
    pub(crate) fn last_freed_epoch(&self) -> u64 {
        self.pending.iter().map(|entry| entry.epoch).fold(self.last_free, u64::max)
    }

    /// Returns the last freed block to the heap and the counters, if it is free.
    #[inline]
    pub(crate) fn flush_last(&mut self) {
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
            self.line.count_free(self.heap.live_bytes(), last.extent.request.bytes());
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
        self.line.count_alloc(self.heap.live_bytes(), request.size());
        let usage = &mut self.usage;
        usage.allocations += 1;
        usage.requested += request.size();
        if request.owner() != Tag::NONE {
            let holding = usage.tagged.of_mut(request.owner());
            holding.bytes += request.size();
            holding.blocks += 1;
        }
    }

    /// Returns the open epoch of the stream.
    #[inline]
    fn open_epoch(&self) -> u64 {
        self.binding.as_ref().map_or(0, |binding| binding.timeline.open())
    }

    /// Registers in the pool's directory that a block of this cache has become a raw address.
    pub(crate) fn record_raw(&self, address: u64) {
        if let Some(binding) = &self.binding {
            binding.directory.record(address, binding.number);
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

    fn is_bound_to(&self, pool: &Arc<dyn CacheHost>) -> bool {
        self.binding
            .as_ref()
            .is_some_and(|binding| ptr::addr_eq(Arc::as_ptr(&binding.pool), Arc::as_ptr(pool)))
    }

    /// Returns the stream that the cache is bound to, if any.
    pub(crate) fn timeline(&self) -> Option<&Arc<Timeline>> {
        self.binding.as_ref().map(|binding| &binding.timeline)
    }

    /// Adds memory that is ordered on the stream from `stamp` on. The caller makes sure that the
    /// memory has no other owner.
    pub(crate) fn add(&mut self, range: Range, stamp: u64) {
        let added = self.heap.add(range, stamp);
        debug_assert!(added.is_ok(), "a range without an owner is in the heap: {added:?}");
    }
}

impl CacheUsage {
    #[inline]
    fn record_free(&mut self, request: PackedRequest) {
        self.requested -= request.bytes();
        if request.tag() != Tag::NONE {
            let holding = self.tagged.of_mut(request.tag());
            holding.bytes -= request.bytes();
            holding.blocks -= 1;
        }
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
