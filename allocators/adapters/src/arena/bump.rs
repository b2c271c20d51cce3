//! The engine of an arena: untyped blocks, marks, and the chunks they lie in.
#![expect(unsafe_code, reason = "moves a pointer through memory of the allocator below")]

use super::{
    ArenaSettings, ArenaStats, Mark, OnReset,
    chunks::{Chunk, Chunks},
};
use allocator_api2::alloc::Allocator;
use aquifer_core::{DeferReuse, Gate, MemoryError, Result, sanitizer};
use std::{
    alloc::Layout,
    cell::{Cell, RefCell},
    num::NonZero,
    ptr::{self, NonNull},
    sync::Arc,
    time::Instant,
};

/// What every chunk is aligned to, at least: most requests then fit from its first byte on.
const CHUNK_ALIGN: usize = 16;

/// Bump allocation over `A`.
///
/// Everything takes `&self` and one thread: the type is not `Sync`. Nothing here unwinds, unless a
/// gate of the user's does. The allocator below and gates are foreign code that could call back in,
/// so no borrow of `chunks` outlives a call of the allocator below, and one that cannot be had (a
/// gate that allocates from the arena that polls it) counts as a refusal.
pub(super) struct Bump<A: Allocator> {
    upstream: A,
    settings: ArenaSettings,
    /// The first free byte of the current chunk, with the provenance of the whole chunk; dangling
    /// if there is none.
    next: Cell<NonNull<u8>>,
    /// The address one past the current chunk, at most `isize::MAX`; that of `next` if there is
    /// none, so that nothing fits.
    end: Cell<usize>,
    /// The address below which `next` is not to fall: the current chunk's base plus what is held
    /// for gates.
    floor: Cell<usize>,
    /// The current chunk's base address.
    base: Cell<usize>,
    /// The furthest that `next` stood in the current chunk before a block was given back; 0 if
    /// none was.
    furthest: Cell<usize>,
    chunks: RefCell<Chunks>,
}

// SAFETY: the chunks are `A`'s blocks and go where `A` goes; the gates are `Send`; the rest is
// numbers.
unsafe impl<A: Allocator + Send> Send for Bump<A> {}

impl<A: Allocator> Bump<A> {
    pub(super) const fn new(settings: ArenaSettings, upstream: A) -> Self {
        let next = NonNull::<u128>::dangling().cast::<u8>();
        Self {
            upstream,
            settings,
            next: Cell::new(next),
            // The address of `next`, which a const function cannot ask for.
            end: Cell::new(align_of::<u128>()),
            floor: Cell::new(align_of::<u128>()),
            base: Cell::new(align_of::<u128>()),
            furthest: Cell::new(0),
            chunks: RefCell::new(Chunks::new()),
        }
    }

    pub(super) fn upstream(&self) -> &A {
        &self.upstream
    }

    /// Bytes of the current chunk that are handed out.
    fn offset(&self) -> usize {
        self.next.get().addr().get() - self.base.get()
    }

    /// A block of this layout; its bytes are whatever they were. Constant time while the current
    /// chunk lasts.
    #[inline]
    pub(super) fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        // Not even the padding of its alignment.
        if layout.size() == 0 {
            return Some(nowhere(layout));
        }
        self.advance(layout).or_else(|| self.allocate_in_next_chunk(layout))
    }

    #[inline]
    fn advance(&self, layout: Layout) -> Option<NonNull<u8>> {
        let next = self.next.get();
        let at = next.addr().get();
        // Neither sum overflows: `next` is at most `isize::MAX`, and so is a layout's size rounded
        // up to its alignment.
        let start = (at + (layout.align() - 1)) & !(layout.align() - 1);
        let stop = start + layout.size();
        if stop > self.end.get() {
            return None;
        }
        // SAFETY: 1. `at <= start <= stop <= end`, so both offsets stay inside the current chunk,
        // whose provenance `next` has; without a chunk both are zero. 2. A chunk has at most
        // `isize::MAX` bytes.
        let block = unsafe { next.add(start - at) };
        sanitizer::unpoison(block, layout.size());
        // SAFETY: as above: `start + size == stop <= end`.
        self.next.set(unsafe { block.add(layout.size()) });
        Some(block)
    }

    /// [`Bump::allocate`] for a layout whose size is a multiple of its alignment, as those of types
    /// and of slices are. From one `next` to the following one, which a loop of small objects waits
    /// for, it is two steps instead of three.
    #[inline]
    pub(super) fn allocate_whole(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.size() == 0 {
            return Some(nowhere(layout));
        }
        debug_assert!(layout.size().is_multiple_of(layout.align()), "{layout:?}");
        let next = self.next.get();
        let at = next.addr().get();
        // The end rounded up is the start rounded up, and a size further on. No sum overflows, as
        // in `advance`.
        let stop = (at + (layout.size() + (layout.align() - 1))) & !(layout.align() - 1);
        if stop > self.end.get() {
            return self.allocate_in_next_chunk(layout);
        }
        // SAFETY: 1. `at <= stop - size <= stop <= end`, so both offsets stay inside the current
        // chunk, whose provenance `next` has; without a chunk both are zero. 2. A chunk has at most
        // `isize::MAX` bytes.
        let block = unsafe { next.add(stop - layout.size() - at) };
        sanitizer::unpoison(block, layout.size());
        // SAFETY: as above: `start + size == stop <= end`.
        self.next.set(unsafe { block.add(layout.size()) });
        Some(block)
    }

    #[cold]
    #[inline(never)]
    fn allocate_in_next_chunk(&self, layout: Layout) -> Option<NonNull<u8>> {
        if let Some(block) = self.allocate_in_first_chunk(layout) {
            return Some(block);
        }
        let mut chunks = self.chunks.try_borrow_mut().ok()?;
        if chunks.entered == 1 && self.offset() == 0 {
            // The first chunk has been entered by a reset, and is too small: it is as good as a
            // spare one.
            self.note_high_water(&mut chunks);
            chunks.entered = 0;
            self.point_nowhere();
        }
        if !chunks.spare_for(layout) {
            drop(chunks);
            let (block, asked) = self.take_chunk(layout)?;
            let Ok(now) = self.chunks.try_borrow_mut() else {
                self.return_chunk(block, asked);
                return None;
            };
            chunks = now;
            chunks.taken += asked.size();
            chunks.merged = 0;
            chunks.grown = asked.size().min(self.settings.max_chunk);
            // `take_chunk` made room, so this does not allocate. Written where it stays: a chunk
            // that is moved is read back before its stores are done.
            let (at, last) = (chunks.entered, chunks.list.len());
            chunks.list.push(Chunk::new(block.cast(), asked, block.len()));
            if at < last {
                chunks.list.swap(at, last);
            }
        }
        self.enter_next(&mut chunks);
        drop(chunks);
        self.advance(layout)
    }

    /// The same in an arena that has no chunk yet, if all is as usual. An arena that is soon
    /// dropped has no other slow path, and this is half as long.
    fn allocate_in_first_chunk(&self, layout: Layout) -> Option<NonNull<u8>> {
        let size =
            layout.size().checked_next_multiple_of(CHUNK_ALIGN)?.max(self.settings.first_chunk);
        if !self.chunks.try_borrow().is_ok_and(|chunks| chunks.is_new())
            || size > self.settings.limit
        {
            return None;
        }
        let asked = Layout::from_size_align(size, layout.align().max(CHUNK_ALIGN)).ok()?;
        let block = self.upstream.allocate(asked).ok()?;
        let base = block.cast();
        let mut chunks = self.chunks.try_borrow_mut().ok().filter(|chunks| chunks.is_new());
        let end = base.addr().get() + block.len();
        let (Some(chunks), true) = (&mut chunks, end <= isize::MAX as usize) else {
            drop(chunks);
            self.return_chunk(block, asked);
            return None;
        };
        chunks.list.push(Chunk::new(base, asked, block.len()));
        (chunks.entered, chunks.taken, chunks.grown) = (1, size, size.min(self.settings.max_chunk));
        self.base.set(base.addr().get());
        self.end.set(end);
        self.floor.set(base.addr().get());
        self.furthest.set(0);
        sanitizer::unpoison(base, layout.size());
        // SAFETY: the chunk has as many bytes, and is aligned for the layout: the block begins
        // where it does.
        self.next.set(unsafe { base.add(layout.size()) });
        Some(base)
    }

    /// Makes the first spare the current chunk.
    fn enter_next(&self, chunks: &mut Chunks) {
        self.note_high_water(chunks);
        let offset = self.offset();
        if let Some(current) = chunks.current() {
            current.filled = offset;
            chunks.filled += offset;
        }
        chunks.entered += 1;
        if let Some(chunk) = chunks.current() {
            let floor = chunk.held;
            self.point_at(chunk, floor);
        }
    }

    /// Lets the next block start at `offset` of this chunk.
    fn point_at(&self, chunk: &Chunk, offset: usize) {
        chunk.poison_from(offset);
        let base = chunk.base.addr().get();
        self.base.set(base);
        self.end.set(chunk.end());
        self.floor.set(base + chunk.held);
        self.furthest.set(0);
        // SAFETY: `offset` was an offset of this chunk when it was noted, so it is at most `bytes`.
        self.next.set(unsafe { chunk.base.add(offset) });
    }

    fn point_nowhere(&self) {
        let next = NonNull::<u128>::dangling().cast::<u8>();
        self.next.set(next);
        self.end.set(next.addr().get());
        self.floor.set(next.addr().get());
        self.base.set(next.addr().get());
        self.furthest.set(0);
    }

    /// Asks the allocator below for a chunk that holds at least this layout: twice the last one's
    /// size if it can be had, less if the limit or the allocator says so.
    fn take_chunk(&self, layout: Layout) -> Option<(NonNull<[u8]>, Layout)> {
        let align = layout.align().max(CHUNK_ALIGN);
        let need = layout.size().checked_next_multiple_of(CHUNK_ALIGN)?;
        let settings = &self.settings;
        let (mut room, wish) = {
            let mut chunks = self.chunks.try_borrow_mut().ok()?;
            chunks.list.try_reserve(1).ok()?;
            let doubled = chunks.grown.saturating_mul(2).min(settings.max_chunk);
            let wish = doubled.max(settings.first_chunk).max(chunks.merged);
            (settings.limit.saturating_sub(chunks.taken), wish)
        };
        // A limit that is no multiple of the chunk alignment can still be used to its last byte.
        let need = if need > room { layout.size() } else { need };
        while room < need {
            // Spares are too small for this one. What is held in them stays held: the allocator
            // below knows of it.
            let spare = self.chunks.try_borrow_mut().ok()?.pop_spare()?;
            room = room.saturating_add(spare.layout.size());
            self.return_chunk(spare.block(), spare.layout);
        }
        let mut size = wish.clamp(need, room.max(need));
        // There is no such block: no spare is worth giving back for it.
        Layout::from_size_align(need, align).ok()?;
        loop {
            // Chunks that no layout can be as large as are refused like any other.
            let asked = Layout::from_size_align(size, align).ok();
            if let Some(asked) = asked
                && let Ok(block) = self.upstream.allocate(asked)
            {
                if block.addr().get() + block.len() <= isize::MAX as usize {
                    return Some((block, asked));
                }
                // No system maps a program's memory there: a bound that costs nothing here spares
                // two checks in `advance`.
                self.return_chunk(block, asked);
                return None;
            }
            if size > need {
                size = (size / 2).max(need);
                continue;
            }
            let spare = self.chunks.try_borrow_mut().ok()?.pop_spare()?;
            self.return_chunk(spare.block(), spare.layout);
        }
    }

    fn return_chunk(&self, block: NonNull<[u8]>, layout: Layout) {
        sanitizer::unpoison(block.cast(), block.len());
        // SAFETY: 1. The block is one of `upstream`'s and nobody else gives it back: it has left
        // the list, or the arena is going. 2. The layout is the one that it was asked for with. 3.
        // Nobody uses it: it was never entered, or it is spare, or the arena is borrowed
        // exclusively. Where a device still may, `upstream` was told by `defer`.
        unsafe { self.upstream.deallocate(block.cast(), layout) };
    }

    /// Whether this is the block of the current chunk that ends where the next one starts.
    fn is_last(&self, block: NonNull<u8>, size: usize) -> bool {
        let start = block.addr().get();
        // The block before a chunk's first byte may end there as well: that of a neighbouring
        // chunk.
        size > 0 && start >= self.base.get() && start + size == self.next.get().addr().get()
    }

    /// Lets the next block start `bytes` earlier, though not among bytes that are held.
    ///
    /// # Safety
    /// The last `bytes` handed out lie in one block, and nobody uses them any more.
    unsafe fn retreat(&self, bytes: usize) {
        let next = self.next.get();
        let back = bytes.min(next.addr().get() - self.floor.get());
        // SAFETY: 1. the target is at or above the floor, which lies in the current chunk like
        // `next` itself. 2. the caller's promise.
        unsafe { self.go_back(back) };
    }

    /// Lets the next block start `bytes` earlier.
    ///
    /// # Safety
    /// 1. As many of the current chunk's have been handed out. 2. Nobody uses the last of them any
    ///    more.
    #[inline]
    unsafe fn go_back(&self, bytes: usize) {
        let next = self.next.get();
        self.furthest.set(self.furthest.get().max(next.addr().get()));
        // SAFETY: the caller's promise: it does not leave the chunk.
        let next = unsafe { next.sub(bytes) };
        sanitizer::poison(next, bytes);
        self.next.set(next);
    }

    /// The most that was ever handed out at once.
    fn high_water(&self, chunks: &Chunks) -> usize {
        chunks.high_water.max(chunks.filled + self.furthest())
    }

    /// The most bytes of the current chunk that were handed out at once.
    fn furthest(&self) -> usize {
        self.furthest.get().max(self.next.get().addr().get()) - self.base.get()
    }

    /// Before the current chunk is left, or what it has handed out comes back without
    /// [`retreat`](Self::retreat).
    fn note_high_water(&self, chunks: &mut Chunks) {
        chunks.high_water = self.high_water(chunks);
    }

    /// Takes a block back. Only the last one makes room.
    ///
    /// # Safety
    /// The block is one of this arena's, of this size, and is not used any more.
    pub(super) unsafe fn deallocate(&self, block: NonNull<u8>, size: usize) {
        let next = self.next.get();
        let start = block.addr().get();
        // A block that begins among bytes that are held, and ends behind them, stays: nothing of it
        // is worth a look here.
        if start >= self.floor.get() && start + size == next.addr().get() {
            // SAFETY: 1. the block lies in the current chunk, since it begins behind its floor, and
            // ends at `next`. 2. the caller's promise.
            unsafe { self.go_back(size) };
        }
    }

    /// Makes a block larger: in place if it is the last one and the chunk has room, else by a move.
    ///
    /// # Safety
    /// As for [`Allocator::grow`].
    pub(super) unsafe fn grow(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<u8>> {
        let start = block.addr().get();
        if self.is_last(block, old.size()) && start.is_multiple_of(new.align()) {
            let stop = start.checked_add(new.size())?;
            if stop <= self.end.get() {
                let next = self.next.get();
                // SAFETY: the block lies in the current chunk and ends at `next`.
                let block = unsafe { next.sub(old.size()) };
                sanitizer::unpoison(block, new.size());
                // SAFETY: `stop` lies in the current chunk.
                self.next.set(unsafe { block.add(new.size()) });
                // From `next`, whose provenance is the whole chunk: the caller's pointer may reach
                // no further than the old block.
                return Some(block);
            }
        }
        // SAFETY: the caller's promise; `old` is the smaller one.
        unsafe { self.relocate(block, old, new, old.size()) }
    }

    /// Makes a block smaller; what the last one gives up is handed out again.
    ///
    /// # Safety
    /// As for [`Allocator::shrink`].
    pub(super) unsafe fn shrink(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<u8>> {
        if new.size() == 0 {
            // SAFETY: the caller hands the block over.
            unsafe { self.deallocate(block, old.size()) };
            return Some(nowhere(new));
        }
        if !block.addr().get().is_multiple_of(new.align()) {
            // SAFETY: the caller's promise; `new` is the smaller one.
            return unsafe { self.relocate(block, old, new, new.size()) };
        }
        if self.is_last(block, old.size()) {
            // SAFETY: the tail belongs to the last block and its owner gives it up.
            unsafe { self.retreat(old.size() - new.size()) };
        }
        Some(block)
    }

    /// # Safety
    /// `block` is a block of layout `old`, readable for `keep` bytes; `new` has at least as many.
    unsafe fn relocate(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
        keep: usize,
    ) -> Option<NonNull<u8>> {
        let moved = self.allocate(new)?;
        // SAFETY: 1. `block` is readable for `keep` bytes, by the caller's promise. 2. `moved` is
        // writable for as many, since `new` has them. 3. Bytes need no alignment. 4. The blocks are
        // both live, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(block.as_ptr(), moved.as_ptr(), keep) };
        // SAFETY: the caller hands the block over, and nothing reads it after the copy.
        unsafe { self.deallocate(block, old.size()) };
        Some(moved)
    }

    /// Where the arena stands. `None` from inside a gate that this arena is asking.
    #[inline]
    pub(super) fn mark(&self) -> Mark {
        // A refused borrow means that chunk bookkeeping is on the stack; the current chunk is then
        // not reliable, and the furthest mark possible makes a later rewind do nothing.
        let Ok(chunks) = self.chunks.try_borrow() else {
            return Mark { entered: usize::MAX, offset: 0, base: usize::MAX };
        };
        Mark { entered: chunks.entered, offset: self.offset(), base: self.base.get() }
    }

    /// Goes back to a mark. Chunks entered since are spare from then on.
    ///
    /// # Safety
    /// Nobody uses what was handed out since the mark, and the arena has not gone further back
    /// meanwhile.
    #[inline]
    pub(super) unsafe fn rewind(&self, mark: Mark) {
        // The same chunk in the same place. Its base alone does not say so: a first chunk that
        // nothing lies in makes way for a larger one, and comes second then.
        let is_there =
            || self.chunks.try_borrow().is_ok_and(|chunks| chunks.entered == mark.entered);
        if mark.base == self.base.get() && self.floor.get() == mark.base && is_there() {
            let back = (self.next.get().addr().get() - mark.base).saturating_sub(mark.offset);
            // SAFETY: 1. at or above the chunk's base, and at or below `next`. 2. the caller's
            // promise.
            return unsafe { self.go_back(back) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.rewind_over_chunks(mark) };
    }

    /// The same where chunks have been entered since the mark, or something is held for gates.
    ///
    /// # Safety
    /// As for [`rewind`](Self::rewind).
    #[cold]
    unsafe fn rewind_over_chunks(&self, mark: Mark) {
        let Ok(mut chunks) = self.chunks.try_borrow_mut() else { return };
        if mark.entered > chunks.entered {
            return;
        }
        self.note_high_water(&mut chunks);
        if mark.entered == chunks.entered && mark.offset >= self.offset() {
            return;
        }
        chunks.list[mark.entered..chunks.entered]
            .iter()
            .for_each(|spare| spare.poison_from(spare.held));
        chunks.entered = mark.entered;
        chunks.filled =
            chunks.list[..mark.entered.saturating_sub(1)].iter().map(|chunk| chunk.filled).sum();
        match chunks.current() {
            None => self.point_nowhere(),
            Some(chunk) => {
                let offset = mark.offset.max(chunk.floor());
                self.point_at(chunk, offset);
            }
        }
    }

    /// Asks every gate once: one that is a point in a stream notes where that is, and opens when
    /// what is queued by now is done. Never blocks.
    pub(super) fn look_at_gates(&mut self) {
        for chunk in &self.chunks.get_mut().list {
            for gate in &chunk.gates {
                gate.is_open();
            }
        }
    }

    /// Waits for every gate, then takes everything back and does with the chunks as the settings
    /// say.
    #[inline]
    pub(super) fn reset(&mut self, deadline: Option<Instant>) -> Result<()> {
        let furthest = self.furthest();
        let chunks = self.chunks.get_mut();
        if let [only] = &chunks.list[..]
            && only.gates.is_empty()
            && chunks.entered == 1
        {
            // It stays, whatever the settings say, and is where the next block goes.
            chunks.high_water = chunks.high_water.max(furthest);
            self.furthest.set(0);
            only.poison_from(0);
            self.next.set(only.base);
            return Ok(());
        }
        self.reset_chunks(deadline)
    }

    #[cold]
    fn reset_chunks(&mut self, deadline: Option<Instant>) -> Result<()> {
        for chunk in &self.chunks.get_mut().list {
            for gate in &chunk.gates {
                if !gate.is_open() && !gate.wait(deadline)? {
                    return Err(MemoryError::TimedOut);
                }
            }
        }
        let (furthest, on_reset) = (self.furthest(), self.settings.on_reset);
        let chunks = self.chunks.get_mut();
        chunks.high_water = chunks.high_water.max(chunks.filled + furthest);
        for chunk in &mut chunks.list {
            chunk.gates.clear();
            chunk.held = 0;
            chunk.poison_from(0);
        }
        (chunks.entered, chunks.filled) = (0, 0);
        let kept = match on_reset {
            OnReset::KeepAll => chunks.list.len(),
            OnReset::Merge if chunks.list.len() > 1 => {
                chunks.merged = chunks.taken;
                0
            }
            OnReset::Merge | OnReset::KeepLargest => 1,
        };
        // The largest one first, so that it is the one which stays.
        if let Some((largest, _)) =
            chunks.list.iter().enumerate().max_by_key(|(_, chunk)| chunk.bytes)
        {
            chunks.list.swap(0, largest);
        }
        self.point_nowhere();
        while self.chunks.get_mut().list.len() > kept {
            let Some(chunk) = self.chunks.get_mut().pop_spare() else { break };
            self.return_chunk(chunk.block(), chunk.layout);
        }
        let chunks = self.chunks.get_mut();
        if !chunks.list.is_empty() {
            chunks.entered = 1;
        }
        // Where the next block goes, so that a reset after each few blocks has no slow path.
        if let Some(first) = self.chunks.borrow().list.first() {
            self.point_at(first, 0);
        }
        Ok(())
    }

    pub(super) fn stats(&self) -> ArenaStats {
        let Ok(chunks) = self.chunks.try_borrow() else { return ArenaStats::default() };
        let allocated = chunks.filled + self.offset();
        ArenaStats {
            allocated,
            capacity: chunks.list.iter().map(|chunk| chunk.bytes).sum(),
            high_water: self.high_water(&chunks),
            chunks: chunks.list.len(),
        }
    }

    /// Whether a chunk in use holds this address. In time linear in the chunks.
    pub(super) fn owns(&self, address: usize) -> bool {
        self.chunks.try_borrow().is_ok_and(|chunks| {
            chunks.list[..chunks.entered].iter().any(|chunk| chunk.holds(address))
        })
    }
}

impl<A: DeferReuse> Bump<A> {
    /// Holds back what lies in the address's chunk now, and the chunk itself, until the gate is
    /// open.
    ///
    /// An arena does not know where its blocks begin and end, so it holds all that precedes the
    /// next block.
    pub(super) fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()> {
        let address = address.addr().get();
        let foreign = MemoryError::ForeignBlock { address: address as u64 };
        let busy = MemoryError::Busy { address: address as u64 };
        let (place, base) = {
            let chunks = self.chunks.try_borrow().map_err(|_| busy.clone())?;
            let used = &chunks.list[..chunks.entered];
            let place = used
                .iter()
                .position(|chunk| chunk.holds(address))
                .ok_or_else(|| foreign.clone())?;
            let filled = if place + 1 == used.len() { self.offset() } else { used[place].filled };
            if address >= used[place].base.addr().get() + filled {
                return Err(foreign);
            }
            (place, used[place].base)
        };
        // The allocator below first: from here on the bytes are safe even if this arena is
        // forgotten.
        self.upstream.defer(base, until.clone())?;
        let mut chunks = self.chunks.try_borrow_mut().map_err(|_| busy)?;
        let last = place + 1 == chunks.entered;
        let Some(chunk) = chunks.list.get_mut(place).filter(|chunk| chunk.base == base) else {
            return Err(foreign);
        };
        // Gates that are open already need no place: a step after step of copies must not make the
        // list longer.
        chunk.gates.retain(|gate| !gate.is_open());
        chunk.gates.push(until);
        if last {
            chunk.held = self.offset();
            self.floor.set(self.next.get().addr().get());
        } else {
            chunk.held = chunk.filled;
        }
        Ok(())
    }
}

impl<A: Allocator> Drop for Bump<A> {
    fn drop(&mut self) {
        for at in 0..self.chunks.get_mut().list.len() {
            let chunk = &self.chunks.get_mut().list[at];
            let (block, layout) = (chunk.block(), chunk.layout);
            self.return_chunk(block, layout);
        }
    }
}

/// An aligned address for a block of no bytes.
fn nowhere(layout: Layout) -> NonNull<u8> {
    // An alignment is never zero.
    NonNull::without_provenance(NonZero::new(layout.align()).unwrap_or(NonZero::<usize>::MIN))
}
