//! Resizing a block in place.

use super::Heap;
use crate::range::SLAB_BIT;
use crate::records::{BORDER_ABOVE, BORDER_BELOW, NIL, Record, State};
use crate::{HeapBlock, HeapError};

impl Heap {
    /// Resizes the live block at `address` to at least `new_bytes`, without moving it.
    ///
    /// A slot of a slab keeps its actual size, and can grow up to it. Any other block frees its
    /// tail with `stamp`, or takes free memory directly above it if no border lies between.
    ///
    /// Returns the block with its new size. The old value stays valid for
    /// [`free_block`](Self::free_block).
    ///
    /// # Errors
    ///
    /// [`HeapError::NoRoom`] with the possible size, [`HeapError::ZeroSize`],
    /// [`HeapError::TooManyRecords`], or those of [`block_at`](Self::block_at) if no live block
    /// starts at `address`.
    pub fn resize_in_place(
        &mut self,
        address: u64,
        new_bytes: u64,
        stamp: u64,
    ) -> Result<HeapBlock, HeapError> {
        let block = self.block_at(address)?;
        if new_bytes == 0 {
            return Err(HeapError::ZeroSize);
        }
        let id = block.key.index();
        if id & SLAB_BIT != 0 {
            return if new_bytes > block.bytes {
                let (range, available) = (block.range(), block.bytes);
                Err(HeapError::NoRoom { block: range, wanted: new_bytes, available })
            } else {
                Ok(block)
            };
        }
        let wanted = self.whole_units(new_bytes).unwrap_or(u64::MAX);
        if wanted < block.bytes {
            self.cut_tail(id, block.bytes - wanted, stamp)?;
        } else if wanted > block.bytes {
            self.extend(id, wanted - block.bytes)?;
        }
        Ok(HeapBlock { bytes: self.records[id].len, ..block })
    }

    /// Frees the last `tail` bytes of the live record `id`.
    fn cut_tail(&mut self, id: u32, tail: u64, stamp: u64) -> Result<(), HeapError> {
        if !self.records.has_room_for(1) {
            return Err(HeapError::TooManyRecords);
        }
        let record = &mut self.records[id];
        let rest = Record::new(
            record.end() - tail,
            tail,
            record.stamp.max(stamp),
            record.borders & BORDER_ABOVE,
        );
        debug_assert!(tail > 0 && tail < record.len, "{tail} bytes of {}", record.len);
        record.len -= tail;
        record.borders &= BORDER_BELOW;
        self.live_bytes -= tail;
        let rest = self.insert_after(id, rest);
        self.free_and_coalesce(rest);
        Ok(())
    }

    /// Grows the live record `id` by the `more` bytes above it.
    fn extend(&mut self, id: u32, more: u64) -> Result<(), HeapError> {
        let block = self.records[id].range();
        let next = self.records[id].next;
        let open = next != NIL && self.is_wholly_free(next) && self.records.mergeable(id, next);
        let room = if open { self.free_run_from(next).0.range.len } else { 0 };
        if room < more {
            let wanted = block.len.saturating_add(more);
            return Err(HeapError::NoRoom { block, wanted, available: block.len + room });
        }
        if !self.records.has_room_for(1) {
            return Err(HeapError::TooManyRecords);
        }
        let piece = self.dissolve_spares_in(crate::Range::new(block.end(), more), next);
        let piece = self.carve(piece, block.end(), more);
        debug_assert_ne!(self.records[piece].state, State::Slab);
        self.merge(id, piece);
        debug_assert_eq!(self.records[id].len, block.len + more, "the block has another length");
        self.live_bytes += more;
        Ok(())
    }
}
