//! The live blocks of a run, and their expected contents.
#![expect(unsafe_code, reason = "reads and writes blocks of the allocator under test")]

use crate::conformance::{AllocatorCall, ContractFault};
use allocator_api2::vec::Vec;
use bumpalo::Bump;
use std::{alloc::Layout, ptr::NonNull};

/// A live block, filled with its own pattern.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) start: NonNull<u8>,
    /// The layout of the last request.
    pub(crate) layout: Layout,
    /// The returned size, at least `layout.size()`.
    pub(crate) bytes: usize,
    /// The seed of its pattern.
    pattern: u64,
}

impl Block {
    pub(crate) fn address(&self) -> usize {
        self.start.addr().get()
    }

    fn overlaps(&self, address: usize, bytes: usize) -> bool {
        self.bytes > 0
            && bytes > 0
            && self.address() < address + bytes
            && address < self.address() + self.bytes
    }

    /// Returns the layout with another size between the requested and the returned one, which also
    /// fits the block.
    pub(crate) fn fitting_layout(&self, extra: usize) -> Layout {
        let size = self.layout.size() + extra.min(self.bytes - self.layout.size());
        Layout::from_size_align(size, self.layout.align()).unwrap_or(self.layout)
    }

    fn expected(&self, offset: usize) -> u8 {
        pattern(self.pattern, offset)
    }

    /// Returns the first byte below `bytes` that differs from the pattern.
    pub(crate) fn first_change(&self, bytes: usize) -> Option<usize> {
        // SAFETY: the block is live and was checked to have `self.bytes` bytes, all of which the
        // ledger has initialised.
        let held =
            unsafe { NonNull::slice_from_raw_parts(self.start, bytes.min(self.bytes)).as_ref() };
        held.iter()
            .enumerate()
            .find(|&(offset, &byte)| byte != self.expected(offset))
            .map(|(offset, _)| offset)
    }

    /// Writes its pattern from `from` on.
    fn fill(&self, from: usize) {
        for offset in from..self.bytes {
            // SAFETY: the block is live and has `self.bytes` bytes.
            unsafe { self.start.add(offset).write(self.expected(offset)) };
        }
    }
}

/// Returns a byte of a pattern. It is never zero, so that missing zeroing is detected, and it
/// differs between blocks at almost every offset.
fn pattern(of: u64, offset: usize) -> u8 {
    let mixed = (of ^ (offset as u64)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    1 + ((mixed >> 56) % 255) as u8
}

/// All live blocks of a run, stored in a separate scratch arena and never in the allocator under
/// test.
pub(crate) struct Ledger<'s> {
    pub(crate) live: Vec<Block, &'s Bump>,
    patterns: u64,
    pub(crate) allocations: usize,
}

impl<'s> Ledger<'s> {
    pub(crate) fn new(scratch: &'s Bump) -> Self {
        Self { live: Vec::new_in(scratch), patterns: 0, allocations: 0 }
    }

    /// Checks the placement of a block that `call` returned, before any of its bytes is accessed.
    pub(crate) fn check_placement(
        &self,
        call: AllocatorCall,
        returned: NonNull<[u8]>,
        layout: Layout,
    ) -> Result<(), ContractFault> {
        let (address, bytes) = (returned.addr().get(), returned.len());
        if bytes < layout.size() {
            return Err(ContractFault::Short { call, requested: layout.size(), returned: bytes });
        }
        if !address.is_multiple_of(layout.align()) {
            return Err(ContractFault::Misaligned { call, address, align: layout.align() });
        }
        match self.find_overlap(address, bytes) {
            None => Ok(()),
            Some(live) => Err(ContractFault::Overlap {
                call,
                address,
                bytes,
                live_address: live.address(),
                live_bytes: live.bytes,
            }),
        }
    }

    pub(crate) fn find_overlap(&self, address: usize, bytes: usize) -> Option<&Block> {
        self.live.iter().find(|block| block.overlaps(address, bytes))
    }

    /// Checks a new block, fills it and records it.
    pub(crate) fn register(
        &mut self,
        call: AllocatorCall,
        returned: NonNull<[u8]>,
        layout: Layout,
    ) -> Result<(), ContractFault> {
        self.check_placement(call, returned, layout)?;
        if call == AllocatorCall::AllocateZeroed {
            check_zero(call, returned, 0)?;
        }
        self.allocations += 1;
        self.insert(returned, layout, 0);
        Ok(())
    }

    /// Checks a block after a growth or shrink, whose first `kept` bytes must be those of the old
    /// one, and records it.
    pub(crate) fn register_resized(
        &mut self,
        call: AllocatorCall,
        old: &Block,
        kept: usize,
        returned: NonNull<[u8]>,
        layout: Layout,
    ) -> Result<(), ContractFault> {
        self.check_placement(call, returned, layout)?;
        let moved =
            Block { start: returned.cast(), layout, bytes: returned.len(), pattern: old.pattern };
        if let Some(offset) = moved.first_change(kept) {
            return Err(ContractFault::PrefixLost { call, offset });
        }
        if call == AllocatorCall::GrowZeroed {
            check_zero(call, returned, kept)?;
        }
        self.insert(returned, layout, 0);
        Ok(())
    }

    fn insert(&mut self, returned: NonNull<[u8]>, layout: Layout, from: usize) {
        self.patterns += 1;
        // Far apart, so that the patterns of two blocks differ.
        let pattern = self.patterns.wrapping_mul(0xD134_2543_DE82_EF95);
        let block = Block { start: returned.cast(), layout, bytes: returned.len(), pattern };
        block.fill(from);
        self.live.push(block);
    }

    /// Checks that every live block is unchanged.
    pub(crate) fn verify(&self, call: AllocatorCall) -> Result<(), ContractFault> {
        self.live.iter().try_for_each(|block| verify(call, block))
    }
}

/// Checks that a block is unchanged.
pub(crate) fn verify(call: AllocatorCall, block: &Block) -> Result<(), ContractFault> {
    match block.first_change(block.bytes) {
        None => Ok(()),
        Some(offset) => Err(ContractFault::Changed { call, address: block.address(), offset }),
    }
}

fn check_zero(
    call: AllocatorCall,
    returned: NonNull<[u8]>,
    from: usize,
) -> Result<(), ContractFault> {
    // SAFETY: the block is live, its length was checked, and a call that returns zeroed memory has
    // initialised it.
    let bytes = unsafe { returned.as_ref() };
    match bytes.iter().enumerate().skip(from).find(|&(_, &byte)| byte != 0) {
        None => Ok(()),
        Some((offset, &value)) => Err(ContractFault::NotZero { call, offset, value }),
    }
}
