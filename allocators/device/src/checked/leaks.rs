//! Reports of live blocks, by the lines that allocated them.

use super::BlockRecord;
use crate::dedicated::Span;
use aquifer_core::{Bytes, Tag};
use aquifer_driver::site;
use aquifer_stream::Timeline;
use std::{
    backtrace::Backtrace,
    collections::{BTreeMap, HashMap},
    fmt,
    panic::Location,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The live blocks of a pool, grouped by the lines that allocated them, most bytes first.
///
/// They include stable and reserved memory, memory of graphs and parked memory. Reserved memory
/// counts with its committed bytes.
///
/// ```
/// use aquifer_device::{Debugging, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let mut config = PoolConfig::default();
/// config.debug.leaks = true;
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let kept = pool.buffer::<u8>(&stream, 1000)?;
/// let leaks = pool.leaks().unwrap_or_default();
/// assert_eq!((leaks.bytes(), leaks.groups()[0].at.file()), (1000, file!()));
/// println!("{leaks}");
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Clone, Default, Debug)]
pub struct LeakReport {
    groups: Vec<LeakGroup>,
}

/// The live blocks that one line has allocated.
///
/// See [`LeakReport`] for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeakGroup {
    /// The line.
    pub at: &'static Location<'static>,
    /// Sum of the bytes requested.
    pub bytes: u64,
    /// The blocks, largest first, and older ones first among equals.
    pub blocks: Vec<BlockRecord>,
}

/// The live blocks of a pool that bypass its checks: stable and reserved memory, memory of graphs
/// and parkable memory. Numbers all blocks of the pool.
#[derive(Default)]
pub(crate) struct LiveBlockList {
    numbers: AtomicU64,
    backtraces: bool,
    live: Mutex<BTreeMap<u64, UncheckedBlock>>,
}

/// A block that bypasses the checks.
struct UncheckedBlock {
    record: BlockRecord,
    /// For reserved memory, the span that it is committed in.
    committed: Option<Weak<Span>>,
}

/// Removes its block from the listing when it is dropped.
pub(crate) struct LiveBlockEntry {
    listing: Arc<LiveBlockList>,
    number: u64,
}

impl Drop for LiveBlockEntry {
    fn drop(&mut self) {
        self.listing.live().remove(&self.number);
    }
}

impl LiveBlockList {
    pub(super) fn new(backtraces: bool) -> Self {
        Self { backtraces, ..Self::default() }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, UncheckedBlock>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the next block.
    pub(super) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Lists a block of `bytes`, or of the committed bytes, until the returned value is dropped.
    #[track_caller]
    pub(crate) fn list(
        self: &Arc<Self>,
        (address, bytes): (u64, u64),
        tag: Tag,
        owner_stream: &Timeline,
        committed: Option<&Arc<Span>>,
    ) -> LiveBlockEntry {
        let number = self.number();
        let record = BlockRecord {
            address,
            bytes,
            tag,
            number,
            stream: super::stream_of(owner_stream),
            of_pool: owner_stream.number(),
            born: Instant::now(),
            allocated_at: site::current(),
            freed_at: None,
            allocated_by: self.backtraces.then(|| Arc::new(Backtrace::force_capture())),
            freed_by: None,
        };
        let committed = committed.map(Arc::downgrade);
        self.live().insert(number, UncheckedBlock { record, committed });
        LiveBlockEntry { listing: self.clone(), number }
    }

    /// Returns the live blocks. Reserved memory counts with its committed bytes, and is left out if
    /// it has none.
    pub(super) fn records(&self) -> Vec<BlockRecord> {
        let live = self.live();
        let records = live.values().filter_map(|block| {
            let committed = block.committed.as_ref().map(Weak::upgrade);
            let bytes = match committed {
                None => block.record.bytes,
                Some(span) => span?.charged_bytes(),
            };
            (bytes > 0).then(|| BlockRecord { bytes, ..block.record.clone() })
        });
        records.collect()
    }
}

impl LeakReport {
    pub(super) fn of(live: impl Iterator<Item = BlockRecord>) -> Self {
        let mut by_line: HashMap<&'static Location<'static>, Vec<BlockRecord>> = HashMap::new();
        for block in live {
            by_line.entry(block.allocated_at).or_default().push(block);
        }
        let mut groups: Vec<LeakGroup> = by_line
            .into_iter()
            .map(|(at, mut blocks)| {
                blocks.sort_by_key(|b| (std::cmp::Reverse(b.bytes), b.number));
                LeakGroup { at, bytes: blocks.iter().map(|b| b.bytes).sum(), blocks }
            })
            .collect();
        // Ties are ordered by line, so that the report is deterministic.
        groups
            .sort_by_key(|g| (std::cmp::Reverse(g.bytes), g.at.file(), g.at.line(), g.at.column()));
        Self { groups }
    }

    /// Returns the groups, most bytes first.
    #[must_use]
    pub fn groups(&self) -> &[LeakGroup] {
        &self.groups
    }

    /// Returns whether no block is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the sum of the bytes requested.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.groups.iter().map(|g| g.bytes).sum()
    }

    /// Returns the number of live blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.groups.iter().map(|g| g.blocks.len()).sum()
    }
}

/// Number of blocks of a group that are printed.
const BLOCKS_SHOWN: usize = 3;

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} live in {} blocks", Bytes(self.bytes()), self.blocks())?;
        for group in &self.groups {
            write!(
                f,
                "\n  {} in {} blocks from {}",
                Bytes(group.bytes),
                group.blocks.len(),
                group.at
            )?;
            for block in group.blocks.iter().take(BLOCKS_SHOWN) {
                write!(f, "\n    {block}, {:.1?} old", block.born.elapsed())?;
            }
            if group.blocks.len() > BLOCKS_SHOWN {
                write!(f, "\n    and {} more", group.blocks.len() - BLOCKS_SHOWN)?;
            }
        }
        Ok(())
    }
}
