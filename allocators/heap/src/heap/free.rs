//! Deallocation.

use super::Heap;
use crate::range::{Key, SLOT};
use crate::records::State;
use crate::slab::Given;
use crate::{Block, Extent, Freed, HeapError, Range};

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
        match self.live_at(address)? {
            Live::Record(id) => Ok(self.free_record(id, stamp)),
            Live::Slot { slab, slot } => Ok(self.free_slot(slab, slot, stamp)),
        }
    }

    /// Frees `block` without a search, and only if it is still the same block.
    ///
    /// [`Block::bytes`] is ignored, so a block that was resized in place can be freed with its old
    /// value.
    ///
    /// # Errors
    ///
    /// Those of [`free`](Self::free), and [`HeapError::Stale`] if the address belongs to a later
    /// block.
    pub fn free_block(&mut self, block: &Block, stamp: u64) -> Result<Freed, HeapError> {
        let Block { address, key, .. } = *block;
        let index = key.index();
        if index & SLOT == 0 {
            if self.is_live(address, key) {
                return Ok(self.free_record(index, stamp));
            }
        } else if let Some(given) =
            self.slabs.give_keyed(index & !SLOT, address, key.generation, stamp)
        {
            return Ok(self.count_given(index & !SLOT, given));
        }
        Err(self.refuse(address))
    }

    /// Like [`free_block`](Self::free_block), by address and key alone and without a result.
    ///
    /// # Errors
    ///
    /// Those of [`free_block`](Self::free_block).
    pub fn free_keyed(&mut self, address: u64, key: Key, stamp: u64) -> Result<(), HeapError> {
        let index = key.index();
        if index & SLOT == 0 {
            if self.is_live(address, key) {
                self.end(index, stamp);
                return Ok(());
            }
        } else if let Some(given) =
            self.slabs.give_keyed(index & !SLOT, address, key.generation, stamp)
        {
            self.live_bytes -= given.bytes;
            self.live_blocks -= 1;
            if given.dissolve {
                self.dissolve(index & !SLOT);
            }
            return Ok(());
        }
        Err(self.refuse(address))
    }

    /// Returns the actual size in bytes of the block with this address and key, if it is live.
    #[must_use]
    pub fn size_of_keyed(&self, address: u64, key: Key) -> Option<u64> {
        let index = key.index();
        if index & SLOT == 0 {
            return self.is_live(address, key).then(|| self.records[index].len);
        }
        let slab = self.slabs.get(index & !SLOT)?;
        slab.live_slot(address, key.generation, self.unit_shift).map(|_| slab.slot)
    }

    /// Returns the error for a key that does not match.
    #[cold]
    fn refuse(&self, address: u64) -> HeapError {
        match self.live_at(address) {
            Ok(_) => HeapError::Stale { address },
            Err(why) => why,
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
        match self.live_at(address).ok()? {
            Live::Record(id) => Some(self.records[id].len),
            Live::Slot { slab, .. } => Some(self.slabs.slab(slab).slot),
        }
    }

    /// Returns the live block that starts at `address`.
    ///
    /// # Errors
    ///
    /// Those of [`free`](Self::free). Nothing is freed.
    pub fn block_at(&self, address: u64) -> Result<Block, HeapError> {
        Ok(match self.live_at(address)? {
            Live::Record(id) => {
                let record = &self.records[id];
                Block { address, bytes: record.len, key: Key::new(id, record.generation) }
            }
            Live::Slot { slab, slot } => {
                let of = self.slabs.slab(slab);
                Block { address, bytes: of.slot, key: Key::new(slab | SLOT, of.generation(slot)) }
            }
        })
    }

    /// Finds the live block that starts at `address`, or the reason why there is none.
    pub(super) fn live_at(&self, address: u64) -> Result<Live, HeapError> {
        let id = self.owner(address).ok_or(HeapError::Foreign { address })?;
        let record = &self.records[id];
        match record.state {
            State::Live if record.start == address => Ok(Live::Record(id)),
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
                    Ok(Live::Slot { slab: record.slab, slot })
                }
            }
            State::Free | State::Vacant => Err(HeapError::DoubleFree { address }),
        }
    }

    fn free_record(&mut self, id: u32, stamp: u64) -> Freed {
        let bytes = self.records[id].len;
        let extent = self.end(id, stamp);
        Freed { bytes, extent: Some(self.extent(extent)) }
    }

    /// Frees the block of the record `id`. Returns the record of the merged extent.
    #[inline]
    fn end(&mut self, id: u32, stamp: u64) -> u32 {
        let record = &mut self.records[id];
        record.generation = record.generation.wrapping_add(1);
        record.stamp = record.stamp.max(stamp);
        self.live_bytes -= record.len;
        self.live_blocks -= 1;
        self.release(id)
    }

    fn free_slot(&mut self, slab: u32, slot: usize, stamp: u64) -> Freed {
        let given = self.slabs.give(slab, slot, stamp);
        self.count_given(slab, given)
    }

    /// Updates the counters after a slot was freed, and dissolves the slab if required.
    fn count_given(&mut self, slab: u32, given: Given) -> Freed {
        let Given { bytes, dissolve } = given;
        self.live_bytes -= bytes;
        self.live_blocks -= 1;
        let extent = dissolve.then(|| self.dissolve(slab));
        Freed { bytes, extent: extent.map(|id| self.extent(id)) }
    }

    fn extent(&self, id: u32) -> Extent {
        Extent { range: self.records[id].range(), stamp: self.records[id].stamp }
    }
}

/// The storage of a live block.
pub(super) enum Live {
    /// It has its own record.
    Record(u32),
    /// It is a slot of a slab.
    Slot { slab: u32, slot: usize },
}
