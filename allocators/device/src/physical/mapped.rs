//! One range of addresses, and physical handles that are mapped where they are needed.
//!
//! All streams of the pool share the range: any free part of it can be transferred from one
//! stream's cache to another's, a unit at a time. A handle is mapped and unmapped as a whole:
//!
//! ```text
//!   nobody's ──claim──▶ being backed ──map, set access──▶ in the streams' caches ──┐
//!      ▲                                                     │ wholly free          │ live blocks keep it
//!      │                                                     ▼                      │
//!      ├───────────── unmap ◀── taken out of the caches, all work there known done  │
//!      └── unmap, later ◀── zombie: handle mapped elsewhere, some work not done ◀───┘
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
//! is free but does not fit where memory is missing is *melted*: it is released to the driver, its
//! charge is kept, and new handles of the right size are created with that charge.
//!
//! A mutex protects the table. It is never held during a driver call. While calls are made, the
//! memory they concern is in no cache, so no other thread can reach it.

mod mapping;
mod offers;
mod release;
mod stock;
mod warm;

use super::{
    commons::{Commons, is_done_but_for},
    handle::{Held, NoHandle},
    slots::{Mapping, Slots},
    window::{self, Grid, Window},
};
use crate::{Request, home::Home, leasing::Fit};
use aquifer_core::{
    Budget, DeviceId, MemoryError, Reservation, Result,
    scratch::{List, Scratch},
};
use aquifer_driver::Driver;
use aquifer_heap::{Config, Range};
use offers::{Offers, Piece};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use stock::Stock;

/// The size classes of the caches.
const UNITS: Config = Config::device();
/// The maximum size of a handle in bytes. Beyond it the cost hardly falls, and the memory that one
/// block pins grows.
const LARGEST_HANDLE: u64 = 64 << 20;
/// A handle is at most this fraction of what the pool could still provide.
const HEADROOM_PARTS: u64 = 4096;

/// Which free memory of other caches may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    /// Memory whose last work the host has seen done.
    Done,
    /// Also memory that is still in use: the receiving stream waits for it on the device.
    Wait,
}

/// The pieces in which memory is transferred between caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Grain {
    /// Whole slots, so that caches stay separate.
    Slots,
    /// Single units.
    Units,
}

/// The options of an attempt to place a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Attempt {
    pub(crate) reach: Reach,
    pub(crate) grain: Grain,
    /// Whether new memory may be taken from the driver.
    pub(crate) grow: bool,
    /// Whether handles may be taken from under free memory elsewhere.
    pub(crate) steal: bool,
}

/// The result of an attempt to place a block.
#[derive(Default, Debug)]
pub(crate) struct Effort<'a> {
    /// A reservation that new memory draws from before it charges the budget.
    pub(crate) reserved: Option<&'a Mutex<Reservation>>,
    /// If the attempt may grow but not steal, it grows by the whole block.
    pub(crate) whole: bool,
    /// Bytes taken from the driver.
    pub(crate) grown: u64,
    /// Bytes taken over from other caches.
    pub(crate) adopted: u64,
    /// Handles that were moved, or melted and recreated.
    pub(crate) moves: u64,
    /// Waits queued on the device.
    pub(crate) waits: u64,
    /// How often memory was in transit.
    pub(crate) transits: u64,
    /// Why no more could be taken from the driver.
    pub(crate) refused: Option<NoHandle>,
}

/// The physical memory of one range of addresses.
pub(crate) struct Mapped {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    /// The devices that can access the mappings. The first is the device itself.
    reach: Arc<[DeviceId]>,
    /// Start of the reserved range.
    base: u64,
    /// Its length in bytes.
    bytes: u64,
    /// Bytes of a slot, which is the smallest handle.
    slot: u64,
    /// The most slots that one handle covers.
    most: u64,
    /// Whether to move handles before growing.
    compact: bool,
    budget: Budget,
    held: Arc<Held>,
    slots: Mutex<Slots>,
    /// Free ranges that are in no cache.
    commons: Mutex<Commons>,
    /// Scratch memory for the lists of a pass.
    scratch: Scratch,
    /// The number of transits begun and ended.
    departed: AtomicU64,
    arrived: AtomicU64,
    /// Set if work that cannot be waited for may still use the mappings. They are then never
    /// unmapped.
    kept: AtomicBool,
}

/// A window whose slots are claimed and whose backed parts are taken out of their caches.
struct Claim<'a> {
    window: Window<'a>,
    taken: List<'a, Piece>,
    /// The maximum number of slots that one handle may cover.
    largest: u64,
    /// Lasts from before anything is taken until all of it is in some list again.
    _transit: Transit<'a>,
}

/// The outcome of an attempt to take a window.
enum Picked<'a> {
    Claimed(Claim<'a>),
    /// Nothing that may be used is large enough.
    Nothing,
    /// Another thread has changed a cache since it was read: retry with new offers.
    Outrun,
}

/// Marks memory that is being moved, which other threads cannot see. It is counted before the
/// memory is taken. So a thread that finds nothing, and no transit, has seen all memory.
struct Transit<'a>(&'a Mapped);

impl Drop for Transit<'_> {
    fn drop(&mut self) {
        self.0.arrived.fetch_add(1, Ordering::SeqCst);
    }
}

impl Mapped {
    /// Reserves addresses for sixteen times the device's memory, or less if the process has not
    /// that many left. Addresses cost nothing, and a block needs them in one piece. The memory is
    /// on the first device of `reach`, and all of them can access it. With `fixed`, all handles
    /// have the size of a slot.
    pub(crate) fn open(
        driver: &Arc<dyn Driver>,
        reach: Arc<[DeviceId]>,
        memory: u64,
        slot: u64,
        fixed: bool,
        compact: bool,
        budget: Budget,
    ) -> Result<Self> {
        let device = reach[0];
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
            reach,
            base,
            bytes,
            slot,
            most: if fixed { 1 } else { (LARGEST_HANDLE / slot).max(1) },
            compact,
            budget,
            held: Arc::default(),
            slots: Mutex::new(Slots::new(bytes / slot)),
            commons: Mutex::default(),
            scratch: Scratch::new(),
            departed: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
            kept: AtomicBool::new(false),
        })
    }

    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    /// Returns the bytes that are neither in a cache nor in use: unmapped handles and the shared
    /// free list.
    pub(crate) fn spare_bytes(&self) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        spare + self.commons().bytes()
    }

    /// Calls `note` for each free range in no cache that queued work may still use, with the number
    /// of that work's stream and the bytes.
    pub(crate) fn shared_in_use(&self, mut note: impl FnMut(u32, u64)) {
        for (range, past) in self.commons().iter() {
            let busy = past.iter().filter(|(timeline, epoch)| !timeline.is_done(*epoch));
            busy.for_each(|(timeline, _)| note(timeline.number(), range.len));
        }
    }

    /// Returns whether an address is free and in no cache.
    pub(crate) fn is_in_commons(&self, address: u64) -> bool {
        self.commons().covers(address)
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn commons(&self) -> MutexGuard<'_, Commons> {
        self.commons.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn lost(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    fn transit(&self) -> Transit<'_> {
        self.departed.fetch_add(1, Ordering::SeqCst);
        Transit(self)
    }

    /// Returns the number of transits begun and ended. Comparing it with a later result shows
    /// whether memory was in transit.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        // The end count is read first. Otherwise a transit that begins and ends between the two
        // reads would look unfinished.
        let arrived = self.arrived.load(Ordering::SeqCst);
        (self.departed.load(Ordering::SeqCst), arrived)
    }

    /// Returns the maximum number of slots of a new handle, while `live` bytes of the held memory
    /// are in use: a fixed part of what could still be provided. So the memory that one live block
    /// pins is small compared to the rest, and handles become small near the limit.
    fn largest_handle(&self, live: u64) -> u64 {
        let left = self.budget.remaining() + self.held.now().saturating_sub(live);
        let slots = (left / HEADROOM_PARTS / self.slot).clamp(1, self.most);
        1 << slots.ilog2()
    }

    /// Finds room for `request` in the free ranges of `home` and `givers` and in unclaimed slots,
    /// and maps what is missing, as far as `how` allows. Returns `None` if there is not enough;
    /// then only unused handles may have moved.
    pub(crate) fn place(
        &self,
        home: &'static Home,
        givers: &[&'static Home],
        request: &Request,
        how: Attempt,
        fit: Fit,
        effort: &mut Effort<'_>,
    ) -> Result<Option<aquifer_heap::Block>> {
        let pass = self.scratch.begin();
        self.reap_zombies(&pass)?;
        // A failed race is retried: another thread has made progress, so this terminates.
        let claim = loop {
            let offers = self.offers(&pass, givers, Some(home), how.reach);
            match self.claim(home, &offers, request, how, fit, effort) {
                Picked::Claimed(claim) => break claim,
                Picked::Nothing => return Ok(None),
                Picked::Outrun => std::thread::yield_now(),
            }
        };
        let mut stock = Stock::new(&pass);
        match self.back(home, givers, &claim, how, &mut stock, effort) {
            Ok(true) => {
                let (used, unused) = stock.take_busy();
                self.zombify(used);
                self.give_back(unused);
                self.put_aside(&mut stock);
                let foreign = claim.taken.iter().filter(|piece| !piece.is_from(home));
                effort.adopted += foreign.map(|piece| piece.range.len).sum::<u64>();
                Ok(self.settle_in(home, claim, request))
            }
            Ok(false) => {
                self.give_back(stock.busy.drain(..));
                self.put_aside(&mut stock);
                self.unclaim(claim);
                Ok(None)
            }
            Err(error) => {
                self.give_back(stock.busy.drain(..));
                stock.forget_fresh();
                self.put_aside(&mut stock);
                self.unclaim_but(claim, &stock.stuck);
                self.zombify_mappings(stock.stuck);
                Err(error)
            }
        }
    }

    fn grid(&self) -> Grid {
        Grid { base: self.base, slot: self.slot }
    }

    /// Allocates a block from the shared free list, at the best place by `fit` that is ready for
    /// its stream. Makes no driver call.
    pub(crate) fn shared(
        &self,
        home: &'static Home,
        request: &Request,
        fit: Fit,
    ) -> Option<aquifer_heap::Block> {
        let bytes = request.size().checked_next_multiple_of(UNITS.unit)?;
        let small = bytes <= UNITS.small_max;
        let (taken, align) = (if small { UNITS.page } else { bytes }, request.alignment());
        let own = home.timeline();
        let (range, past) = {
            let mut commons = self.commons();
            let range = commons
                .place(taken, align, fit, self.grid(), |past| is_done_but_for(past, Some(&own)))?;
            (range, commons.take(range)?)
        };
        // Dependencies that are not done belong to the stream itself.
        let stamp = past.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0).min(own.open());
        home.with(|s| {
            s.add(range, stamp);
            if small { s.allocate(request) } else { s.allocate_at(range, request) }
        })
    }

    /// Maps what is missing in a claim, and makes the stream of `home` wait for the work on the
    /// memory it takes over. Returns whether there was enough.
    fn back(
        &self,
        home: &'static Home,
        givers: &[&'static Home],
        claim: &Claim<'_>,
        how: Attempt,
        stock: &mut Stock<'_>,
        effort: &mut Effort<'_>,
    ) -> Result<bool> {
        if !self.gather(givers, claim, how, stock, effort)? {
            return Ok(false);
        }
        let taker = home.timeline();
        let in_use = stock.busy.iter().flat_map(|stolen| &stolen.pieces).chain(&claim.taken);
        for (stream, epoch) in in_use.flat_map(|piece| &piece.past) {
            effort.waits += u64::from(taker.wait_for(stream, *epoch)?);
        }
        self.map_all(stock)?;
        Ok(true)
    }

    /// Picks the window among the offers and takes it: its unclaimed slots, and its backed parts
    /// from their owners. If it returns no claim, nothing has changed.
    fn claim<'a>(
        &'a self,
        home: &'static Home,
        offers: &Offers<'a>,
        request: &Request,
        how: Attempt,
        fit: Fit,
        effort: &mut Effort<'_>,
    ) -> Picked<'a> {
        let bump = offers.bump();
        let small = request.size() <= UNITS.small_max;
        let Some(exact) = request.size().checked_next_multiple_of(UNITS.unit) else {
            return Picked::Nothing;
        };
        let mut claim = None;
        // Small blocks come from slabs of the heap. A whole slot gives the heap room for many
        // blocks, a unit for one.
        let several = if how.grain == Grain::Slots { self.slot } else { UNITS.page };
        let sizes = [(several, several.max(request.alignment())), (exact, request.alignment())];
        for (bytes, align) in if small { &sizes[..] } else { &sizes[1..] } {
            let ranges = offers.all.iter().filter_map(|offer| {
                let own = offers.home(offer).is_some_and(|from| std::ptr::eq(from, home));
                let range = if own || how.grain == Grain::Units {
                    offer.range
                } else {
                    self.whole_range(offer.range)
                };
                (range.len > 0 && !(effort.whole && how.grow && !how.steal)).then_some(range)
            });
            let mut slots = self.slots();
            let window =
                window::best(bump, ranges, slots.free_runs(), self.grid(), *bytes, *align, fit);
            let allowed = |window: &Window<'_>| window.missing.is_empty() || how.grow || how.steal;
            let Some(window) = window.filter(allowed) else { continue };
            let transit = self.transit();
            effort.transits += 1;
            for &(first, count) in &window.missing {
                slots.claim(first, count);
            }
            drop(slots);
            let largest = self.largest_handle(offers.live);
            claim = Some(Claim { window, taken: List::new_in(bump), largest, _transit: transit });
            break;
        }
        let Some(mut claim) = claim else { return Picked::Nothing };
        let block = claim.window.block;
        let (around, taker) = (self.slots_around(block), home.timeline());
        for offer in offers.touching(around) {
            let own = offers.home(offer).is_some_and(|from| std::ptr::eq(from, home));
            let (range, within) = match how.grain {
                Grain::Slots if !own => (self.whole_range(offer.range), around),
                _ => (offer.range, block),
            };
            let Some(range) = intersection(range, within) else { continue };
            // Another thread may have taken or used it in the meantime.
            let piece = self.take_piece(offers, offer, range);
            let ready =
                |piece: &Piece| how.reach == Reach::Wait || piece.is_done_but_for(Some(&taker));
            let ready = piece.as_ref().is_some_and(ready);
            claim.taken.extend(piece);
            if !ready {
                self.unclaim(claim);
                return Picked::Outrun;
            }
        }
        Picked::Claimed(claim)
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
        self.unclaim_but(claim, &[]);
    }

    /// Releases a claim, except for the slots under `stuck`.
    fn unclaim_but(&self, mut claim: Claim<'_>, stuck: &[Mapping]) {
        self.put_back(claim.taken.drain(..));
        let mut slots = self.slots();
        for &(first, count) in &claim.window.missing {
            slots.release(first, count);
            for mapping in stuck.iter().filter(|m| first <= m.first && m.first < first + count) {
                slots.claim(mapping.first, mapping.count);
            }
        }
    }

    /// Adds a claimed and backed window to the cache and allocates from it.
    fn settle_in(
        &self,
        home: &'static Home,
        mut claim: Claim<'_>,
        request: &Request,
    ) -> Option<aquifer_heap::Block> {
        home.with(|s| {
            // In its open epoch, the stream has waited for all earlier uses of this memory.
            let epoch = s.timeline().map_or(0, |t| t.open());
            for &(first, count) in &claim.window.missing {
                s.add(self.range(first, count), epoch);
            }
            for piece in claim.taken.drain(..) {
                let stamp = if piece.is_from(home) {
                    piece.past.iter().map(|(_, epoch)| *epoch).max()
                } else {
                    None
                };
                s.add(piece.range, stamp.unwrap_or(epoch));
            }
            if request.size() <= UNITS.small_max {
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
