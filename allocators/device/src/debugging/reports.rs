//! What the checks report: faults of blocks, and live blocks by the lines that allocated them.

use crate::base::record::BlockRecord;
use aquifer_core::{Bytes, MemoryError};
use std::{collections::HashMap, fmt, panic::Location};

/// A fault of a block, or a possible fault.
///
/// Its `Display` is a readable report of a few lines.
///
/// See [`Debugging`](crate::Debugging) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// The fault.
    pub fault: Fault,
    /// The block concerned.
    pub block: BlockRecord,
}

/// The kinds of faults. Offsets count bytes from the first of the block.
///
/// See [`Debugging`](crate::Debugging) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Memory before the block was written.
    Underrun {
        /// The lowest wrong byte; -1 is right before the block.
        offset: i64,
        /// The value found.
        found: u8,
    },
    /// Memory behind the block was written.
    Overrun {
        /// The first wrong byte; the block's length is right behind it.
        offset: u64,
        /// The value found.
        found: u8,
    },
    /// The block was live when its pool closed.
    Leak,
    /// The block returned to the pool without a check, since the driver refused to read it.
    Unchecked {
        /// The driver's error.
        error: MemoryError,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fault {
            Fault::Underrun { offset, found } => {
                write!(f, "written before its start: {found:#04x} at byte {offset}")?;
            }
            Fault::Overrun { offset, found } => {
                let bytes = self.block.bytes;
                write!(f, "written past its end: {found:#04x} at byte {offset} of {bytes}")?;
            }
            Fault::Leak => write!(f, "never freed, {:.1?} old", self.block.born.elapsed())?,
            Fault::Unchecked { error } => write!(f, "not looked at: {error}")?,
        }
        self.block.write_details(f)
    }
}

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
    pub(crate) fn of(live: impl Iterator<Item = BlockRecord>) -> Self {
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
