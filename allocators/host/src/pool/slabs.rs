//! Slabs: blocks of the heap that are divided into equal slots, for requests of up to 64 KiB. And
//! single blocks, for all others: blocks of the heap that serve one request each. Both are
//! described by a [`SlabSpan`].
//!
//! A slab begins at a page boundary. A class with few live blocks gets short slabs, and longer ones
//! as more of it is in use, so that a hundred classes with one block each do not cost a hundred
//! long slabs. A slab with no used slot goes back to the heap, unless it is the only one of its
//! class with room. That one stays as a spare, and goes back before the pool reports a lack of
//! memory.
//!
//! Each allocation and free writes the slot's state, and the states of a slab share cache lines. To
//! avoid contention on these lines, a slab belongs to one *shard*, and each shard serves one thread
//! unless there are more threads than shards. A thread gets a slot of another shard only where no
//! slab can be cut.

use super::{
    classes::{SLAB_ALIGN, SLOTTED, bytes_of},
    page_map,
    span::{MAX_SLOTS, SlabSpan},
};
use aquifer_heap::{Heap, HeapBlock, Key};

/// Maximum bytes of a slab, unless a slot is longer.
const SLAB_MAX: usize = 256 << 10;
/// Maximum number of shards.
pub(super) const SHARDS: usize = 64;

#[derive(Debug, Default)]
struct ClassSlabs {
    /// Slabs with a free slot.
    partial: Vec<&'static SlabSpan>,
    /// Number of slots that are not free.
    used: usize,
}

/// The slabs and single blocks of a pool.
#[derive(Debug)]
pub(super) struct Spans {
    /// By shard, then by class. Grows with the shards in use.
    classes: Vec<ClassSlabs>,
    /// Spans that are not in use.
    vacant: Vec<&'static SlabSpan>,
    /// All spans by number, with the heap's key of the block that they describe.
    all: Vec<(&'static SlabSpan, Option<Key>)>,
}

impl Spans {
    pub(super) fn new() -> Self {
        Self { classes: Vec::new(), vacant: Vec::new(), all: Vec::new() }
    }

    fn span(&mut self) -> &'static SlabSpan {
        self.vacant.pop().unwrap_or_else(|| {
            let span = &*Box::leak(Box::new(SlabSpan::vacant(self.all.len() as u32)));
            self.all.push((span, None));
            span
        })
    }

    /// Returns a span for a block of the heap.
    fn span_of(&mut self, block: &HeapBlock) -> &'static SlabSpan {
        let span = self.span();
        if let Some((_, key)) = self.all.get_mut(span.number()) {
            *key = Some(block.key);
        }
        span
    }

    /// Takes a slot of the class: from the shard's slabs, else from a new slab, else from another
    /// shard's slabs.
    pub(super) fn allocate(
        &mut self,
        heap: &mut Heap,
        generation: u64,
        class: usize,
        shard: usize,
    ) -> Option<(&'static SlabSpan, usize)> {
        self.allocate_from_shard(class, shard)
            .or_else(|| {
                self.make_slab(heap, generation, class, shard)?;
                self.allocate_from_shard(class, shard)
            })
            .or_else(|| self.allocate_from_any_shard(class))
    }

    /// As [`Spans::allocate`], from existing slabs of the shard.
    pub(super) fn allocate_from_shard(
        &mut self,
        class: usize,
        shard: usize,
    ) -> Option<(&'static SlabSpan, usize)> {
        let class = self.classes.get_mut(shard * SLOTTED + class)?;
        let span = *class.partial.last()?;
        let slot = span.take_slot()?;
        class.used += 1;
        debug_assert_eq!(span.shard(), shard, "a slab in the list of another shard");
        if span.is_full() {
            class.partial.pop();
        }
        Some((span, slot))
    }

    /// As [`Spans::allocate`], from existing slabs of any shard.
    pub(super) fn allocate_from_any_shard(
        &mut self,
        class: usize,
    ) -> Option<(&'static SlabSpan, usize)> {
        (0..self.classes.len() / SLOTTED).find_map(|shard| self.allocate_from_shard(class, shard))
    }

    fn make_slab(
        &mut self,
        heap: &mut Heap,
        generation: u64,
        class: usize,
        shard: usize,
    ) -> Option<&'static SlabSpan> {
        let bytes = bytes_of(class);
        let longest = (SLAB_MAX / bytes).clamp(1, MAX_SLOTS);
        let place = shard * SLOTTED + class;
        if place >= self.classes.len() {
            self.classes.resize_with((shard + 1) * SLOTTED, ClassSlabs::default);
        }
        let wanted = self.classes[place].used.clamp(1, longest);
        // Up to the end of the last page, whose rest only a block without a class could use.
        let wanted =
            ((wanted * bytes).next_multiple_of(SLAB_ALIGN as usize) / bytes).clamp(1, longest);
        let try_slots = |heap: &mut Heap, slots: usize| {
            Some((heap.alloc((slots * bytes) as u64, SLAB_ALIGN)?, slots))
        };
        let shortest = (SLAB_ALIGN as usize / bytes).clamp(1, longest);
        let (block, slots) = try_slots(heap, wanted)
            .or_else(|| if shortest < wanted { try_slots(heap, shortest) } else { None })
            .or_else(|| if 1 < shortest.min(wanted) { try_slots(heap, 1) } else { None })?;
        let span = self.span_of(&block);
        span.init_slab(generation, block.address, class, slots);
        page_map::set(block.address, span.bytes(), true, span);
        let partial = &mut self.classes[place].partial;
        span.set_shard(shard);
        span.set_list_index(partial.len());
        partial.push(span);
        Some(span)
    }

    /// Frees a slot of a slab.
    pub(super) fn free(&mut self, heap: &mut Heap, span: &'static SlabSpan, slot: usize) {
        let was_full = span.is_full();
        span.free_slot(slot);
        let class = &mut self.classes[Self::class_index(span)];
        debug_assert!(class.used > 0, "no slot of the class is used");
        class.used -= 1;
        if was_full {
            span.set_list_index(class.partial.len());
            class.partial.push(span);
        }
        if span.used() == 0 && class.partial.len() > 1 {
            self.release_slab(heap, span);
        }
    }

    /// Returns the index of a slab's shard and class.
    fn class_index(slab: &SlabSpan) -> usize {
        slab.shard() * SLOTTED + slab.class() as usize
    }

    /// Returns a slab without used slots to the heap.
    fn release_slab(&mut self, heap: &mut Heap, span: &'static SlabSpan) {
        debug_assert_eq!(span.used(), 0, "a slab with used slots is released");
        let partial = &mut self.classes[Self::class_index(span)].partial;
        let removed = partial.swap_remove(span.list_index());
        debug_assert!(std::ptr::eq(removed, span), "a slab is not where its index says");
        if let Some(moved) = partial.get(span.list_index()) {
            moved.set_list_index(span.list_index());
        }
        self.retire_span(heap, span, true);
    }

    /// Returns all slabs without used slots to the heap. Returns whether there were any.
    pub(super) fn release_empty_slabs(&mut self, heap: &mut Heap) -> bool {
        let mut any = false;
        for class in 0..self.classes.len() {
            let spare = self.classes[class].partial.iter().copied().find(|span| span.used() == 0);
            if let Some(spare) = spare {
                self.release_slab(heap, spare);
                any = true;
            }
        }
        any
    }

    /// Returns the bytes of free slots.
    pub(super) fn free_bytes(&self) -> u64 {
        let free =
            |span: &SlabSpan| (span.slots() as u64 - u64::from(span.used())) * span.slot_bytes();
        self.classes.iter().flat_map(|class| &class.partial).map(|span| free(span)).sum()
    }

    /// Returns whether the classes count as many used slots as their slabs.
    pub(super) fn counts_used(&self) -> bool {
        let slabs = self.iter().filter(|span| !span.is_single());
        let used: usize = slabs.map(|slab| slab.used() as usize).sum();
        used == self.classes.iter().map(|class| class.used).sum()
    }

    /// Allocates a single block.
    pub(super) fn allocate_single(
        &mut self,
        heap: &mut Heap,
        generation: u64,
        bytes: u64,
        align: u64,
    ) -> Option<(&'static SlabSpan, usize)> {
        let block = heap.alloc(bytes, align)?;
        let span = self.span_of(&block);
        span.init_single(generation, block.address, block.bytes);
        page_map::set(block.address, block.bytes, false, span);
        Some((span, 0))
    }

    /// Frees a single block.
    pub(super) fn free_single(&mut self, heap: &mut Heap, span: &'static SlabSpan) {
        span.set(0, super::span::SlotState::Free);
        self.retire_span(heap, span, false);
    }

    fn retire_span(&mut self, heap: &mut Heap, span: &'static SlabSpan, slab: bool) {
        debug_assert!(span.generation() != 0, "a vacant span is retired");
        page_map::clear(span.start(), span.bytes(), slab);
        // It has been a live block of the heap, so the free cannot fail.
        if let Some(key) = self.all.get_mut(span.number()).and_then(|(_, key)| key.take()) {
            let _freed = heap.free_keyed(span.start(), key, 0);
        }
        span.clear();
        self.vacant.push(span);
    }

    /// An iterator over the spans in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = &'static SlabSpan> {
        self.all.iter().map(|&(span, _)| span).filter(|span| span.generation() != 0)
    }

    /// Resets the state for the next generation, and keeps the spans for reuse.
    pub(super) fn reset(self) -> Self {
        let mut next = Self::new();
        (next.vacant, next.all) = (self.vacant, self.all);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::classes;
    use aquifer_heap::{Config, Range};
    use std::alloc::Layout;

    /// Addresses that this process does not use.
    const AT: u64 = 7 << 40;

    #[test]
    fn shards_use_separate_slabs_until_no_slab_can_be_made() {
        let mut heap = Heap::new(Config { small_max: 0, ..Config::host() });
        assert!(
            page_map::create_tables(AT..AT + (1 << 20))
                && heap.add_segment(Range::new(AT, 1 << 20), 0).is_ok()
        );
        let mut spans = Spans::new();
        let class = classes::slotted(Layout::from_size_align(1024, 16).unwrap()).unwrap();
        let mut slabs = [Vec::new(), Vec::new()];
        let mut out = Vec::new();
        // Alternately, as two threads would.
        for n in 0..256 {
            let (span, slot) = spans.allocate(&mut heap, 1, class, n % 2).unwrap();
            slabs[n % 2].push(std::ptr::from_ref(span));
            out.push((span, slot));
        }
        assert!(
            slabs[0].iter().all(|slab| !slabs[1].contains(slab)),
            "a line that two threads write"
        );
        out.drain(..128).for_each(|(span, slot)| spans.free(&mut heap, span, slot));
        // One shard takes all that is left, including the other's free slots.
        while let Some(slot) = spans.allocate(&mut heap, 1, class, 0) {
            out.push(slot);
        }
        assert_eq!((out.len(), spans.free_bytes()), (1024, 0));
        out.into_iter().for_each(|(span, slot)| spans.free(&mut heap, span, slot));
        spans.release_empty_slabs(&mut heap);
        assert!(heap.is_free(Range::new(AT, 1 << 20)));
    }
}
