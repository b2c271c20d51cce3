//! Deallocation.

use super::Heap;
use crate::range::{Key, SLAB_BIT};
use crate::records::State;
use crate::slab::FreedSlot;
use crate::{HeapBlock, HeapError, Range};

impl Heap {
    /// Frees `block`, see [`free_keyed`](Self::free_keyed).
    ///
    /// # Errors
    ///
    /// Those of [`free_keyed`](Self::free_keyed).
    pub fn free_block(&mut self, block: &HeapBlock, stamp: u64) -> Result<(), HeapError> {
        self.free_keyed(block.address, block.key, stamp)
    }

    /// Frees the block at `address` without a search, and only if it is still the block of this
    /// key.
    ///
    /// `stamp` is the caller's statement of how long the bytes may still be in use. The resulting
    /// extent carries the largest of its own stamps, this one, and the stamp that the bytes had
    /// before.
    ///
    /// # Errors
    ///
    /// [`HeapError::Foreign`] for an address that is not in the heap, [`HeapError::DoubleFree`] for
    /// a free address, [`HeapError::Interior`] for an address inside a live block, and
    /// [`HeapError::Stale`] if the address belongs to a later block.
    pub fn free_keyed(&mut self, address: u64, key: Key, stamp: u64) -> Result<(), HeapError> {
        let index = key.index();
        if index & SLAB_BIT == 0 {
            if self.is_live(address, key) {
                self.free_live_record(index, stamp);
                return Ok(());
            }
        } else if let Some(freed) =
            self.slabs.free_keyed(index & !SLAB_BIT, address, key.generation, stamp)
        {
            self.finish_slot_free(index & !SLAB_BIT, freed);
            return Ok(());
        }
        Err(self.key_error(address))
    }

    /// Returns the actual size in bytes of the block with this address and key, if it is live.
    #[must_use]
    pub fn size_of_keyed(&self, address: u64, key: Key) -> Option<u64> {
        let index = key.index();
        if index & SLAB_BIT == 0 {
            return self.is_live(address, key).then(|| self.records[index].len);
        }
        let slab = self.slabs.get(index & !SLAB_BIT)?;
        slab.live_slot(address, key.generation, self.unit_shift).map(|_| slab.slot)
    }

    /// Returns the error for a key that does not match.
    #[cold]
    fn key_error(&self, address: u64) -> HeapError {
        match self.block_at(address) {
            Ok(_) => HeapError::Stale { address },
            Err(error) => error,
        }
    }

    /// Returns whether the record of `key`, which is not that of a slab, is still that block.
    #[inline]
    fn is_live(&self, address: u64, key: Key) -> bool {
        self.records.get(key.index()).is_some_and(|record| {
            record.state == State::Live
                && record.start == address
                && record.generation == key.generation
        })
    }

    /// Returns the live block that starts at `address`.
    ///
    /// # Errors
    ///
    /// Those of [`free_keyed`](Self::free_keyed), except for [`HeapError::Stale`].
    pub fn block_at(&self, address: u64) -> Result<HeapBlock, HeapError> {
        let id = self.record_containing(address).ok_or(HeapError::Foreign { address })?;
        let record = &self.records[id];
        match record.state {
            State::Live if record.start == address => {
                Ok(HeapBlock { address, bytes: record.len, key: Key::new(id, record.generation) })
            }
            State::Live => Err(HeapError::Interior { address, block: record.range() }),
            State::Slab => {
                let (slot, inside) = self.slabs.slot_at(record.slab, address);
                let slab = self.slabs.slab(record.slab);
                let (start, bytes) = (slab.address(slot), slab.slot);
                if slab.is_free(slot) {
                    Err(HeapError::DoubleFree { address })
                } else if inside > 0 {
                    Err(HeapError::Interior { address, block: Range::new(start, bytes) })
                } else {
                    let key = Key::new(record.slab | SLAB_BIT, slab.generation(slot));
                    Ok(HeapBlock { address, bytes, key })
                }
            }
            State::Free | State::Vacant => Err(HeapError::DoubleFree { address }),
        }
    }

    /// Frees the block of the record `id`.
    #[inline]
    fn free_live_record(&mut self, id: u32, stamp: u64) {
        debug_assert!(self.live_blocks > 0, "no block is live");
        let record = &mut self.records[id];
        debug_assert_eq!(record.state, State::Live, "no live block at {:#x}", record.start);
        debug_assert!(self.live_bytes >= record.len, "more is freed than is live");
        record.generation = record.generation.wrapping_add(1);
        record.stamp = record.stamp.max(stamp);
        self.live_bytes -= record.len;
        self.live_blocks -= 1;
        self.free_and_coalesce(id);
    }

    /// Updates the counters after a slot was freed, and dissolves the slab if required.
    fn finish_slot_free(&mut self, slab: u32, freed: FreedSlot) {
        let FreedSlot { bytes, dissolve } = freed;
        debug_assert!(self.live_bytes >= bytes && self.live_blocks > 0, "no slot is live");
        self.live_bytes -= bytes;
        self.live_blocks -= 1;
        if dissolve {
            self.dissolve(slab);
        }
    }
}
