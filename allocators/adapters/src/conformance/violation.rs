//! Violations of the allocator contract.

use std::{error, fmt};

/// A method of the allocator traits.
///
/// See [`Suite`](crate::conformance::Suite) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AllocatorCall {
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
    /// `clone`, or dropping a clone
    Clone,
}

impl fmt::Display for AllocatorCall {
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

/// A broken rule of the allocator contract.
///
/// See [`check`](crate::conformance::check) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ContractFault {
    /// A block overlaps a live one.
    Overlap {
        /// The call that returned it.
        call: AllocatorCall,
        /// Address of the block.
        address: usize,
        /// Bytes of the block.
        bytes: usize,
        /// Address of the live block.
        live_address: usize,
        /// Bytes of the live block.
        live_bytes: usize,
    },
    /// A block does not have the requested alignment.
    Misaligned {
        /// The call that returned it.
        call: AllocatorCall,
        /// Address of the block.
        address: usize,
        /// Requested alignment.
        align: usize,
    },
    /// A block is shorter than requested.
    Short {
        /// The call that returned it.
        call: AllocatorCall,
        /// Requested bytes.
        requested: usize,
        /// Bytes returned.
        returned: usize,
    },
    /// A growth or shrink did not keep the common prefix.
    PrefixLost {
        /// The call.
        call: AllocatorCall,
        /// The first byte that differs, from the block's start.
        offset: usize,
    },
    /// A byte that must be zero is not.
    NotZero {
        /// The call.
        call: AllocatorCall,
        /// The byte, from the block's start.
        offset: usize,
        /// Its value.
        value: u8,
    },
    /// The contents of a live block changed, although its owner did not write to it.
    Changed {
        /// The last call before the change was detected.
        call: AllocatorCall,
        /// Address of the block.
        address: usize,
        /// The first byte that differs, from the block's start.
        offset: usize,
    },
    /// A growth was refused, but the block was freed.
    FailedGrowFreed {
        /// Address of the block.
        address: usize,
        /// Bytes of the block.
        bytes: usize,
    },
    /// An empty block was refused.
    ZeroSizeRefused {
        /// The call that refused it.
        call: AllocatorCall,
        /// Requested alignment.
        align: usize,
    },
    /// A call unwound.
    Unwound {
        /// The call.
        call: AllocatorCall,
        /// The size in its layout, or in its old layout if it has two.
        size: usize,
        /// The returned size of the block that the call was given, or 0 if there was none.
        returned: usize,
    },
    /// No allocation succeeded, so nothing was checked.
    NothingServed,
}

impl fmt::Display for ContractFault {
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

/// A [`ContractFault`], with the information to reproduce it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContractViolation {
    /// The seed of the run, for [`Suite::seed`](crate::conformance::Suite::seed).
    pub seed: u64,
    /// The operation at which it was detected, counted from 0.
    pub operation: usize,
    /// The broken rule.
    pub fault: ContractFault,
}

impl fmt::Display for ContractViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (seed {}, operation {})", self.fault, self.seed, self.operation)
    }
}

impl error::Error for ContractViolation {}
