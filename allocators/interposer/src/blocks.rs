//! The live blocks of the process, by address or by the driver's pointer to an array.
//!
//! Threads that use different addresses take different locks. None is held over a call of the
//! driver.

use crate::{guest::lock, log::Subject, pools::DriverPool};
use aquifer_core::Charge;
use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{Mutex, MutexGuard},
};

/// Which memory of the device lies behind a block.
pub(crate) enum Memory {
    /// Pages of its own, as long as they are charged, and pages at its edges that other blocks may
    /// lie on as well.
    Pages {
        /// Charged until it is dropped.
        _own: Charge,
        edges: [Option<u64>; 2],
    },
    /// Bytes of its own, as long as they are charged.
    Own(#[expect(dead_code, reason = "charged until it is dropped")] Charge),
    /// Memory of this pool of the driver.
    Pool(&'static DriverPool),
    /// Memory that comes when it is touched, and counts as the driver's own.
    Managed,
    /// A block of this library's pool.
    Served,
}

/// A live block.
pub(crate) struct Block {
    pub(crate) what: Subject,
    /// The context whose end frees it, or 0 if none does.
    pub(crate) context: usize,
    pub(crate) memory: Memory,
}

/// A power of two.
const SHARDS: usize = 64;

/// Hashes an address: the program's own are spread well enough by one multiplication.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, address: u64) {
        // The map takes its slot from the low bits, and the upper ones differ most.
        self.0 = (address >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

type BlockMap = HashMap<u64, Block, BuildHasherDefault<AddressHasher>>;

pub(crate) struct Blocks {
    shards: [Mutex<BlockMap>; SHARDS],
}

impl Blocks {
    pub(crate) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()) }
    }

    fn shard(&self, address: u64) -> MutexGuard<'_, BlockMap> {
        // Addresses differ from bit 9 on, and large ones from bit 21 on.
        let mixed = (address >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        lock(&self.shards[mixed as usize % SHARDS])
    }

    /// Adds a block. Returns one that was there: it has ended without a call that is known here.
    pub(crate) fn insert(&self, address: u64, block: Block) -> Option<Block> {
        self.shard(address).insert(address, block)
    }

    pub(crate) fn remove(&self, address: u64) -> Option<Block> {
        self.shard(address).remove(&address)
    }

    /// Removes the blocks that end with a context.
    pub(crate) fn remove_of(&self, context: usize) -> Vec<(u64, Block)> {
        let mut removed = Vec::new();
        for shard in &self.shards {
            let mut shard = lock(shard);
            removed.extend(shard.extract_if(|_, block| block.context == context));
        }
        removed
    }
}
