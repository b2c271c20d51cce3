//! A pool's state under its lock: its memory, live blocks and pending frees.

use super::{
    classes::{self, LINE},
    context::PoolContext,
    depot::{Depot, DepotCapacity},
    magazine::Magazine,
    owner_biased_lock::LockProof,
    page_map, poison,
    slabs::Spans,
    span::{SlabSpan, SlotState},
    stats::{PinnedStats, Tally},
};
use crate::{
    kernel::Span as AddressRange,
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
const SHRINK_MIN: u64 = 8192;

/// Everything that the lock of a core guards. No method makes a system call, or calls the driver or
/// a gate.
#[derive(Debug)]
pub(super) struct PoolState {
    /// The generation of the core, unique in the process. Allocators carry it.
    pub(super) generation: u64,
    /// The lock proof for the locks of its magazines.
    pub(super) proof: LockProof,
    /// The capacity of its depot.
    pub(super) depot_capacity: DepotCapacity,
    /// Whether allocations are served.
    pub(super) open: bool,
    /// `None` while the core serves no pool.
    pub(super) shared: Option<Arc<PoolContext>>,
    heap: Heap,
    spans: Spans,
    /// By start address. Each registration of a region is a segment of the heap.
    regions: BTreeMap<u64, Region>,
    /// Live and pending blocks with gates, by address.
    gated: BTreeMap<u64, GatedBlock>,
    /// Addresses of pending blocks, oldest first.
    pending: VecDeque<u64>,
    /// A reusable vector for polling, so that polling allocates nothing.
    poll_buffer: Vec<PolledBlock>,
    /// Bytes of blocks that are live, in magazines or in the depot.
    out_of_heap: u64,
    /// Counts of what was done under the lock. Magazines count the rest. `live`, `cached` and
    /// `blocks` are computed on request.
    counts: PoolStats,
    /// The sum of the magazines' `requested` when statistics were last read.
    magazines_requested: u64,
    refused: u64,
    /// Acquisitions of the lock.
    pub(super) locked: u64,
}

/// A block with gates.
#[derive(Debug)]
struct GatedBlock {
    gates: Vec<Arc<dyn Gate>>,
    /// Set when the owner has freed it.
    freed: Option<FreedBlock>,
}

/// A freed block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FreedBlock {
    pub(super) address: u64,
    /// The size that was requested.
    pub(super) requested: u64,
}

/// A pending block whose gates a thread polls. It stays in the pool's metadata, and no other thread
/// polls it at the same time.
#[derive(Debug)]
pub(super) struct PolledBlock {
    pub(super) block: FreedBlock,
    pub(super) gates: Vec<Arc<dyn Gate>>,
}

/// The result of a free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FreeOutcome {
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

impl PoolState {
    pub(super) fn new() -> Self {
        Self {
            generation: fresh_generation(),
            proof: LockProof::new(),
            depot_capacity: DepotCapacity::default(),
            open: false,
            shared: None,
            heap: heap(),
            spans: Spans::new(),
            regions: BTreeMap::new(),
            gated: BTreeMap::new(),
            pending: VecDeque::new(),
            poll_buffer: Vec::new(),
            out_of_heap: 0,
            counts: PoolStats::default(),
            magazines_requested: 0,
            refused: 0,
            locked: 0,
        }
    }

    /// Allocates a block, preferably a slot of the shard's slabs. Returns `None` if nothing free
    /// fits.
    #[inline]
    pub(super) fn allocate(&mut self, layout: Layout, shard: usize) -> Option<u64> {
        let found = self.find_slot(layout, shard);
        // Spare slabs are returned to the heap before the request fails.
        let found = if found.is_none() && self.spans.release_empty_slabs(&mut self.heap) {
            self.find_slot(layout, shard)
        } else {
            found
        };
        found.map(|(span, slot)| self.finish_allocation(span, slot, layout.size() as u64))
    }

    #[inline]
    fn find_slot(&mut self, layout: Layout, shard: usize) -> Option<(&'static SlabSpan, usize)> {
        let Self { heap, spans, generation, .. } = self;
        match classes::slotted(layout) {
            Some(class) => spans.allocate(heap, *generation, class, shard),
            None => {
                let bytes = classes::single(layout.size() as u64)?;
                // Always aligned to a cache line, since magazines reuse the block for requests of
                // that alignment.
                spans.allocate_single(heap, *generation, bytes, (layout.align() as u64).max(LINE))
            }
        }
    }

    #[inline]
    fn finish_allocation(&mut self, span: &'static SlabSpan, slot: usize, requested: u64) -> u64 {
        debug_assert_eq!(span.get(slot), SlotState::Live, "a slot that was not taken");
        debug_assert_eq!(span.generation(), self.generation, "a span of another pool");
        debug_assert!(requested <= span.slot_bytes(), "{requested} bytes in a shorter slot");
        self.out_of_heap += span.slot_bytes();
        debug_assert!(self.out_of_heap <= self.counts.physical, "more is live than there is");
        let counts = &mut self.counts;
        counts.requested = counts.requested.wrapping_add(requested);
        counts.allocations += 1;
        self.update_peaks();
        span.address(slot)
    }

    fn update_peaks(&mut self) {
        let counts = &mut self.counts;
        counts.peak_live = counts.peak_live.max(self.out_of_heap);
        // Negative if more was freed here than in magazines since statistics were last read.
        let requested = counts
            .requested
            .wrapping_add(self.magazines_requested)
            .cast_signed()
            .max(0)
            .cast_unsigned();
        counts.peak_requested = counts.peak_requested.max(requested.min(self.out_of_heap));
    }

    /// Assigns a magazine to this pool, which is open. For the magazine's owner, and only while no
    /// other thread is entering.
    pub(super) fn assign(&mut self, magazine: &Magazine) {
        if magazine.lock.generation() != self.generation {
            // It is new, or was emptied when its last pool was closed.
            magazine.lock.assign(&mut self.proof, self.generation);
        }
    }

    /// Moves about 64 KiB of free slots of the class from the shard's existing slabs into the
    /// magazine. For the magazine's owner.
    pub(super) fn refill(&mut self, magazine: &Magazine, class: usize) {
        if class >= classes::SLOTTED {
            return;
        }
        let bytes = classes::bytes_of(class);
        for _ in 0..((64 << 10) / bytes).clamp(2, 32).min(magazine.free_entries(class)) {
            let Some((span, slot)) = self.spans.allocate_from_shard(class, magazine.shard()) else {
                break;
            };
            self.out_of_heap += bytes as u64;
            magazine.insert(span, slot);
        }
    }

    /// Makes room in the magazine for one more block of the class. Doubles the bin while the heap
    /// has as many free bytes as the magazine may hold beyond its initial size. Otherwise half of
    /// the bin returns to the heap. For the magazine's owner.
    pub(super) fn make_room(&mut self, magazine: &Magazine, depot: &Depot, class: usize) {
        if class >= classes::SLOTTED {
            let (mut capacity, free) = (self.depot_capacity, self.free_bytes());
            depot.make_room(class, &mut capacity, free, |address| self.return_to_heap(address));
            self.depot_capacity = capacity;
        } else if magazine.free_entries(class) == 0 && !magazine.grow_bin(class, self.free_bytes())
        {
            magazine.halve_bin(class, |address| self.return_to_heap(address));
        }
    }

    /// Returns a free block from a magazine or the depot to the heap.
    pub(super) fn return_to_heap(&mut self, address: u64) {
        let Some((span, slot)) = page_map::block_starting_at(address) else { return };
        debug_assert_eq!(span.generation(), self.generation, "a block of another pool");
        debug_assert!(self.out_of_heap >= span.slot_bytes(), "more comes back than was out");
        self.out_of_heap -= span.slot_bytes();
        // A gate may have been noted while the owner freed the block. It still holds the block
        // back.
        if !self.gated.is_empty()
            && let Some(entry) = self.gated.get_mut(&address)
        {
            span.set(slot, SlotState::Pending);
            entry.freed = Some(FreedBlock { address, requested: 0 });
            self.pending.push_back(address);
            self.counts.pending += span.slot_bytes();
            return;
        }
        self.free_slot(span, slot);
    }

    #[inline]
    fn free_slot(&mut self, span: &'static SlabSpan, slot: usize) {
        poison::on_return_to_heap(span, span.address(slot));
        if span.is_single() {
            self.spans.free_single(&mut self.heap, span);
        } else {
            self.spans.free(&mut self.heap, span, slot);
        }
    }

    /// Returns the block that begins at `address`, if it is live and has at least `bytes` bytes.
    #[inline]
    fn owned(&self, address: u64, bytes: u64) -> Option<(&'static SlabSpan, usize)> {
        let (span, slot) = page_map::block_starting_at(address)?;
        let fits = span.generation() == self.generation && bytes <= span.slot_bytes();
        (fits && span.get(slot).is_owned()).then_some((span, slot))
    }

    /// Returns whether the block at `address` can be freed or resized as one of `bytes` bytes, and
    /// has no gate noted on it.
    pub(super) fn can_free(&self, address: u64, bytes: u64) -> bool {
        self.owned(address, bytes).is_some_and(|(span, slot)| span.get(slot) == SlotState::Live)
    }

    /// Frees a block.
    #[inline]
    pub(super) fn free(&mut self, block: FreedBlock) -> FreeOutcome {
        let FreedBlock { address, requested } = block;
        let Some((span, slot)) = self.owned(address, requested) else {
            self.refused += 1;
            return FreeOutcome::Refused;
        };
        let bytes = span.slot_bytes();
        debug_assert!(self.out_of_heap >= bytes, "more is freed than was out");
        self.out_of_heap -= bytes;
        let counts = &mut self.counts;
        counts.requested = counts.requested.wrapping_sub(requested);
        counts.frees += 1;
        if span.get(slot) == SlotState::Gated
            && let Some(entry) = self.gated.get_mut(&address)
        {
            entry.freed = Some(block);
            span.set(slot, SlotState::Pending);
            self.pending.push_back(address);
            counts.pending += bytes;
            return FreeOutcome::Pending;
        }
        self.free_slot(span, slot);
        FreeOutcome::Free
    }

    /// Resizes a block in place. Returns whether it succeeded.
    pub(super) fn resize(&mut self, address: u64, old: u64, new: u64) -> bool {
        let Some((span, slot)) = self.owned(address, old) else { return false };
        let size = span.slot_bytes();
        // A tail that a device may still access must not be reused.
        let stays = new <= size && (new >= old || span.get(slot) == SlotState::Gated);
        let now = if stays || !span.is_single() {
            size
        } else {
            let wanted = if new < size { new.max(size.min(SHRINK_MIN)) } else { new };
            let resized = classes::single(wanted)
                .and_then(|wanted| self.heap.resize_in_place(address, wanted, 0).ok());
            resized.map_or(size, |block| block.bytes)
        };
        if now < new {
            return false;
        }
        if now != size {
            span.resize(now);
            self.out_of_heap = self.out_of_heap - size + now;
        }
        self.counts.requested = self.counts.requested.wrapping_sub(old).wrapping_add(new);
        self.update_peaks();
        true
    }

    /// Returns the start of the live block that contains `address`.
    pub(super) fn block_at(&self, address: u64) -> Option<u64> {
        let start = match page_map::slot_containing(address) {
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
    pub(super) fn add_gate(&mut self, start: u64, gate: Arc<dyn Gate>) -> usize {
        if let Some((span, slot)) = self.owned(start, 0) {
            span.set(slot, SlotState::Gated);
        }
        let entry = self
            .gated
            .entry(start)
            .or_insert_with(|| GatedBlock { gates: Vec::new(), freed: None });
        entry.gates.push(gate);
        entry.gates.len()
    }

    /// Returns the gates of a live block, to be polled outside the lock.
    pub(super) fn gates(&self, start: u64) -> Vec<Arc<dyn Gate>> {
        self.gated.get(&start).map(|entry| entry.gates.clone()).unwrap_or_default()
    }

    /// Removes gates of a live block that were found open. Returns them, to be dropped outside the
    /// lock.
    pub(super) fn remove_gates(
        &mut self,
        start: u64,
        open: &[Arc<dyn Gate>],
    ) -> Vec<Arc<dyn Gate>> {
        let Some(entry) = self.gated.get_mut(&start).filter(|entry| entry.freed.is_none()) else {
            return Vec::new();
        };
        let (gone, stay) = std::mem::take(&mut entry.gates)
            .into_iter()
            .partition(|gate| open.iter().any(|other| Arc::ptr_eq(gate, other)));
        entry.gates = stay;
        if entry.gates.is_empty() {
            self.gated.remove(&start);
            if let Some((span, slot)) = self.owned(start, 0) {
                span.set(slot, SlotState::Live);
            }
        }
        gone
    }

    pub(super) fn has_pollable(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Returns whether blocks are pending, including those that are being polled.
    pub(super) fn has_pending(&self) -> bool {
        self.counts.pending > 0
    }

    /// Takes up to `most` of the oldest pending blocks that are not being polled.
    pub(super) fn begin_poll(&mut self, most: usize) -> Vec<PolledBlock> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let mut polled = std::mem::take(&mut self.poll_buffer);
        for _ in 0..most.min(self.pending.len()) {
            let Some(address) = self.pending.pop_front() else { break };
            let Some(entry) = self.gated.get_mut(&address) else { continue };
            let Some(block) = entry.freed else { continue };
            polled.push(PolledBlock { block, gates: std::mem::take(&mut entry.gates) });
        }
        polled
    }

    /// Stores the results of polling: blocks without shut gates become free. The others stay
    /// pending, ahead of younger ones.
    pub(super) fn end_poll(&mut self, mut polled: Vec<PolledBlock>) {
        for PolledBlock { block, gates } in polled.drain(..).rev() {
            if gates.is_empty() {
                self.gated.remove(&block.address);
                if let Some((span, slot)) = page_map::block_starting_at(block.address) {
                    debug_assert_eq!(span.get(slot), SlotState::Pending, "not a pending block");
                    debug_assert!(self.counts.pending >= span.slot_bytes(), "nothing is pending");
                    self.counts.pending -= span.slot_bytes();
                    self.free_slot(span, slot);
                }
            } else if let Some(entry) = self.gated.get_mut(&block.address) {
                entry.gates = gates;
                self.pending.push_front(block.address);
            }
        }
        if polled.capacity() > self.poll_buffer.capacity() {
            self.poll_buffer = polled;
        }
    }

    /// Adds a region, with a segment for each registration. Returns the region if that is not
    /// possible.
    pub(super) fn add(&mut self, region: Region) -> Option<Region> {
        let span = region.span();
        if !page_map::create_tables(span.start as u64..span.end() as u64) {
            return Some(region);
        }
        let whole = [span];
        let parts = if region.registrations().is_empty() { &whole } else { region.registrations() };
        let unit = self.heap.config().unit;
        let range =
            |part: &AddressRange| Range::new(part.start as u64, part.len as u64 / unit * unit);
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
        debug_assert!(
            parts.iter().all(|part| part.start >= span.start && part.end() <= span.end()),
            "a registration lies outside of its region"
        );
        poison::on_region_added(span);
        self.regions.insert(span.start as u64, region);
        None
    }

    /// Returns the bytes of the shortest region.
    pub(super) fn shortest_region(&self) -> Option<u64> {
        self.regions.values().map(|region| region.span().len as u64).min()
    }

    /// Returns whether this is the state of the pool with these settings. The core of a closed pool
    /// can serve another one at any time.
    pub(super) fn serves(&self, shared: &Arc<PoolContext>) -> bool {
        self.shared.as_ref().is_some_and(|now| Arc::ptr_eq(now, shared))
    }

    /// Removes the largest region that is wholly free, if at least `keep` free bytes stay. Removes
    /// none if the core serves another pool now.
    pub(super) fn remove(&mut self, shared: &Arc<PoolContext>, keep: u64) -> Option<Region> {
        if !self.serves(shared) {
            return None;
        }
        self.spans.release_empty_slabs(&mut self.heap);
        // Blocks in magazines count as neither free nor releasable here.
        let cached = self.counts.physical - self.out_of_heap - self.counts.pending;
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
        poison::on_region_removed(region.span());
        let len = region.span().len as u64;
        let _stamp = self.heap.remove(Range::new(start, len));
        debug_assert!(self.counts.physical - len >= self.out_of_heap, "a live region is removed");
        self.counts.physical -= len;
        Some(region)
    }

    /// Counts a released region.
    pub(super) fn count_reaped(&mut self, bytes: u64) {
        self.counts.reaped += bytes;
    }

    pub(super) fn count_failure(&mut self) {
        self.counts.failures += 1;
    }

    pub(super) fn count_host_wait(&mut self) {
        self.counts.host_waits += 1;
    }

    /// Returns whether any block has gates noted on it, including blocks that are being polled.
    pub(super) fn has_gated_blocks(&self) -> bool {
        !self.gated.is_empty()
    }

    /// Returns whether any block is live, where magazines hold none.
    pub(super) fn has_live(&self) -> bool {
        self.out_of_heap > 0
    }

    /// Returns whether nothing of a closed pool is left.
    pub(super) fn is_finished(&self) -> bool {
        !self.open && self.regions.is_empty() && self.gated.is_empty()
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
        debug_assert!(
            self.counts.physical >= self.out_of_heap + self.counts.pending,
            "more is out of the heap than there is"
        );
        self.counts.physical - self.out_of_heap - self.counts.pending
    }

    /// Returns the bytes of the largest free extent of the heap.
    pub(super) fn largest_free(&self) -> u64 {
        self.heap.largest_free()
    }

    pub(super) fn stats(&mut self, magazines: Tally) -> PinnedStats {
        self.magazines_requested = magazines.requested;
        self.update_peaks();
        let mut memory = self.counts;
        memory.live = self.out_of_heap.saturating_sub(magazines.cached);
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
    pub(super) fn complete_error(
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
    pub(super) fn open_as(&self, generation: u64) -> Result<&Arc<PoolContext>> {
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
            && self.spans.counts_used()
            && stats.live == live.0 + gated.0
            && stats.blocks == live.1 + gated.1
            && stats.pending == pending.0
            && (magazines.cached, magazines.blocks) == cached
            && stats.requested <= stats.live
            && self.pending.len() as u64 <= pending.1
            && self.gated.len() as u64 == gated.1 + pending.1
            && self.gated.keys().all(|&address| page_map::block_starting_at(address).is_some())
    }

    /// Adds the counts of a magazine to those of the pool.
    pub(super) fn absorb(&mut self, tally: Tally) {
        let counts = &mut self.counts;
        counts.allocations += tally.allocations;
        counts.frees += tally.frees;
        counts.requested = counts.requested.wrapping_add(tally.requested);
    }

    /// Resets the state for the next generation.
    pub(super) fn reset(&mut self) -> Option<Arc<PoolContext>> {
        let old = std::mem::replace(self, Self::new());
        self.spans = old.spans.reset();
        old.shared
    }
}
