//! Physical memory behind a pool's addresses.
//!
//! - With virtual memory management ([`mapped`]), a pool has one range of addresses and a set of
//!   physical handles. Addresses are cheap and handles are memory, so handles are moved to where
//!   they are needed: those of live blocks stay, and those under free ranges can be unmapped and
//!   mapped elsewhere.
//! - Without it ([`segments`]), a pool has whole allocations of the driver. Each is a segment, and
//!   no block crosses segments.

pub(crate) mod handle;
pub(crate) mod mapped;
pub(crate) mod options;
pub(crate) mod segments;
pub(crate) mod shared_free;
pub(crate) mod slots;
pub(crate) mod window;

use crate::{
    Request,
    base::released::Released,
    sharing_policy::{Fit, Granularity},
    stream_cache::StreamCache,
};
use aquifer_core::{
    MemoryError, Result,
    scratch::{Bump, List},
};
use aquifer_heap::{HeapBlock, Range};
use aquifer_stream::Timeline;
use handle::{Handle, HeldBytes};
use options::{PlaceOptions, PlaceOutcome};
use std::{fmt, sync::Arc, time::Duration};

/// The physical memory of a pool, of one of the two kinds. It is called on slow paths only.
pub(crate) trait Physical: fmt::Debug + Send + Sync {
    /// Returns the counter of bytes held from the driver.
    fn held(&self) -> &HeldBytes;

    /// Returns whether the memory is mapped: it can be moved between caches in parts, and be
    /// released without a wait for the device.
    fn is_mapped(&self) -> bool;

    /// Returns the least number of bytes that are released at once: a slot where memory is mapped.
    /// Segments have no common length, so it is 1 there. It is unrelated to the unit of the heap in
    /// [`Granularity::Units`].
    fn unit(&self) -> u64;

    /// Returns the bytes of physical memory that hold any block of this request.
    fn backing_bytes(&self, request: &Request) -> u64;

    /// Returns the cost of releasing `bytes` and taking them again, with `peers` that have access.
    fn reclaim_cost(&self, bytes: u64, peers: u32) -> Duration;

    /// Finds room for `request` in the free memory of `cache` and `donors` and in new memory, as
    /// far as `options` allows, and allocates there. Returns `None` if there is not enough.
    fn place(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        options: PlaceOptions,
        fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<HeapBlock>>;

    /// Returns the bytes that a trim of the caches could release now.
    fn idle(&self, caches: &[&'static StreamCache]) -> u64;

    /// Releases free memory whose work is known to be done from the caches until they hold at most
    /// `keep` bytes.
    fn trim(&self, caches: &[&'static StreamCache], keep: u64) -> Released;

    /// Takes the free memory of caches whose streams have no lease. Mapped memory goes to the
    /// shared free list, and idle segments go to the cache `heir`. Returns the bytes that `heir`
    /// got, and the number of moves begun, as [`Physical::move_counts`] counts them: these
    /// transfers between lists move no handle. Makes no driver call.
    fn inherit(&self, heir: &'static StreamCache, abandoned: &[&'static StreamCache])
    -> (u64, u64);

    /// Takes memory from the driver until `bytes` are held. Returns the bytes taken.
    fn warm(&self, _bytes: u64) -> Result<u64> {
        Err(MemoryError::Unsupported { feature: "virtual memory management (cuMemMap)" })
    }

    /// Allocates a block from the free memory that no cache has, of which the cache gets pieces of
    /// this granularity. Makes no driver call.
    fn allocate_shared(
        &self,
        _cache: &'static StreamCache,
        _request: &Request,
        _pieces: Granularity,
        _fit: Fit,
    ) -> Option<HeapBlock> {
        None
    }

    /// Takes free ranges of at least `least` bytes from caches, for all streams.
    fn share_free(&self, _caches: &[&'static StreamCache], _least: u64) {}

    /// As [`Physical::share_free`], for what each cache has beyond `cap` bytes. Returns the number
    /// of moves begun, one for each such cache. No handle is moved.
    fn cap_caches(&self, _caches: &[&'static StreamCache], _cap: u64) -> u64 {
        0
    }

    /// Takes the ranges of a retired cache. All work of its stream has been waited for.
    fn take_back(&self, _ranges: &mut dyn Iterator<Item = Range>) {}

    /// Marks that queued work which cannot be waited for may still use a cache's memory.
    fn leak(&self) {}

    /// Drops references to streams whose work is done.
    fn forget_done(&self) {}

    /// Releases held memory that is mapped nowhere.
    fn drop_spare(&self) {}

    /// Returns the bytes that are neither in a cache nor in use.
    fn uncached_bytes(&self) -> u64 {
        0
    }

    /// Returns whether an address is free and in no cache.
    fn is_shared_free(&self, _address: u64) -> bool {
        false
    }

    /// Returns the handles behind a range of a live block, and the offset of the range in the
    /// first. They stay where they are while the block lives.
    fn handles(&self, _range: Range) -> Option<(Vec<Arc<Handle>>, u64)> {
        None
    }

    /// Calls `note` for each free range in no cache that queued work may still use, with the number
    /// of that work's stream and the bytes.
    fn shared_in_use(&self, _note: &mut dyn FnMut(u32, u64)) {}

    /// Returns the number of moves begun and ended. Comparing it with a later result shows whether
    /// memory was being moved.
    ///
    /// A move here is any time in which a thread has memory in hand that is in no list: while it is
    /// transferred between lists, backed, or released, with or without a driver call.
    /// [`PoolStats::moves`](aquifer_core::PoolStats::moves) counts something else: handles.
    fn move_counts(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Returns the epochs that unused mappings wait for.
    fn zombie_fences<'s>(&self, bump: &'s Bump) -> List<'s, (Arc<Timeline>, u64)> {
        List::new_in(bump)
    }
}
