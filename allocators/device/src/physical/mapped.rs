//! One range of addresses, and physical handles that are mapped where they are needed.
//!
//! All streams of the pool share the range: any free part of it can be transferred from one
//! stream's cache to another's, a unit at a time. A handle is mapped and unmapped as a whole:
//!
//! ```text
//!   unclaimed ──claim──▶ being backed ──map, set access──▶ in the streams' caches ──┐
//!       ▲                                                     │ wholly free          │ live blocks keep it
//!      │                                                     ▼                      │
//!       ├───────────── unmap ◀── taken out of the caches, all work there known done  │
//!       └── unmap, later ◀── zombie: handle mapped elsewhere, some work not done ◀───┘
//! ```
//!
//! **A move** takes a handle from under free memory and maps it where memory is missing. If the
//! work that last used the memory is known to be done, the old mapping is removed first. If not,
//! the new mapping is made first, and the receiving stream waits for that work on the device. The
//! old mapping becomes a *zombie*: it is removed when the host has seen the work done, since
//! unmapping is not stream ordered. The host does not wait.
//!
//! **Handle sizes.** The cost of a mapping depends on the number of handles and hardly on their
//! size. So a block of 512 MiB gets a few large handles if a handle is far smaller than the memory
//! that is left, and small ones near the limit: see [`Mapped::largest_handle`]. A large handle that
//! is free but does not fit where memory is missing is released to the driver, its
//! charge is kept, and new handles of the right size are created with that charge.
//!
//! A mutex protects the table. It is never held during a driver call. While calls are made, the
//! memory they concern is in no cache, so no other thread can reach it.

mod free_ranges;
mod mapping;
mod plan;
mod release;
mod warm;

use super::{
    handle::{HandleError, HeldBytes},
    shared_free::SharedFreeList,
    slots::{Mapping, Slots},
    window::{self, Grid, Window},
};
use crate::{
    Request, base::dependencies::is_done_except, sharing_policy::Fit, stream_cache::StreamCache,
};
use aquifer_core::{
    Budget, DeviceId, MemoryError, Reservation, Result,
    scratch::{List, Scratch},
};
use aquifer_driver::Driver;
use aquifer_heap::{Config, Range};
use free_ranges::{FreeRanges, RangePiece};
use plan::MappingPlan;
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The size classes of the caches.
const HEAP: Config = Config::device();
/// The maximum size of a handle in bytes. Beyond it the cost hardly falls, and the memory that one
/// block pins grows.
const LARGEST_HANDLE: u64 = 64 << 20;
/// A handle is at most this fraction of what the pool could still provide.
const HEADROOM_PARTS: u64 = 4096;

/// Which free memory of other caches may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readiness {
    /// Memory whose last work the host has seen done.
    Completed,
    /// Also memory that is still in use: the receiving stream waits for it on the device.
    MayWait,
}

/// The pieces in which memory is transferred between caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Granularity {
    /// Whole slots, so that caches stay separate.
    Slots,
    /// Single units.
    Units,
}

/// The options of an attempt to place a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlaceOptions {
    pub(crate) readiness: Readiness,
    pub(crate) granularity: Granularity,
    /// Whether new memory may be taken from the driver.
    pub(crate) grow: bool,
    /// Whether handles may be taken from under free memory elsewhere.
    pub(crate) move_handles: bool,
}

/// The result of an attempt to place a block.
#[derive(Default, Debug)]
pub(crate) struct PlaceOutcome<'a> {
    /// A reservation that new memory draws from before it charges the budget.
    pub(crate) reserved: Option<&'a Mutex<Reservation>>,
    /// If the attempt may grow but not steal, it grows by the whole block.
    pub(crate) whole: bool,
    /// Bytes taken from the driver.
    pub(crate) grown: u64,
    /// Bytes taken over from other caches.
    pub(crate) adopted: u64,
    /// Handles that were moved, or released and recreated.
    pub(crate) moves: u64,
    /// Waits queued on the device.
    pub(crate) waits: u64,
    /// Moves of memory that this call has begun.
    pub(crate) own_moves: u64,
    /// Why no more could be taken from the driver.
    pub(crate) refused: Option<HandleError>,
}

/// The physical memory of one range of addresses.
pub(crate) struct Mapped {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    /// The devices that can access the mappings. The first is the device itself.
    accessors: Arc<[DeviceId]>,
    /// Start of the reserved range.
    base: u64,
    /// Its length in bytes.
    bytes: u64,
    /// Bytes of a slot, which is the smallest handle.
    slot: u64,
    /// The most slots that one handle covers.
    max_handle_slots: u64,
    /// Whether to move handles before growing.
    compact: bool,
    budget: Budget,
    held: Arc<HeldBytes>,
    slots: Mutex<Slots>,
    /// Free ranges that are in no cache.
    shared_free: Mutex<SharedFreeList>,
    /// Scratch memory for the lists of a pass.
    scratch: Scratch,
    /// The number of transits begun and ended.
    moves_begun: AtomicU64,
    moves_ended: AtomicU64,
    /// Set if work that cannot be waited for may still use the mappings. They are then never
    /// unmapped.
    leaked: AtomicBool,
}

/// A window whose slots are claimed and whose backed parts are taken out of their caches.
struct Claim<'a> {
    window: Window<'a>,
    pieces: List<'a, RangePiece>,
    /// The maximum number of slots that one handle may cover.
    largest: u64,
    /// Lasts from before anything is taken until all of it is in some list again.
    _move: MoveGuard<'a>,
}

/// The outcome of an attempt to take a window.
enum ClaimOutcome<'a> {
    Claimed(Claim<'a>),
    /// Nothing that may be used is large enough.
    NoWindow,
    /// Another thread has changed a cache since it was read: retry with new free ranges.
    Raced,
}

/// Marks memory that is being moved, which other threads cannot see. It is counted before the
/// memory is taken. So a thread that finds nothing, and no move, has seen all memory.
struct MoveGuard<'a>(&'a Mapped);

impl Drop for MoveGuard<'_> {
    fn drop(&mut self) {
        self.0.moves_ended.fetch_add(1, Ordering::SeqCst);
    }
}

impl Mapped {
    /// Reserves addresses for sixteen times the device's memory, or less if the process has not
    /// that many left. Addresses cost nothing, and a block needs them in one piece. The memory is
    /// on the first device of `accessors`, and all of them can access it. With `fixed`, all handles
    /// have the size of a slot.
    pub(crate) fn open(
        driver: &Arc<dyn Driver>,
        accessors: Arc<[DeviceId]>,
        memory: u64,
        slot: u64,
        fixed: bool,
        compact: bool,
        budget: Budget,
    ) -> Result<Self> {
        let device = accessors[0];
        let mut bytes = memory.saturating_mul(16).div_ceil(slot) * slot;
        let base = loop {
            match driver.address_reserve(device, bytes, slot) {
                Ok(base) => break base,
                Err(e) if e.is_out_of_memory() && bytes / 2 >= memory.max(slot) => {
                    bytes = (bytes / 2).div_ceil(slot) * slot;
                }
                Err(e) => return Err(MemoryError::driver(device, e)),
            }
        };
        Ok(Self {
            driver: driver.clone(),
            device,
            accessors,
            base,
            bytes,
            slot,
            max_handle_slots: if fixed { 1 } else { (LARGEST_HANDLE / slot).max(1) },
            compact,
            budget,
            held: Arc::default(),
            slots: Mutex::new(Slots::new(bytes / slot)),
            shared_free: Mutex::default(),
            scratch: Scratch::new(),
            moves_begun: AtomicU64::new(0),
            moves_ended: AtomicU64::new(0),
            leaked: AtomicBool::new(false),
        })
    }

    pub(crate) fn held(&self) -> &HeldBytes {
        &self.held
    }

    /// Returns the bytes that are neither in a cache nor in use: unmapped handles and the shared
    /// free list.
    pub(crate) fn spare_bytes(&self) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        spare + self.shared_free().bytes()
    }

    /// Calls `note` for each free range in no cache that queued work may still use, with the number
    /// of that work's stream and the bytes.
    pub(crate) fn shared_in_use(&self, mut note: impl FnMut(u32, u64)) {
        for (range, deps) in self.shared_free().iter() {
            let busy = deps.iter().filter(|(timeline, epoch)| !timeline.is_done(*epoch));
            busy.for_each(|(timeline, _)| note(timeline.number(), range.len));
        }
    }

    /// Returns whether an address is free and in no cache.
    pub(crate) fn is_shared_free(&self, address: u64) -> bool {
        self.shared_free().covers(address)
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared_free(&self) -> MutexGuard<'_, SharedFreeList> {
        self.shared_free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self, slot: u64) -> u64 {
        self.base + slot * self.slot
    }

    fn range(&self, first: u64, count: u64) -> Range {
        Range { start: self.address(first), len: count * self.slot }
    }

    /// Returns the whole slots inside a range: first and count.
    fn whole_slots(&self, range: Range) -> (u64, u64) {
        let first = (range.start - self.base).div_ceil(self.slot);
        let end = (range.start + range.len - self.base) / self.slot;
        (first, end.saturating_sub(first))
    }

    fn driver_error(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    fn begin_move(&self) -> MoveGuard<'_> {
        self.moves_begun.fetch_add(1, Ordering::SeqCst);
        MoveGuard(self)
    }

    /// Returns the number of transits begun and ended. Comparing it with a later result shows
    /// whether memory was being moved.
    pub(crate) fn move_counts(&self) -> (u64, u64) {
        // The end count is read first. Otherwise a move that begins and ends between the two
        // reads would look unfinished.
        let moves_ended = self.moves_ended.load(Ordering::SeqCst);
        (self.moves_begun.load(Ordering::SeqCst), moves_ended)
    }

    /// Returns the maximum number of slots of a new handle, while `live` bytes of the held memory
    /// are in use: a fixed part of what could still be provided. So the memory that one live block
    /// pins is small compared to the rest, and handles become small near the limit.
    fn largest_handle(&self, live: u64) -> u64 {
        let left = self.budget.remaining() + self.held.now().saturating_sub(live);
        let slots = (left / HEADROOM_PARTS / self.slot).clamp(1, self.max_handle_slots);
        1 << slots.ilog2()
    }

    /// Finds room for `request` in the free ranges of `cache` and `donors` and in unclaimed slots,
    /// and maps what is missing, as far as `options` allows. Returns `None` if there is not enough;
    /// then only unused handles may have moved.
    pub(crate) fn place(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        request: &Request,
        options: PlaceOptions,
        fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<Option<aquifer_heap::HeapBlock>> {
        let pass = self.scratch.begin();
        self.reap_zombies(&pass)?;
        // A failed race is retried: another thread has made progress, so this terminates.
        let claim = loop {
            let free_ranges = self.free_ranges(&pass, donors, Some(cache), options.readiness);
            match self.claim(cache, &free_ranges, request, options, fit, outcome) {
                ClaimOutcome::Claimed(claim) => break claim,
                ClaimOutcome::NoWindow => return Ok(None),
                ClaimOutcome::Raced => std::thread::yield_now(),
            }
        };
        let mut plan = MappingPlan::new(&pass);
        match self.back_window(cache, donors, &claim, options, &mut plan, outcome) {
            Ok(true) => {
                let (used, unused) = plan.split_busy();
                self.zombify(used);
                self.restore_mappings(unused);
                self.stash_spare(&mut plan);
                let foreign = claim.pieces.iter().filter(|piece| !piece.is_from(cache));
                outcome.adopted += foreign.map(|piece| piece.range.len).sum::<u64>();
                Ok(self.commit_claim(cache, claim, request))
            }
            Ok(false) => {
                self.restore_mappings(plan.busy.drain(..));
                self.stash_spare(&mut plan);
                self.unclaim(claim);
                Ok(None)
            }
            Err(error) => {
                self.restore_mappings(plan.busy.drain(..));
                plan.forget_new();
                self.stash_spare(&mut plan);
                self.unclaim_except(claim, &plan.stuck);
                self.zombify_mappings(plan.stuck);
                Err(error)
            }
        }
    }

    fn grid(&self) -> Grid {
        Grid { base: self.base, slot: self.slot }
    }

    /// Allocates a block from the shared free list, at the best place by `fit` that is ready for
    /// its stream. Makes no driver call.
    pub(crate) fn allocate_shared(
        &self,
        cache: &'static StreamCache,
        request: &Request,
        fit: Fit,
    ) -> Option<aquifer_heap::HeapBlock> {
        let bytes = request.size().checked_next_multiple_of(HEAP.unit)?;
        let small = bytes <= HEAP.small_max;
        let (len, align) = (if small { HEAP.page } else { bytes }, request.alignment());
        let own = cache.timeline();
        let (range, deps) = {
            let mut shared_free = self.shared_free();
            let range = shared_free
                .find(len, align, fit, self.grid(), |deps| is_done_except(deps, Some(&own)))?;
            (range, shared_free.take(range)?)
        };
        // Dependencies that are not done belong to the stream itself.
        let stamp = deps.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0).min(own.open());
        cache.with(|s| {
            s.add(range, stamp);
            if small { s.allocate(request) } else { s.allocate_at(range, request) }
        })
    }

    /// Maps what is missing in a claim, and makes the stream of `cache` wait for the work on the
    /// memory it takes over. Returns whether there was enough.
    fn back_window(
        &self,
        cache: &'static StreamCache,
        donors: &[&'static StreamCache],
        claim: &Claim<'_>,
        options: PlaceOptions,
        plan: &mut MappingPlan<'_>,
        outcome: &mut PlaceOutcome<'_>,
    ) -> Result<bool> {
        if !self.gather_handles(donors, claim, options, plan, outcome)? {
            return Ok(false);
        }
        let taker = cache.timeline();
        let in_use = plan.busy.iter().flat_map(|reclaimed| &reclaimed.pieces).chain(&claim.pieces);
        for (stream, epoch) in in_use.flat_map(|piece| &piece.deps) {
            outcome.waits += u64::from(taker.wait_for(stream, *epoch)?);
        }
        self.map_all(plan)?;
        Ok(true)
    }

    /// Picks the window among the free ranges and takes it: its unclaimed slots, and its backed
    /// parts from their owners. If it returns no claim, nothing has changed.
    fn claim<'a>(
        &'a self,
        cache: &'static StreamCache,
        free_ranges: &FreeRanges<'a>,
        request: &Request,
        options: PlaceOptions,
        fit: Fit,
        outcome: &mut PlaceOutcome<'_>,
    ) -> ClaimOutcome<'a> {
        let bump = free_ranges.bump();
        let small = request.size() <= HEAP.small_max;
        let Some(exact) = request.size().checked_next_multiple_of(HEAP.unit) else {
            return ClaimOutcome::NoWindow;
        };
        let mut claim = None;
        // Small blocks come from slabs of the heap. A whole slot gives the heap room for many
        // blocks, a unit for one.
        let several = if options.granularity == Granularity::Slots { self.slot } else { HEAP.page };
        let sizes = [(several, several.max(request.alignment())), (exact, request.alignment())];
        for (bytes, align) in if small { &sizes[..] } else { &sizes[1..] } {
            let ranges = free_ranges.all.iter().filter_map(|free_range| {
                let own =
                    free_ranges.cache_of(free_range).is_some_and(|from| std::ptr::eq(from, cache));
                let range = if own || options.granularity == Granularity::Units {
                    free_range.range
                } else {
                    self.whole_range(free_range.range)
                };
                (range.len > 0 && !(outcome.whole && options.grow && !options.move_handles))
                    .then_some(range)
            });
            let mut slots = self.slots();
            let window =
                window::best(bump, ranges, slots.free_runs(), self.grid(), *bytes, *align, fit);
            let allowed = |window: &Window<'_>| {
                window.missing.is_empty() || options.grow || options.move_handles
            };
            let Some(window) = window.filter(allowed) else { continue };
            let guard = self.begin_move();
            outcome.own_moves += 1;
            for &(first, count) in &window.missing {
                slots.claim(first, count);
            }
            drop(slots);
            let largest = self.largest_handle(free_ranges.live);
            claim = Some(Claim { window, pieces: List::new_in(bump), largest, _move: guard });
            break;
        }
        let Some(mut claim) = claim else { return ClaimOutcome::NoWindow };
        let block = claim.window.block;
        let (around, taker) = (self.slots_around(block), cache.timeline());
        for free_range in free_ranges.touching(around) {
            let own =
                free_ranges.cache_of(free_range).is_some_and(|from| std::ptr::eq(from, cache));
            let (range, within) = match options.granularity {
                Granularity::Slots if !own => (self.whole_range(free_range.range), around),
                _ => (free_range.range, block),
            };
            let Some(range) = intersection(range, within) else { continue };
            // Another thread may have taken or used it in the meantime.
            let piece = self.take_piece(free_ranges, free_range, range);
            let ready = |piece: &RangePiece| {
                options.readiness == Readiness::MayWait || piece.is_done_except(Some(&taker))
            };
            let ready = piece.as_ref().is_some_and(ready);
            claim.pieces.extend(piece);
            if !ready {
                self.unclaim(claim);
                return ClaimOutcome::Raced;
            }
        }
        ClaimOutcome::Claimed(claim)
    }

    /// Returns the whole slots inside a range.
    fn whole_range(&self, range: Range) -> Range {
        let (first, count) = self.whole_slots(range);
        self.range(first, count)
    }

    /// Returns the slots that a range touches.
    fn slots_around(&self, range: Range) -> Range {
        let first = (range.start - self.base) / self.slot;
        let end = (range.start + range.len - self.base).div_ceil(self.slot);
        self.range(first, end - first)
    }

    /// Releases a claim.
    fn unclaim(&self, claim: Claim<'_>) {
        self.unclaim_except(claim, &[]);
    }

    /// Releases a claim, except for the slots under `stuck`.
    fn unclaim_except(&self, mut claim: Claim<'_>, stuck: &[Mapping]) {
        self.return_pieces(claim.pieces.drain(..));
        let mut slots = self.slots();
        for &(first, count) in &claim.window.missing {
            slots.release(first, count);
            for mapping in stuck.iter().filter(|m| first <= m.first && m.first < first + count) {
                slots.claim(mapping.first, mapping.count);
            }
        }
    }

    /// Adds a claimed and backed window to the cache and allocates from it.
    fn commit_claim(
        &self,
        cache: &'static StreamCache,
        mut claim: Claim<'_>,
        request: &Request,
    ) -> Option<aquifer_heap::HeapBlock> {
        cache.with(|s| {
            // In its open epoch, the stream has waited for all earlier uses of this memory.
            let epoch = s.timeline().map_or(0, |t| t.open());
            for &(first, count) in &claim.window.missing {
                s.add(self.range(first, count), epoch);
            }
            for piece in claim.pieces.drain(..) {
                let stamp = if piece.is_from(cache) {
                    piece.deps.iter().map(|(_, epoch)| *epoch).max()
                } else {
                    None
                };
                s.add(piece.range, stamp.unwrap_or(epoch));
            }
            if request.size() <= HEAP.small_max {
                s.allocate(request)
            } else {
                s.allocate_at(claim.window.block, request)
            }
        })
    }
}

fn intersection(a: Range, b: Range) -> Option<Range> {
    let start = a.start.max(b.start);
    let end = (a.start + a.len).min(b.start + b.len);
    (start < end).then(|| Range { start, len: end - start })
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots();
        f.debug_struct("Mapped")
            .field("base", &format_args!("{:#x}", self.base))
            .field("slot", &self.slot)
            .field("mapped", &slots.mapped().count())
            .field("spare", &slots.spare.len())
            .field("zombies", &slots.zombies.len())
            .finish_non_exhaustive()
    }
}
