//! What an allocator did wrong.

use std::{error, fmt};

/// A method of the allocator traits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Call {
    /// `allocate`
    Allocate,
    /// `allocate_zeroed`
    AllocateZeroed,
    /// `deallocate`
    Deallocate,
    /// `grow`
    Grow,
    /// `grow_zeroed`
    GrowZeroed,
    /// `shrink`
    Shrink,
    /// `clone`, or the drop of a clone
    Clone,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allocate => "allocate",
            Self::AllocateZeroed => "allocate_zeroed",
            Self::Deallocate => "deallocate",
            Self::Grow => "grow",
            Self::GrowZeroed => "grow_zeroed",
            Self::Shrink => "shrink",
            Self::Clone => "clone",
        })
    }
}

/// A rule of the allocator contract that was broken.
///
/// Its example is that of [`check`](super::check).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// A block shares bytes with a live one.
    Overlap {
        /// The call that answered with it.
        call: Call,
        /// Where it begins.
        address: usize,
        /// Its bytes.
        bytes: usize,
        /// Where the live one begins.
        live_address: usize,
        /// The live one's bytes.
        live_bytes: usize,
    },
    /// A block is not aligned as asked.
    Misaligned {
        /// The call that answered with it.
        call: Call,
        /// Where it begins.
        address: usize,
        /// The alignment asked for.
        align: usize,
    },
    /// A block is shorter than asked.
    Short {
        /// The call that answered with it.
        call: Call,
        /// Bytes asked for.
        requested: usize,
        /// Bytes returned.
        returned: usize,
    },
    /// A growth or shrinkage did not keep what both sizes have in common.
    PrefixLost {
        /// The call.
        call: Call,
        /// The first byte that differs, counted from the block's start.
        offset: usize,
    },
    /// A byte that must be zero is not.
    NotZero {
        /// The call.
        call: Call,
        /// The byte, counted from the block's start.
        offset: usize,
        /// What it is.
        value: u8,
    },
    /// The contents of a live block changed though nobody wrote them.
    Changed {
        /// The call before it was seen.
        call: Call,
        /// Where the block begins.
        address: usize,
        /// The first byte that differs, counted from the block's start.
        offset: usize,
    },
    /// A growth was refused, and the block was given away all the same.
    FailedGrowFreed {
        /// Where the block begins.
        address: usize,
        /// Its bytes.
        bytes: usize,
    },
    /// A block of no bytes was refused.
    ZeroSizeRefused {
        /// The call that refused it.
        call: Call,
        /// The alignment asked for.
        align: usize,
    },
    /// A call unwound.
    Unwound {
        /// The call.
        call: Call,
        /// The size in its layout: the old one's where it has two.
        size: usize,
        /// The size of the block that the call was about, as it was returned; 0 if there was none
        /// yet.
        returned: usize,
    },
    /// No allocation at all was served, so nothing was checked.
    NothingServed,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Overlap { call, address, bytes, live_address, live_bytes } => write!(
                f,
                "{call} answered with {bytes} bytes at {address:#x}, which overlap the live {live_bytes} at {live_address:#x}"
            ),
            Self::Misaligned { call, address, align } => {
                write!(f, "{call} answered with {address:#x} for an alignment of {align}")
            }
            Self::Short { call, requested, returned } => {
                write!(f, "{call} answered with {returned} bytes for {requested}")
            }
            Self::PrefixLost { call, offset } => {
                write!(f, "{call} lost the contents from byte {offset} on")
            }
            Self::NotZero { call, offset, value } => {
                write!(f, "{call} left byte {offset} at {value:#04x}, not zero")
            }
            Self::Changed { call, address, offset } => {
                write!(
                    f,
                    "byte {offset} of the live block at {address:#x} was changed, seen after {call}"
                )
            }
            Self::FailedGrowFreed { address, bytes } => {
                write!(f, "a refused grow gave the block of {bytes} bytes at {address:#x} away")
            }
            Self::ZeroSizeRefused { call, align } => {
                write!(f, "{call} refused a block of no bytes with an alignment of {align}")
            }
            Self::Unwound { call, size, returned } => {
                write!(f, "{call} unwound, with a size of {size} for a block of {returned} bytes")
            }
            Self::NothingServed => f.write_str("no allocation was served, so nothing was checked"),
        }
    }
}

/// A [`Fault`], and how to see it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The seed of the run, for [`Suite::seed`](super::Suite::seed).
    pub seed: u64,
    /// The operation at which it was found, counted from 0.
    pub operation: usize,
    /// What was wrong.
    pub fault: Fault,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (seed {}, operation {})", self.fault, self.seed, self.operation)
    }
}

impl error::Error for Violation {}
