//! Equal slots cut from one extent, a bit for each.
//!
//! A slab is as long as its slots need and no longer. A class that has few blocks gets short
//! slabs, and longer ones the more of it is live, so that forty classes with a block each do not
//! cost forty pages. Inside a slab the lowest free slot goes first.
//!
//! When the last block of a slab is freed, its memory goes back to the extents, unless that was
//! the class's only slab with room: that one stays as a *spare*, or a loop that allocates and
//! frees one small block would cut and merge an extent each time. A spare counts as free
//! memory wherever that is asked about, and is given up before the heap answers that something
//! does not fit.

use crate::Config;
use crate::classes::{class_of, divide, reciprocal, units_of};
use crate::records::NIL;

/// Words of the bitmap.
const WORDS: usize = 8;
/// The most slots of a slab.
const MAX_SLOTS: u64 = WORDS as u64 * 64;
/// The shortest slabs are this part of a page. It bounds how many can start in one.
const SHORTEST: u64 = 16;

/// One slab.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The first address.
    pub(crate) start: u64,
    /// Bytes of a slot.
    pub(crate) slot: u64,
    /// The largest stamp of what it was cut from and of all frees into it.
    pub(crate) stamp: u64,
    /// What to multiply by in place of a division by the slot's units.
    reciprocal: u64,
    /// The record that stands for it, `NIL` when the slab is vacant.
    pub(crate) record: u32,
    /// The slab before it in its class's list of those with room.
    pub(crate) prev: u32,
    /// The slab after it in its class's list; of a vacant one, in the list of vacant ones.
    pub(crate) next: u32,
    pub(crate) class: u16,
    /// How many slots it has.
    pub(crate) slots: u16,
    /// How many of them are live.
    pub(crate) used: u16,
    /// Bit n: slot n is free.
    free: [u64; WORDS],
    /// Goes up each time the slot is freed, and outlives the slab's use.
    generations: Box<[u32]>,
}

impl Slab {
    pub(crate) fn address(&self, slot: usize) -> u64 {
        self.start + slot as u64 * self.slot
    }

    /// Whether its number waits to be used again.
    pub(crate) fn is_vacant(&self) -> bool {
        self.record == NIL
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.slot * u64::from(self.slots)
    }

    pub(crate) fn is_free(&self, slot: usize) -> bool {
        self.free[slot / 64] >> (slot % 64) & 1 == 1
    }

    pub(crate) fn generation(&self, slot: usize) -> u32 {
        self.generations[slot]
    }

    /// How many bits say free. For the self-check.
    pub(crate) fn free_slots(&self) -> u32 {
        self.free.iter().map(|word| word.count_ones()).sum()
    }
}

/// One size class.
#[derive(Debug)]
struct Class {
    /// Bytes of a slot.
    slot: u64,
    reciprocal: u64,
    /// How many slots the shortest slab has, and the longest.
    slots: (u64, u64),
    /// Live blocks in the slabs of this class.
    live: u64,
    /// The head of the slabs with room.
    room: u32,
    /// The slab that is empty and stays, or `NIL`. It is in the list of those with room.
    spare: u32,
    /// The head of the vacant slabs, whose generations go on with the next slab of the class.
    vacant: u32,
}

/// All slabs of a heap.
#[derive(Debug)]
pub(crate) struct Slabs {
    shift: u32,
    slabs: Vec<Slab>,
    classes: Vec<Class>,
    /// Bit n: class n has a slab with room.
    with_room: u128,
    /// Bit n: class n has a spare.
    with_spare: u128,
    /// Bytes of all spares.
    pub(crate) spare_bytes: u64,
}

impl Slabs {
    pub(crate) fn new(config: &Config) -> Self {
        let shift = config.unit.trailing_zeros();
        let count = if config.small_max == 0 { 0 } else { class_of(config.small_max >> shift) + 1 };
        // Half of the largest page, 2¹⁵ units, is in class 103.
        debug_assert!(count <= u128::BITS as usize);
        let classes = (0..count).map(|class| {
            let slot = units_of(class) << shift;
            let longest = (config.page / slot).clamp(2, MAX_SLOTS);
            let shortest = (config.page / SHORTEST).div_ceil(slot).min(longest);
            Class {
                slot,
                reciprocal: reciprocal(slot >> shift),
                slots: (shortest, longest),
                live: 0,
                room: NIL,
                spare: NIL,
                vacant: NIL,
            }
        });
        Self {
            shift,
            slabs: Vec::new(),
            classes: classes.collect(),
            with_room: 0,
            with_spare: 0,
            spare_bytes: 0,
        }
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Slab> {
        self.slabs.get(id as usize)
    }

    pub(crate) fn slab(&self, id: u32) -> &Slab {
        &self.slabs[id as usize]
    }

    /// Live blocks in the slabs of each class.
    pub(crate) fn live(&self) -> impl Iterator<Item = u64> {
        self.classes.iter().map(|class| class.live)
    }

    /// Bytes of a slot of `class`.
    pub(crate) fn slot_bytes(&self, class: usize) -> u64 {
        self.classes[class].slot
    }

    /// How many slots the next slab of `class` should have, and how many at least.
    pub(crate) fn next_slots(&self, class: usize) -> (u64, u64) {
        let Class { slots: (shortest, longest), live, .. } = self.classes[class];
        (live.clamp(shortest, longest), shortest)
    }

    /// The first slab of `class` with room.
    pub(crate) fn room(&self, class: usize) -> u32 {
        self.classes[class].room
    }

    /// The smallest class from `class` on that has a slab with room.
    pub(crate) fn class_with_room(&self, class: usize) -> Option<usize> {
        let left = self.with_room & u128::MAX.checked_shl(class as u32).unwrap_or(0);
        (left != 0).then(|| left.trailing_zeros() as usize)
    }

    /// The spare of the lowest class that has one.
    pub(crate) fn first_spare(&self) -> Option<u32> {
        (self.with_spare != 0).then(|| self.classes[self.with_spare.trailing_zeros() as usize].spare)
    }

    /// Whether more than one class has a spare.
    #[inline]
    pub(crate) fn has_several_spares(&self) -> bool {
        self.with_spare & self.with_spare.wrapping_sub(1) != 0
    }

    /// The spares, by class.
    pub(crate) fn spares(&self) -> impl Iterator<Item = u32> {
        let mut left = self.with_spare;
        core::iter::from_fn(move || {
            let class = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(self.classes[class].spare)
        })
    }

    /// Makes a slab of `slots` slots out of the record `record`, which starts at `start`.
    ///
    /// It has room, and it is no spare although it is empty: a slot is taken from it next.
    pub(crate) fn make(&mut self, class: usize, slots: u64, record: u32, start: u64, stamp: u64) -> u32 {
        let Class { slot, reciprocal, slots: (_, longest), vacant, .. } = self.classes[class];
        let id = if vacant == NIL {
            self.slabs.push(Slab {
                start,
                slot,
                stamp,
                reciprocal,
                record: NIL,
                prev: NIL,
                next: NIL,
                class: class as u16,
                slots: 0,
                used: 0,
                free: [0; WORDS],
                generations: vec![0; longest as usize].into_boxed_slice(),
            });
            (self.slabs.len() - 1) as u32
        } else {
            self.classes[class].vacant = self.slabs[vacant as usize].next;
            vacant
        };
        let slab = &mut self.slabs[id as usize];
        slab.start = start;
        slab.stamp = stamp;
        slab.record = record;
        slab.slots = slots as u16;
        slab.used = 0;
        for (n, word) in slab.free.iter_mut().enumerate() {
            let left = slots.saturating_sub(n as u64 * 64);
            *word = if left >= 64 { u64::MAX } else { (1 << left) - 1 };
        }
        self.link(id);
        id
    }

    /// Makes an empty slab vacant. Its record is the caller's to give back.
    pub(crate) fn dissolve(&mut self, id: u32) {
        self.unlink(id);
        let Slab { class, slot, slots, .. } = self.slabs[id as usize];
        let class_index = usize::from(class);
        let class = &mut self.classes[class_index];
        if class.spare == id {
            class.spare = NIL;
            self.with_spare &= !(1 << class_index);
            self.spare_bytes -= slot * u64::from(slots);
        }
        let slab = &mut self.slabs[id as usize];
        slab.record = NIL;
        slab.next = class.vacant;
        class.vacant = id;
    }

    /// Takes the lowest free slot of a slab that has room.
    pub(crate) fn take(&mut self, id: u32) -> usize {
        let slab = &mut self.slabs[id as usize];
        let class_index = usize::from(slab.class);
        let class = &mut self.classes[class_index];
        if class.spare == id {
            class.spare = NIL;
            self.with_spare &= !(1 << class_index);
            self.spare_bytes -= slab.bytes();
        }
        let mut word = 0;
        while slab.free[word] == 0 && word < WORDS - 1 {
            word += 1;
        }
        let bit = slab.free[word].trailing_zeros() as usize;
        slab.free[word] &= slab.free[word].wrapping_sub(1);
        slab.used += 1;
        class.live += 1;
        if slab.used == slab.slots {
            self.unlink(id);
        }
        word * 64 + bit
    }

    /// Gives a live slot back. Says whether the slab should be dissolved.
    pub(crate) fn give(&mut self, id: u32, slot: usize, stamp: u64) -> bool {
        let slab = &mut self.slabs[id as usize];
        slab.free[slot / 64] |= 1 << (slot % 64);
        slab.generations[slot] = slab.generations[slot].wrapping_add(1);
        slab.stamp = slab.stamp.max(stamp);
        let was_full = slab.used == slab.slots;
        slab.used -= 1;
        let empty = slab.used == 0;
        let class_index = usize::from(slab.class);
        let bytes = slab.bytes();
        self.classes[class_index].live -= 1;
        if was_full {
            self.link(id);
        }
        if !empty {
            return false;
        }
        let slab = &self.slabs[id as usize];
        if slab.prev != NIL || slab.next != NIL {
            return true;
        }
        self.classes[class_index].spare = id;
        self.with_spare |= 1 << class_index;
        self.spare_bytes += bytes;
        false
    }

    /// Which slot of slab `id` the address lies in, and how far from its start.
    pub(crate) fn slot_at(&self, id: u32, address: u64) -> (usize, u64) {
        let slab = &self.slabs[id as usize];
        let slot = divide((address - slab.start) >> self.shift, slab.reciprocal) as usize;
        (slot, address - slab.address(slot))
    }

    /// Puts a slab into its class's list: in front when it lies lower than the one there, else
    /// right behind it, so that low memory tends to fill up and high memory to empty.
    fn link(&mut self, id: u32) {
        let class_index = usize::from(self.slabs[id as usize].class);
        let head = self.classes[class_index].room;
        self.with_room |= 1 << class_index;
        if head == NIL {
            self.classes[class_index].room = id;
            let slab = &mut self.slabs[id as usize];
            (slab.prev, slab.next) = (NIL, NIL);
        } else if self.slabs[id as usize].start < self.slabs[head as usize].start {
            self.classes[class_index].room = id;
            self.slabs[head as usize].prev = id;
            let slab = &mut self.slabs[id as usize];
            (slab.prev, slab.next) = (NIL, head);
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

    /// Takes a slab out of its class's list.
    fn unlink(&mut self, id: u32) {
        let slab = &mut self.slabs[id as usize];
        let (prev, next, class_index) = (slab.prev, slab.next, usize::from(slab.class));
        (slab.prev, slab.next) = (NIL, NIL);
        if prev == NIL {
            self.classes[class_index].room = next;
            if next == NIL {
                self.with_room &= !(1 << class_index);
            }
        } else {
            self.slabs[prev as usize].next = next;
        }
        if next != NIL {
            self.slabs[next as usize].prev = prev;
        }
    }

    /// Calls `visit` with each slab in a list of those with room and whether it may be there.
    /// For the self-check.
    pub(crate) fn audit(&self, mut visit: impl FnMut(u32, bool)) {
        let mut spare_bytes = 0;
        for (index, class) in self.classes.iter().enumerate() {
            let (mut prev, mut at) = (NIL, class.room);
            let flagged = self.with_room >> index & 1 == 1;
            let spare_flagged = self.with_spare >> index & 1 == 1;
            if flagged != (at != NIL) || spare_flagged != (class.spare != NIL) {
                visit(at, false);
            }
            while at != NIL {
                let slab = self.slab(at);
                let in_place =
                    slab.prev == prev && usize::from(slab.class) == index && slab.slot == class.slot;
                let sound = in_place && slab.used < slab.slots && (slab.used == 0) == (class.spare == at);
                visit(at, sound);
                if class.spare == at {
                    spare_bytes += slab.bytes();
                }
                (prev, at) = (at, slab.next);
            }
        }
        if spare_bytes != self.spare_bytes {
            visit(NIL, false);
        }
    }
}
