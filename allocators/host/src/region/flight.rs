//! Copies that own a region, or memory that is pinned in place.
#![expect(unsafe_code, reason = "promises that memory stays until copies are done")]

use super::{InPlace, PinnableMut, Region};
use aquifer_core::{Gate, Result};
use aquifer_stream::HostOwned;
use std::{ptr::NonNull, sync::Arc};

// SAFETY: 1. a region's memory was written when it was populated, and does not move with it.
// 2. the backing keeps the gate, and neither unmaps nor gives anything out before it is open:
//    dropped, it is retired.
unsafe impl HostOwned for Region {
    type Item = u8;

    fn bytes(&mut self) -> NonNull<[u8]> {
        NonNull::from(self.bytes_mut())
    }

    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()> {
        self.backing.defer(until);
        Ok(())
    }
}

// SAFETY: 1. `Pinnable` promises initialised elements that stay where they are.
// 2. the backing keeps the gate, and is retired with its owner if it is dropped before that is
//    open; until then nobody has
// the owner. What may not be written is left out, since a download would write it.
unsafe impl<T: PinnableMut> HostOwned for InPlace<T> {
    type Item = T::Item;

    fn bytes(&mut self) -> NonNull<[T::Item]> {
        NonNull::from(self.items_mut())
    }

    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()> {
        self.backing_mut().defer(until);
        Ok(())
    }
}
