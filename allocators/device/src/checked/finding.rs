//! Findings.

use crate::base::record::BlockRecord;
use aquifer_core::MemoryError;
use std::fmt;

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
    /// The block was written after it was freed and all of its recorded uses were done.
    LateWrite {
        /// The first wrong byte.
        offset: u64,
        /// The value found.
        found: u8,
    },
    /// The block would have overlapped a block in use, and has been refused.
    Overlap {
        /// The block in use.
        held: Box<BlockRecord>,
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
            Fault::LateWrite { offset, found } => {
                write!(f, "written after its free: {found:#04x} at byte {offset}")?;
            }
            Fault::Overlap { .. } => f.write_str("overlaps a block that is held")?,
            Fault::Leak => write!(f, "never freed, {:.1?} old", self.block.born.elapsed())?,
            Fault::Unchecked { error } => write!(f, "not looked at: {error}")?,
        }
        self.block.write_details(f)?;
        if let Fault::Overlap { held } = &self.fault {
            f.write_str("\nand")?;
            held.write_details(f)?;
        }
        Ok(())
    }
}
