//! Raw blocks that belong to no stream's cache.

use crate::Block;
use aquifer_core::{MemoryError, Result};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Raw blocks that belong to no cache, by address. No two live blocks of a process share an
/// address.
static RAW_TABLE: Mutex<RawTable> = Mutex::new(RawTable(BTreeMap::new()));

/// Blocks by their raw addresses. Any of them may be shared.
#[derive(Default)]
pub(crate) struct RawTable(BTreeMap<u64, Arc<Block>>);

impl RawTable {
    /// Returns the block at this address.
    pub(crate) fn get(&self, address: u64) -> Option<&Block> {
        self.0.get(&address).map(|block| &**block)
    }

    pub(crate) fn insert(&mut self, block: Block) {
        let before = self.0.insert(block.address(), Arc::new(block));
        debug_assert!(before.is_none(), "two live blocks at one address");
    }

    pub(crate) fn share(&self, address: u64) -> Option<Arc<Block>> {
        self.0.get(&address).cloned()
    }

    /// Removes and returns the block, unless it is shared.
    pub(crate) fn take_unique(&mut self, address: u64) -> Option<Result<Block>> {
        let block = self.0.remove(&address)?;
        Some(Arc::try_unwrap(block).map_err(|shared| {
            self.0.insert(address, shared);
            MemoryError::Busy { address }
        }))
    }

    /// Removes the block. The caller must drop it without this table's lock.
    pub(crate) fn remove(&mut self, address: u64) -> Option<Arc<Block>> {
        self.0.remove(&address)
    }
}

/// Returns the table of raw blocks that belong to no cache.
pub(crate) fn raw_table() -> MutexGuard<'static, RawTable> {
    RAW_TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}
