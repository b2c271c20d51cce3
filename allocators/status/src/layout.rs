//! The layout of a status file, version 1.
//!
//! ```text
//!   0        header: magic, versions, process, numbers of slots and lines in use
//!   4 KiB    256 slots of 512 bytes, one for each pool or part of a pool
//!   132 KiB  1,024 lines of 128 bytes, one for each cache
//!   260 KiB  end
//! ```
//!
//! All numbers are words of eight bytes in the byte order of the machine. A process with another
//! byte order sees a wrong magic. Texts have their length in the word before them.

use aquifer_core::PoolStats;

/// `AQUIFERS`, read as a word.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"AQUIFERS");
/// The version of this layout.
pub(crate) const VERSION: u64 = 1;

pub(crate) const WORD: usize = 8;
pub(crate) const HEADER_BYTES: usize = 4096;
pub(crate) const SLOTS: usize = 256;
pub(crate) const SLOT_BYTES: usize = 512;
pub(crate) const SLOT_WORDS: usize = SLOT_BYTES / WORD;
pub(crate) const LINES: usize = 1024;
pub(crate) const LINE_BYTES: usize = 128;
pub(crate) const LINE_WORDS: usize = LINE_BYTES / WORD;
pub(crate) const SLOTS_AT: usize = HEADER_BYTES;
pub(crate) const LINES_AT: usize = SLOTS_AT + SLOTS * SLOT_BYTES;
pub(crate) const FILE_BYTES: usize = LINES_AT + LINES * LINE_BYTES;

/// The end of the name of a status file.
pub(crate) const SUFFIX: &str = ".status";

/// Words of the header.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 1;
    pub(crate) const PROCESS: usize = 2;
    /// Nanoseconds since 1970, as all times.
    pub(crate) const STARTED: usize = 3;
    /// One more than the highest number of a slot that was ever in use.
    pub(crate) const SLOTS_USED: usize = 4;
    /// The same of the lines.
    pub(crate) const LINES_USED: usize = 5;
    /// The version of the library: a text of at most [`LIBRARY_BYTES`].
    pub(crate) const LIBRARY: usize = 8;
    pub(crate) const LIBRARY_BYTES: usize = 56;
    /// The command: a text of at most [`COMMAND_BYTES`].
    pub(crate) const COMMAND: usize = 16;
    pub(crate) const COMMAND_BYTES: usize = 504;
}

/// Words of a slot. The first is its [sequence](crate::sequence).
pub(crate) mod slot {
    /// The slot's number plus one, and the number of its opening in the upper half; 0 if the slot
    /// is not in use.
    pub(crate) const ID: usize = 1;
    /// The [`ID`] of the pool that this slot is a part of, or 0.
    pub(crate) const PART_OF: usize = 2;
    pub(crate) const KIND: usize = 3;
    /// The device's ordinal plus one, or 0.
    pub(crate) const DEVICE: usize = 4;
    /// The NUMA node's number plus one, or 0.
    pub(crate) const NODE: usize = 5;
    pub(crate) const OPENED: usize = 6;
    pub(crate) const PUBLISHED: usize = 7;
    /// The tightest budget's limit, or [`NONE`].
    pub(crate) const LIMIT: usize = 8;
    /// The largest free extent in bytes, or [`NONE`].
    pub(crate) const LARGEST_FREE: usize = 9;
    /// The figures of [`PoolStats`](aquifer_core::PoolStats), in the order of its fields.
    pub(crate) const STATS: usize = 12;
    /// A text of at most [`ADDRESS_BYTES`].
    pub(crate) const ADDRESS: usize = 34;
    pub(crate) const ADDRESS_BYTES: usize = 56;
    /// A text of at most [`NAME_BYTES`].
    pub(crate) const NAME: usize = 42;
    pub(crate) const NAME_BYTES: usize = 160;
    /// The value of a figure that is not known.
    pub(crate) const NONE: u64 = u64::MAX;
}

/// The number of figures of [`PoolStats`].
pub(crate) const FIGURES: usize = 20;

const _: () =
    assert!(LINES_AT.is_multiple_of(LINE_BYTES) && FILE_BYTES.is_multiple_of(HEADER_BYTES));
const _: () = assert!(slot::STATS + FIGURES <= slot::ADDRESS);
const _: () = assert!(slot::ADDRESS + 1 + slot::ADDRESS_BYTES / WORD <= slot::NAME);
const _: () = assert!(slot::NAME + 1 + slot::NAME_BYTES / WORD <= SLOT_WORDS);
const _: () = assert!((header::COMMAND + 1) * WORD + header::COMMAND_BYTES <= HEADER_BYTES);

/// Returns the figures as words.
pub(crate) fn words_of(stats: &PoolStats) -> [u64; FIGURES] {
    [
        stats.live,
        stats.requested,
        stats.cached,
        stats.pending,
        stats.physical,
        stats.graphs,
        stats.peak_requested,
        stats.peak_live,
        stats.peak_physical,
        stats.blocks,
        stats.allocations,
        stats.frees,
        stats.failures,
        stats.growths,
        stats.reaped,
        stats.moves,
        stats.adoptions,
        stats.fences,
        stats.stream_waits,
        stats.host_waits,
    ]
}

/// Returns the figures of these words. The inverse of [`words_of`].
pub(crate) fn stats_of(words: &[u64; FIGURES]) -> PoolStats {
    let mut stats = PoolStats::default();
    [
        stats.live,
        stats.requested,
        stats.cached,
        stats.pending,
        stats.physical,
        stats.graphs,
        stats.peak_requested,
        stats.peak_live,
        stats.peak_physical,
        stats.blocks,
        stats.allocations,
        stats.frees,
        stats.failures,
        stats.growths,
        stats.reaped,
        stats.moves,
        stats.adoptions,
        stats.fences,
        stats.stream_waits,
        stats.host_waits,
    ] = *words;
    stats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_survive_the_way_through_words() {
        let words: [u64; FIGURES] = std::array::from_fn(|n| 1000 + n as u64);
        assert_eq!(words_of(&stats_of(&words)), words);
    }
}
