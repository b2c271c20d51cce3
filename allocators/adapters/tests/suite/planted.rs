//! Tests that the conformance suite finds the fault of allocators that break one rule each.
//!
//! Each allocator places its blocks in a buffer that outlives them all, so that a broken guarantee
//! stays defined behaviour: no block is really freed, and two overlapping blocks are two pointers
//! into one buffer.

#![expect(unsafe_code, reason = "allocators, broken on purpose")]

use allocator_api2::alloc::{AllocError, Allocator};
use aquifer_adapters::conformance::{ContractFault, ContractViolation, Suite};
use std::{
    alloc::Layout,
    cell::{Cell, RefCell},
    ptr::NonNull,
    rc::Rc,
};

/// The rule that an allocator breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    None,
    Overlap,
    Misaligned,
    ShortBlock,
    GrowLosesPrefix,
    ShrinkLosesPrefix,
    DirtyZeroed,
    DirtyGrowZeroed,
    LayoutInRangeRefused,
    FailedGrowFrees,
    CloneCannotFree,
    ZeroSizeRefused,
    ZeroSizeMisaligned,
    FreeWritesNeighbour,
}

const ROOM: usize = if cfg!(miri) { 1 << 16 } else { 1 << 20 };
/// Blocks are this much longer than requested, so that a range of sizes fits them.
const SLACK: usize = 8;

/// A first-fit allocator over a buffer, correct except for its planted bug.
struct Planted {
    bug: Bug,
    heap: Rc<Heap>,
    /// Blocks allocated by this clone.
    mine: RefCell<Vec<usize>>,
    is_clone: bool,
}

struct Heap {
    base: NonNull<u8>,
    /// Live blocks in the order of their offsets: start, reserved bytes, requested size.
    live: RefCell<Vec<(usize, usize, usize)>>,
    calls: Cell<u32>,
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: the buffer came from a box of this type, and all pointers into it were dropped
        // before.
        drop(unsafe { Box::from_raw(self.base.cast::<[u8; ROOM]>().as_ptr()) });
    }
}

impl Planted {
    fn new(bug: Bug) -> Self {
        let base = NonNull::from(Box::leak(Box::new([0xA5u8; ROOM]))).cast();
        let heap = Heap { base, live: RefCell::default(), calls: Cell::new(0) };
        Self { bug, heap: Rc::new(heap), mine: RefCell::default(), is_clone: false }
    }

    /// Returns `true` at random. A bug that shows at every call would be found too easily.
    fn now_and_then(&self) -> bool {
        self.heap.calls.set(self.heap.calls.get() + 1);
        self.heap.calls.get().is_multiple_of(5)
    }

    fn place(&self, layout: Layout) -> Option<usize> {
        let bytes = layout.size() + SLACK;
        let base = self.heap.base.addr().get();
        let mut live = self.heap.live.borrow_mut();
        let mut start = base.next_multiple_of(layout.align()) - base;
        for &(other, other_bytes, _) in live.iter() {
            if start + bytes <= other {
                break;
            }
            start = start.max((base + other + other_bytes).next_multiple_of(layout.align()) - base);
        }
        if start + bytes > ROOM {
            return None;
        }
        let at = live.partition_point(|&(other, ..)| other < start);
        live.insert(at, (start, bytes, layout.size()));
        self.mine.borrow_mut().push(start);
        Some(start)
    }

    fn answer(&self, start: usize, bytes: usize) -> NonNull<[u8]> {
        // SAFETY: `start` is an offset in the buffer.
        NonNull::slice_from_raw_parts(unsafe { self.heap.base.add(start) }, bytes)
    }

    fn forget(&self, block: NonNull<u8>) {
        // An empty block lies nowhere in the buffer.
        let start = block.addr().get().wrapping_sub(self.heap.base.addr().get());
        self.heap.live.borrow_mut().retain(|&(live, ..)| live != start);
    }
}

impl Clone for Planted {
    fn clone(&self) -> Self {
        Self { bug: self.bug, heap: self.heap.clone(), mine: RefCell::default(), is_clone: true }
    }
}

// SAFETY: deliberately broken by all but one of these. No reference to a block is made here, and
// the buffer outlives its blocks, so the worst effect is a wrong byte.
unsafe impl Allocator for Planted {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            return match self.bug {
                Bug::ZeroSizeRefused => Err(AllocError),
                Bug::ZeroSizeMisaligned => Ok(self.answer(1, 0)),
                _ => Ok(NonNull::slice_from_raw_parts(
                    NonNull::without_provenance(layout.align().try_into().map_err(|_| AllocError)?),
                    0,
                )),
            };
        }
        let start = self.place(layout).ok_or(AllocError)?;
        let bytes = layout.size() + SLACK;
        let here = self.now_and_then();
        match self.bug {
            Bug::Overlap if here => {
                let other = self.heap.live.borrow()[0].0;
                let base = self.heap.base.addr().get();
                if (base + other).is_multiple_of(layout.align()) {
                    return Ok(self.answer(other, bytes));
                }
                Ok(self.answer(start, bytes))
            }
            Bug::Misaligned if here && layout.align() > 1 => {
                Ok(self.answer(start + layout.align() / 2, layout.size()))
            }
            Bug::ShortBlock if here => Ok(self.answer(start, layout.size() - 1)),
            _ => Ok(self.answer(start, bytes)),
        }
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let block = self.allocate(layout)?;
        let dirty = usize::from(self.bug == Bug::DirtyZeroed && block.len() > 1);
        // SAFETY: the block has as many bytes.
        unsafe { block.cast::<u8>().write_bytes(0, block.len() - dirty) };
        Ok(block)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let start = block.addr().get() - self.heap.base.addr().get();
        if self.bug == Bug::CloneCannotFree && self.is_clone {
            assert!(self.mine.borrow().contains(&start), "no block of this clone");
        }
        if self.bug == Bug::LayoutInRangeRefused {
            let asked =
                self.heap.live.borrow().iter().find(|live| live.0 == start).map(|live| live.2);
            assert_eq!(asked, Some(layout.size()), "not the size it was asked for with");
        }
        if self.bug == Bug::FreeWritesNeighbour {
            let after = start + layout.size() + SLACK;
            if after < ROOM {
                // SAFETY: an offset in the buffer, in any block.
                unsafe { self.heap.base.add(after).write(0) };
            }
        }
        self.forget(block);
    }

    unsafe fn grow(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        let grown = self.allocate(new);
        if grown.is_err() && self.bug == Bug::FailedGrowFrees {
            self.forget(block);
        }
        let grown = grown?;
        let lost =
            usize::from(self.bug == Bug::GrowLosesPrefix && old.size() > 16 && self.now_and_then());
        // SAFETY: both are blocks of the buffer with as many bytes; `copy` allows those that
        // overlap.
        unsafe { block.copy_to(grown.cast(), old.size() - lost) };
        self.forget(block);
        Ok(grown)
    }

    unsafe fn grow_zeroed(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: guaranteed by the caller.
        let grown = unsafe { self.grow(block, old, new) }?;
        let clean = if self.bug == Bug::DirtyGrowZeroed { old.size() + 1 } else { old.size() };
        if clean < grown.len() {
            // SAFETY: the block has as many bytes.
            unsafe { grown.cast::<u8>().add(clean).write_bytes(0, grown.len() - clean) };
        }
        Ok(grown)
    }

    unsafe fn shrink(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        let shrunk = self.allocate(new)?;
        let lost = usize::from(
            self.bug == Bug::ShrinkLosesPrefix && new.size() > 16 && self.now_and_then(),
        );
        // SAFETY: both are blocks of the buffer with as many bytes.
        unsafe { block.copy_to(shrunk.cast(), new.size() - lost) };
        if old.size() > 0 {
            self.forget(block);
        }
        Ok(shrunk)
    }
}

/// Returns the fault that the suite reports for an allocator with this bug, at the first seed that
/// reports any.
fn found(bug: Bug) -> Option<ContractFault> {
    let suite = |seed| Suite { seed, alignment: 64, ..Suite::default() };
    let mut found = (0..8).filter_map(|seed| suite(seed).check(&Planted::new(bug)).err());
    found.next().map(|violation| violation.fault)
}

#[test]
fn one_without_a_bug_passes() {
    for seed in 0..if cfg!(miri) { 1 } else { 4 } {
        let suite = Suite { seed, alignment: 64, ..Suite::default() };
        assert_eq!(suite.check(&Planted::new(Bug::None)), Ok(()));
    }
}

macro_rules! finds {
    ($($(#[$attribute:meta])? $name:ident: $bug:ident => $fault:pat,)*) => {$(
        $(#[$attribute])?
        #[test]
        fn $name() {
            let fault = found(Bug::$bug);
            assert!(matches!(fault, Some($fault)), "{fault:?}");
        }
    )*};
}

finds! {
    blocks_that_overlap: Overlap => ContractFault::Overlap { .. },
    blocks_that_are_misaligned: Misaligned => ContractFault::Misaligned { .. },
    blocks_that_are_short: ShortBlock => ContractFault::Short { .. },
    a_growth_that_loses_its_prefix: GrowLosesPrefix => ContractFault::Changed { .. },
    a_shrinkage_that_loses_its_prefix: ShrinkLosesPrefix => ContractFault::Changed { .. },
    zeroed_memory_that_is_not: DirtyZeroed => ContractFault::NotZero { .. },
    a_zeroed_growth_that_is_not: DirtyGrowZeroed => ContractFault::NotZero { .. },
    a_size_in_range_that_is_refused: LayoutInRangeRefused => ContractFault::Unwound,
    #[cfg_attr(miri, ignore = "it takes a request that cannot be served for an error")]
    a_failed_growth_that_frees: FailedGrowFrees => ContractFault::Overlap { .. },
    a_clone_that_cannot_free: CloneCannotFree => ContractFault::Unwound,
    a_refused_block_of_no_bytes: ZeroSizeRefused => ContractFault::ZeroSizeRefused { .. },
    #[cfg_attr(miri, ignore = "its short runs find what follows from it first")]
    a_misaligned_block_of_no_bytes: ZeroSizeMisaligned => ContractFault::Misaligned { .. },
    a_free_that_writes_its_neighbour: FreeWritesNeighbour => ContractFault::Changed { .. },
}

#[test]
fn the_same_seed_finds_the_same_thing_at_the_same_operation() {
    let suite = Suite { seed: 3, alignment: 64, ..Suite::default() };
    let first = suite.check(&Planted::new(Bug::DirtyZeroed)).map_err(|v| v.operation);
    assert!(first.is_err());
    assert_eq!(suite.check(&Planted::new(Bug::DirtyZeroed)).map_err(|v| v.operation), first);
}

#[test]
fn a_violation_reports_how_to_reproduce_it() {
    let found = ContractViolation { seed: 7, operation: 12, fault: ContractFault::NothingServed };
    assert_eq!(
        found.to_string(),
        "no allocation was served, so nothing was checked (seed 7, operation 12)"
    );
}
