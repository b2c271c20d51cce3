//! Whole allocations of the driver, on devices without virtual memory mapping.
//!
//! A segment is one `cuMemAlloc`. No block crosses from one segment to the next, even if two are
//! adjacent. A segment is released as a whole, and only by an explicit trim, since `cuMemFree`
//! waits for the device.
#![expect(unsafe_code, reason = "frees device memory")]

use super::{
    Physical,
    handle::{Funds, HandleError, HeldBytes},
    options::{PlaceOptions, PlaceOutcome, Readiness},
};
use crate::{
    Request,
    base::{
        reclaim_cost::{MIB, reclaim_cost},
        released::Released,
    },
    sharing_policy::Fit,
    stream_cache::StreamCache,
};
use aquifer_core::{
    Budget, Charge, DeviceId, MemoryError, Result,
    budget::StrandedCharge,
    scratch::{Bump, List, Scratch, list},
};
use aquifer_driver::{Driver, Relaxed, leftovers};
use aquifer_heap::{HeapBlock, Range};
use aquifer_stream::Timeline;
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The minimum length of segments in bytes, if the budget allows it.
const SEGMENT: u64 = 32 << 20;
/// The granularity of segment lengths in bytes, that of the driver.
const SEGMENT_UNIT: u64 = 2 << 20;

/// The bytes of a segment, in the cost of reclaim.
const COST_UNIT: u64 = 64 * MIB;

/// Physical memory in segments.
pub(crate) struct Segments {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    budget: Budget,
    held: Arc<HeldBytes>,
    /// By address.
    segments: Mutex<BTreeMap<u64, Segment>>,
    /// Scratch memory for the lists of a pass.
    scratch: Scratch,
}

struct Segment {
    bytes: u64,
    charge: Charge,
}

impl Segments {
    pub(crate) fn new(driver: &Arc<dyn Driver>, device: DeviceId, budget: Budget) -> Self {
        let (driver, segments) = (driver.clone(), Mutex::default());
        Self { driver, device, budget, held: Arc::default(), segments, scratch: Scratch::new() }
    }

    fn segments(&self) -> MutexGuard<'_, BTreeMap<u64, Segment>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the ranges of the segments, by address. Read them before a cache is locked, since
    /// the table's lock may sleep.
    fn ranges<'s>(&self, bump: &'s Bump) -> List<'s, Range> {
        list(bump, self.segments().iter().map(|(&at, segment)| Range::new(at, segment.bytes)))
    }

    /// Takes the smallest free segment that holds the request from a cache other than `cache`. Only
    /// whole segments are taken: otherwise their pieces would be scattered over caches and never
    /// released. Returns the range, its cache, the timeline that keeps that cache bound to its
    /// stream, and its stamp.
    fn take_free_segment(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        readiness: Readiness,
    ) -> Option<(Range, &'static StreamCache, Arc<Timeline>, u64)> {
        let pass = self.scratch.begin();
        let segments = self.ranges(&pass);
        let is_segment = |range: Range| is_one_of(&segments, range);
        let mut best: Option<(bool, Range, &'static StreamCache)> = None;
        for &donor in donors.iter().filter(|donor| !std::ptr::eq(**donor, cache)) {
            donor.with(|s| {
                let Some(timeline) = s.timeline() else { return };
                for extent in s.heap.free_extents() {
                    let busy = !timeline.is_done(extent.stamp);
                    let fits = extent.range.len >= request.size() + request.alignment();
                    if fits
                        && (!busy || readiness == Readiness::MayWait)
                        && is_segment(extent.range)
                    {
                        let candidate = (busy, extent.range, donor);
                        if best.is_none_or(|(b, r, _)| (busy, extent.range.len) < (b, r.len)) {
                            best = Some(candidate);
                        }
                    }
                }
            });
        }
        let (_, range, donor) = best?;
        // Another thread of that stream may have taken it in the meantime.
        let (timeline, stamp) =
            donor.with(|s| Some((s.timeline()?.clone(), s.heap.remove(range).ok()?)))?;
        Some((range, donor, timeline, stamp))
    }

    /// Moves a free segment of another cache to `cache`, whose stream waits for it on the
    /// device if necessary, and allocates from it.
    fn adopt(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        readiness: Readiness,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<HeapBlock>> {
        let Some((range, donor, timeline, stamp)) =
            self.take_free_segment(cache, donors, request, readiness)
        else {
            return Ok(None);
        };
        let taker = cache.timeline();
        match taker.wait_for(&timeline, stamp) {
            Ok(waited) => outcome.waits += u64::from(waited),
            Err(error) => {
                donor.with(|s| s.add_segment(range, stamp));
                return Err(error);
            }
        }
        outcome.adopted += range.len;
        Ok(cache.with(|s| {
            // Covers the wait that was just queued.
            s.add_segment(range, taker.open());
            s.allocate(request)
        }))
    }

    /// Returns the bytes of a segment that holds any block of this request.
    fn backing_bytes(request: &Request) -> u64 {
        (request.size() + request.alignment()).div_ceil(SEGMENT_UNIT) * SEGMENT_UNIT
    }

    /// Allocates a segment that `request` fits in, adds it to `cache` and allocates
    /// from it. Returns `None` if neither a large nor an exact segment is available.
    fn grow(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<HeapBlock>> {
        let exact = Self::backing_bytes(request);
        let funds = Funds { budget: &self.budget, reserved: outcome.reserved };
        for bytes in [exact.max(SEGMENT), exact] {
            let charge = match funds.charge(bytes) {
                Ok(charge) => charge,
                Err(refused) => {
                    outcome.refused = Some(HandleError::Budget(refused));
                    continue;
                }
            };
            let taken = {
                let _relaxed = Relaxed::enter(&*self.driver);
                self.driver.mem_alloc(self.device, bytes)
            };
            let address = match taken {
                Ok(address) => address,
                Err(e) if e.is_out_of_memory() => {
                    outcome.refused = Some(HandleError::Driver(e));
                    continue;
                }
                Err(e) => return Err(MemoryError::driver(self.device, e)),
            };
            self.held.add(bytes);
            outcome.grown += bytes;
            let segment = Segment { bytes, charge };
            let whole = Range::new(address, bytes);
            self.segments().insert(address, segment);
            return Ok(cache.with(|s| {
                let epoch = s.timeline().map_or(0, |t| t.open());
                s.add_segment(whole, epoch);
                s.allocate(request)
            }));
        }
        Ok(None)
    }

    /// Keeps a segment whose release the driver has refused while the pool closes. It stays
    /// charged, as stranded, until a later sweep frees it.
    fn retry_free_later(&self, address: u64) {
        let Some(Segment { bytes, charge }) = self.segments().remove(&address) else { return };
        let (driver, device, held) = (self.driver.clone(), self.device, self.held.clone());
        held.strand(bytes);
        let mut stranded = Some(charge.strand());
        leftovers::keep(&self.driver, move || {
            let freed = {
                let _relaxed = Relaxed::enter(&*driver);
                // SAFETY: 1. as in `Segments::free`, which has not succeeded. 2. its pool has been
                // dropped, and with it all caches.
                unsafe { driver.mem_free(device, address) }
            };
            if freed.is_ok() || freed.is_err_and(|e| e.is_device_lost()) {
                held.unstrand(bytes);
                stranded.take().into_iter().for_each(StrandedCharge::freed);
            }
            freed
        });
    }

    /// Releases one segment that is not in use.
    fn free(&self, address: u64) -> Result<()> {
        let Some(segment) = self.segments().remove(&address) else { return Ok(()) };
        let freed = {
            let _relaxed = Relaxed::enter(&*self.driver);
            // SAFETY: 1. it came from `mem_alloc`, and is removed from the table before it is
            // freed. 2. it is in no cache, and the host has seen the epoch done that covers its
            // last use.
            unsafe { self.driver.mem_free(self.device, address) }
        };
        match freed {
            Ok(()) => {
                self.held.sub(segment.bytes);
                drop(segment.charge);
                Ok(())
            }
            Err(error) => {
                self.segments().insert(address, segment);
                Err(MemoryError::driver(self.device, error))
            }
        }
    }
}

/// Returns whether a range is exactly one of these segments, which are sorted.
fn is_one_of(segments: &[Range], range: Range) -> bool {
    let at = segments.partition_point(|segment| segment.start < range.start);
    segments.get(at) == Some(&range)
}

impl Physical for Segments {
    fn held(&self) -> &HeldBytes {
        &self.held
    }

    fn is_mapped(&self) -> bool {
        false
    }

    fn unit(&self) -> u64 {
        1
    }

    fn backing_bytes(&self, request: &Request) -> u64 {
        Self::backing_bytes(request)
    }

    fn reclaim_cost(&self, bytes: u64, _peers: u32) -> Duration {
        let pieces = bytes.div_ceil(COST_UNIT);
        reclaim_cost(pieces, Duration::from_micros(52), bytes, Duration::from_nanos(400))
    }

    fn place(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        options: PlaceOptions,
        _fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<HeapBlock>> {
        let PlaceOptions { readiness, grow, move_handles, .. } = options;
        if !grow && !move_handles || readiness == Readiness::MayWait {
            self.adopt(cache, donors, request, readiness, outcome)
        } else if grow {
            self.grow(cache, request, outcome)
        } else {
            // Segments cannot be moved.
            Ok(None)
        }
    }

    fn idle(&self, caches: &[&'static StreamCache]) -> u64 {
        let pass = self.scratch.begin();
        let segments = self.ranges(&pass);
        let in_cache = |cache: &&'static StreamCache| -> u64 {
            cache.with(|s| {
                let Some(timeline) = s.timeline() else { return 0 };
                let done = s.heap.free_extents().filter(|e| timeline.is_done(e.stamp));
                let whole =
                    |e: &Range| segments.iter().filter(|s| e.covers(s)).map(|s| s.len).sum::<u64>();
                done.map(|e| whole(&e.range)).sum()
            })
        };
        caches.iter().map(in_cache).sum()
    }

    fn trim(&self, caches: &[&'static StreamCache], keep: u64) -> Released {
        // Whole segments, largest first. A release blocks until the device is idle.
        let (before, mut released) = (self.held.now(), Released::default());
        let pass = self.scratch.begin();
        let mut segments = self.ranges(&pass);
        segments.sort_unstable_by_key(|segment| Reverse((segment.len, segment.start)));
        for usable in segments {
            if self.held.now() <= keep {
                break;
            }
            let taken = caches.iter().find_map(|&cache| {
                cache.with(|s| {
                    let timeline = s.timeline()?.clone();
                    let free = s.heap.free_extents().find(|e| e.range.covers(&usable))?;
                    if !timeline.is_done(free.stamp) {
                        return None;
                    }
                    s.heap.remove(usable).ok().map(|stamp| (cache, timeline, stamp))
                })
            });
            // While the timeline is held, the cache is not recycled for another stream.
            let Some((cache, _timeline, stamp)) = taken else { continue };
            if let Err(error) = self.free(usable.start) {
                cache.with(|s| s.add_segment(usable, stamp));
                released.add_refusal(Err(error));
            }
        }
        released.bytes = before.saturating_sub(self.held.now());
        released
    }

    fn inherit(
        &self,
        heir: &'static StreamCache,
        abandoned: &[&'static StreamCache],
    ) -> (u64, u64) {
        let pass = self.scratch.begin();
        let segments = self.ranges(&pass);
        let mut inherited = 0;
        for &donor in abandoned {
            let taken = donor.with(|s| {
                let Some(timeline) = s.timeline().cloned() else { return List::new_in(&*pass) };
                let free =
                    s.heap.free_extents().filter(|e| timeline.is_done(e.stamp)).map(|e| e.range);
                let mut free = list(&pass, free.filter(|&range| is_one_of(&segments, range)));
                free.retain(|&range| s.heap.remove(range).is_ok());
                free
            });
            inherited += taken.iter().map(|range| range.len).sum::<u64>();
            // The host has seen their work done, so no epoch of the receiving stream is needed.
            heir.with(|s| taken.into_iter().for_each(|range| s.add_segment(range, 0)));
        }
        (inherited, 0)
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        let left: Vec<u64> = self.segments().keys().copied().collect();
        for address in left {
            // Every cache has been retired, and its stream was waited for.
            match self.free(address) {
                Ok(()) | Err(MemoryError::DeviceLost { .. }) => {}
                Err(_) => self.retry_free_later(address),
            }
        }
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments").field("held", &self.held.now()).finish_non_exhaustive()
    }
}
