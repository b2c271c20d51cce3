//! What is known of a stretch of memory that blocks lie in, for everybody to read at any time.

use super::classes;
use std::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// The most slots of a span.
pub(super) const MAX_SLOTS: usize = 256;
/// The class of a span that is one block of a length that no class has.
pub(super) const EXACT: u32 = u32::MAX;
/// The rack of a span that is one block: there is never room in it.
pub(super) const NO_RACK: u8 = u8::MAX;

/// How a slot stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Slot {
    /// In the pool's books, to be given out.
    Free = 0,
    /// Its owner's.
    Live = 1,
    /// Its owner's, with a gate noted on it.
    Gated = 2,
    /// Freed with a gate that was shut.
    Pending = 3,
    /// Freed, in some thread's magazine.
    Cached = 4,
}

impl Slot {
    fn from(byte: u8) -> Self {
        [Self::Free, Self::Live, Self::Gated, Self::Pending, Self::Cached][usize::from(byte).min(4)]
    }

    /// Whether an owner holds it.
    pub(super) fn is_owned(self) -> bool {
        matches!(self, Self::Live | Self::Gated)
    }
}

/// A slab of equal slots, or a single block, in one pool's memory.
///
/// It is leaked and used again, so a look at it is never a look at nothing. What describes it
/// changes only while none of its slots is anybody's: for the owner of a block it stands still. A
/// slot's state is written by whoever has the slot: the owner who frees it, the thread whose
/// magazine it is in, the holder of the pool's lock for the others.
///
/// What is looked at on the way of every free comes first, in one cache line with the states of the
/// first slots. States are written by the thread whose blocks they are of, so neighbours should be
/// one thread's: see `slabs`. Aligned to two lines, since processors fetch lines in pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Span {
    /// The generation of the pool that it is of; zero while it is vacant.
    life: AtomicU64,
    start: AtomicU64,
    /// Bytes of all of it.
    bytes: AtomicU64,
    /// Bytes of a slot.
    slot: AtomicU64,
    /// What to multiply an offset by in place of a division by `slot`: 2⁶⁴ / `slot`, rounded up.
    /// One for a single block.
    reciprocal: AtomicU64,
    class: AtomicU32,
    slots: AtomicU32,
    /// The rack of a magazine that its slots go to.
    rack: AtomicU8,
    states: [AtomicU8; MAX_SLOTS],
    /// How many slots are not free. This and the following are for the holder of the lock only.
    used: AtomicU32,
    /// Where it stands in its class's list of those with room.
    place: AtomicU32,
    /// Whose slab it is.
    shard: AtomicU32,
    /// Bit n: slot n is free. For the holder of the lock only.
    free: [AtomicU64; MAX_SLOTS / 64],
    /// Its place among all spans of its shell.
    number: u32,
}

impl Span {
    /// Describes nothing yet.
    pub(super) fn vacant(number: u32) -> Self {
        Self {
            life: AtomicU64::new(0),
            start: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            slot: AtomicU64::new(0),
            reciprocal: AtomicU64::new(0),
            class: AtomicU32::new(EXACT),
            slots: AtomicU32::new(0),
            rack: AtomicU8::new(NO_RACK),
            used: AtomicU32::new(0),
            place: AtomicU32::new(0),
            shard: AtomicU32::new(0),
            states: [const { AtomicU8::new(0) }; MAX_SLOTS],
            free: [const { AtomicU64::new(0) }; MAX_SLOTS / 64],
            number,
        }
    }

    /// Describes a slab whose slots are all free.
    pub(super) fn cut(&self, life: u64, start: u64, class: usize, slots: usize) {
        let bytes = classes::bytes_of(class) as u64;
        self.start.store(start, Relaxed);
        self.slot.store(bytes, Relaxed);
        self.bytes.store(bytes * slots as u64, Relaxed);
        self.reciprocal.store(u64::MAX / bytes + 1, Relaxed);
        self.class.store(class as u32, Relaxed);
        self.rack.store(class as u8, Relaxed);
        self.slots.store(slots as u32, Relaxed);
        for (n, word) in self.free.iter().enumerate() {
            let left = slots.saturating_sub(n * 64);
            word.store(if left >= 64 { u64::MAX } else { (1 << left) - 1 }, Relaxed);
        }
        self.used.store(0, Relaxed);
        self.life.store(life, Release);
    }

    /// Describes a block of its own, which is live.
    pub(super) fn exact(&self, life: u64, start: u64, bytes: u64) {
        self.start.store(start, Relaxed);
        self.resize(bytes);
        self.reciprocal.store(1, Relaxed);
        self.rack.store(NO_RACK, Relaxed);
        self.slots.store(1, Relaxed);
        self.used.store(1, Relaxed);
        self.set(0, Slot::Live);
        self.life.store(life, Release);
    }

    pub(super) fn number(&self) -> usize {
        self.number as usize
    }

    /// Ends it: no address is in it any more.
    pub(super) fn clear(&self) {
        self.life.store(0, Relaxed);
        self.slots.store(0, Relaxed);
        self.bytes.store(0, Relaxed);
    }

    #[inline(always)]
    pub(super) fn life(&self) -> u64 {
        self.life.load(Acquire)
    }

    #[inline(always)]
    pub(super) fn start(&self) -> u64 {
        self.start.load(Relaxed)
    }

    /// Bytes of a slot.
    #[inline(always)]
    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot.load(Relaxed)
    }

    /// Changes the length of a single block.
    pub(super) fn resize(&self, bytes: u64) {
        let class = classes::of_single(bytes).map_or(EXACT, |class| class as u32);
        self.class.store(class, Relaxed);
        self.slot.store(bytes, Relaxed);
        self.bytes.store(bytes, Relaxed);
    }

    /// Whether it is one block, and no slab.
    pub(super) fn is_single(&self) -> bool {
        self.class() as usize >= classes::SLOTTED
    }

    #[inline(always)]
    pub(super) fn class(&self) -> u32 {
        self.class.load(Relaxed)
    }

    /// The rack that its slots go to: their class, or [`NO_RACK`].
    #[inline(always)]
    pub(super) fn rack(&self) -> u8 {
        self.rack.load(Relaxed)
    }

    #[inline(always)]
    pub(super) fn slots(&self) -> usize {
        self.slots.load(Relaxed) as usize
    }

    /// Bytes of all of it.
    #[inline(always)]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// The slot that `address` lies in.
    #[inline(always)]
    pub(super) fn slot_at(&self, address: u64) -> Option<usize> {
        let offset = address.wrapping_sub(self.start());
        (offset < self.bytes()).then(|| self.divide(offset).0)
    }

    /// The slot that begins at `address`.
    #[inline(always)]
    pub(super) fn slot_from(&self, address: u64) -> Option<usize> {
        let (slot, begins) = self.divide(address.wrapping_sub(self.start()));
        (slot < self.slots() && begins).then_some(slot)
    }

    /// The slot that an offset lies in, and whether it begins there; a slot beyond all where the
    /// offset is.
    ///
    /// After D. Lemire, O. Kaser, N. Kurz, *Faster remainder by direct computation* (2019): the
    /// upper half of the product with a reciprocal is the quotient, the lower half, for a divisor,
    /// below the reciprocal. A slab is at most 2¹⁸ bytes long and its slots at most 2¹⁶, so that
    /// what the reciprocal was rounded up by stays far below it; a longer offset's quotient is at
    /// least the true one.
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

    /// The byte that says how a slot stands.
    #[inline(always)]
    pub(super) fn state(&self, slot: usize) -> &AtomicU8 {
        &self.states[slot % MAX_SLOTS]
    }

    pub(super) fn get(&self, slot: usize) -> Slot {
        Slot::from(self.get_raw(slot))
    }

    /// How a slot stands, as its byte.
    #[inline(always)]
    pub(super) fn get_raw(&self, slot: usize) -> u8 {
        self.state(slot).load(Relaxed)
    }

    pub(super) fn set(&self, slot: usize, to: Slot) {
        self.state(slot).store(to as u8, Relaxed);
    }

    /// Takes the lowest free slot and makes it live. For the holder of the lock.
    pub(super) fn take(&self) -> Option<usize> {
        for (n, word) in self.free.iter().enumerate() {
            let bits = word.load(Relaxed);
            if bits != 0 {
                word.store(bits & (bits - 1), Relaxed);
                self.used.store(self.used() + 1, Relaxed);
                let slot = n * 64 + bits.trailing_zeros() as usize;
                self.set(slot, Slot::Live);
                return Some(slot);
            }
        }
        None
    }

    /// Puts a slot back. For the holder of the lock.
    pub(super) fn give(&self, slot: usize) {
        self.set(slot, Slot::Free);
        let word = &self.free[slot / 64 % self.free.len()];
        word.store(word.load(Relaxed) | 1 << (slot % 64), Relaxed);
        self.used.store(self.used() - 1, Relaxed);
    }

    /// How many slots are not free.
    pub(super) fn used(&self) -> u32 {
        self.used.load(Relaxed)
    }

    pub(super) fn is_full(&self) -> bool {
        self.used() as usize == self.slots()
    }

    pub(super) fn place(&self) -> usize {
        self.place.load(Relaxed) as usize
    }

    pub(super) fn set_place(&self, place: usize) {
        self.place.store(place as u32, Relaxed);
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
        let span = Span::vacant(0);
        for class in (0..classes::SLOTTED).step_by(if cfg!(miri) { 13 } else { 1 }) {
            let bytes = classes::bytes_of(class) as u64;
            let slots = ((256 << 10) / bytes as usize).min(MAX_SLOTS);
            span.cut(1, 1 << 30, class, slots);
            for slot in 0..slots {
                let start = span.address(slot);
                assert_eq!((span.slot_at(start), span.slot_from(start)), (Some(slot), Some(slot)));
                assert_eq!(
                    (span.slot_at(start + bytes - 1), span.slot_from(start + 1)),
                    (Some(slot), None)
                );
            }
            assert_eq!(span.slot_at((1 << 30) + slots as u64 * bytes), None);
            assert_eq!(span.slot_at((1 << 30) - 1), None);
            // Far away, before and behind: offsets whose products with the reciprocal wrap.
            for far in (18..64).map(|power| 1 << power).filter(|&far| far >= span.bytes()) {
                for address in [(1u64 << 30).wrapping_add(far), (1u64 << 30).wrapping_sub(far)] {
                    assert_eq!((span.slot_at(address), span.slot_from(address)), (None, None));
                }
            }
        }
        span.exact(1, 4096, 1 << 40);
        assert_eq!(
            (span.slot_at(1 << 39), span.slot_from(4096), span.slot_from(8192)),
            (Some(0), Some(0), None)
        );
        span.clear();
        assert_eq!((span.slot_at(4096), span.life()), (None, 0));
    }

    #[test]
    fn slots_are_taken_lowest_first_and_come_back() {
        let span = Span::vacant(0);
        span.cut(7, 4096, classes::of(Layout::new::<u64>()).unwrap(), 200);
        let taken: Vec<_> = std::iter::from_fn(|| span.take()).collect();
        assert!(taken.iter().copied().eq(0..200) && span.is_full());
        span.give(130);
        span.give(3);
        assert_eq!((span.get(3), span.get(4), span.used()), (Slot::Free, Slot::Live, 198));
        assert_eq!([span.take(), span.take(), span.take()], [Some(3), Some(130), None]);
    }
}
