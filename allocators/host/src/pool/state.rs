//! A pool's books: which memory it has, which blocks are live, and which wait for a gate.

use super::{PinnedStats, Shared};
use crate::{
    kernel::Span,
    region::{Region, RegionReport},
};
use aquifer_core::{Gate, MemoryError, PoolStats, Result};
use aquifer_heap::{Config, Heap, HeapError, Range};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// Everything that the lock of a shell guards. Nothing here makes a system call, or asks the driver or a gate.
#[derive(Debug)]
pub(super) struct State {
    /// Which life of the shell this is. Allocators carry it.
    pub(super) generation: u32,
    /// Whether allocations are served.
    pub(super) open: bool,
    /// `None` between two lives.
    pub(super) shared: Option<Arc<Shared>>,
    heap: Heap,
    /// By first address. Each registration of a region is a segment of the heap.
    regions: BTreeMap<u64, Region>,
    /// Blocks with gates noted on them, by address: live ones, and pending ones.
    held: BTreeMap<u64, Held>,
    /// The pending ones of them, oldest first.
    pending: VecDeque<u64>,
    counts: PoolStats,
    refused: u64,
}

/// A block with gates.
#[derive(Debug)]
struct Held {
    gates: Vec<Arc<dyn Gate>>,
    /// Its owner has freed it, in this size.
    freed: Option<Freed>,
}

/// A block that left its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Freed {
    pub(super) address: u64,
    /// The size that was asked for.
    pub(super) requested: u64,
}

/// A pending block whose gates somebody is asking. It is still in the books, and nobody else asks meanwhile.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) block: Freed,
    pub(super) gates: Vec<Arc<dyn Gate>>,
}

/// What became of a free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Released {
    /// It can be given out again.
    Free,
    /// It waits for its gates.
    Pending,
    /// It was no live block.
    Refused,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            generation: 0,
            open: false,
            shared: None,
            heap: Heap::new(Config::host()),
            regions: BTreeMap::new(),
            held: BTreeMap::new(),
            pending: VecDeque::new(),
            counts: PoolStats::default(),
            refused: 0,
        }
    }

    /// A block; `None` if nothing free holds it.
    pub(super) fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let block = self.heap.alloc(bytes, align)?;
        let counts = &mut self.counts;
        counts.live += block.bytes;
        counts.requested += bytes;
        counts.blocks += 1;
        counts.allocations += 1;
        counts.peak_live = counts.peak_live.max(counts.live);
        counts.peak_requested = counts.peak_requested.max(counts.requested);
        Some(block.address)
    }

    /// The real size of the live block at `address`, if it can be freed or resized as one of `bytes` bytes.
    pub(super) fn live_size(&self, address: u64, bytes: u64) -> Option<u64> {
        let pending =
            !self.held.is_empty() && self.held.get(&address).is_some_and(|held| held.freed.is_some());
        let size = if pending { None } else { self.heap.size_of(address) };
        size.filter(|&size| bytes <= size)
    }

    /// Whether a gate is noted on it, so that its bytes may still be read or written by a device.
    pub(super) fn has_gates(&self, address: u64) -> bool {
        !self.held.is_empty() && self.held.get(&address).is_some_and(|held| !held.gates.is_empty())
    }

    /// Takes a block back from its owner.
    pub(super) fn release(&mut self, block: Freed) -> Released {
        let Freed { address, requested } = block;
        let Some(bytes) = self.live_size(address, requested) else {
            self.refused += 1;
            return Released::Refused;
        };
        let counts = &mut self.counts;
        counts.live -= bytes;
        counts.requested = counts.requested.saturating_sub(requested);
        counts.blocks -= 1;
        counts.frees += 1;
        if !self.held.is_empty()
            && let Some(held) = self.held.get_mut(&address)
        {
            held.freed = Some(block);
            self.pending.push_back(address);
            self.counts.pending += bytes;
            return Released::Pending;
        }
        // It is live, so the heap takes it.
        let _freed = self.heap.free(address, 0);
        Released::Free
    }

    /// Makes a block larger or smaller where it is; says whether that could be done.
    pub(super) fn resize(&mut self, address: u64, old: u64, new: u64) -> bool {
        let Some(size) = self.live_size(address, old) else { return false };
        // A tail that a device may still touch must not go to somebody else.
        let resized = if new <= size && (new >= old || self.has_gates(address)) {
            Ok(size)
        } else {
            self.heap.resize_in_place(address, new, 0).map(|block| block.bytes)
        };
        let Ok(now) = resized else { return false };
        let counts = &mut self.counts;
        counts.live = counts.live - size + now;
        counts.requested = counts.requested.saturating_sub(old) + new;
        counts.peak_live = counts.peak_live.max(counts.live);
        counts.peak_requested = counts.peak_requested.max(counts.requested);
        true
    }

    /// The start of the live block that `address` lies in.
    pub(super) fn block_at(&mut self, address: u64) -> Option<u64> {
        let start = if self.heap.size_of(address).is_some() {
            address
        } else {
            // No block starts there, so this frees nothing, and says which block it is inside of.
            match self.heap.free(address, 0) {
                Err(HeapError::Interior { block, .. }) => block.start,
                _ => return None,
            }
        };
        self.live_size(start, 0).map(|_| start)
    }

    /// Notes a gate on the live block that starts at `start`. Answers with how many it has.
    pub(super) fn note(&mut self, start: u64, gate: Arc<dyn Gate>) -> usize {
        let held = self.held.entry(start).or_insert_with(|| Held { gates: Vec::new(), freed: None });
        held.gates.push(gate);
        held.gates.len()
    }

    /// The gates of a live block, to be asked outside the lock.
    pub(super) fn gates(&self, start: u64) -> Vec<Arc<dyn Gate>> {
        self.held.get(&start).map(|held| held.gates.clone()).unwrap_or_default()
    }

    /// Forgets gates of a live block that have been found open. Answers with them, to be dropped outside the lock.
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
        }
        gone
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Up to `most` of the oldest pending blocks that nobody is asking about.
    pub(super) fn ask(&mut self, most: usize) -> Vec<Asked> {
        let mut asked = Vec::new();
        for _ in 0..most.min(self.pending.len()) {
            let Some(address) = self.pending.pop_front() else { break };
            let Some(held) = self.held.get_mut(&address) else { continue };
            let Some(block) = held.freed else { continue };
            asked.push(Asked { block, gates: std::mem::take(&mut held.gates) });
        }
        asked
    }

    /// Takes the answers in: blocks whose gates are all open are free, the others wait on, before those that are
    /// younger.
    pub(super) fn answer(&mut self, asked: Vec<Asked>) {
        for Asked { block, gates } in asked.into_iter().rev() {
            if gates.is_empty() {
                self.held.remove(&block.address);
                if let Ok(freed) = self.heap.free(block.address, 0) {
                    self.counts.pending -= freed.bytes;
                }
            } else if let Some(held) = self.held.get_mut(&block.address) {
                held.gates = gates;
                self.pending.push_front(block.address);
            }
        }
    }

    /// Puts a region in, a segment for each registration. Hands it back if the books are full.
    pub(super) fn add(&mut self, region: Region) -> Option<Region> {
        let span = region.span();
        let whole = [span];
        let parts = if region.registrations().is_empty() { &whole } else { region.registrations() };
        let unit = self.heap.config().unit;
        let range = |part: &Span| Range::new(part.start as u64, part.len as u64 / unit * unit);
        for (added, part) in parts.iter().enumerate() {
            if self.heap.add_segment(range(part), 0).is_err() {
                for part in &parts[..added] {
                    // Just added, so wholly free.
                    let _stamp = self.heap.remove(range(part));
                }
                return Some(region);
            }
        }
        let counts = &mut self.counts;
        counts.physical += span.len as u64;
        counts.peak_physical = counts.peak_physical.max(counts.physical);
        counts.growths += 1;
        self.regions.insert(span.start as u64, region);
        None
    }

    /// Takes out the largest region that is wholly free and leaves at least `keep` free bytes.
    pub(super) fn remove(&mut self, keep: u64) -> Option<Region> {
        let cached = self.cached();
        let heap = &self.heap;
        let free = |region: &Region| {
            let span = region.span();
            let len = span.len as u64;
            cached - cached.min(len) >= keep && heap.is_free(Range::new(span.start as u64, len))
        };
        let start =
            *self.regions.iter().filter(|(_, region)| free(region)).max_by_key(|(_, r)| r.span().len)?.0;
        let region = self.regions.remove(&start)?;
        let len = region.span().len as u64;
        let _stamp = self.heap.remove(Range::new(start, len));
        self.counts.physical -= len;
        Some(region)
    }

    /// Counts a region that has been given back.
    pub(super) fn reaped(&mut self, bytes: u64) {
        self.counts.reaped += bytes;
    }

    pub(super) fn failed(&mut self) {
        self.counts.failures += 1;
    }

    pub(super) fn waited(&mut self) {
        self.counts.host_waits += 1;
    }

    /// Whether any block has gates noted on it, also where somebody is asking them now.
    pub(super) fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether nothing of a closed pool is left.
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

    pub(super) fn largest_free(&self) -> u64 {
        self.heap.largest_free()
    }

    fn cached(&self) -> u64 {
        self.counts.physical - self.counts.live - self.counts.pending
    }

    pub(super) fn stats(&self) -> PinnedStats {
        let mut memory = self.counts;
        memory.cached = self.cached();
        let pinned =
            self.regions.values().filter(|region| region.is_pinned()).map(|r| r.span().len as u64).sum();
        PinnedStats { memory, regions: self.regions.len() as u64, pinned, refused_frees: self.refused }
    }

    /// The error of a request that nothing made room for.
    pub(super) fn explain(&self, mut error: Box<aquifer_core::OutOfMemory>) -> MemoryError {
        error.live = self.counts.live;
        error.cached = self.cached();
        error.pending = self.counts.pending;
        error.physical = self.counts.physical;
        error.largest_free = self.largest_free();
        MemoryError::OutOfMemory(error)
    }

    /// The shared part if the pool of this generation is open.
    pub(super) fn open_as(&self, generation: u32) -> Result<&Arc<Shared>> {
        match &self.shared {
            Some(shared) if self.open && self.generation == generation => Ok(shared),
            _ => Err(MemoryError::Closed),
        }
    }

    pub(super) fn is_consistent(&self) -> bool {
        let regions: u64 = self.regions.values().map(|region| region.span().len as u64).sum();
        let pending: u64 = self.held.values().filter(|h| h.freed.is_some()).count() as u64;
        self.heap.check().is_ok()
            && regions == self.counts.physical
            && self.heap.managed_bytes() == regions
            && self.heap.live_bytes() == self.counts.live + self.counts.pending
            && self.heap.live_blocks() == self.counts.blocks + pending
            && self.counts.requested <= self.counts.live
            && self.counts.allocations - self.counts.frees == self.counts.blocks
            && self.pending.len() as u64 <= pending
            && self.held.keys().all(|&address| self.heap.size_of(address).is_some())
    }

    /// The books of the next life.
    pub(super) fn renew(&mut self) -> Option<Arc<Shared>> {
        let generation = self.generation.wrapping_add(1);
        let old = std::mem::replace(self, Self { generation, ..Self::new() });
        old.shared
    }
}
