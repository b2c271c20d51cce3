//! A conformance suite for the contract of [`Allocator`].
//!
//! [`check`] runs allocations, frees, growths and shrinks in a seeded random order against an
//! allocator and clones of it. It verifies these rules:
//!
//! - live blocks never overlap, have the requested alignment, and have at least the requested size
//! - contents stay unchanged until the block is freed, and growing and shrinking keep the common
//!   prefix
//! - zeroed memory is zero, also after a growth
//! - a block may be freed, grown or shrunk with any size from the requested to the returned one
//! - a failed call changes nothing
//! - an empty block can be allocated with any alignment, freed, grown, and shrunk to
//! - clones are interchangeable
//! - nothing unwinds
//!
//! The first broken rule ends the run with a [`ContractViolation`]. It contains the seed and the
//! operation, so that the run can be repeated.
//!
//! ```
//! use allocator_api2::alloc::Global;
//! use aquifer::conformance::Suite;
//! aquifer::conformance::check(&Global)?;
//! Suite { seed: 7, operations: 200, ..Suite::default() }.check(&Global)?;
//! # Ok::<(), aquifer::conformance::ContractViolation>(())
//! ```
#![expect(unsafe_code, reason = "calls the unsafe methods of the allocator under test")]

use allocator_api2::alloc::{AllocError, Allocator};
use aquifer_core::random::SplitMix64;
use std::{
    alloc::Layout,
    error, fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
};

/// The maximum number of live blocks, so that a run both fills and drains an allocator.
const MAX_LIVE: usize = 48;

/// A test suite that runs operations in a seeded random order.
///
/// The default is 2,000 operations on blocks of up to 8 KiB, aligned to up to 1 KiB. Under Miri it
/// is 100 operations on up to 64 bytes.
///
/// ```
/// use aquifer::conformance::Suite;
/// use allocator_api2::alloc::Global;
/// Suite { seed: 3, largest: 1 << 16, ..Suite::default() }.check(&Global)?;
/// # Ok::<(), aquifer::conformance::ContractViolation>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Suite {
    /// The seed of the random order.
    pub seed: u64,
    /// The number of operations.
    pub operations: usize,
    /// The largest requested size in bytes, except for growths that must fail.
    pub largest: usize,
    /// The largest requested alignment in bytes, a power of two.
    pub alignment: usize,
}

impl Default for Suite {
    fn default() -> Self {
        let (operations, largest, alignment) =
            if cfg!(miri) { (100, 64, 64) } else { (2000, 8 << 10, 1 << 10) };
        Self { seed: 0, operations, largest, alignment }
    }
}

/// A broken rule of the allocator contract. Addresses are those of the block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ContractFault {
    /// A block overlaps a live one.
    Overlap {
        /// Address of the block.
        address: usize,
        /// Address of the live block.
        live: usize,
    },
    /// A block does not have the requested alignment.
    Misaligned {
        /// Address of the block.
        address: usize,
        /// Requested alignment.
        align: usize,
    },
    /// A block is shorter than requested.
    Short {
        /// Requested bytes.
        requested: usize,
        /// Bytes returned.
        returned: usize,
    },
    /// The contents of a live block changed, although its owner did not write to it, or were lost
    /// when it grew or shrank.
    Changed {
        /// Address of the block.
        address: usize,
        /// The first byte that differs, from the block's start.
        offset: usize,
    },
    /// A byte that must be zero is not.
    NotZero {
        /// Address of the block.
        address: usize,
        /// The byte, from the block's start.
        offset: usize,
    },
    /// An empty block was refused.
    ZeroSizeRefused {
        /// Requested alignment.
        align: usize,
    },
    /// A call unwound.
    Unwound,
    /// No allocation succeeded, so nothing was checked.
    NothingServed,
}

impl fmt::Display for ContractFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Overlap { address, live } => {
                write!(f, "the block at {address:#x} overlaps the live one at {live:#x}")
            }
            Self::Misaligned { address, align } => {
                write!(f, "the block at {address:#x} does not have the alignment {align}")
            }
            Self::Short { requested, returned } => {
                write!(f, "a block of {returned} bytes was returned for {requested}")
            }
            Self::Changed { address, offset } => {
                write!(f, "byte {offset} of the live block at {address:#x} has changed")
            }
            Self::NotZero { address, offset } => {
                write!(f, "byte {offset} of the zeroed block at {address:#x} is not zero")
            }
            Self::ZeroSizeRefused { align } => {
                write!(f, "an empty block with an alignment of {align} was refused")
            }
            Self::Unwound => f.write_str("a call unwound"),
            Self::NothingServed => f.write_str("no allocation was served, so nothing was checked"),
        }
    }
}

/// A [`ContractFault`], with the information to reproduce it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContractViolation {
    /// The seed of the run, for [`Suite::seed`].
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

/// Runs the default [`Suite`] against an allocator.
///
/// # Errors
/// The first [`ContractViolation`].
pub fn check<A: Allocator + Clone>(allocator: &A) -> Result<(), ContractViolation> {
    Suite::default().check(allocator)
}

impl Suite {
    /// Runs the suite against an allocator and clones of it, which are created and dropped during
    /// the run. Each call goes to a random one of them. On success all blocks have been freed.
    ///
    /// # Errors
    /// The first [`ContractViolation`]. The live blocks are leaked then, because the allocator has
    /// broken the contract and is not called again.
    pub fn check<A: Allocator + Clone>(&self, allocator: &A) -> Result<(), ContractViolation> {
        let mut run = Run {
            suite: *self,
            random: SplitMix64::new(self.seed),
            original: allocator,
            clone: None,
            live: Vec::new(),
            patterns: 0,
            served: false,
        };
        for operation in 0..=self.operations {
            let step = || if operation < self.operations { run.step() } else { run.drain() };
            // A run that has unwound ends.
            let outcome = catch_unwind(AssertUnwindSafe(step));
            if let Err(fault) = outcome.unwrap_or(Err(ContractFault::Unwound)) {
                return Err(ContractViolation { seed: self.seed, operation, fault });
            }
        }
        Ok(())
    }
}

/// A live block, filled with its own pattern.
#[derive(Clone, Copy)]
struct Block {
    start: NonNull<u8>,
    /// The layout of the last request.
    layout: Layout,
    /// The returned size, at least `layout.size()`.
    bytes: usize,
    /// The seed of its pattern.
    pattern: u64,
}

impl Block {
    fn address(&self) -> usize {
        self.start.addr().get()
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (one, two) = (self.address(), other.address());
        self.bytes > 0 && other.bytes > 0 && one < two + other.bytes && two < one + self.bytes
    }

    /// Returns a byte of its pattern. It is never zero, so that missing zeroing is detected, and it
    /// differs between blocks at almost every offset.
    fn expected(&self, offset: usize) -> u8 {
        let mixed = (self.pattern ^ (offset as u64)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        1 + ((mixed >> 56) % 255) as u8
    }

    /// Checks that its first `bytes` are those of the pattern of `of`.
    fn verify(&self, of: &Self, bytes: usize) -> Result<(), ContractFault> {
        // SAFETY: the block is live and was checked to have as many bytes, all of which the run or
        // the allocator's copy has initialised.
        let held = unsafe { NonNull::slice_from_raw_parts(self.start, bytes).as_ref() };
        match held.iter().enumerate().find(|&(offset, &byte)| byte != of.expected(offset)) {
            None => Ok(()),
            Some((offset, _)) => Err(ContractFault::Changed { address: self.address(), offset }),
        }
    }
}

struct Run<'a, A> {
    suite: Suite,
    random: SplitMix64,
    original: &'a A,
    clone: Option<A>,
    /// Never stored in the allocator under test.
    live: Vec<Block>,
    patterns: u64,
    served: bool,
}

impl<A: Allocator + Clone> Run<'_, A> {
    /// Returns a number in `0..=max`.
    fn up_to(&mut self, max: usize) -> usize {
        (self.random.next_u64() % (max as u64).saturating_add(1)) as usize
    }

    /// Returns a layout of up to this many bytes, small and large sizes being equally likely, and
    /// small alignments more likely than large ones.
    fn layout(&mut self, largest: usize) -> Layout {
        let bits = usize::BITS - largest.leading_zeros();
        let shift = self.up_to(bits as usize);
        let size = self.up_to(largest).min((1 << shift) - 1);
        let most = self.suite.alignment.max(1).ilog2() as usize;
        let align = self.up_to(most).min(self.up_to(most));
        Layout::from_size_align(size, 1 << align).unwrap_or(Layout::new::<u8>())
    }

    fn allocator(&mut self) -> &A {
        if self.up_to(1) == 0 {
            self.original
        } else {
            self.clone.as_ref().unwrap_or(self.original)
        }
    }

    fn step(&mut self) -> Result<(), ContractFault> {
        if self.up_to(7) == 0 {
            // Clones the clone as often as the original. The old clone is dropped, and its blocks
            // must stay valid.
            self.clone = Some(self.allocator().clone());
        }
        let (count, choice) = (self.live.len(), self.up_to(9));
        if count == 0 || choice < 4 && count < MAX_LIVE {
            let layout = self.layout(self.suite.largest);
            return self.allocate(layout, choice < 2);
        }
        let at = self.up_to(count - 1);
        let block = self.live[at];
        block.verify(&block, block.bytes)?;
        let resized = self.layout(self.suite.largest);
        match choice {
            0..=5 => self.deallocate(at),
            6 if cfg!(miri) => {} // It reports such a request as an error.
            6 => {
                let size = isize::MAX as usize - (block.layout.align() - 1);
                self.resize(at, size, block.layout.align())?;
                // If the failed growth freed the block, this is likely to return it.
                self.allocate(block.layout, false)?;
            }
            _ => self.resize(at, resized.size(), resized.align())?,
        }
        Ok(())
    }

    /// Checks a block that a call returned, whose first bytes must be those of `old`, and, if
    /// `zeroed`, the rest zero. Then fills and records it.
    fn admit(
        &mut self,
        returned: NonNull<[u8]>,
        layout: Layout,
        old: Option<(Block, usize)>,
        zeroed: bool,
    ) -> Result<(), ContractFault> {
        self.patterns += 1;
        // Far apart, so that the patterns of two blocks differ.
        let pattern = self.patterns.wrapping_mul(0xD134_2543_DE82_EF95);
        let block = Block { start: returned.cast(), layout, bytes: returned.len(), pattern };
        let (address, requested, align) = (block.address(), layout.size(), layout.align());
        if block.bytes < requested {
            return Err(ContractFault::Short { requested, returned: block.bytes });
        }
        if !address.is_multiple_of(align) {
            return Err(ContractFault::Misaligned { address, align });
        }
        if let Some(live) = self.live.iter().find(|live| live.overlaps(&block)) {
            return Err(ContractFault::Overlap { address, live: live.address() });
        }
        let kept = old.map_or(0, |(_, kept)| kept);
        if let Some((old, kept)) = old {
            block.verify(&old, kept)?;
        }
        for offset in kept..if zeroed { block.bytes } else { 0 } {
            // SAFETY: the block is live and has more bytes, which a call that returns zeroed memory
            // has initialised.
            if unsafe { block.start.add(offset).read() } != 0 {
                return Err(ContractFault::NotZero { address, offset });
            }
        }
        for offset in 0..block.bytes {
            // SAFETY: the block is live and has more bytes.
            unsafe { block.start.add(offset).write(block.expected(offset)) };
        }
        self.live.push(block);
        Ok(())
    }

    fn allocate(&mut self, layout: Layout, zeroed: bool) -> Result<(), ContractFault> {
        let allocator = self.allocator();
        let returned =
            if zeroed { allocator.allocate_zeroed(layout) } else { allocator.allocate(layout) };
        match returned {
            Ok(block) => {
                self.served |= layout.size() > 0;
                self.admit(block, layout, None, zeroed)
            }
            Err(AllocError) if layout.size() == 0 => {
                Err(ContractFault::ZeroSizeRefused { align: layout.align() })
            }
            Err(AllocError) => Ok(()),
        }
    }

    /// Returns the block's layout with another size between the requested and the returned one,
    /// which also fits it.
    fn fitting(&mut self, block: &Block) -> Layout {
        let size = block.layout.size() + self.up_to(block.bytes - block.layout.size());
        Layout::from_size_align(size, block.layout.align()).unwrap_or(block.layout)
    }

    fn deallocate(&mut self, at: usize) {
        let block = self.live.swap_remove(at);
        let layout = self.fitting(&block);
        // SAFETY: 1. The block is live in this allocator or a clone of it. 2. The layout fits it.
        unsafe { self.allocator().deallocate(block.start, layout) };
    }

    /// Grows or shrinks a block to this size.
    fn resize(&mut self, at: usize, size: usize, align: usize) -> Result<(), ContractFault> {
        let block = self.live[at];
        let Ok(new) = Layout::from_size_align(size, align) else { return Ok(()) };
        let old = self.fitting(&block);
        let zeroed = new.size() >= old.size() && self.up_to(1) == 0;
        let allocator = self.allocator();
        // SAFETY: 1. The block is live in this allocator or a clone of it. 2. `old` fits it. 3.
        // `new` is not smaller where it grows, and not larger where it shrinks.
        let returned = unsafe {
            match (new.size() >= old.size(), zeroed) {
                (true, true) => allocator.grow_zeroed(block.start, old, new),
                (true, false) => allocator.grow(block.start, old, new),
                (false, _) => allocator.shrink(block.start, old, new),
            }
        };
        match returned {
            Ok(returned) => {
                self.live.swap_remove(at);
                self.admit(returned, new, Some((block, old.size().min(size))), zeroed)
            }
            Err(AllocError) if size == 0 => Err(ContractFault::ZeroSizeRefused { align }),
            Err(AllocError) => block.verify(&block, block.bytes),
        }
    }

    /// Frees all blocks.
    fn drain(&mut self) -> Result<(), ContractFault> {
        while let Some(block) = self.live.last().copied() {
            block.verify(&block, block.bytes)?;
            self.deallocate(self.live.len() - 1);
        }
        if self.served { Ok(()) } else { Err(ContractFault::NothingServed) }
    }
}
