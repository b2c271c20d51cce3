//! Reports of live blocks, by the lines that allocated them.

use crate::base::record::BlockRecord;
use aquifer_core::Bytes;
use std::{collections::HashMap, fmt, panic::Location};

/// The live blocks of a pool, grouped by the lines that allocated them, most bytes first.
///
/// They include stable and reserved memory, memory of graphs and parked memory. Reserved memory
/// counts with its committed bytes.
///
/// ```
/// use aquifer::{Debugging, DeviceId, DevicePool, PoolConfig, sim::Sim};
/// let mut config = PoolConfig::default();
/// config.debug.leaks = true;
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let kept = pool.buffer::<u8>(&stream, 1000)?;
/// let leaks = pool.leaks().unwrap_or_default();
/// assert_eq!((leaks.bytes(), leaks.groups()[0].at.file()), (1000, file!()));
/// println!("{leaks}");
/// # Ok::<(), aquifer::MemoryError>(())
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
