//! The descriptor of a slab or of a single block, readable by all threads at any time.

use super::classes;
use std::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Maximum number of slots of a span.
pub(super) const MAX_SLOTS: usize = 256;
/// The class of a single block whose size is no class's.
pub(super) const NO_CLASS: u32 = u32::MAX;
/// The bin index of a single block. This bin never has room.
pub(super) const NO_BIN: u8 = u8::MAX;

/// The state of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum SlotState {
    /// Free in the pool's heap.
    Free = 0,
    /// Live.
    Live = 1,
    /// Live, with a gate noted on it.
    Gated = 2,
    /// Freed while a gate was shut.
    Pending = 3,
    /// Free in a magazine or in the depot.
    Cached = 4,
}

impl SlotState {
    fn from(byte: u8) -> Self {
        [Self::Free, Self::Live, Self::Gated, Self::Pending, Self::Cached][usize::from(byte).min(4)]
    }

    /// Returns whether the block is live.
    pub(super) fn is_owned(self) -> bool {
        matches!(self, Self::Live | Self::Gated)
    }
}

/// A slab of equal slots, or a single block, in the memory of one pool.
///
/// A single block is a slab of one slot: it has no neighbours that share its descriptor. All
/// requests above 64 KiB get single blocks, and so do smaller ones with an alignment above 4 KiB.
///
/// Spans are leaked and reused, so a reference to one never dangles. The description changes only
/// while no slot is live, so it is constant for the owner of a block. A slot's state is written by
/// the current holder of the slot: by the owner that frees it, by the thread whose magazine
/// contains it, and otherwise under the pool's lock.
///
/// The fields that every free reads come first, in one cache line with the states of the first
/// slots. States are written by the thread that uses the blocks, so the slots of one span should
/// belong to one thread (see `slabs`). Aligned to two lines, since processors fetch lines in pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct SlabSpan {
    /// The generation of the pool, or zero while the span is vacant.
    generation: AtomicU64,
    start: AtomicU64,
    /// Bytes of the whole span.
    bytes: AtomicU64,
    /// Bytes of a slot.
    slot: AtomicU64,
    /// The factor that replaces a division by `slot`: 2⁶⁴ / `slot`, rounded up. One for a single
    /// block.
    reciprocal: AtomicU64,
    class: AtomicU32,
    slots: AtomicU32,
    /// The bin of a magazine that its slots go to.
    bin: AtomicU8,
    states: [AtomicU8; MAX_SLOTS],
    /// Number of slots that are not free. Guarded by the pool's lock, as are the following fields.
    used: AtomicU32,
    /// Its index in its class's list of partial slabs.
    list_index: AtomicU32,
    /// The shard that the slab belongs to.
    shard: AtomicU32,
    /// Bit n is set if slot n is free.
    free: [AtomicU64; MAX_SLOTS / 64],
    /// Its index among all spans of its core.
    number: u32,
}

impl SlabSpan {
    /// Creates a span that is not in use.
    pub(super) fn vacant(number: u32) -> Self {
        Self {
            generation: AtomicU64::new(0),
            start: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            slot: AtomicU64::new(0),
            reciprocal: AtomicU64::new(0),
            class: AtomicU32::new(NO_CLASS),
            slots: AtomicU32::new(0),
            bin: AtomicU8::new(NO_BIN),
            used: AtomicU32::new(0),
            list_index: AtomicU32::new(0),
            shard: AtomicU32::new(0),
            states: [const { AtomicU8::new(0) }; MAX_SLOTS],
            free: [const { AtomicU64::new(0) }; MAX_SLOTS / 64],
            number,
        }
    }

    /// Makes this the span of a slab whose slots are all free.
    pub(super) fn init_slab(&self, generation: u64, start: u64, class: usize, slots: usize) {
        let bytes = classes::bytes_of(class) as u64;
        self.start.store(start, Relaxed);
        self.slot.store(bytes, Relaxed);
        self.bytes.store(bytes * slots as u64, Relaxed);
        self.reciprocal.store(u64::MAX / bytes + 1, Relaxed);
        self.class.store(class as u32, Relaxed);
        self.bin.store(class as u8, Relaxed);
        self.slots.store(slots as u32, Relaxed);
        for (n, word) in self.free.iter().enumerate() {
            let left = slots.saturating_sub(n * 64);
            word.store(if left >= 64 { u64::MAX } else { (1 << left) - 1 }, Relaxed);
        }
        self.used.store(0, Relaxed);
        self.generation.store(generation, Release);
    }

    /// Makes this the span of a single live block.
    pub(super) fn init_single(&self, generation: u64, start: u64, bytes: u64) {
        self.start.store(start, Relaxed);
        self.resize(bytes);
        self.reciprocal.store(1, Relaxed);
        self.bin.store(NO_BIN, Relaxed);
        self.slots.store(1, Relaxed);
        self.used.store(1, Relaxed);
        self.set(0, SlotState::Live);
        self.generation.store(generation, Release);
    }

    pub(super) fn number(&self) -> usize {
        self.number as usize
    }

    /// Makes the span vacant, so that it contains no address.
    pub(super) fn clear(&self) {
        self.generation.store(0, Relaxed);
        self.slots.store(0, Relaxed);
        self.bytes.store(0, Relaxed);
    }

    #[inline(always)]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Acquire)
    }

    #[inline(always)]
    pub(super) fn start(&self) -> u64 {
        self.start.load(Relaxed)
    }

    /// Returns the bytes of a slot.
    #[inline(always)]
    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot.load(Relaxed)
    }

    /// Changes the size of a single block.
    pub(super) fn resize(&self, bytes: u64) {
        let class = classes::of_single(bytes).map_or(NO_CLASS, |class| class as u32);
        self.class.store(class, Relaxed);
        self.slot.store(bytes, Relaxed);
        self.bytes.store(bytes, Relaxed);
    }

    /// Returns whether it is a single block.
    pub(super) fn is_single(&self) -> bool {
        self.class() as usize >= classes::SLOTTED
    }

    #[inline(always)]
    pub(super) fn class(&self) -> u32 {
        self.class.load(Relaxed)
    }

    /// Returns the bin that its slots go to: their class, or [`NO_BIN`].
    #[inline(always)]
    pub(super) fn bin(&self) -> u8 {
        self.bin.load(Relaxed)
    }

    #[inline(always)]
    pub(super) fn slots(&self) -> usize {
        self.slots.load(Relaxed) as usize
    }

    /// Returns the bytes of the whole span.
    #[inline(always)]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Returns the slot that contains `address`.
    #[inline(always)]
    pub(super) fn slot_containing(&self, address: u64) -> Option<usize> {
        let offset = address.wrapping_sub(self.start());
        (offset < self.bytes()).then(|| self.divide(offset).0)
    }

    /// Returns the slot that begins at `address`.
    #[inline(always)]
    pub(super) fn slot_starting_at(&self, address: u64) -> Option<usize> {
        let (slot, begins) = self.divide(address.wrapping_sub(self.start()));
        (slot < self.slots() && begins).then_some(slot)
    }

    /// Returns the slot that contains an offset, and whether the offset is the slot's start. The
    /// slot of an offset beyond the span is beyond all slots.
    ///
    /// After D. Lemire, O. Kaser, N. Kurz, *Faster remainder by direct computation* (2019). The
    /// product with the reciprocal has the quotient in its upper half. Its lower half is below the
    /// reciprocal exactly if the offset is a multiple. A slab is at most 2¹⁸ bytes long and its
    /// slots at most 2¹⁶, so the rounding error of the reciprocal stays far below it. The quotient
    /// of a longer offset is at least the true one.
    #[inline(always)]
    fn divide(&self, offset: u64) -> (usize, bool) {
        let reciprocal = self.reciprocal.load(Relaxed);
        let product = u128::from(offset) * u128::from(reciprocal);
        ((product >> 64) as usize, (product as u64) < reciprocal)
    }

    #[inline(always)]
    pub(super) fn address(&self, slot: usize) -> u64 {
        self.start().wrapping_add(self.slot_bytes().wrapping_mul(slot as u64))
    }

    /// Returns the state byte of a slot.
    #[inline(always)]
    pub(super) fn state(&self, slot: usize) -> &AtomicU8 {
        &self.states[slot % MAX_SLOTS]
    }

    pub(super) fn get(&self, slot: usize) -> SlotState {
        SlotState::from(self.get_raw(slot))
    }

    /// Returns the state of a slot as a byte.
    #[inline(always)]
    pub(super) fn get_raw(&self, slot: usize) -> u8 {
        self.state(slot).load(Relaxed)
    }

    pub(super) fn set(&self, slot: usize, to: SlotState) {
        self.state(slot).store(to as u8, Relaxed);
    }

    /// Takes the lowest free slot and makes it live. The caller must hold the pool's lock.
    pub(super) fn take_slot(&self) -> Option<usize> {
        for (n, word) in self.free.iter().enumerate() {
            let bits = word.load(Relaxed);
            if bits != 0 {
                word.store(bits & (bits - 1), Relaxed);
                self.used.store(self.used() + 1, Relaxed);
                let slot = n * 64 + bits.trailing_zeros() as usize;
                self.set(slot, SlotState::Live);
                return Some(slot);
            }
        }
        None
    }

    /// Frees a slot. The caller must hold the pool's lock.
    pub(super) fn free_slot(&self, slot: usize) {
        debug_assert!(slot < self.slots() && self.used() > 0, "slot {slot} was not taken");
        self.set(slot, SlotState::Free);
        let word = &self.free[slot / 64 % self.free.len()];
        debug_assert_eq!(word.load(Relaxed) >> (slot % 64) & 1, 0, "slot {slot} is free already");
        word.store(word.load(Relaxed) | 1 << (slot % 64), Relaxed);
        self.used.store(self.used() - 1, Relaxed);
    }

    /// Returns the number of slots that are not free.
    pub(super) fn used(&self) -> u32 {
        self.used.load(Relaxed)
    }

    pub(super) fn is_full(&self) -> bool {
        self.used() as usize == self.slots()
    }

    pub(super) fn list_index(&self) -> usize {
        self.list_index.load(Relaxed) as usize
    }

    pub(super) fn set_list_index(&self, list_index: usize) {
        self.list_index.store(list_index as u32, Relaxed);
    }

    pub(super) fn shard(&self) -> usize {
        self.shard.load(Relaxed) as usize
    }

    pub(super) fn set_shard(&self, shard: usize) {
        self.shard.store(shard as u32, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::alloc::Layout;

    #[test]
    fn slots_are_found_from_their_addresses_in_every_class() {
        let span = SlabSpan::vacant(0);
        for class in (0..classes::SLOTTED).step_by(if cfg!(miri) { 13 } else { 1 }) {
            let bytes = classes::bytes_of(class) as u64;
            let slots = ((256 << 10) / bytes as usize).min(MAX_SLOTS);
            span.init_slab(1, 1 << 30, class, slots);
            for slot in 0..slots {
                let start = span.address(slot);
                assert_eq!(
                    (span.slot_containing(start), span.slot_starting_at(start)),
                    (Some(slot), Some(slot))
                );
                assert_eq!(
                    (span.slot_containing(start + bytes - 1), span.slot_starting_at(start + 1)),
                    (Some(slot), None)
                );
            }
            assert_eq!(span.slot_containing((1 << 30) + slots as u64 * bytes), None);
            assert_eq!(span.slot_containing((1 << 30) - 1), None);
            // Far below and above: offsets whose products with the reciprocal wrap.
            for far in (18..64).map(|power| 1 << power).filter(|&far| far >= span.bytes()) {
                for address in [(1u64 << 30).wrapping_add(far), (1u64 << 30).wrapping_sub(far)] {
                    assert_eq!(
                        (span.slot_containing(address), span.slot_starting_at(address)),
                        (None, None)
                    );
                }
            }
        }
        span.init_single(1, 4096, 1 << 40);
        assert_eq!(
            (
                span.slot_containing(1 << 39),
                span.slot_starting_at(4096),
                span.slot_starting_at(8192)
            ),
            (Some(0), Some(0), None)
        );
        span.clear();
        assert_eq!((span.slot_containing(4096), span.generation()), (None, 0));
    }

    #[test]
    fn slots_are_taken_lowest_first_and_reused() {
        let span = SlabSpan::vacant(0);
        span.init_slab(7, 4096, classes::of(Layout::new::<u64>()).unwrap(), 200);
        let taken: Vec<_> = std::iter::from_fn(|| span.take_slot()).collect();
        assert!(taken.iter().copied().eq(0..200) && span.is_full());
        span.free_slot(130);
        span.free_slot(3);
        assert_eq!(
            (span.get(3), span.get(4), span.used()),
            (SlotState::Free, SlotState::Live, 198)
        );
        assert_eq!(
            [span.take_slot(), span.take_slot(), span.take_slot()],
            [Some(3), Some(130), None]
        );
    }
}
