//! The figures of a process and of its pools: consistent copies of their slots, with those of their
//! parts and lines.

use crate::{
    error::FileFault,
    layout::{FIGURES, LINE_WORDS, SLOT_WORDS, slot, stats_of, words_of},
    sequence,
    slot::PoolKind,
    text::read_text,
};
use aquifer_core::PoolStats;
use std::{
    collections::HashMap,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The figures of one pool of a process. [`StatusFolder`](crate::StatusFolder) has an example.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PoolStatus {
    /// What its memory is.
    pub kind: PoolKind,
    /// The name of the device, the source or the allocator.
    pub name: String,
    /// The ordinal of its device, as its process counts them.
    pub device: Option<u32>,
    /// The PCI address of its device, by which devices of several processes are compared.
    pub address: Option<String>,
    /// The NUMA node of its memory.
    pub node: Option<u32>,
    /// Its statistics. Of device pools, the bytes and blocks in caches are current. The block that
    /// a stream has freed last counts as live until the stream's next operation.
    pub stats: PoolStats,
    /// The limit of the tightest budget when it was last published.
    pub limit: Option<u64>,
    /// The largest free extent in bytes, where it is known.
    pub largest_free: Option<u64>,
    /// Caches of streams or threads whose figures are current (a count).
    pub caches: u32,
    /// When the pool was opened, in nanoseconds since 1970.
    pub opened_ns: u64,
    /// When its slow path last published, in nanoseconds since 1970.
    pub published_ns: u64,
}

impl PoolStatus {
    /// Returns when its slow path last published. Figures that only change there are as old as
    /// that only if nothing has changed.
    #[must_use]
    pub fn published(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.published_ns)
    }
}

/// Of each slot of a file its consistent copy, once there is one.
pub(super) struct Copies(Vec<Option<[u64; SLOT_WORDS]>>);

impl Copies {
    /// Takes two copies of all slots, the second made after the first.
    pub(super) fn new(first: &[u64], second: &[u64]) -> Self {
        let (first, _) = first.as_chunks::<SLOT_WORDS>();
        let (second, _) = second.as_chunks::<SLOT_WORDS>();
        let settled = |(first, second): (&[u64; SLOT_WORDS], &[u64; SLOT_WORDS])| {
            sequence::is_consistent(first, second).then_some(*second)
        };
        Self(first.iter().zip(second).map(settled).collect())
    }

    /// Returns the numbers of the slots without a consistent copy.
    pub(super) fn unsettled(&self) -> Vec<usize> {
        self.0.iter().enumerate().filter_map(|(n, slot)| slot.is_none().then_some(n)).collect()
    }

    /// Takes two more copies of one slot. Returns whether they are consistent.
    pub(super) fn settle(&mut self, number: usize, first: &[u64], second: &[u64]) -> bool {
        let copy = second.try_into().ok().filter(|_| sequence::is_consistent(first, second));
        if let (Some(slot), Some(copy)) = (self.0.get_mut(number), copy) {
            *slot = Some(copy);
            return true;
        }
        false
    }

    /// Returns the pools, with the figures of their parts and of these lines, and the slots that
    /// never were consistent.
    pub(super) fn pools(self, lines: &[u64]) -> (Vec<PoolStatus>, Vec<FileFault>) {
        let mut pools: Vec<PoolStatus> = Vec::new();
        let (mut faults, mut by_id) = (Vec::new(), HashMap::new());
        for (number, words) in self.0.iter().enumerate() {
            match words {
                None => faults.push(FileFault::Torn { slot: number }),
                Some(words) if words[slot::ID] == 0 || words[slot::PART_OF] != 0 => {}
                Some(words) => {
                    if let Some(pool) = pool_of(words) {
                        by_id.insert(words[slot::ID], pools.len());
                        pools.push(pool);
                    }
                }
            }
        }
        let owner = |id: u64| by_id.get(&id).copied().filter(|_| id != 0);
        for words in self.0.iter().flatten().filter(|words| words[slot::ID] != 0) {
            if let Some(pool) = owner(words[slot::PART_OF]).and_then(|at| pools.get_mut(at)) {
                let part = stats(words);
                let peaks = (
                    pool.stats.peak_live.max(part.peak_live),
                    pool.stats.peak_requested.max(part.peak_requested),
                );
                pool.stats = sum(&pool.stats, &part);
                // Those of a part are of its whole pool.
                (pool.stats.peak_live, pool.stats.peak_requested) = peaks;
                pool.published_ns = pool.published_ns.max(words[slot::PUBLISHED]);
            }
        }
        for line in lines.as_chunks::<LINE_WORDS>().0 {
            let [id, ..] = *line;
            if let Some(pool) = owner(id).and_then(|at| pools.get_mut(at)) {
                add_line(&mut pool.stats, line);
                pool.caches += 1;
            }
        }
        // The figures of a slot and its lines are not of one moment, so a difference may be
        // slightly below zero.
        for pool in &mut pools {
            let words = words_of(&pool.stats).map(|word| if word >> 63 == 0 { word } else { 0 });
            pool.stats = stats_of(&words);
            // Peaks are published by slow paths, so what is live now may be above them.
            pool.stats.peak_live = pool.stats.peak_live.max(pool.stats.live);
            pool.stats.peak_requested = pool.stats.peak_requested.max(pool.stats.requested);
        }
        (pools, faults)
    }
}

fn stats(words: &[u64; SLOT_WORDS]) -> PoolStats {
    let figures: [u64; FIGURES] = std::array::from_fn(|at| words[slot::STATS + at]);
    stats_of(&figures)
}

/// Returns the pool of a slot, or `None` if its kind is unknown.
fn pool_of(words: &[u64; SLOT_WORDS]) -> Option<PoolStatus> {
    let number = |at: usize| words[at].checked_sub(1).and_then(|n| u32::try_from(n).ok());
    let known = |at: usize| Some(words[at]).filter(|&value| value != slot::NONE);
    let address = read_text(words, slot::ADDRESS, slot::ADDRESS_BYTES);
    Some(PoolStatus {
        kind: PoolKind::numbered(words[slot::KIND])?,
        name: read_text(words, slot::NAME, slot::NAME_BYTES),
        device: number(slot::DEVICE),
        address: (!address.is_empty()).then_some(address),
        node: number(slot::NODE),
        stats: stats(words),
        limit: known(slot::LIMIT),
        largest_free: known(slot::LARGEST_FREE),
        caches: 0,
        opened_ns: words[slot::OPENED],
        published_ns: words[slot::PUBLISHED],
    })
}

/// Adds two statistics, where any figure may be below zero, or anything at all in a hostile file.
pub(crate) fn sum(a: &PoolStats, b: &PoolStats) -> PoolStats {
    let (mut sum, other) = (words_of(a), words_of(b));
    sum.iter_mut().zip(other).for_each(|(word, by)| *word = word.wrapping_add(by));
    stats_of(&sum)
}

/// Adds what a cache has counted: the words of a [`CacheLine`](crate::CacheLine) in their order.
fn add_line(stats: &mut PoolStats, line: &[u64; LINE_WORDS]) {
    let &[_, occupied, requested, taken, returned, pending, pending_blocks, ..] = line;
    let live = occupied.wrapping_sub(pending);
    let blocks = taken.wrapping_sub(returned).wrapping_sub(pending_blocks);
    let mut figures = PoolStats::default();
    figures.live = live;
    figures.requested = requested;
    figures.cached = occupied.wrapping_neg();
    figures.pending = pending;
    figures.blocks = blocks;
    figures.allocations = taken;
    figures.frees = taken.wrapping_sub(blocks);
    *stats = sum(stats, &figures);
}

/// The figures of one process.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ProcessStatus {
    /// The number that the process had when it started. Not to be trusted: after its death another
    /// process may have it.
    pub process: u32,
    /// The command with its arguments, cut after 504 bytes.
    pub command: String,
    /// The version of the library.
    pub version: String,
    /// When the process began to publish, in nanoseconds since 1970.
    pub started_ns: u64,
    /// Whether the process lives: whether it holds the lock of its file.
    pub is_alive: bool,
    /// Its pools, in the order of their slots.
    pub pools: Vec<PoolStatus>,
    /// Pools whose figures cannot be read.
    pub faults: Vec<FileFault>,
    /// Its file.
    pub path: PathBuf,
}

impl ProcessStatus {
    /// Returns whether the process lived when it was read.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.is_alive
    }

    /// Returns when the process began to publish.
    #[must_use]
    pub fn started(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.started_ns)
    }

    /// Returns the sum of the statistics of all pools.
    #[must_use]
    pub fn total(&self) -> PoolStats {
        self.pools.iter().fold(PoolStats::default(), |total, pool| sum(&total, &pool.stats))
    }
}
