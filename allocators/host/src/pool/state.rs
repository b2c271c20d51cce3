//! A pool's state under its lock: its memory, live blocks and pending frees.

use super::{
    PinnedStats, Shared,
    classes::{self, LINE},
    depot::{Depot, Room},
    door::Key,
    magazine::{Magazine, Tally},
    map, poison,
    slabs::Spans,
    span::{Slot, Span},
};
use crate::{
    kernel::Span as Addresses,
    region::{Region, RegionReport},
};
use aquifer_core::{Gate, MemoryError, PoolStats, Result};
use aquifer_heap::{Config, Heap, HeapError, Range};
use std::{
    alloc::Layout,
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Minimum bytes that a single block shrinks to in place, so that a page begins inside it.
const SHORTEST: u64 = 8192;

/// Everything that the lock of a core guards. No method makes a system call, or calls the driver or
/// a gate.
#[derive(Debug)]
pub(super) struct State {
    /// The generation of the core, unique in the process. Allocators carry it.
    pub(super) generation: u64,
    /// The lock proof for the doors of its magazines.
    pub(super) key: Key,
    /// The capacity of its depot.
    pub(super) depot: Room,
    /// Whether allocations are served.
    pub(super) open: bool,
    /// `None` while the core serves no pool.
    pub(super) shared: Option<Arc<Shared>>,
    heap: Heap,
    spans: Spans,
    /// By start address. Each registration of a region is a segment of the heap.
    regions: BTreeMap<u64, Region>,
    /// Live and pending blocks with gates, by address.
    held: BTreeMap<u64, Held>,
    /// Addresses of pending blocks, oldest first.
    pending: VecDeque<u64>,
    /// A reusable vector for polling, so that polling allocates nothing.
    asked: Vec<Asked>,
    /// Bytes of blocks that are live, in magazines or in the depot.
    out: u64,
    /// Counts of what was done under the lock. Magazines count the rest. `live`, `cached` and
    /// `blocks` are computed on request.
    counts: PoolStats,
    /// The sum of the magazines' `requested` when statistics were last read.
    looked: u64,
    refused: u64,
    /// Acquisitions of the lock.
    pub(super) locked: u64,
}

/// A block with gates.
#[derive(Debug)]
struct Held {
    gates: Vec<Arc<dyn Gate>>,
    /// Set when the owner has freed it.
    freed: Option<Freed>,
}

/// A freed block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Freed {
    pub(super) address: u64,
    /// The size that was requested.
    pub(super) requested: u64,
}

/// A pending block whose gates a thread polls. It stays in the pool's metadata, and no other thread
/// polls it at the same time.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) block: Freed,
    pub(super) gates: Vec<Arc<dyn Gate>>,
}

/// The result of a free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Released {
    /// The block can be reused.
    Free,
    /// The block is pending until its gates open.
    Pending,
    /// It was no live block.
    Refused,
}

/// Creates the heap of a pool. It needs no slabs of its own.
fn heap() -> Heap {
    Heap::new(Config { small_max: 0, ..Config::host() })
}

/// Returns a new, unique generation.
fn fresh_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            generation: fresh_generation(),
            key: Key::new(),
            depot: Room::default(),
            open: false,
            shared: None,
            heap: heap(),
            spans: Spans::new(),
            regions: BTreeMap::new(),
            held: BTreeMap::new(),
            pending: VecDeque::new(),
            asked: Vec::new(),
            out: 0,
            counts: PoolStats::default(),
            looked: 0,
            refused: 0,
            locked: 0,
        }
    }

    /// Allocates a block, preferably a slot of the shard's slabs. Returns `None` if nothing free
    /// fits.
    #[inline]
    pub(super) fn take(&mut self, layout: Layout, shard: usize) -> Option<u64> {
        let taken = self.find(layout, shard);
        // Spare slabs are returned to the heap before the request fails.
        let taken = if taken.is_none() && self.spans.dissolve_spares(&mut self.heap) {
            self.find(layout, shard)
        } else {
            taken
        };
        taken.map(|(span, slot)| self.hand_out(span, slot, layout.size() as u64))
    }

    #[inline]
    fn find(&mut self, layout: Layout, shard: usize) -> Option<(&'static Span, usize)> {
        let Self { heap, spans, generation, .. } = self;
        match classes::slotted(layout) {
            Some(class) => spans.take(heap, *generation, class, shard),
            None => {
                let bytes = classes::single(layout.size() as u64)?;
                // Always aligned to a cache line, since magazines reuse the block for requests of
                // that alignment.
                spans.take_exact(heap, *generation, bytes, (layout.align() as u64).max(LINE))
            }
        }
    }

    /// Allocates a slot of a larger class, as a last resort.
    pub(super) fn take_larger(&mut self, layout: Layout) -> Option<u64> {
        let class = classes::slotted(layout)?;
        let fits = |&class: &usize| classes::bytes_of(class).is_multiple_of(layout.align());
        let (span, slot) = (class..classes::SLOTTED)
            .filter(fits)
            .find_map(|class| self.spans.take_of_any(class))?;
        Some(self.hand_out(span, slot, layout.size() as u64))
    }

    #[inline]
    fn hand_out(&mut self, span: &'static Span, slot: usize, requested: u64) -> u64 {
        self.out += span.slot_bytes();
        let counts = &mut self.counts;
        counts.requested = counts.requested.wrapping_add(requested);
        counts.allocations += 1;
        self.note_peaks();
        span.address(slot)
    }

    fn note_peaks(&mut self) {
        let counts = &mut self.counts;
        counts.peak_live = counts.peak_live.max(self.out);
        // Negative if more was freed here than in magazines since statistics were last read.
        let requested =
            counts.requested.wrapping_add(self.looked).cast_signed().max(0).cast_unsigned();
        counts.peak_requested = counts.peak_requested.max(requested.min(self.out));
    }

    /// Assigns a magazine to this pool, which is open. For the magazine's owner, and only while no
    /// other thread is entering.
    pub(super) fn ready(&mut self, magazine: &Magazine) {
        if magazine.door.life() != self.generation {
            // It is new, or was emptied when its last pool was closed.
            magazine.door.serve(&mut self.key, self.generation);
        }
    }

    /// Moves about 64 KiB of free slots of the class from the shard's existing slabs into the
    /// magazine. For the magazine's owner.
    pub(super) fn stock(&mut self, magazine: &Magazine, class: usize) {
        if class >= classes::SLOTTED {
            return;
        }
        let bytes = classes::bytes_of(class);
        for _ in 0..((64 << 10) / bytes).clamp(2, 32).min(magazine.room(class)) {
            let Some((span, slot)) = self.spans.take_ready(class, magazine.shard()) else { break };
            self.out += bytes as u64;
            magazine.stock(span, slot);
        }
    }

    /// Makes room in the magazine for one more block of the class. Doubles the bin while the heap
    /// has as many free bytes as the magazine may hold beyond its initial size. Otherwise half of
    /// the bin returns to the heap. For the magazine's owner.
    pub(super) fn make_room(&mut self, magazine: &Magazine, depot: &Depot, class: usize) {
        if class >= classes::SLOTTED {
            let (mut room, free) = (self.depot, self.free_bytes());
            depot.make_room(class, &mut room, free, |address| self.unstock(address));
            self.depot = room;
        } else if magazine.room(class) == 0 && !magazine.grow(class, self.free_bytes()) {
            magazine.shed_half(class, |address| self.unstock(address));
        }
    }

    /// Returns a free block from a magazine or the depot to the heap.
    pub(super) fn unstock(&mut self, address: u64) {
        let Some((span, slot)) = map::block_from(address) else { return };
        self.out -= span.slot_bytes();
        // A gate may have been noted while the owner freed the block. It still holds the block
        // back.
        if !self.held.is_empty()
            && let Some(held) = self.held.get_mut(&address)
        {
            span.set(slot, Slot::Pending);
            held.freed = Some(Freed { address, requested: 0 });
            self.pending.push_back(address);
            self.counts.pending += span.slot_bytes();
            return;
        }
        self.give(span, slot);
    }

    #[inline]
    fn give(&mut self, span: &'static Span, slot: usize) {
        poison::free(span, span.address(slot));
        if span.is_single() {
            self.spans.give_exact(&mut self.heap, span);
        } else {
            self.spans.give(&mut self.heap, span, slot);
        }
    }

    /// Returns the block that begins at `address`, if it is live and has at least `bytes` bytes.
    #[inline]
    fn owned(&self, address: u64, bytes: u64) -> Option<(&'static Span, usize)> {
        let (span, slot) = map::block_from(address)?;
        let fits = span.life() == self.generation && bytes <= span.slot_bytes();
        (fits && span.get(slot).is_owned()).then_some((span, slot))
    }

    /// Returns whether the block at `address` can be freed or resized as one of `bytes` bytes, and
    /// has no gate noted on it.
    pub(super) fn is_free_to_go(&self, address: u64, bytes: u64) -> bool {
        self.owned(address, bytes).is_some_and(|(span, slot)| span.get(slot) == Slot::Live)
    }

    /// Frees a block.
    #[inline]
    pub(super) fn release(&mut self, block: Freed) -> Released {
        let Freed { address, requested } = block;
        let Some((span, slot)) = self.owned(address, requested) else {
            self.refused += 1;
            return Released::Refused;
        };
        let bytes = span.slot_bytes();
        self.out -= bytes;
        let counts = &mut self.counts;
        counts.requested = counts.requested.wrapping_sub(requested);
        counts.frees += 1;
        if span.get(slot) == Slot::Gated
            && let Some(held) = self.held.get_mut(&address)
        {
            held.freed = Some(block);
            span.set(slot, Slot::Pending);
            self.pending.push_back(address);
            counts.pending += bytes;
            return Released::Pending;
        }
        self.give(span, slot);
        Released::Free
    }

    /// Resizes a block in place. Returns whether it succeeded.
    pub(super) fn resize(&mut self, address: u64, old: u64, new: u64) -> bool {
        let Some((span, slot)) = self.owned(address, old) else { return false };
        let size = span.slot_bytes();
        // A tail that a device may still access must not be reused.
        let stays = new <= size && (new >= old || span.get(slot) == Slot::Gated);
        let now = if stays || !span.is_single() {
            size
        } else {
            let wanted = if new < size { new.max(size.min(SHORTEST)) } else { new };
            let resized = classes::single(wanted)
                .and_then(|wanted| self.heap.resize_in_place(address, wanted, 0).ok());
            resized.map_or(size, |block| block.bytes)
        };
        if now < new {
            return false;
        }
        if now != size {
            span.resize(now);
            self.out = self.out - size + now;
        }
        self.counts.requested = self.counts.requested.wrapping_sub(old).wrapping_add(new);
        self.note_peaks();
        true
    }

    /// Returns the start of the live block that contains `address`.
    pub(super) fn block_at(&self, address: u64) -> Option<u64> {
        let start = match map::slab_at(address) {
            Some((span, slot)) if !span.is_single() => span.address(slot),
            _ => match self.heap.block_at(address) {
                Ok(block) => block.address,
                Err(HeapError::Interior { block, .. }) => block.start,
                Err(_) => return None,
            },
        };
        self.owned(start, 0).map(|_| start)
    }

    /// Notes a gate on the live block that begins at `start`. Returns the number of its gates.
    pub(super) fn note(&mut self, start: u64, gate: Arc<dyn Gate>) -> usize {
        if let Some((span, slot)) = self.owned(start, 0) {
            span.set(slot, Slot::Gated);
        }
        let held =
            self.held.entry(start).or_insert_with(|| Held { gates: Vec::new(), freed: None });
        held.gates.push(gate);
        held.gates.len()
    }

    /// Returns the gates of a live block, to be polled outside the lock.
    pub(super) fn gates(&self, start: u64) -> Vec<Arc<dyn Gate>> {
        self.held.get(&start).map(|held| held.gates.clone()).unwrap_or_default()
    }

    /// Removes gates of a live block that were found open. Returns them, to be dropped outside the
    /// lock.
    pub(super) fn forget(&mut self, start: u64, open: &[Arc<dyn Gate>]) -> Vec<Arc<dyn Gate>> {
        let Some(held) = self.held.get_mut(&start).filter(|held| held.freed.is_none()) else {
            return Vec::new();
        };
        let (gone, stay) = std::mem::take(&mut held.gates)
            .into_iter()
            .partition(|gate| open.iter().any(|other| Arc::ptr_eq(gate, other)));
        held.gates = stay;
        if held.gates.is_empty() {
            self.held.remove(&start);
            if let Some((span, slot)) = self.owned(start, 0) {
                span.set(slot, Slot::Live);
            }
        }
        gone
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Returns whether blocks are pending, including those that are being polled.
    pub(super) fn is_waiting(&self) -> bool {
        self.counts.pending > 0
    }

    /// Takes up to `most` of the oldest pending blocks that are not being polled.
    pub(super) fn ask(&mut self, most: usize) -> Vec<Asked> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let mut asked = std::mem::take(&mut self.asked);
        for _ in 0..most.min(self.pending.len()) {
            let Some(address) = self.pending.pop_front() else { break };
            let Some(held) = self.held.get_mut(&address) else { continue };
            let Some(block) = held.freed else { continue };
            asked.push(Asked { block, gates: std::mem::take(&mut held.gates) });
        }
        asked
    }

    /// Stores the results of polling: blocks without shut gates become free. The others stay
    /// pending, ahead of younger ones.
    pub(super) fn answer(&mut self, mut asked: Vec<Asked>) {
        for Asked { block, gates } in asked.drain(..).rev() {
            if gates.is_empty() {
                self.held.remove(&block.address);
                if let Some((span, slot)) = map::block_from(block.address) {
                    self.counts.pending -= span.slot_bytes();
                    self.give(span, slot);
                }
            } else if let Some(held) = self.held.get_mut(&block.address) {
                held.gates = gates;
                self.pending.push_front(block.address);
            }
        }
        if asked.capacity() > self.asked.capacity() {
            self.asked = asked;
        }
    }

    /// Adds a region, with a segment for each registration. Returns the region if that is not
    /// possible.
    pub(super) fn add(&mut self, region: Region) -> Option<Region> {
        let span = region.span();
        if !map::cover(span.start as u64..span.end() as u64) {
            return Some(region);
        }
        let whole = [span];
        let parts = if region.registrations().is_empty() { &whole } else { region.registrations() };
        let unit = self.heap.config().unit;
        let range = |part: &Addresses| Range::new(part.start as u64, part.len as u64 / unit * unit);
        for (added, part) in parts.iter().enumerate() {
            if self.heap.add_segment(range(part), 0).is_err() {
                for part in &parts[..added] {
                    // It was just added, so it is wholly free.
                    let _stamp = self.heap.remove(range(part));
                }
                return Some(region);
            }
        }
        let counts = &mut self.counts;
        counts.physical += span.len as u64;
        counts.peak_physical = counts.peak_physical.max(counts.physical);
        counts.growths += 1;
        poison::come(span);
        self.regions.insert(span.start as u64, region);
        None
    }

    /// Returns the bytes of the shortest region.
    pub(super) fn shortest_region(&self) -> Option<u64> {
        self.regions.values().map(|region| region.span().len as u64).min()
    }

    /// Removes the largest region that is wholly free, if at least `keep` free bytes stay.
    pub(super) fn remove(&mut self, keep: u64) -> Option<Region> {
        self.spans.dissolve_spares(&mut self.heap);
        // Blocks in magazines count as neither free nor releasable here.
        let cached = self.counts.physical - self.out - self.counts.pending;
        let heap = &self.heap;
        let free = |region: &Region| {
            let span = region.span();
            let len = span.len as u64;
            cached - cached.min(len) >= keep && heap.is_free(Range::new(span.start as u64, len))
        };
        let start = *self
            .regions
            .iter()
            .filter(|(_, region)| free(region))
            .max_by_key(|(_, r)| r.span().len)?
            .0;
        let region = self.regions.remove(&start)?;
        poison::gone(region.span());
        let len = region.span().len as u64;
        let _stamp = self.heap.remove(Range::new(start, len));
        self.counts.physical -= len;
        Some(region)
    }

    /// Counts a released region.
    pub(super) fn reaped(&mut self, bytes: u64) {
        self.counts.reaped += bytes;
    }

    pub(super) fn failed(&mut self) {
        self.counts.failures += 1;
    }

    pub(super) fn waited(&mut self) {
        self.counts.host_waits += 1;
    }

    /// Returns whether any block has gates noted on it, including blocks that are being polled.
    pub(super) fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns whether nothing of a closed pool is left.
    pub(super) fn is_over(&self) -> bool {
        !self.open && self.regions.is_empty() && self.held.is_empty()
    }

    pub(super) fn is_pinned(&self, address: u64) -> Option<bool> {
        self.regions.range(..=address).next_back().map(|(_, region)| region.is_pinned())
    }

    pub(super) fn reports(&self) -> Vec<RegionReport> {
        self.regions.values().map(|region| region.report().clone()).collect()
    }

    pub(super) fn physical(&self) -> u64 {
        self.counts.physical
    }

    /// Returns the bytes that are free in the heap, without those in magazines and in the depot.
    pub(super) fn free_bytes(&self) -> u64 {
        self.counts.physical - self.out - self.counts.pending
    }

    pub(super) fn stats(&mut self, magazines: Tally) -> PinnedStats {
        self.looked = magazines.requested;
        self.note_peaks();
        let mut memory = self.counts;
        memory.live = self.out.saturating_sub(magazines.cached);
        memory.requested = memory.requested.wrapping_add(magazines.requested);
        memory.cached = memory.physical - memory.pending - memory.live;
        memory.allocations += magazines.allocations;
        memory.frees += magazines.frees;
        memory.blocks = memory.allocations.saturating_sub(memory.frees);
        let pinned = self
            .regions
            .values()
            .filter(|region| region.is_pinned())
            .map(|r| r.span().len as u64)
            .sum();
        PinnedStats {
            memory,
            regions: self.regions.len() as u64,
            pinned,
            in_magazines: magazines.cached,
            refused_frees: self.refused,
            locked: self.locked,
        }
    }

    /// Completes the error of a request that could not be served.
    pub(super) fn explain(
        &mut self,
        mut error: Box<aquifer_core::OutOfMemory>,
        magazines: Tally,
    ) -> MemoryError {
        let PoolStats { live, cached, pending, physical, .. } = self.stats(magazines).memory;
        (error.live, error.cached, error.pending, error.physical) =
            (live, cached, pending, physical);
        error.largest_free = self.heap.largest_free();
        error.available = error.largest_free;
        MemoryError::OutOfMemory(error)
    }

    /// Returns the shared part if the pool of this generation is open.
    #[inline]
    pub(super) fn open_as(&self, generation: u64) -> Result<&Arc<Shared>> {
        match &self.shared {
            Some(shared) if self.open && self.generation == generation => Ok(shared),
            _ => Err(MemoryError::Closed),
        }
    }

    pub(super) fn is_consistent(&mut self, magazines: Tally) -> bool {
        let (mut spanned, mut blocks) = (0, 0);
        // Bytes and number of slots, by state.
        let mut by = [(0u64, 0u64); 5];
        for span in self.spans.iter() {
            spanned += span.bytes();
            blocks += 1;
            for slot in 0..span.slots() {
                let (bytes, count) = &mut by[span.get(slot) as usize];
                *bytes += span.slot_bytes();
                *count += 1;
            }
        }
        let [free, live, gated, pending, cached] = by;
        let regions: u64 = self.regions.values().map(|region| region.span().len as u64).sum();
        let stats = self.stats(magazines).memory;
        self.heap.check().is_ok()
            && regions == stats.physical
            && self.heap.managed_bytes() == regions
            && (self.heap.live_bytes(), self.heap.live_blocks()) == (spanned, blocks)
            && free.0 == self.spans.free_bytes()
            && stats.live == live.0 + gated.0
            && stats.blocks == live.1 + gated.1
            && stats.pending == pending.0
            && (magazines.cached, magazines.blocks) == cached
            && stats.requested <= stats.live
            && self.pending.len() as u64 <= pending.1
            && self.held.len() as u64 == gated.1 + pending.1
            && self.held.keys().all(|&address| map::block_from(address).is_some())
    }

    /// Adds the counts of a magazine to those of the pool.
    pub(super) fn absorb(&mut self, tally: Tally) {
        let counts = &mut self.counts;
        counts.allocations += tally.allocations;
        counts.frees += tally.frees;
        counts.requested = counts.requested.wrapping_add(tally.requested);
    }

    /// Resets the state for the next generation.
    pub(super) fn renew(&mut self) -> Option<Arc<Shared>> {
        let old = std::mem::replace(self, Self::new());
        self.spans = old.spans.renew();
        old.shared
    }
}
