//! Equal slots cut from blocks of the heap, for requests that have a class.
//!
//! A slab begins at a page and is as long as its slots need. A class that has few blocks gets short
//! slabs, and longer ones the more of it is out, so that a hundred classes with a block each do not
//! cost a hundred long slabs. When its last slot comes back a slab goes back to the heap, unless it
//! is the class's only one with room: that one stays as a spare, and goes before anybody is told
//! that memory is short.
//!
//! How a block stands is written at each allocation and free, and the states of a slab's slots
//! share cache lines. So a slab is of one *shard*, which is one thread's unless there are many: two
//! threads that took turns with the slots of one slab would wait for each other's lines, 330 ns an
//! operation with sixteen of them instead of 9. Only where no slab can be cut does a thread get
//! another's slot.

use super::{
    classes::{SLAB_ALIGN, SLOTTED, bytes_of},
    map,
    span::{MAX_SLOTS, Span},
};
use aquifer_heap::{Block, Heap, Key};

/// The longest slabs, in bytes, unless a slot is longer.
const LONGEST: usize = 256 << 10;
/// How many shards there are at most.
pub(super) const SHARDS: usize = 64;

#[derive(Debug, Default)]
struct Class {
    /// Slabs with a free slot.
    room: Vec<&'static Span>,
    /// Slots that are not free.
    used: usize,
}

/// All slabs and single blocks of a pool.
#[derive(Debug)]
pub(super) struct Spans {
    /// By shard, and within by class: as many as have been asked for.
    classes: Vec<Class>,
    /// Spans that describe nothing now.
    vacant: Vec<&'static Span>,
    /// Every span there is, and the heap's key of what it describes, by number.
    all: Vec<(&'static Span, Option<Key>)>,
}

impl Spans {
    pub(super) fn new() -> Self {
        Self { classes: Vec::new(), vacant: Vec::new(), all: Vec::new() }
    }

    fn span(&mut self) -> &'static Span {
        self.vacant.pop().unwrap_or_else(|| {
            let span = &*Box::leak(Box::new(Span::vacant(self.all.len() as u32)));
            self.all.push((span, None));
            span
        })
    }

    /// A span for a block of the heap.
    fn span_of(&mut self, block: &Block) -> &'static Span {
        let span = self.span();
        if let Some((_, key)) = self.all.get_mut(span.number()) {
            *key = Some(block.key);
        }
        span
    }

    /// A slot of the class: of the shard's own slabs, of a new one, or where none can be cut of
    /// another shard's.
    pub(super) fn take(
        &mut self,
        heap: &mut Heap,
        life: u64,
        class: usize,
        shard: usize,
    ) -> Option<(&'static Span, usize)> {
        self.take_ready(class, shard)
            .or_else(|| {
                self.cut(heap, life, class, shard)?;
                self.take_ready(class, shard)
            })
            .or_else(|| self.take_of_any(class))
    }

    /// As [`Spans::take`], from the slabs that the shard has.
    pub(super) fn take_ready(
        &mut self,
        class: usize,
        shard: usize,
    ) -> Option<(&'static Span, usize)> {
        let class = self.classes.get_mut(shard * SLOTTED + class)?;
        let span = *class.room.last()?;
        let slot = span.take()?;
        class.used += 1;
        if span.is_full() {
            class.room.pop();
        }
        Some((span, slot))
    }

    /// As [`Spans::take`], from the slabs that are there, whosever.
    pub(super) fn take_of_any(&mut self, class: usize) -> Option<(&'static Span, usize)> {
        (0..self.classes.len() / SLOTTED).find_map(|shard| self.take_ready(class, shard))
    }

    fn cut(
        &mut self,
        heap: &mut Heap,
        life: u64,
        class: usize,
        shard: usize,
    ) -> Option<&'static Span> {
        let bytes = bytes_of(class);
        let longest = (LONGEST / bytes).clamp(1, MAX_SLOTS);
        let place = shard * SLOTTED + class;
        if place >= self.classes.len() {
            self.classes.resize_with((shard + 1) * SLOTTED, Class::default);
        }
        let wanted = self.classes[place].used.clamp(1, longest);
        // To the end of its last page, which nothing but a block without a class could use.
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
        span.cut(life, block.address, class, slots);
        map::set(block.address, span.bytes(), true, span);
        let room = &mut self.classes[place].room;
        span.set_shard(shard);
        span.set_place(room.len());
        room.push(span);
        Some(span)
    }

    /// Puts a slot of a slab back.
    pub(super) fn give(&mut self, heap: &mut Heap, span: &'static Span, slot: usize) {
        let was_full = span.is_full();
        span.give(slot);
        let class = &mut self.classes[Self::place(span)];
        class.used -= 1;
        if was_full {
            span.set_place(class.room.len());
            class.room.push(span);
        }
        if span.used() == 0 && class.room.len() > 1 {
            self.dissolve(heap, span);
        }
    }

    /// Where a slab's class of its shard stands.
    fn place(slab: &Span) -> usize {
        slab.shard() * SLOTTED + slab.class() as usize
    }

    /// Gives a slab with no slot out back to the heap.
    fn dissolve(&mut self, heap: &mut Heap, span: &'static Span) {
        let room = &mut self.classes[Self::place(span)].room;
        room.swap_remove(span.place());
        if let Some(moved) = room.get(span.place()) {
            moved.set_place(span.place());
        }
        self.end(heap, span, true);
    }

    /// Gives every slab with no slot out back to the heap; says whether there was one.
    pub(super) fn dissolve_spares(&mut self, heap: &mut Heap) -> bool {
        let mut any = false;
        for class in 0..self.classes.len() {
            let spare = self.classes[class].room.iter().copied().find(|span| span.used() == 0);
            if let Some(spare) = spare {
                self.dissolve(heap, spare);
                any = true;
            }
        }
        any
    }

    /// Bytes of slots that are free.
    pub(super) fn free_bytes(&self) -> u64 {
        let free = |span: &Span| (span.slots() as u64 - u64::from(span.used())) * span.slot_bytes();
        self.classes.iter().flat_map(|class| &class.room).map(|span| free(span)).sum()
    }

    /// A single block.
    pub(super) fn take_exact(
        &mut self,
        heap: &mut Heap,
        life: u64,
        bytes: u64,
        align: u64,
    ) -> Option<(&'static Span, usize)> {
        let block = heap.alloc(bytes, align)?;
        let span = self.span_of(&block);
        span.exact(life, block.address, block.bytes);
        map::set(block.address, block.bytes, false, span);
        Some((span, 0))
    }

    /// Ends a single block.
    pub(super) fn give_exact(&mut self, heap: &mut Heap, span: &'static Span) {
        span.set(0, super::span::Slot::Free);
        self.end(heap, span, false);
    }

    fn end(&mut self, heap: &mut Heap, span: &'static Span, slab: bool) {
        map::clear(span.start(), span.bytes(), slab);
        // It was a block of the heap's since it was cut.
        if let Some(key) = self.all.get_mut(span.number()).and_then(|(_, key)| key.take()) {
            let _freed = heap.free_keyed(span.start(), key, 0);
        }
        span.clear();
        self.vacant.push(span);
    }

    /// The spans that describe something.
    pub(super) fn iter(&self) -> impl Iterator<Item = &'static Span> {
        self.all.iter().map(|&(span, _)| span).filter(|span| span.life() != 0)
    }

    /// The books of the next life: the spans are used again.
    pub(super) fn renew(self) -> Self {
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

    /// Addresses that nothing of this process has.
    const AT: u64 = 7 << 40;

    #[test]
    fn slots_of_two_shards_lie_in_two_slabs_until_no_more_can_be_cut() {
        let mut heap = Heap::new(Config { small_max: 0, ..Config::host() });
        assert!(
            map::cover(AT..AT + (1 << 20)) && heap.add_segment(Range::new(AT, 1 << 20), 0).is_ok()
        );
        let mut spans = Spans::new();
        let class = classes::slotted(Layout::from_size_align(1024, 16).unwrap()).unwrap();
        let mut slabs = [Vec::new(), Vec::new()];
        let mut out = Vec::new();
        // In turns, as two threads would.
        for n in 0..256 {
            let (span, slot) = spans.take(&mut heap, 1, class, n % 2).unwrap();
            slabs[n % 2].push(std::ptr::from_ref(span));
            out.push((span, slot));
        }
        assert!(
            slabs[0].iter().all(|slab| !slabs[1].contains(slab)),
            "a line that two threads write"
        );
        out.drain(..128).for_each(|(span, slot)| spans.give(&mut heap, span, slot));
        // One takes all that is left, the other's free slots with it.
        while let Some(taken) = spans.take(&mut heap, 1, class, 0) {
            out.push(taken);
        }
        assert_eq!((out.len(), spans.free_bytes()), (1024, 0));
        out.into_iter().for_each(|(span, slot)| spans.give(&mut heap, span, slot));
        spans.dissolve_spares(&mut heap);
        assert!(heap.is_free(Range::new(AT, 1 << 20)));
    }
}
