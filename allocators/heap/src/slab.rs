//! Slabs: equal slots in one extent, with a bitmap.
//!
//! - A slab is only as long as its slots need. A class with few blocks gets short slabs, and longer
//!   ones as its population grows, so that forty classes with one block each do not take forty
//!   pages.
//! - Inside a slab the lowest free slot is taken first.
//! - When the last block of a slab is freed, its memory returns to the extents, unless it was the
//!   class's only slab with room. That one stays as a *spare*, since a loop that allocates and
//!   frees one small block would otherwise cut and merge an extent each time.
//! - A spare counts as free memory in all queries, and is dissolved before an allocation fails.

use crate::Config;
use crate::classes::{class_of, divide, reciprocal, units_of};
use crate::records::NIL;

/// Words of the bitmap.
const WORDS: usize = 8;
/// The most slots of a slab.
const MAX_SLOTS: u64 = WORDS as u64 * 64;
/// The shortest slab is this fraction of a page, which bounds how many slabs can start in one.
const SHORTEST_FRACTION: u64 = 16;

/// One slab.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The first address.
    pub(crate) start: u64,
    /// Bytes of a slot.
    pub(crate) slot: u64,
    /// The largest stamp of its extent and of all frees into it.
    pub(crate) stamp: u64,
    /// The factor that replaces a division by the slot's units.
    reciprocal: u64,
    /// Its record, or `NIL` if the slab is vacant.
    pub(crate) record: u32,
    /// The previous slab in its class's list of slabs with room.
    pub(crate) prev: u32,
    /// The next slab in its class's list, or of a vacant slab, in the list of vacant slabs.
    pub(crate) next: u32,
    pub(crate) class: u32,
    /// The number of slots.
    pub(crate) slots: u32,
    /// The number of live slots.
    pub(crate) used: u32,
    /// Bit n: slot n is free.
    free_bits: [u64; WORDS],
    /// The generation of the block in each live slot. Meaningless for a free slot.
    generations: Box<[u32]>,
    /// The generation of the next block. It counts the blocks of all slots, and persists when the
    /// slab is reused: a reused slab may start elsewhere, so that an old address falls into
    /// another slot, and a count per slot could repeat an old key. Wraps, with the bound that
    /// [`Key`](crate::Key) documents.
    next_generation: u32,
}

impl Slab {
    pub(crate) fn address(&self, slot: usize) -> u64 {
        self.start + slot as u64 * self.slot
    }

    /// Returns whether the slab is vacant, so that its number can be reused.
    pub(crate) fn is_vacant(&self) -> bool {
        self.record == NIL
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.slot * u64::from(self.slots)
    }

    pub(crate) fn is_free(&self, slot: usize) -> bool {
        self.free_bits[slot / 64 % WORDS] >> (slot % 64) & 1 == 1
    }

    /// Returns the slot at `address` if it is live with this `generation`. A vacant slab has no
    /// live slots.
    #[inline]
    pub(crate) fn live_slot(&self, address: u64, generation: u32, shift: u32) -> Option<usize> {
        let offset = address.wrapping_sub(self.start);
        if offset >= self.bytes() {
            return None;
        }
        let slot = divide(offset >> shift, self.reciprocal) as usize;
        let matches = slot as u64 * self.slot == offset
            && !self.is_free(slot)
            && self.generations.get(slot) == Some(&generation);
        matches.then_some(slot)
    }

    pub(crate) fn generation(&self, slot: usize) -> u32 {
        self.generations[slot]
    }

    /// Returns the number of free bits. For the self-check.
    pub(crate) fn free_slots(&self) -> u32 {
        self.free_bits.iter().map(|word| word.count_ones()).sum()
    }
}

/// A slot that was allocated.
pub(crate) struct AllocatedSlot {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) generation: u32,
}

/// A slot that was freed.
pub(crate) struct FreedSlot {
    /// The size of the slot.
    pub(crate) bytes: u64,
    /// Whether its slab is empty and should be dissolved.
    pub(crate) dissolve: bool,
}

/// One size class.
#[derive(Debug)]
struct SizeClass {
    /// Bytes of a slot.
    slot: u64,
    reciprocal: u64,
    /// The number of slots of the shortest and of the longest slab.
    slots: (u64, u64),
    /// Slots in all slabs of this class.
    capacity: u64,
    /// The head of the list of slabs with room.
    with_room: u32,
    /// The last slab that became empty while no other slab of the class had room, or `NIL`. It is
    /// the class's spare while it is empty. It may contain live blocks again.
    spare: u32,
    /// The head of the list of vacant slabs. Their generations continue with the next slab of the
    /// class.
    vacant: u32,
}

/// All slabs of a heap.
#[derive(Debug)]
pub(crate) struct Slabs {
    shift: u32,
    slabs: Vec<Slab>,
    classes: Vec<SizeClass>,
    /// The number of classes with a `spare`. If no block is live, all of these are empty.
    spare_count: u32,
}

impl Slabs {
    pub(crate) fn new(config: &Config) -> Self {
        let shift = config.unit.trailing_zeros();
        let count = if config.small_max == 0 { 0 } else { class_of(config.small_max >> shift) + 1 };
        let classes = (0..count).map(|class| {
            let slot = units_of(class) << shift;
            let longest = (config.page / slot).clamp(2, MAX_SLOTS);
            let shortest = (config.page / SHORTEST_FRACTION).div_ceil(slot).min(longest);
            SizeClass {
                slot,
                reciprocal: reciprocal(slot >> shift),
                slots: (shortest, longest),
                capacity: 0,
                with_room: NIL,
                spare: NIL,
                vacant: NIL,
            }
        });
        Self { shift, slabs: Vec::new(), classes: classes.collect(), spare_count: 0 }
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Slab> {
        self.slabs.get(id as usize)
    }

    pub(crate) fn slab(&self, id: u32) -> &Slab {
        &self.slabs[id as usize]
    }

    /// An iterator over the number of slots of each class.
    pub(crate) fn capacities(&self) -> impl Iterator<Item = u64> {
        self.classes.iter().map(|class| class.capacity)
    }

    /// Returns the size of a slot of `class`, in bytes.
    pub(crate) fn slot_bytes(&self, class: usize) -> u64 {
        self.classes[class].slot
    }

    /// Returns the desired and the minimum number of slots of the next slab of `class`. The desired
    /// number doubles the class's capacity, since a slab is created when all slots are live.
    pub(crate) fn next_slots(&self, class: usize) -> (u64, u64) {
        let SizeClass { slots: (shortest, longest), capacity, .. } = self.classes[class];
        (capacity.clamp(shortest, longest), shortest)
    }

    /// Returns the first slab of `class` with room.
    pub(crate) fn first_with_room(&self, class: usize) -> u32 {
        self.classes[class].with_room
    }

    /// Returns the smallest class from `class` on that has a slab with room.
    pub(crate) fn class_with_room(&self, class: usize) -> Option<usize> {
        (class..self.classes.len()).find(|&class| self.classes[class].with_room != NIL)
    }

    /// An iterator over the spares, by class. It visits each class: spares change often with small
    /// blocks, and are needed only when memory runs out.
    pub(crate) fn spares(&self) -> impl Iterator<Item = u32> {
        let empty = |spare: &u32| *spare != NIL && self.slab(*spare).used == 0;
        self.classes.iter().map(|class| class.spare).filter(empty)
    }

    /// Returns the spare of the lowest class that has one.
    pub(crate) fn first_spare(&self) -> Option<u32> {
        self.spares().next()
    }

    /// Returns whether more than one class has a spare. Exact only if no block is live.
    #[inline]
    pub(crate) fn has_several_spares(&self) -> bool {
        self.spare_count > 1
    }

    /// Returns the bytes of all spares.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.spares().map(|spare| self.slab(spare).bytes()).sum()
    }

    /// Creates a slab of `slots` slots in the record `record`, which starts at `start`.
    ///
    /// It is empty but not a spare, since the caller takes a slot next.
    pub(crate) fn create(
        &mut self,
        class: usize,
        slots: u64,
        record: u32,
        start: u64,
        stamp: u64,
    ) -> u32 {
        let SizeClass { slot, reciprocal, slots: (_, longest), vacant, .. } = self.classes[class];
        let id = if vacant == NIL {
            self.slabs.push(Slab {
                start,
                slot,
                stamp,
                reciprocal,
                record: NIL,
                prev: NIL,
                next: NIL,
                class: class as u32,
                slots: 0,
                used: 0,
                free_bits: [0; WORDS],
                generations: vec![0; longest as usize].into_boxed_slice(),
                next_generation: 0,
            });
            (self.slabs.len() - 1) as u32
        } else {
            self.classes[class].vacant = self.slabs[vacant as usize].next;
            vacant
        };
        self.classes[class].capacity += slots;
        let slab = &mut self.slabs[id as usize];
        // The slab is in no list now: it may come from the list of vacant slabs.
        slab.next = NIL;
        slab.start = start;
        slab.stamp = stamp;
        slab.record = record;
        slab.slots = slots as u32;
        slab.used = 0;
        for (n, word) in slab.free_bits.iter_mut().enumerate() {
            let remaining = slots.saturating_sub(n as u64 * 64);
            *word = if remaining >= 64 { u64::MAX } else { (1 << remaining) - 1 };
        }
        self.link(id);
        id
    }

    /// Makes an empty slab vacant. The caller releases its record.
    pub(crate) fn dissolve(&mut self, id: u32) {
        self.unlink(id);
        let slab = &mut self.slabs[id as usize];
        debug_assert_eq!(slab.used, 0, "{} slots are live", slab.used);
        let class = &mut self.classes[slab.class as usize];
        if class.spare == id {
            class.spare = NIL;
            self.spare_count -= 1;
        }
        class.capacity -= u64::from(slab.slots);
        slab.record = NIL;
        slab.next = class.vacant;
        class.vacant = id;
    }

    /// Takes the lowest free slot of a slab that has room.
    #[inline(always)]
    pub(crate) fn alloc(&mut self, id: u32) -> AllocatedSlot {
        let slab = &mut self.slabs[id as usize];
        let mut slot = 0;
        for (n, word) in slab.free_bits.iter_mut().enumerate() {
            if *word != 0 {
                slot = n * 64 + word.trailing_zeros() as usize;
                *word &= *word - 1;
                break;
            }
        }
        debug_assert!(slab.used < slab.slots, "a full slab has no slot");
        slab.used += 1;
        let generation = slab.next_generation;
        slab.next_generation = generation.wrapping_add(1);
        slab.generations[slot] = generation;
        let allocated = AllocatedSlot { address: slab.address(slot), bytes: slab.slot, generation };
        if slab.used == slab.slots {
            self.unlink(id);
        }
        allocated
    }

    /// Frees the slot at `address`, if it is live with this `generation`.
    #[inline(always)]
    pub(crate) fn free_keyed(
        &mut self,
        id: u32,
        address: u64,
        generation: u32,
        stamp: u64,
    ) -> Option<FreedSlot> {
        let slot = self.slabs.get(id as usize)?.live_slot(address, generation, self.shift)?;
        Some(self.free(id, slot, stamp))
    }

    /// Frees a live slot.
    #[inline(always)]
    pub(crate) fn free(&mut self, id: u32, slot: usize, stamp: u64) -> FreedSlot {
        let slab = &mut self.slabs[id as usize];
        debug_assert!(!slab.is_free(slot), "slot {slot} is freed twice");
        debug_assert!(slab.used > 0 && slot < slab.slots as usize, "slot {slot} was not taken");
        slab.free_bits[slot / 64 % WORDS] |= 1 << (slot % 64);
        slab.stamp = slab.stamp.max(stamp);
        let (was_full, bytes) = (slab.used == slab.slots, slab.slot);
        slab.used -= 1;
        if !was_full && slab.used > 0 {
            return FreedSlot { bytes, dissolve: false };
        }
        if was_full {
            self.link(id);
        }
        FreedSlot {
            bytes,
            dissolve: self.slabs[id as usize].used == 0 && !self.retain_as_spare(id),
        }
    }

    /// Returns whether the empty slab `id` is kept as the spare: no other slab of its class has
    /// room.
    fn retain_as_spare(&mut self, id: u32) -> bool {
        let slab = &self.slabs[id as usize];
        let only_one_with_room = slab.prev == NIL && slab.next == NIL;
        let spare = &mut self.classes[slab.class as usize].spare;
        if only_one_with_room && *spare != id {
            self.spare_count += u32::from(*spare == NIL);
            *spare = id;
        }
        only_one_with_room
    }

    /// Returns the slot of slab `id` that contains the address, and the offset in it.
    pub(crate) fn slot_at(&self, id: u32, address: u64) -> (usize, u64) {
        let slab = &self.slabs[id as usize];
        let slot = divide((address - slab.start) >> self.shift, slab.reciprocal) as usize;
        (slot, address - slab.address(slot))
    }

    /// Inserts a slab that is in no list (its links are `NIL`) into its class's list: before the
    /// head if its address is lower, otherwise directly after it. So low memory tends to fill up
    /// and high memory to empty.
    fn link(&mut self, id: u32) {
        let slab = &self.slabs[id as usize];
        let (class, start) = (slab.class as usize, slab.start);
        let head = self.classes[class].with_room;
        if head == NIL {
            self.classes[class].with_room = id;
        } else if start < self.slabs[head as usize].start {
            self.classes[class].with_room = id;
            self.slabs[head as usize].prev = id;
            self.slabs[id as usize].next = head;
        } else {
            let next = self.slabs[head as usize].next;
            self.slabs[head as usize].next = id;
            if next != NIL {
                self.slabs[next as usize].prev = id;
            }
            let slab = &mut self.slabs[id as usize];
            (slab.prev, slab.next) = (head, next);
        }
    }

    /// Removes a slab from its class's list.
    fn unlink(&mut self, id: u32) {
        let slab = &mut self.slabs[id as usize];
        let (prev, next, class) = (slab.prev, slab.next, slab.class as usize);
        (slab.prev, slab.next) = (NIL, NIL);
        if prev == NIL {
            self.classes[class].with_room = next;
        } else {
            self.slabs[prev as usize].next = next;
        }
        if next != NIL {
            self.slabs[next as usize].prev = prev;
        }
    }

    /// Calls `visit` with each slab in the lists of slabs with room, and whether it is valid there.
    /// For the self-check.
    pub(crate) fn audit(&self, mut visit: impl FnMut(u32, bool)) {
        for (index, class) in self.classes.iter().enumerate() {
            let (mut prev, mut at) = (NIL, class.with_room);
            let mut spare = class.spare;
            if spare != NIL && self.slab(spare).used > 0 {
                spare = NIL;
            }
            while at != NIL {
                let slab = self.slab(at);
                let in_place =
                    slab.prev == prev && slab.class as usize == index && slab.slot == class.slot;
                let valid =
                    in_place && slab.used < slab.slots && (slab.used > 0 || class.spare == at);
                visit(at, valid);
                if spare == at {
                    spare = NIL;
                }
                (prev, at) = (at, slab.next);
            }
            if spare != NIL {
                visit(NIL, false);
            }
        }
        let spares = self.classes.iter().filter(|class| class.spare != NIL);
        if spares.count() != self.spare_count as usize {
            visit(NIL, false);
        }
    }
}
