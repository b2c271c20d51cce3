//! One range of addresses, and handles that go where the need is.
//!
//! A slot's life:
//!
//! ```text
//!   nobody's ──claim──▶ being backed ──map, set access──▶ in a stream's cache ──┐
//!      ▲                                                     │ free, whole       │ live blocks keep it
//!      │                                                     ▼                   │
//!      ├───────────── unmap ◀── taken out of the cache, its work known done      │
//!      └── unmap, later ◀── zombie: handle mapped elsewhere, its work not done ◀─┘
//! ```
//!
//! **A move** takes a handle from under a free slot and maps it where it is missing. If the work that last used the slot
//! is known to be done, the old mapping goes first. If not, the new mapping comes first, the stream that gets it waits
//! for that work on the device, and the old mapping becomes a *zombie* that goes when the host has seen the work done:
//! unmapping is not ordered with streams. Nobody waits on the host.
//!
//! The table is under a mutex that is never held over a driver call. While calls are made, the slots they concern are
//! in nobody's cache, so no other thread can reach them.

mod handles;
mod release;

use super::{
    handle::{Handle, Held, NoHandle},
    slots::{Slots, Zombie, runs},
    window,
};
use crate::{Request, home::Home};
use allocator_api2::vec::Vec as ScratchVec;
use aquifer_core::{Budget, DeviceId, MemoryError, Reservation, Result};
use aquifer_driver::Driver;
use aquifer_heap::{Config, Range};
use aquifer_stream::Timeline;
use bumpalo::Bump;
use handles::Stolen;
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
};

/// The sizes that caches work in.
const UNITS: Config = Config::device();

/// How far to go for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    /// What is backed already, in any cache, and whose work is known to be done.
    Ready,
    /// Also new handles, and those under free slots whose work is known to be done.
    Done,
    /// Also what is still in use: the taker waits for it, on the device.
    Wait,
}

/// What an attempt to place a block did.
#[derive(Default, Debug)]
pub(crate) struct Effort<'a> {
    /// What new memory is drawn from before the budget is asked.
    pub(crate) reserved: Option<&'a Mutex<Reservation>>,
    /// Bytes taken from the driver.
    pub(crate) grown: u64,
    /// Bytes taken over from other caches.
    pub(crate) adopted: u64,
    /// Handles moved.
    pub(crate) moves: u64,
    /// Waits queued on the device.
    pub(crate) waits: u64,
    /// Why no more could be taken from the driver.
    pub(crate) refused: Option<NoHandle>,
}

/// Physical memory behind one range of addresses.
pub(crate) struct Mapped {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    /// Start of the reserved range.
    base: u64,
    /// Its length in bytes.
    bytes: u64,
    /// Bytes of a slot, which is a handle's.
    slot: u64,
    budget: Budget,
    held: Arc<Held>,
    slots: Mutex<Slots>,
    /// Work that nobody could wait for may still run on what is mapped, so it stays for good.
    kept: AtomicBool,
}

/// A window whose slots are claimed and whose backed parts are out of their caches.
struct Claim {
    window: window::Window,
    taken: Vec<Taken>,
}

/// A free range taken out of a cache.
struct Taken {
    range: Range,
    from: &'static Home,
    timeline: Arc<Timeline>,
    stamp: u64,
}

impl Mapped {
    /// Reserves addresses: sixteen times the device's memory, since addresses cost nothing and a block needs them in one
    /// piece. Less where the process has not that many left.
    pub(crate) fn open(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        memory: u64,
        slot: u64,
        budget: Budget,
    ) -> Result<Self> {
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
            base,
            bytes,
            slot,
            budget,
            held: Arc::default(),
            slots: Mutex::new(Slots::new(bytes / slot)),
            kept: AtomicBool::new(false),
        })
    }

    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    /// Bytes that nobody could be given now without a new handle: spare handles and zombies count as cached.
    pub(crate) fn spare_bytes(&self) -> u64 {
        let slots = self.slots();
        slots.spare.len() as u64 * self.slot
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self, slot: u64) -> u64 {
        self.base + slot * self.slot
    }

    fn range(&self, first: u64, count: u64) -> Range {
        Range { start: self.address(first), len: count * self.slot }
    }

    /// The whole slots inside a range: first and count.
    fn whole_slots(&self, range: Range) -> (u64, u64) {
        let first = (range.start - self.base).div_ceil(self.slot);
        let end = (range.start + range.len - self.base) / self.slot;
        (first, end.saturating_sub(first))
    }

    fn lost(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    /// Finds room for `request` among what is free in the cache of `home`, whole slots that are free in those of
    /// `givers`, and slots that are nobody's. What is missing is backed with new handles and, where those are refused,
    /// with handles from under free slots elsewhere. `None` if there are not enough; nothing has changed then.
    pub(crate) fn place(
        &self,
        home: &'static Home,
        givers: &[&'static Home],
        request: &Request,
        reach: Reach,
        effort: &mut Effort<'_>,
    ) -> Result<Option<aquifer_heap::Block>> {
        self.reap_zombies()?;
        let Some(mut claim) = self.claim(home, givers, request, reach) else { return Ok(None) };
        let needed = claim.window.missing.len();
        let (mut stock, grown) = match self.stock(needed, effort) {
            Ok(stock) => stock,
            Err(error) => {
                self.unclaim(claim);
                return Err(error);
            }
        };
        let Some(stolen) = self.steal(givers, needed - stock.len(), reach) else {
            self.unclaim(claim);
            // New handles that cannot help go back where they came from; those that were spare stay spare.
            self.put_aside(stock, grown);
            return Ok(None);
        };
        let moved = stolen.len() as u64;
        let (done, busy): (Vec<_>, Vec<_>) = stolen.into_iter().partition(|s| s.done);
        let mut stuck = Vec::new();
        let outcome = self.back(home, &claim, &mut stock, done, &busy, effort, &mut stuck);
        if let Err(error) = outcome {
            claim.window.missing.retain(|slot| !stuck.iter().any(|(at, _)| at == slot));
            self.unmap_later(stuck, &home.timeline());
            // Handles whose work is not done are still mapped where they were, and belong there.
            stock.retain(|handle| !busy.iter().any(|s| Arc::ptr_eq(&s.handle, handle)));
            self.give_back(busy);
            self.slots().spare.append(&mut stock);
            self.unclaim(claim);
            return Err(error);
        }
        let zombies =
            busy.into_iter().map(|s| Zombie { slot: s.slot, handle: s.handle, until: (s.timeline, s.stamp) });
        self.slots().zombies.extend(zombies);
        effort.grown += grown as u64 * self.slot;
        effort.moves += moved;
        let foreign = claim.taken.iter().filter(|t| !std::ptr::eq(t.from, home));
        effort.adopted += foreign.map(|t| t.range.len).sum::<u64>();
        Ok(self.settle_in(home, claim, request))
    }

    /// Maps handles at the missing slots: the stock, those that come loose from `done` slots, and a second mapping of
    /// those that are `busy`. The taker waits for these on the device, and for whoever used what it takes over. If it fails, what came loose is in the stock and
    /// nothing new is mapped, but for what is `stuck`.
    #[expect(
        clippy::too_many_arguments,
        reason = "one step of `place`, apart so that its failures have one way out"
    )]
    fn back(
        &self,
        home: &'static Home,
        claim: &Claim,
        stock: &mut Vec<Arc<Handle>>,
        done: Vec<Stolen>,
        busy: &[Stolen],
        effort: &mut Effort<'_>,
        stuck: &mut Vec<(u64, Arc<Handle>)>,
    ) -> Result<()> {
        let (mut loose, outcome) = self.unmap_known_done(done);
        stock.append(&mut loose);
        outcome?;
        let taker = home.timeline();
        let in_use = busy.iter().map(|s| (&s.timeline, s.stamp));
        for (timeline, stamp) in in_use.chain(claim.taken.iter().map(|t| (&t.timeline, t.stamp))) {
            effort.waits += u64::from(taker.wait_for(timeline, stamp)?);
        }
        stock.extend(busy.iter().map(|s| s.handle.clone()));
        self.map_all(&claim.window.missing, stock, stuck)
    }

    /// Picks the window and takes it: its slots from nobody, its backed parts out of their caches. `None` if there is
    /// none within reach, or if another thread was faster.
    fn claim(
        &self,
        home: &'static Home,
        givers: &[&'static Home],
        request: &Request,
        reach: Reach,
    ) -> Option<Claim> {
        // Small blocks come from pages of the heap's own; one more slot gives it room for many.
        let small = request.size() <= UNITS.small_max;
        let bytes = if small { self.slot } else { request.size().checked_next_multiple_of(UNITS.unit)? };
        let align = if small { self.slot } else { request.alignment() };
        let scratch = Bump::new();
        let mut backed = ScratchVec::new_in(&scratch);
        for &giver in givers {
            let own = std::ptr::eq(giver, home);
            giver.with(|s| {
                let Some(timeline) = s.timeline() else { return };
                for extent in s.heap.free_extents() {
                    // A slot has one owner, so of another's only whole ones can be had.
                    let range = if own { extent.range } else { self.whole_range(extent.range) };
                    if range.len > 0 && (own || reach == Reach::Wait || timeline.is_done(extent.stamp)) {
                        backed.push((range, giver));
                    }
                }
            });
        }
        let window = {
            let mut slots = self.slots();
            let ranges = backed.iter().map(|&(range, _)| range);
            let window = window::best(ranges, slots.free_runs(), self.base, self.slot, bytes, align)?;
            if reach == Reach::Ready && !window.missing.is_empty() {
                return None;
            }
            for (first, count) in runs(&window.missing) {
                slots.claim(first, count);
            }
            window
        };
        let mut claim = Claim { window, taken: Vec::new() };
        let around = self.slots_around(claim.window.block);
        for (range, from) in backed {
            let own = std::ptr::eq(from, home);
            let Some(range) = intersection(range, if own { claim.window.block } else { around }) else {
                continue;
            };
            let timeline = from.timeline();
            let taken = from.with(|s| s.heap.remove(range));
            match taken {
                Ok(stamp) if own || reach == Reach::Wait || timeline.is_done(stamp) => {
                    claim.taken.push(Taken { range, from, timeline, stamp });
                }
                Ok(stamp) => {
                    claim.taken.push(Taken { range, from, timeline, stamp });
                    self.unclaim(claim);
                    return None;
                }
                Err(_) => {
                    self.unclaim(claim);
                    return None;
                }
            }
        }
        Some(claim)
    }

    /// The whole slots inside a range.
    fn whole_range(&self, range: Range) -> Range {
        let (first, count) = self.whole_slots(range);
        self.range(first, count)
    }

    /// The slots that a range touches.
    fn slots_around(&self, range: Range) -> Range {
        let first = (range.start - self.base) / self.slot;
        let end = (range.start + range.len - self.base).div_ceil(self.slot);
        self.range(first, end - first)
    }

    /// Takes a claim back.
    fn unclaim(&self, claim: Claim) {
        for Taken { range, from, stamp, .. } in claim.taken {
            from.with(|s| s.add(range, stamp));
        }
        let mut slots = self.slots();
        for (first, count) in runs(&claim.window.missing) {
            slots.release(first, count);
        }
    }

    /// Gives a claimed and backed window to the cache and allocates from it.
    fn settle_in(&self, home: &'static Home, claim: Claim, request: &Request) -> Option<aquifer_heap::Block> {
        home.with(|s| {
            // The stream has waited for whoever used this memory before, in its open epoch.
            let epoch = s.timeline().map_or(0, |t| t.open());
            for (first, count) in runs(&claim.window.missing) {
                s.add(self.range(first, count), epoch);
            }
            for Taken { range, from, stamp, .. } in claim.taken {
                s.add(range, if std::ptr::eq(from, home) { stamp } else { epoch });
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
            .field("mapped", &slots.mapped_count())
            .field("spare", &slots.spare.len())
            .field("zombies", &slots.zombies.len())
            .finish_non_exhaustive()
    }
}
