//! The untyped bump allocator of an arena: blocks, marks and chunks.
#![expect(unsafe_code, reason = "moves a pointer through memory of the allocator below")]

use super::{
    ArenaMark, ArenaSettings, ArenaStats, OnReset,
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

/// The minimum alignment of a chunk, so that most requests fit at its first byte.
const CHUNK_ALIGN: usize = 16;

/// A bump allocator over `A`.
///
/// - All methods take `&self`. The type is not `Sync`, so only one thread uses it at a time.
/// - Nothing unwinds, except a gate of the user.
/// - The upstream allocator and gates are foreign code that may call back. So no borrow of `chunks`
///   is held across a call of the upstream allocator. If a borrow fails (a gate allocates from the
///   arena that polls it), the operation is refused.
pub(super) struct Bump<A: Allocator> {
    upstream: A,
    settings: ArenaSettings,
    /// The first free byte of the current chunk, with the provenance of the whole chunk. Dangling
    /// if there is no chunk.
    next: Cell<NonNull<u8>>,
    /// The address one past the current chunk, at most `isize::MAX`. Equal to the address of
    /// `next` if there is no chunk, so that nothing fits.
    end: Cell<usize>,
    /// The lowest address that `next` may go back to: the base of the current chunk plus the bytes
    /// held back for gates.
    floor: Cell<usize>,
    /// The base address of the current chunk.
    base: Cell<usize>,
    /// The highest `next` in the current chunk before a block was freed. 0 if none was freed.
    peak_next: Cell<usize>,
    chunks: RefCell<Chunks>,
}

// SAFETY: the chunks are blocks of `A` and move with it, the gates are `Send`, and the rest are
// numbers.
unsafe impl<A: Allocator + Send> Send for Bump<A> {}

impl<A: Allocator> Bump<A> {
    pub(super) const fn new(settings: ArenaSettings, upstream: A) -> Self {
        let next = NonNull::<u128>::dangling().cast::<u8>();
        Self {
            upstream,
            settings,
            next: Cell::new(next),
            // The address of `next`, which a const function cannot compute.
            end: Cell::new(align_of::<u128>()),
            floor: Cell::new(align_of::<u128>()),
            base: Cell::new(align_of::<u128>()),
            peak_next: Cell::new(0),
            chunks: RefCell::new(Chunks::new()),
        }
    }

    pub(super) fn upstream(&self) -> &A {
        &self.upstream
    }

    /// Returns the allocated bytes of the current chunk.
    fn offset(&self) -> usize {
        self.next.get().addr().get() - self.base.get()
    }

    /// Allocates a block of this layout, with unspecified contents. Constant time until the current
    /// chunk is full.
    #[inline]
    pub(super) fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        // Adds no padding for an empty block.
        if layout.size() == 0 {
            return Some(dangling(layout));
        }
        self.advance(layout).or_else(|| self.allocate_in_next_chunk(layout))
    }

    #[inline]
    fn advance(&self, layout: Layout) -> Option<NonNull<u8>> {
        let next = self.next.get();
        let at = next.addr().get();
        // Neither sum overflows: `next` is at most `isize::MAX`, and so is the size of a layout
        // rounded up to its alignment.
        let start = (at + (layout.align() - 1)) & !(layout.align() - 1);
        let stop = start + layout.size();
        if stop > self.end.get() {
            return None;
        }
        // SAFETY: 1. `at <= start <= stop <= end`, so both offsets stay inside the current chunk,
        // whose provenance `next` has. Without a chunk both are zero. 2. A chunk has at most
        // `isize::MAX` bytes.
        let block = unsafe { next.add(start - at) };
        sanitizer::unpoison(block, layout.size());
        // SAFETY: as above: `start + size == stop <= end`.
        self.next.set(unsafe { block.add(layout.size()) });
        Some(block)
    }

    /// Like [`Bump::allocate`], for a layout whose size is a multiple of its alignment, as for
    /// types and slices. This shortens the dependency chain from one `next` to the following one,
    /// which limits a loop of small allocations.
    #[inline]
    pub(super) fn allocate_padded(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.size() == 0 {
            return Some(dangling(layout));
        }
        debug_assert!(layout.size().is_multiple_of(layout.align()), "{layout:?}");
        let next = self.next.get();
        let at = next.addr().get();
        // The rounded-up end equals the rounded-up start plus the size. No sum overflows, as in
        // `advance`.
        let stop = (at + (layout.size() + (layout.align() - 1))) & !(layout.align() - 1);
        if stop > self.end.get() {
            return self.allocate_in_next_chunk(layout);
        }
        // SAFETY: 1. `at <= stop - size <= stop <= end`, so both offsets stay inside the current
        // chunk, whose provenance `next` has. Without a chunk both are zero. 2. A chunk has at most
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
        if chunks.in_use == 1 && self.offset() == 0 {
            // A reset entered the first chunk, which is empty but too small. Treat it as a spare
            // one.
            self.update_high_water(&mut chunks);
            chunks.in_use = 0;
            self.clear_current();
        }
        if !chunks.find_spare(layout) {
            drop(chunks);
            let (block, chunk_layout) = self.acquire_chunk(layout)?;
            let Ok(now) = self.chunks.try_borrow_mut() else {
                self.release_chunk(block, chunk_layout);
                return None;
            };
            chunks = now;
            chunks.upstream_bytes += chunk_layout.size();
            chunks.merge_bytes = 0;
            chunks.last_growth = chunk_layout.size().min(self.settings.max_chunk);
            // `acquire_chunk` reserved space, so this does not allocate. The chunk is constructed
            // in place, because moving it would read back stores that are not complete yet.
            let (at, last) = (chunks.in_use, chunks.list.len());
            chunks.list.push(Chunk::new(block.cast(), chunk_layout, block.len()));
            if at < last {
                chunks.list.swap(at, last);
            }
        }
        self.enter_next(&mut chunks);
        drop(chunks);
        self.advance(layout)
    }

    /// Allocates in the first chunk of an arena without chunks, in the common case. For a
    /// short-lived arena this is the only slow path, so it is kept short.
    fn allocate_in_first_chunk(&self, layout: Layout) -> Option<NonNull<u8>> {
        let size =
            layout.size().checked_next_multiple_of(CHUNK_ALIGN)?.max(self.settings.first_chunk);
        if !self.chunks.try_borrow().is_ok_and(|chunks| chunks.is_unused())
            || size > self.settings.limit
        {
            return None;
        }
        let chunk_layout = Layout::from_size_align(size, layout.align().max(CHUNK_ALIGN)).ok()?;
        let block = self.upstream.allocate(chunk_layout).ok()?;
        let base = block.cast();
        let mut chunks = self.chunks.try_borrow_mut().ok().filter(|chunks| chunks.is_unused());
        let end = base.addr().get() + block.len();
        let (Some(chunks), true) = (&mut chunks, end <= isize::MAX as usize) else {
            drop(chunks);
            self.release_chunk(block, chunk_layout);
            return None;
        };
        chunks.list.push(Chunk::new(base, chunk_layout, block.len()));
        (chunks.in_use, chunks.upstream_bytes, chunks.last_growth) =
            (1, size, size.min(self.settings.max_chunk));
        self.base.set(base.addr().get());
        self.end.set(end);
        self.floor.set(base.addr().get());
        self.peak_next.set(0);
        sanitizer::unpoison(base, layout.size());
        // SAFETY: the chunk has at least as many bytes and is aligned for the layout, and the block
        // begins at its base.
        self.next.set(unsafe { base.add(layout.size()) });
        Some(base)
    }

    /// Makes the first spare chunk the current one.
    fn enter_next(&self, chunks: &mut Chunks) {
        self.update_high_water(chunks);
        let offset = self.offset();
        if let Some(current) = chunks.current() {
            current.filled = offset;
            chunks.filled += offset;
        }
        chunks.in_use += 1;
        if let Some(chunk) = chunks.current() {
            let floor = chunk.deferred;
            self.make_current(chunk, floor);
        }
    }

    /// Makes the next block start at `offset` of this chunk.
    fn make_current(&self, chunk: &Chunk, offset: usize) {
        chunk.poison_from(offset);
        let base = chunk.base.addr().get();
        self.base.set(base);
        self.end.set(chunk.end());
        self.floor.set(base + chunk.deferred);
        self.peak_next.set(0);
        // SAFETY: `offset` was recorded as an offset of this chunk, so it is at most `bytes`.
        self.next.set(unsafe { chunk.base.add(offset) });
    }

    fn clear_current(&self) {
        let next = NonNull::<u128>::dangling().cast::<u8>();
        self.next.set(next);
        self.end.set(next.addr().get());
        self.floor.set(next.addr().get());
        self.base.set(next.addr().get());
        self.peak_next.set(0);
    }

    /// Allocates a chunk for at least this layout from the upstream allocator. Its size is twice
    /// that of the last one, or less if the limit or the upstream allocator requires it.
    fn acquire_chunk(&self, layout: Layout) -> Option<(NonNull<[u8]>, Layout)> {
        let align = layout.align().max(CHUNK_ALIGN);
        let min_size = layout.size().checked_next_multiple_of(CHUNK_ALIGN)?;
        let settings = &self.settings;
        let (mut remaining, preferred) = {
            let mut chunks = self.chunks.try_borrow_mut().ok()?;
            chunks.list.try_reserve(1).ok()?;
            let doubled = chunks.last_growth.saturating_mul(2).min(settings.max_chunk);
            let preferred = doubled.max(settings.first_chunk).max(chunks.merge_bytes);
            (settings.limit.saturating_sub(chunks.upstream_bytes), preferred)
        };
        // A limit that is not a multiple of the chunk alignment can still be used up to its last
        // byte.
        let min_size = if min_size > remaining { layout.size() } else { min_size };
        while remaining < min_size {
            // Spare chunks are too small for this layout. Bytes held back in them stay held back,
            // because they are also deferred in the upstream allocator.
            let spare = self.chunks.try_borrow_mut().ok()?.pop_spare()?;
            remaining = remaining.saturating_add(spare.layout.size());
            self.release_chunk(spare.block(), spare.layout);
        }
        let mut size = preferred.clamp(min_size, remaining.max(min_size));
        // No such layout exists, so return no spare chunks for it.
        Layout::from_size_align(min_size, align).ok()?;
        loop {
            // A size that no layout can have is treated as a refusal.
            let chunk_layout = Layout::from_size_align(size, align).ok();
            if let Some(chunk_layout) = chunk_layout
                && let Ok(block) = self.upstream.allocate(chunk_layout)
            {
                if block.addr().get() + block.len() <= isize::MAX as usize {
                    return Some((block, chunk_layout));
                }
                // No system maps user memory there. This bound costs nothing here and saves two
                // checks in `advance`.
                self.release_chunk(block, chunk_layout);
                return None;
            }
            if size > min_size {
                size = (size / 2).max(min_size);
                continue;
            }
            let spare = self.chunks.try_borrow_mut().ok()?.pop_spare()?;
            self.release_chunk(spare.block(), spare.layout);
        }
    }

    fn release_chunk(&self, block: NonNull<[u8]>, layout: Layout) {
        sanitizer::unpoison(block.cast(), block.len());
        // SAFETY: 1. `upstream` allocated the block, and it is deallocated only here: it was
        // removed from the list, or the arena is being dropped. 2. It was allocated with this
        // layout. 3. It is not in use: it was never entered, or it is spare, or the arena is
        // borrowed exclusively. If a device may still use it, it was deferred in `upstream`.
        unsafe { self.upstream.deallocate(block.cast(), layout) };
    }

    /// Returns whether this block of the current chunk ends where the next one starts.
    fn is_last(&self, block: NonNull<u8>, size: usize) -> bool {
        let start = block.addr().get();
        // A block of an adjacent chunk may also end at the first byte of this chunk.
        size > 0 && start >= self.base.get() && start + size == self.next.get().addr().get()
    }

    /// Makes the next block start `bytes` earlier, but not within bytes that are held back.
    ///
    /// # Safety
    /// The last `bytes` allocated lie in one block and are not used any more.
    unsafe fn rewind_above_floor(&self, bytes: usize) {
        let next = self.next.get();
        let back = bytes.min(next.addr().get() - self.floor.get());
        // SAFETY: 1. the target is at or above the floor, which lies in the current chunk like
        // `next` itself. 2. guaranteed by the caller.
        unsafe { self.rewind_by(back) };
    }

    /// Makes the next block start `bytes` earlier.
    ///
    /// # Safety
    /// 1. At least as many bytes of the current chunk are allocated.
    /// 2. The last of them are not used any more.
    #[inline]
    unsafe fn rewind_by(&self, bytes: usize) {
        let next = self.next.get();
        self.peak_next.set(self.peak_next.get().max(next.addr().get()));
        // SAFETY: guaranteed by the caller: the result lies in the chunk.
        let next = unsafe { next.sub(bytes) };
        sanitizer::poison(next, bytes);
        self.next.set(next);
    }

    /// Returns the maximum number of bytes that were allocated at once.
    fn high_water(&self, chunks: &Chunks) -> usize {
        chunks.high_water.max(chunks.filled + self.peak_offset())
    }

    /// Returns the maximum number of bytes of the current chunk that were allocated at once.
    fn peak_offset(&self) -> usize {
        self.peak_next.get().max(self.next.get().addr().get()) - self.base.get()
    }

    /// Updates the high-water mark. Must be called before the current chunk is left, and before its
    /// blocks are freed without [`rewind_above_floor`](Self::rewind_above_floor).
    fn update_high_water(&self, chunks: &mut Chunks) {
        chunks.high_water = self.high_water(chunks);
    }

    /// Deallocates a block. Only the last block frees memory.
    ///
    /// # Safety
    /// The block was allocated by this arena with this size, and is not used any more.
    pub(super) unsafe fn deallocate(&self, block: NonNull<u8>, size: usize) {
        let next = self.next.get();
        let start = block.addr().get();
        // A block that begins within held-back bytes and ends behind them is left allocated, for
        // simplicity.
        if start >= self.floor.get() && start + size == next.addr().get() {
            // SAFETY: 1. the block lies in the current chunk, because it begins at or above its
            // floor and ends at `next`. 2. guaranteed by the caller.
            unsafe { self.rewind_by(size) };
        }
    }

    /// Grows a block: in place if it is the last one and the chunk has room, otherwise by moving
    /// it.
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
                // Derived from `next`, which has the provenance of the whole chunk. The caller's
                // pointer may be valid only for the old block.
                return Some(block);
            }
        }
        // SAFETY: guaranteed by the caller, and `old` is the smaller size.
        unsafe { self.relocate(block, old, new, old.size()) }
    }

    /// Shrinks a block. If it is the last one, the freed tail can be reused.
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
            // SAFETY: the caller gives up the block.
            unsafe { self.deallocate(block, old.size()) };
            return Some(dangling(new));
        }
        if !block.addr().get().is_multiple_of(new.align()) {
            // SAFETY: guaranteed by the caller, and `new` is the smaller size.
            return unsafe { self.relocate(block, old, new, new.size()) };
        }
        if self.is_last(block, old.size()) {
            // SAFETY: the tail belongs to the last block, and its owner gives it up.
            unsafe { self.rewind_above_floor(old.size() - new.size()) };
        }
        Some(block)
    }

    /// # Safety
    /// `block` has the layout `old` and is readable for `keep` bytes, and `new` has at least as
    /// many.
    unsafe fn relocate(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
        keep: usize,
    ) -> Option<NonNull<u8>> {
        let moved = self.allocate(new)?;
        // SAFETY: 1. `block` is readable for `keep` bytes, as the caller guarantees. 2. `moved` is
        // writable for as many, because `new` has them. 3. Bytes need no alignment. 4. Both blocks
        // are live, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(block.as_ptr(), moved.as_ptr(), keep) };
        // SAFETY: the caller gives up the block, and nothing reads it after the copy.
        unsafe { self.deallocate(block, old.size()) };
        Some(moved)
    }

    /// Returns the current position. Inside a gate that this arena is polling, returns a mark to
    /// which a rewind has no effect.
    #[inline]
    pub(super) fn mark(&self) -> ArenaMark {
        // A failed borrow means that chunk metadata is being changed up the stack, so the current
        // chunk is not reliable. The highest possible mark makes a later rewind do nothing.
        let Ok(chunks) = self.chunks.try_borrow() else {
            return ArenaMark { in_use: usize::MAX, offset: 0, base: usize::MAX };
        };
        ArenaMark { in_use: chunks.in_use, offset: self.offset(), base: self.base.get() }
    }

    /// Rewinds to a mark. Chunks entered since then become spare.
    ///
    /// # Safety
    /// Nothing allocated since the mark is used any more, and the arena was not rewound further
    /// since then.
    #[inline]
    pub(super) unsafe fn rewind(&self, mark: ArenaMark) {
        // Checks that the same chunk has the same index. Its base alone is not enough: an empty
        // first chunk that is too small is swapped with a larger one and becomes the second.
        let same_index =
            || self.chunks.try_borrow().is_ok_and(|chunks| chunks.in_use == mark.in_use);
        if mark.base == self.base.get() && self.floor.get() == mark.base && same_index() {
            let back = (self.next.get().addr().get() - mark.base).saturating_sub(mark.offset);
            // SAFETY: 1. the target is at or above the chunk's base, and at or below `next`. 2.
            // guaranteed by the caller.
            return unsafe { self.rewind_by(back) };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.rewind_over_chunks(mark) };
    }

    /// Rewinds when chunks were entered since the mark, or bytes are held back for gates.
    ///
    /// # Safety
    /// As for [`rewind`](Self::rewind).
    #[cold]
    unsafe fn rewind_over_chunks(&self, mark: ArenaMark) {
        let Ok(mut chunks) = self.chunks.try_borrow_mut() else { return };
        if mark.in_use > chunks.in_use {
            return;
        }
        self.update_high_water(&mut chunks);
        if mark.in_use == chunks.in_use && mark.offset >= self.offset() {
            return;
        }
        chunks.list[mark.in_use..chunks.in_use]
            .iter()
            .for_each(|spare| spare.poison_from(spare.deferred));
        chunks.in_use = mark.in_use;
        chunks.filled =
            chunks.list[..mark.in_use.saturating_sub(1)].iter().map(|chunk| chunk.filled).sum();
        match chunks.current() {
            None => self.clear_current(),
            Some(chunk) => {
                let offset = mark.offset.max(chunk.poll_floor());
                self.make_current(chunk, offset);
            }
        }
    }

    /// Polls every gate once. A gate that is a point in a stream then records its position, and
    /// opens when the work queued so far is complete. Never blocks.
    pub(super) fn poll_gates(&mut self) {
        for chunk in &self.chunks.get_mut().list {
            for gate in &chunk.gates {
                gate.is_open();
            }
        }
    }

    /// Waits for every gate, frees everything, and keeps or returns the chunks according to the
    /// settings.
    #[inline]
    pub(super) fn reset(&mut self, deadline: Option<Instant>) -> Result<()> {
        let peak = self.peak_offset();
        let chunks = self.chunks.get_mut();
        if let [only] = &chunks.list[..]
            && only.gates.is_empty()
            && chunks.in_use == 1
        {
            // A single chunk is kept by every setting, and the next block starts at its base.
            chunks.high_water = chunks.high_water.max(peak);
            self.peak_next.set(0);
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
        let (peak, on_reset) = (self.peak_offset(), self.settings.on_reset);
        let chunks = self.chunks.get_mut();
        chunks.high_water = chunks.high_water.max(chunks.filled + peak);
        for chunk in &mut chunks.list {
            chunk.gates.clear();
            chunk.deferred = 0;
            chunk.poison_from(0);
        }
        (chunks.in_use, chunks.filled) = (0, 0);
        let kept = match on_reset {
            OnReset::KeepAll => chunks.list.len(),
            OnReset::Merge if chunks.list.len() > 1 => {
                chunks.merge_bytes = chunks.upstream_bytes;
                0
            }
            OnReset::Merge | OnReset::KeepLargest => 1,
        };
        // Move the largest chunk to the front, so that it is the one that is kept.
        if let Some((largest, _)) =
            chunks.list.iter().enumerate().max_by_key(|(_, chunk)| chunk.bytes)
        {
            chunks.list.swap(0, largest);
        }
        self.clear_current();
        while self.chunks.get_mut().list.len() > kept {
            let Some(chunk) = self.chunks.get_mut().pop_spare() else { break };
            self.release_chunk(chunk.block(), chunk.layout);
        }
        let chunks = self.chunks.get_mut();
        if !chunks.list.is_empty() {
            chunks.in_use = 1;
        }
        // Enter the first chunk, so that frequent resets do not take the slow path.
        if let Some(first) = self.chunks.borrow().list.first() {
            self.make_current(first, 0);
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

    /// Returns whether a chunk in use contains this address. Takes time linear in the number of
    /// chunks.
    pub(super) fn owns(&self, address: usize) -> bool {
        self.chunks.try_borrow().is_ok_and(|chunks| {
            chunks.list[..chunks.in_use].iter().any(|chunk| chunk.contains(address))
        })
    }
}

impl<A: DeferReuse> Bump<A> {
    /// Holds back everything allocated so far in the chunk of this address, and the chunk itself,
    /// until the gate is open.
    ///
    /// An arena does not record where its blocks begin, so it holds back everything before the next
    /// block.
    pub(super) fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()> {
        let address = address.addr().get();
        let foreign = MemoryError::ForeignBlock { address: address as u64 };
        let busy = MemoryError::Busy { address: address as u64 };
        let (index, base) = {
            let chunks = self.chunks.try_borrow().map_err(|_| busy.clone())?;
            let used = &chunks.list[..chunks.in_use];
            let index = used
                .iter()
                .position(|chunk| chunk.contains(address))
                .ok_or_else(|| foreign.clone())?;
            let filled = if index + 1 == used.len() { self.offset() } else { used[index].filled };
            if address >= used[index].base.addr().get() + filled {
                return Err(foreign);
            }
            (index, used[index].base)
        };
        // Defer in the upstream allocator first: then the bytes are safe even if this arena is
        // forgotten.
        self.upstream.defer(base, until.clone())?;
        let mut chunks = self.chunks.try_borrow_mut().map_err(|_| busy)?;
        let last = index + 1 == chunks.in_use;
        let Some(chunk) = chunks.list.get_mut(index).filter(|chunk| chunk.base == base) else {
            return Err(foreign);
        };
        // Remove open gates, so that the list does not grow with repeated copies.
        chunk.gates.retain(|gate| !gate.is_open());
        chunk.gates.push(until);
        if last {
            chunk.deferred = self.offset();
            self.floor.set(self.next.get().addr().get());
        } else {
            chunk.deferred = chunk.filled;
        }
        Ok(())
    }
}

impl<A: Allocator> Drop for Bump<A> {
    fn drop(&mut self) {
        for at in 0..self.chunks.get_mut().list.len() {
            let chunk = &self.chunks.get_mut().list[at];
            let (block, layout) = (chunk.block(), chunk.layout);
            self.release_chunk(block, layout);
        }
    }
}

/// Returns an aligned address for an empty block.
fn dangling(layout: Layout) -> NonNull<u8> {
    // An alignment is never zero.
    NonNull::without_provenance(NonZero::new(layout.align()).unwrap_or(NonZero::<usize>::MIN))
}
