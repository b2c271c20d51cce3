//! Which caches have released an address as a raw address.
//!
//! The directory is a hint. A cache that it has dropped is found by searching all caches, and a
//! cache that it names wrongly does not have the address.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

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
