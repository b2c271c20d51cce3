//! The chunks of an arena: filled, current and spare.
//!
//! ```text
//!   in_use = 3                  spare
//!   ├── filled ──┼── filled ──┼── current ─┼──────────┼──────────┤
//!        0            1            2            3          4
//! ```
//!
//! A mark refers to a chunk by its index, so the indices of chunks in use never change. Only spare
//! chunks are swapped.

use aquifer_core::{Gate, sanitizer};
use smallvec::SmallVec;
use std::{alloc::Layout, ptr::NonNull, sync::Arc};

/// One block of the upstream allocator.
pub(super) struct Chunk {
    pub(super) base: NonNull<u8>,
    /// The layout that the block was allocated with.
    pub(super) layout: Layout,
    /// Usable bytes, at least `layout.size()`.
    pub(super) bytes: usize,
    /// Bytes filled when the arena moved on to the next chunk. Not valid for the current chunk and
    /// for spare ones.
    pub(super) filled: usize,
    /// Bytes from `base` that are not reused before all of `gates` are open. 0 if there are no
    /// gates.
    pub(super) deferred: usize,
    pub(super) gates: Vec<Arc<dyn Gate>>,
}

impl Chunk {
    /// Creates a chunk from a block of the upstream allocator. Nothing in it is allocated.
    pub(super) fn new(base: NonNull<u8>, layout: Layout, bytes: usize) -> Self {
        sanitizer::poison(base, bytes);
        Self { base, layout, bytes, filled: 0, deferred: 0, gates: Vec::new() }
    }

    /// Returns the lowest offset that may be allocated. Polls the gates. Never blocks.
    pub(super) fn poll_floor(&mut self) -> usize {
        if self.deferred > 0 && self.gates.iter().all(|gate| gate.is_open()) {
            self.gates.clear();
            self.deferred = 0;
        }
        self.deferred
    }

    /// Poisons the bytes from `offset` on in `AddressSanitizer`, because they are not allocated.
    pub(super) fn poison_from(&self, offset: usize) {
        sanitizer::poison(
            self.base.map_addr(|base| base.saturating_add(offset)),
            self.bytes - offset,
        );
    }

    /// Returns whether a block of this layout fits above `floor`.
    pub(super) fn fits(&self, floor: usize, layout: Layout) -> bool {
        let start = self.base.addr().get() + floor;
        start
            .checked_next_multiple_of(layout.align())
            .and_then(|start| start.checked_add(layout.size()))
            .is_some_and(|stop| stop <= self.end())
    }

    /// Returns the whole block.
    pub(super) fn block(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, self.bytes)
    }

    /// Returns the address one past the last byte.
    pub(super) fn end(&self) -> usize {
        self.base.addr().get() + self.bytes
    }

    pub(super) fn contains(&self, address: usize) -> bool {
        (self.base.addr().get()..self.end()).contains(&address)
    }
}

/// All chunks of an arena.
pub(super) struct Chunks {
    /// The first chunk is stored inline, because many arenas never need a second one.
    pub(super) list: SmallVec<[Chunk; 1]>,
    /// The number of chunks in use, `list[..in_use]`. The last of them is the current one.
    pub(super) in_use: usize,
    /// The sum of `filled` over the chunks in use, except the current one.
    pub(super) filled: usize,
    /// The sum of `layout.size()` over all chunks, which the limit bounds.
    pub(super) upstream_bytes: usize,
    /// The size of the newest chunk taken by growth, which determines the size of the next. 0
    /// before the first.
    pub(super) last_growth: usize,
    /// The size of the single chunk that replaces several after a reset. 0 once it has been
    /// allocated.
    pub(super) merge_bytes: usize,
    /// See [`ArenaStats::high_water`](super::ArenaStats::high_water).
    pub(super) high_water: usize,
}

impl Chunks {
    pub(super) const fn new() -> Self {
        Self {
            list: SmallVec::new_const(),
            in_use: 0,
            filled: 0,
            upstream_bytes: 0,
            last_growth: 0,
            merge_bytes: 0,
            high_water: 0,
        }
    }

    /// Returns whether there is no chunk, and no merged chunk is to be allocated next.
    #[inline]
    pub(super) fn is_unused(&self) -> bool {
        self.list.is_empty() && self.merge_bytes == 0
    }

    #[inline]
    pub(super) fn current(&mut self) -> Option<&mut Chunk> {
        self.list[..self.in_use].last_mut()
    }

    /// Finds a spare chunk that the layout fits into, and moves it to the index that is entered
    /// next. Returns whether there is one.
    pub(super) fn find_spare(&mut self, layout: Layout) -> bool {
        for at in self.in_use..self.list.len() {
            let chunk = &mut self.list[at];
            let floor = chunk.poll_floor();
            if chunk.fits(floor, layout) {
                self.list.swap(self.in_use, at);
                return true;
            }
        }
        false
    }

    /// Removes a spare chunk, to be returned to the upstream allocator.
    pub(super) fn pop_spare(&mut self) -> Option<Chunk> {
        if self.list.len() == self.in_use {
            return None;
        }
        let chunk = self.list.pop()?;
        self.upstream_bytes -= chunk.layout.size();
        Some(chunk)
    }
}
