//! Copies that own a region, or memory that is pinned in place.
#![expect(unsafe_code, reason = "promises that memory stays until copies are done")]

use super::{InPlace, PinnableMut, Region};
use aquifer_core::{Gate, Result};
use aquifer_stream::HostOwned;
use std::{ptr::NonNull, sync::Arc};

// SAFETY: 1. the memory of a region was initialised when it was populated, and does not move with
// it. 2. the backing keeps the gate. Before the gate is open, the memory is neither unmapped nor
// passed on: a dropped backing is retired.
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

// SAFETY: 1. `Pinnable` guarantees initialised elements with a stable address. 2. the backing keeps
// the gate. If it is dropped before the gate is open, it is retired together with its owner, and
// until then no code can access the owner. Owners of read-only memory are excluded, since a
// download would write it.
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
