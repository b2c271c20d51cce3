//! The chunks of an arena: which are filled, which is being filled, which are spare.
//!
//! ```text
//!   entered = 3                 spare
//!   ├── filled ──┼── filled ──┼── current ─┼──────────┼──────────┤
//!        0            1            2            3          4
//! ```
//!
//! A mark names a chunk by its place, so the places of entered chunks never change; only spares
//! trade places.

use aquifer_core::{Gate, sanitizer};
use smallvec::SmallVec;
use std::{alloc::Layout, ptr::NonNull, sync::Arc};

/// One block of the allocator below.
pub(super) struct Chunk {
    pub(super) base: NonNull<u8>,
    /// As it was asked for, and so as it is given back.
    pub(super) layout: Layout,
    /// Usable bytes: `layout.size()` or more.
    pub(super) bytes: usize,
    /// Bytes filled when the arena moved on to the next chunk. Not kept for the current chunk, nor
    /// for spares.
    pub(super) filled: usize,
    /// Bytes from `base` on that are not handed out again before every one of `gates` is open. 0
    /// if there are none.
    pub(super) held: usize,
    pub(super) gates: Vec<Arc<dyn Gate>>,
}

impl Chunk {
    /// A block that the allocator below has just given. Nothing of it is handed out.
    pub(super) fn new(base: NonNull<u8>, layout: Layout, bytes: usize) -> Self {
        sanitizer::poison(base, bytes);
        Self { base, layout, bytes, filled: 0, held: 0, gates: Vec::new() }
    }

    /// The offset from which on bytes may be handed out; asks the gates. Never blocks.
    pub(super) fn floor(&mut self) -> usize {
        if self.held > 0 && self.gates.iter().all(|gate| gate.is_open()) {
            self.gates.clear();
            self.held = 0;
        }
        self.held
    }

    /// `AddressSanitizer` is told that nothing from `offset` on is handed out.
    pub(super) fn poison_from(&self, offset: usize) {
        sanitizer::poison(
            self.base.map_addr(|base| base.saturating_add(offset)),
            self.bytes - offset,
        );
    }

    /// Whether a block of this layout fits above `floor`.
    pub(super) fn fits(&self, floor: usize, layout: Layout) -> bool {
        let start = self.base.addr().get() + floor;
        start
            .checked_next_multiple_of(layout.align())
            .and_then(|start| start.checked_add(layout.size()))
            .is_some_and(|stop| stop <= self.end())
    }

    /// All of it.
    pub(super) fn block(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, self.bytes)
    }

    /// The address one past the last byte.
    pub(super) fn end(&self) -> usize {
        self.base.addr().get() + self.bytes
    }

    pub(super) fn holds(&self, address: usize) -> bool {
        (self.base.addr().get()..self.end()).contains(&address)
    }
}

/// All chunks of an arena.
pub(super) struct Chunks {
    /// The first one lies in the arena itself: many an arena never has a second.
    pub(super) list: SmallVec<[Chunk; 1]>,
    /// Chunks in use: `list[..entered]`; the last of them is the current one.
    pub(super) entered: usize,
    /// The sum of `filled` over the chunks in use but the current one.
    pub(super) filled: usize,
    /// The sum of `layout.size()` over all chunks: what the limit speaks of.
    pub(super) taken: usize,
    /// The size of the newest chunk that was taken by growth, from which the next one follows. 0
    /// before the first.
    pub(super) grown: usize,
    /// The size of the chunk that a reset has made one of several; 0 once it is taken.
    pub(super) merged: usize,
    /// See [`ArenaStats::high_water`](super::ArenaStats::high_water).
    pub(super) high_water: usize,
}

impl Chunks {
    pub(super) const fn new() -> Self {
        Self {
            list: SmallVec::new_const(),
            entered: 0,
            filled: 0,
            taken: 0,
            grown: 0,
            merged: 0,
            high_water: 0,
        }
    }

    /// Whether nothing has been taken since the arena was made, nor since a reset that kept nothing
    /// for the next chunk.
    #[inline]
    pub(super) fn is_new(&self) -> bool {
        self.list.is_empty() && self.merged == 0
    }

    #[inline]
    pub(super) fn current(&mut self) -> Option<&mut Chunk> {
        self.list[..self.entered].last_mut()
    }

    /// Finds a spare that the layout fits into and moves it to where the next chunk is entered.
    pub(super) fn spare_for(&mut self, layout: Layout) -> bool {
        for at in self.entered..self.list.len() {
            let chunk = &mut self.list[at];
            let floor = chunk.floor();
            if chunk.fits(floor, layout) {
                self.list.swap(self.entered, at);
                return true;
            }
        }
        false
    }

    /// Takes a spare out, for the allocator below.
    pub(super) fn pop_spare(&mut self) -> Option<Chunk> {
        if self.list.len() == self.entered {
            return None;
        }
        let chunk = self.list.pop()?;
        self.taken -= chunk.layout.size();
        Some(chunk)
    }
}
