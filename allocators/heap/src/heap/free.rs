//! Deallocation.

use super::Heap;
use crate::range::{Key, SLAB_BIT};
use crate::records::State;
use crate::slab::FreedSlot;
use crate::{Extent, Freed, HeapBlock, HeapError, Range};

impl Heap {
    /// Frees the block that starts at `address`.
    ///
    /// `stamp` is the caller's statement of how long the bytes may still be in use. The resulting
    /// extent carries the largest of its own stamps, this one, and the stamp that the bytes had
    /// before.
    ///
    /// # Errors
    ///
    /// [`HeapError::Foreign`] for an address that is not in the heap, [`HeapError::DoubleFree`] for
    /// a free address, [`HeapError::Interior`] for an address inside a live block. If a freed
    /// block's address has been allocated again, the address alone does not distinguish them. Use
    /// [`free_block`](Self::free_block) then.
    pub fn free(&mut self, address: u64, stamp: u64) -> Result<Freed, HeapError> {
        match self.find_live(address)? {
            LiveBlock::Record(id) => Ok(self.free_record(id, stamp)),
            LiveBlock::Slot { slab, slot } => Ok(self.free_slot(slab, slot, stamp)),
        }
    }

    /// Frees `block` without a search, and only if it is still the same block.
    ///
    /// [`HeapBlock::bytes`] is ignored, so a block that was resized in place can be freed with its
    /// old value.
    ///
    /// # Errors
    ///
    /// Those of [`free`](Self::free), and [`HeapError::Stale`] if the address belongs to a later
    /// block.
    pub fn free_block(&mut self, block: &HeapBlock, stamp: u64) -> Result<Freed, HeapError> {
        let HeapBlock { address, key, .. } = *block;
        let index = key.index();
        if index & SLAB_BIT == 0 {
            if self.is_live(address, key) {
                return Ok(self.free_record(index, stamp));
            }
        } else if let Some(freed) =
            self.slabs.free_keyed(index & !SLAB_BIT, address, key.generation, stamp)
        {
            return Ok(self.finish_slot_free(index & !SLAB_BIT, freed));
        }
        Err(self.key_error(address))
    }

    /// Like [`free_block`](Self::free_block), by address and key alone and without a result.
    ///
    /// # Errors
    ///
    /// Those of [`free_block`](Self::free_block).
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
            let _merged = self.finish_slot_free(index & !SLAB_BIT, freed);
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
        match self.find_live(address) {
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

    /// Returns the actual size in bytes of the live block that starts at `address`.
    #[must_use]
    pub fn size_of(&self, address: u64) -> Option<u64> {
        match self.find_live(address).ok()? {
            LiveBlock::Record(id) => Some(self.records[id].len),
            LiveBlock::Slot { slab, .. } => Some(self.slabs.slab(slab).slot),
        }
    }

    /// Returns the live block that starts at `address`.
    ///
    /// # Errors
    ///
    /// Those of [`free`](Self::free). Nothing is freed.
    pub fn block_at(&self, address: u64) -> Result<HeapBlock, HeapError> {
        Ok(match self.find_live(address)? {
            LiveBlock::Record(id) => {
                let record = &self.records[id];
                HeapBlock { address, bytes: record.len, key: Key::new(id, record.generation) }
            }
            LiveBlock::Slot { slab, slot } => {
                let slab_ref = self.slabs.slab(slab);
                HeapBlock {
                    address,
                    bytes: slab_ref.slot,
                    key: Key::new(slab | SLAB_BIT, slab_ref.generation(slot)),
                }
            }
        })
    }

    /// Finds the live block that starts at `address`, or the reason why there is none.
    pub(super) fn find_live(&self, address: u64) -> Result<LiveBlock, HeapError> {
        let id = self.record_containing(address).ok_or(HeapError::Foreign { address })?;
        let record = &self.records[id];
        match record.state {
            State::Live if record.start == address => Ok(LiveBlock::Record(id)),
            State::Live => Err(HeapError::Interior { address, block: record.range() }),
            State::Slab => {
                let (slot, inside) = self.slabs.slot_at(record.slab, address);
                let slab = self.slabs.slab(record.slab);
                if slab.is_free(slot) {
                    Err(HeapError::DoubleFree { address })
                } else if inside > 0 {
                    Err(HeapError::Interior {
                        address,
                        block: Range::new(slab.address(slot), slab.slot),
                    })
                } else {
                    Ok(LiveBlock::Slot { slab: record.slab, slot })
                }
            }
            State::Free | State::Vacant => Err(HeapError::DoubleFree { address }),
        }
    }

    fn free_record(&mut self, id: u32, stamp: u64) -> Freed {
        let bytes = self.records[id].len;
        let extent = self.free_live_record(id, stamp);
        Freed { bytes, extent: Some(self.extent_of(extent)) }
    }

    /// Frees the block of the record `id`. Returns the record of the merged extent.
    #[inline]
    fn free_live_record(&mut self, id: u32, stamp: u64) -> u32 {
        debug_assert!(self.live_blocks > 0, "no block is live");
        let record = &mut self.records[id];
        debug_assert_eq!(record.state, State::Live, "no live block at {:#x}", record.start);
        debug_assert!(self.live_bytes >= record.len, "more is freed than is live");
        record.generation = record.generation.wrapping_add(1);
        record.stamp = record.stamp.max(stamp);
        self.live_bytes -= record.len;
        self.live_blocks -= 1;
        self.free_and_coalesce(id)
    }

    fn free_slot(&mut self, slab: u32, slot: usize, stamp: u64) -> Freed {
        let freed = self.slabs.free(slab, slot, stamp);
        self.finish_slot_free(slab, freed)
    }

    /// Updates the counters after a slot was freed, and dissolves the slab if required.
    fn finish_slot_free(&mut self, slab: u32, freed: FreedSlot) -> Freed {
        let FreedSlot { bytes, dissolve } = freed;
        debug_assert!(self.live_bytes >= bytes && self.live_blocks > 0, "no slot is live");
        self.live_bytes -= bytes;
        self.live_blocks -= 1;
        let extent = dissolve.then(|| self.dissolve(slab));
        Freed { bytes, extent: extent.map(|id| self.extent_of(id)) }
    }

    fn extent_of(&self, id: u32) -> Extent {
        Extent { range: self.records[id].range(), stamp: self.records[id].stamp }
    }
}

/// The storage of a live block.
pub(super) enum LiveBlock {
    /// It has its own record.
    Record(u32),
    /// It is a slot of a slab.
    Slot { slab: u32, slot: usize },
}
