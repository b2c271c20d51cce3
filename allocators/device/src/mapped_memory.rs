//! One range of addresses, and physical handles that are mapped where they are needed.
//!
//! All streams of the pool share the range: any free part of it can be transferred from one
//! stream's cache to another's, in multiples of the heap's unit of 512 bytes. A handle is mapped
//! and unmapped as a whole:
//!
//! ```text
//!   unclaimed ──claim──▶ being backed ──map, set access──▶ in the streams' caches ──┐
//!       ▲                                                     │ wholly free          │ live blocks keep it
//!       │                                                     ▼                     │
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
//! **Growth** backs the missing slots of a window, in this order:
//!
//! 0. Old mappings whose work is done (zombies) are unmapped, by at most 64 calls (`cuMemUnmap`).
//! 1. The window's unclaimed slots are claimed, and its backed parts are taken out of their lists.
//! 2. Spare handles are taken. If they and the rest of the budget are not enough, handles are
//!    unmapped under free memory (`cuMemUnmap`), where handles may move; where moves come first, in
//!    any case. The bytes that are missing then are charged, all at once. With a reservation,
//!    each handle is charged in step 3 instead.
//! 3. The missing handles are created with this charge (`cuMemCreate`).
//! 4. The receiving stream waits on the device for work on memory that it takes over.
//! 5. Each handle is mapped (`cuMemMap`), then each run of slots is made accessible
//!    (`cuMemSetAccess`).
//! 6. The window is added to the cache, and the block is allocated there.
//!
//! If the driver has no memory in step 3, smaller handles are tried. If these fail too, or if the
//! budget refuses in step 2, only moves are left, where handles may move. If that is not enough,
//! the attempt finds no place. The handles that it has created or unmapped stay charged, as spare,
//! and the next attempt of the same request uses them. If the request is refused in the end, all
//! spare handles are released. A handle that the driver refuses to unmap under free memory stays
//! there, and another one is taken. Any other error, in any step, ends the request: handles that
//! the attempt has created are released with their charges, and others become spare. A new mapping
//! that the driver refuses to remove again becomes a zombie, with its slots claimed and its handle
//! charged.
//!
//! **Handle sizes.** The cost of a mapping depends on the number of handles and hardly on their
//! size. But a live block keeps the whole handle that it lies on in place. So a block of 512 MiB
//! gets a few large handles if a handle is far smaller than the memory that is left, or if the live
//! blocks are as large on average, and small ones otherwise: see [`MappedMemory::largest_handle`]. A
//! large handle that is free but does not fit where memory is missing is released to the driver,
//! its charge is kept, and new handles of the right size are created with that charge.
//!
//! A large handle that is still in use can be neither released nor mapped into a shorter hole. Near
//! the bound such handles move to unclaimed addresses as a whole, with the block, which may end
//! within the last of them.
//!
//! A mutex protects the table. It is never held during a driver call. While calls are made, the
//! memory they concern is in no cache, so no other thread can reach it.

mod free_ranges;
mod place;
mod plan;
mod release;
pub(crate) mod search;

use crate::{
    Request,
    backing::{
        handle::{Handle, HeldBytes},
        shared_free::SharedFreeList,
        slots::Slots,
        window::Grid,
    },
    base::{policy_params::policy, released::reclaim_cost},
};
use aquifer_core::{
    Budget, DeviceId, MemoryError, Result,
    scratch::{Bump, List, Scratch, list},
};
use aquifer_driver::{Driver, ExportTypes};
use aquifer_heap::{Config, Range};
use aquifer_stream::Timeline;
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// The size classes of the caches.
const HEAP: Config = Config::device();

/// The physical memory of one range of addresses.
pub(crate) struct MappedMemory {
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
    /// A new handle is at most this part of what is held. With `None` it is one slot.
    held_parts: Option<u64>,
    /// What new handles can be exported as.
    export: ExportTypes,
    budget: Budget,
    held: Arc<HeldBytes>,
    slots: Mutex<Slots>,
    /// Free ranges that are in no cache.
    shared_free: Mutex<SharedFreeList>,
    /// Scratch memory for the lists of a pass.
    scratch: Scratch,
    /// The number of transfers begun and ended.
    transfers_begun: AtomicU64,
    transfers_ended: AtomicU64,
    /// Set if work that cannot be waited for may still use the mappings. They are then never
    /// unmapped.
    leaked: AtomicBool,
}

/// Marks a transfer: a time in which a thread has memory in hand that is in no list, so that other
/// threads cannot see it. It is counted before the memory is taken. So a thread that finds nothing,
/// and no transfer, has seen all memory.
struct TransferGuard<'a>(&'a MappedMemory);

impl Drop for TransferGuard<'_> {
    fn drop(&mut self) {
        self.0.transfers_ended.fetch_add(1, Ordering::SeqCst);
    }
}

impl MappedMemory {
    /// Reserves addresses for sixteen times the device's memory, or less if the process has not
    /// that many left. Addresses cost nothing, and a block needs them in one piece. The memory is
    /// on the first device of `accessors`, and all of them can access it.
    ///
    /// With slots of 0 bytes it reserves none, and never has memory.
    pub(crate) fn open(
        driver: &Arc<dyn Driver>,
        accessors: Arc<[DeviceId]>,
        memory: u64,
        slot: u64,
        held_parts: Option<u64>,
        export: ExportTypes,
        budget: Budget,
    ) -> Result<Self> {
        let device = accessors[0];
        let mut bytes = if slot > 0 { memory.saturating_mul(16).div_ceil(slot) * slot } else { 0 };
        let base = loop {
            if bytes == 0 {
                break 0;
            }
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
            slot: slot.max(1),
            held_parts,
            export,
            budget,
            held: Arc::default(),
            slots: Mutex::new(Slots::new(bytes / slot.max(1))),
            shared_free: Mutex::default(),
            scratch: Scratch::new(),
            transfers_begun: AtomicU64::new(0),
            transfers_ended: AtomicU64::new(0),
            leaked: AtomicBool::new(false),
        })
    }

    /// Returns the counter of bytes held from the driver.
    pub(crate) fn held(&self) -> &HeldBytes {
        &self.held
    }

    /// Returns the bytes of a slot, the least that is released at once.
    pub(crate) fn slot(&self) -> u64 {
        self.slot
    }

    /// Returns the bytes of handles that hold any block of this request.
    pub(crate) fn backing_bytes(&self, request: &Request) -> u64 {
        request.size().next_multiple_of(self.slot)
    }

    /// Returns the cost of releasing `bytes` and taking them again, with `peers` that have access.
    pub(crate) fn reclaim_cost(&self, bytes: u64, peers: u32) -> Duration {
        let handles = bytes.div_ceil(self.mean_handle());
        let each = Duration::from_micros(44) + Duration::from_micros(1000) * peers;
        reclaim_cost(handles, each, bytes, Duration::from_nanos(1300))
    }

    /// Returns the mean size of the held handles in bytes.
    fn mean_handle(&self) -> u64 {
        let count = self.slots().count();
        self.held.now().checked_div(count).unwrap_or(0).max(self.slot)
    }

    /// Marks that queued work which cannot be waited for may still use a cache's memory.
    pub(crate) fn leak(&self) {
        self.leaked.store(true, Ordering::Relaxed);
    }

    /// Drops references to streams whose work is done.
    pub(crate) fn forget_done(&self) {
        self.shared_free().forget_done();
    }

    /// Releases held memory that is mapped nowhere.
    pub(crate) fn drop_spare(&self) {
        let mut slots = self.slots();
        if slots.spare.is_empty() {
            return;
        }
        let _transfer = self.begin_transfer();
        let pass = self.scratch.begin();
        let spare = list(&pass, slots.spare.drain(..));
        drop(slots);
        drop(spare);
    }

    /// Returns the bytes that are neither in a cache nor in use.
    pub(crate) fn uncached_bytes(&self) -> u64 {
        let spare: u64 = self.slots().spare.iter().map(|handle| handle.bytes()).sum();
        spare + self.shared_free().bytes()
    }

    /// Returns whether an address is free and in no cache.
    pub(crate) fn is_shared_free(&self, address: u64) -> bool {
        self.shared_free().covers(address)
    }

    /// Returns the handles behind a range of a live block, and the offset of the range in the
    /// first. They stay where they are while the block lives.
    pub(crate) fn handles(&self, range: Range) -> Option<(Vec<Arc<Handle>>, u64)> {
        let around = self.slots_around(range);
        let (first, count) = self.whole_slots(around);
        let slots = self.slots();
        let offset = range.start - self.address(slots.covering(first, count).next()?.first);
        Some((slots.covering(first, count).map(|mapping| mapping.handle.clone()).collect(), offset))
    }

    /// Calls `note` for each free range in no cache that queued work may still use, with the number
    /// of that work's stream and the bytes.
    pub(crate) fn shared_in_use(&self, mut note: impl FnMut(u32, u64)) {
        for (range, deps) in self.shared_free().iter() {
            let busy = deps.iter().filter(|(timeline, epoch)| !timeline.is_done(*epoch));
            busy.for_each(|(timeline, _)| note(timeline.number(), range.len));
        }
    }

    /// Returns the number of transfers begun and ended. Comparing it with a later result shows
    /// whether memory was in no list: on its way between lists, being backed, or being released,
    /// with or without a driver call. [`PoolStats::moves`](aquifer_core::PoolStats::moves) counts
    /// handles.
    pub(crate) fn transfer_counts(&self) -> (u64, u64) {
        // The end count is read first. Otherwise a move that begins and ends between the two
        // reads would look unfinished.
        let transfers_ended = self.transfers_ended.load(Ordering::SeqCst);
        (self.transfers_begun.load(Ordering::SeqCst), transfers_ended)
    }

    /// Checks the table and the shared free list, and that a handle lies behind each free range.
    /// Called while no other thread uses the pool.
    ///
    /// # Panics
    /// If this is not so.
    pub(crate) fn check(&self) {
        let slots = self.slots();
        slots.check();
        let shared_free = self.shared_free();
        shared_free.check();
        for (range, _) in shared_free.iter() {
            let around = self.slots_around(range);
            let (first, count) = self.whole_slots(around);
            let backed: u64 = slots
                .covering(first, count)
                .map(|mapping| mapping.end().min(first + count) - mapping.first.max(first))
                .sum();
            assert_eq!(backed, count, "nothing lies behind a part of {range:?}");
        }
    }

    /// Returns the epochs that unused mappings wait for.
    pub(crate) fn zombie_fences<'s>(&self, bump: &'s Bump) -> List<'s, (Arc<Timeline>, u64)> {
        list(bump, self.slots().zombies.iter().flat_map(|zombie| zombie.until.iter().cloned()))
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

    fn begin_transfer(&self) -> TransferGuard<'_> {
        self.transfers_begun.fetch_add(1, Ordering::SeqCst);
        TransferGuard(self)
    }

    /// Returns the maximum number of slots of a new handle, while `held` bytes are held and `live`
    /// of them in use: a fixed part of a `typical` block, or if that is more, of what is held and
    /// of what could still be provided. So the memory that one live block pins is small compared
    /// to the block, or to all memory and to the rest.
    fn largest_handle(&self, held: u64, live: u64, typical: u64) -> u64 {
        let Some(held_parts) = self.held_parts else { return 1 };
        let policy = policy();
        let left = self.budget.remaining() + self.held.now().saturating_sub(live);
        let by_memory = (held / held_parts).min(left / policy.headroom_parts);
        let bytes = by_memory.max(typical / policy.block_parts).min(policy.largest_handle);
        1 << (bytes / self.slot).max(1).ilog2()
    }

    fn grid(&self) -> Grid {
        Grid { base: self.base, slot: self.slot }
    }

    /// Returns the slots that a range touches.
    fn slots_around(&self, range: Range) -> Range {
        let first = (range.start - self.base) / self.slot;
        let end = (range.start + range.len - self.base).div_ceil(self.slot);
        self.range(first, end - first)
    }
}

fn intersection(a: Range, b: Range) -> Option<Range> {
    let start = a.start.max(b.start);
    let end = (a.start + a.len).min(b.start + b.len);
    (start < end).then(|| Range { start, len: end - start })
}

impl fmt::Debug for MappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots();
        f.debug_struct("MappedMemory")
            .field("base", &format_args!("{:#x}", self.base))
            .field("slot", &self.slot)
            .field("mapped", &slots.mapped().count())
            .field("spare", &slots.spare.len())
            .field("zombies", &slots.zombies.len())
            .finish_non_exhaustive()
    }
}
