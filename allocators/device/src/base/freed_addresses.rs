//! The addresses of blocks that were freed.

use aquifer_core::MemoryError;
use std::collections::{HashMap, VecDeque};

/// The maximum number of freed addresses that are remembered.
const MAX_REMEMBERED: usize = 1 << 16;

/// The newest addresses whose blocks were freed and that have not been allocated since. They
/// distinguish a double free from an address that was never allocated.
#[derive(Default, Debug)]
pub(crate) struct FreedAddresses {
    /// The number of the free at each address.
    at: HashMap<u64, u64>,
    /// Oldest first, some of them out of date.
    order: VecDeque<(u64, u64)>,
    frees: u64,
}

impl FreedAddresses {
    /// Records that the block at this address was freed.
    pub(crate) fn insert(&mut self, address: u64) {
        self.frees += 1;
        self.at.insert(address, self.frees);
        self.order.push_back((address, self.frees));
        if self.order.len() > MAX_REMEMBERED
            && let Some((oldest, free)) = self.order.pop_front()
            && self.at.get(&oldest) == Some(&free)
        {
            self.at.remove(&oldest);
        }
    }

    /// Records that a block was allocated at this address.
    pub(crate) fn remove(&mut self, address: u64) {
        self.at.remove(&address);
    }

    pub(crate) fn contains(&self, address: u64) -> bool {
        self.at.contains_key(&address)
    }

    /// Returns the error for an address without a raw block.
    pub(crate) fn refuse(&self, address: u64) -> MemoryError {
        if self.contains(address) {
            MemoryError::DoubleFree { address }
        } else {
            MemoryError::ForeignBlock { address }
        }
    }
}
