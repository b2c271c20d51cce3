//! What is known by address: maps, the caches that have released one as a raw address, and freed
//! ones.

use aquifer_core::MemoryError;
use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasherDefault, Hasher},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// A map by addresses.
pub(crate) type AddressMap<V> = HashMap<u64, V, BuildHasherDefault<AddressHasher>>;

/// A hash for addresses, whose low bits are all alike. It is deterministic, like all of the pool.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, address: u64) {
        let mixed = (self.0 ^ address).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// The bytes of addresses that share an entry, as a power of two.
const GRAIN_BITS: u32 = 21;

/// The number of entries: 128 GiB of consecutive addresses have one each.
const ENTRIES: usize = 1 << 16;

/// Caches per entry, in two bytes each: the number of the cache plus one, the latest in the lowest.
const CACHES_PER_ENTRY: u32 = 4;

/// The maximum number of caches that can be recorded.
pub(crate) const DIRECT_CACHES: usize = 1024;

/// Maps addresses to the caches that may have released them as raw addresses.
#[derive(Default)]
pub(crate) struct AddressDirectory {
    /// Allocated at the first raw address: half a MiB, of which the kernel backs only what is
    /// used.
    entries: OnceLock<Box<[AtomicU64]>>,
}

impl AddressDirectory {
    fn entry(address: u64) -> usize {
        (address >> GRAIN_BITS) as usize % ENTRIES
    }

    /// Records that the cache of this number has released an address here.
    pub(crate) fn record(&self, address: u64, number: usize) {
        if number >= DIRECT_CACHES {
            return;
        }
        let entries = self
            .entries
            .get_or_init(|| std::iter::repeat_with(AtomicU64::default).take(ENTRIES).collect());
        let lane = number as u64 + 1;
        let entry = &entries[Self::entry(address)];
        let noted = entry.load(Ordering::Relaxed);
        if !(0..CACHES_PER_ENTRY).any(|n| noted >> (16 * n) & 0xffff == lane) {
            // A race between two stores may lose one of the records. The only cost is a search.
            entry.store(noted << 16 | lane, Ordering::Relaxed);
        }
    }

    /// Returns the numbers of the caches that may have released `address`, the most likely first.
    pub(crate) fn candidates(&self, address: u64) -> impl Iterator<Item = usize> + use<> {
        let entry = self.entries.get().map(|entries| &entries[Self::entry(address)]);
        let noted = entry.map_or(0, |entry| entry.load(Ordering::Relaxed));
        (0..CACHES_PER_ENTRY).filter_map(move |n| {
            let number = (noted >> (16 * n) & 0xffff).checked_sub(1)?;
            Some(number as usize)
        })
    }
}

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
