//! The randomised test suite.
#![expect(unsafe_code, reason = "calls the unsafe methods of the allocator under test")]

use crate::conformance::{
    AllocatorCall, ContractFault, ContractViolation,
    ledger::{Block, Ledger, verify},
};
use allocator_api2::alloc::{AllocError, Allocator};
use bumpalo::Bump;
use std::{
    alloc::Layout,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
};

/// The maximum number of live blocks, so that a run both fills and drains an allocator.
const MAX_LIVE: usize = 48;

/// A test suite that runs operations in a seeded random order.
///
/// ```
/// use aquifer::conformance::Suite;
/// use allocator_api2::alloc::Global;
/// Suite::new().seed(3).operations(500).largest(1 << 16).check_clone(&Global)?;
/// # Ok::<(), aquifer::conformance::ContractViolation>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Suite {
    seed: u64,
    operations: usize,
    largest: usize,
    alignment: usize,
    impossible: Option<usize>,
}

impl Suite {
    /// Creates the default suite: 2,000 operations on blocks of up to 8 KiB, aligned to up to 1
    /// KiB, and growths to half the address space.
    ///
    /// Under Miri it is 100 operations on up to 64 bytes, without growths to an impossible size,
    /// which Miri reports as an error.
    #[must_use]
    pub const fn new() -> Self {
        if cfg!(miri) {
            return Self { seed: 0, operations: 100, largest: 64, alignment: 64, impossible: None };
        }
        Self {
            seed: 0,
            operations: 2000,
            largest: 8 << 10,
            alignment: 1 << 10,
            impossible: Some(isize::MAX as usize),
        }
    }

    /// Sets the seed of the random order.
    #[must_use]
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the number of operations.
    #[must_use]
    pub const fn operations(mut self, operations: usize) -> Self {
        self.operations = operations;
        self
    }

    /// Sets the largest requested size in bytes, except for growths that must fail. At least 1.
    #[must_use]
    pub const fn largest(mut self, bytes: usize) -> Self {
        self.largest = if bytes == 0 { 1 } else { bytes };
        self
    }

    /// Sets the largest requested alignment in bytes, rounded down to a power of two.
    #[must_use]
    pub const fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = if bytes == 0 { 1 } else { 1 << bytes.ilog2() };
        self
    }

    /// Sets a size in bytes that the allocator must refuse. `None` skips the tests that need a
    /// refusal.
    #[must_use]
    pub const fn impossible(mut self, bytes: Option<usize>) -> Self {
        self.impossible = bytes;
        self
    }

    /// Runs the suite against an allocator. On success all blocks have been freed.
    ///
    /// # Errors
    /// The first [`ContractViolation`]. The live blocks are leaked then, because the allocator has
    /// broken the contract and is not called again.
    pub fn check<A: Allocator>(&self, allocator: &A) -> Result<(), ContractViolation> {
        self.run(&mut SingleAllocator(allocator))
    }

    /// Runs the suite against an allocator and clones of it, which are created and dropped during
    /// the run. Each call goes to a random one of them.
    ///
    /// # Errors
    /// As [`check`](Suite::check).
    pub fn check_clone<A: Allocator + Clone>(
        &self,
        allocator: &A,
    ) -> Result<(), ContractViolation> {
        self.run(&mut CloningAllocator { original: allocator, clone: None })
    }

    fn run<A: Allocator>(&self, source: &mut impl Source<A>) -> Result<(), ContractViolation> {
        let scratch = Bump::new();
        let mut run = SuiteRun {
            suite: self,
            random: Random::new(self.seed),
            ledger: Ledger::new(&scratch),
            last: AllocatorCall::Allocate,
        };
        let mut operation = 0;
        let mut outcome = run.test_empty_blocks(source);
        while outcome.is_ok() && operation < self.operations {
            outcome = run.step(source);
            operation += 1;
        }
        outcome.and_then(|()| run.drain(source)).map_err(|fault| ContractViolation {
            seed: self.seed,
            operation,
            fault,
        })
    }
}

impl Default for Suite {
    fn default() -> Self {
        Self::new()
    }
}

/// Selects the allocator for the next call.
trait Source<A> {
    fn select(&mut self, random: &mut Random) -> Result<&A, ContractFault>;
}

struct SingleAllocator<'a, A>(&'a A);

impl<A> Source<A> for SingleAllocator<'_, A> {
    fn select(&mut self, _: &mut Random) -> Result<&A, ContractFault> {
        Ok(self.0)
    }
}

struct CloningAllocator<'a, A> {
    original: &'a A,
    clone: Option<A>,
}

impl<A: Clone> Source<A> for CloningAllocator<'_, A> {
    fn select(&mut self, random: &mut Random) -> Result<&A, ContractFault> {
        if random.up_to(7) == 0 {
            // Clones the clone as often as the original. The old clone is dropped, and its blocks
            // must stay valid.
            let next = catch_panic(AllocatorCall::Clone, 0, 0, || {
                self.clone.as_ref().unwrap_or(self.original).clone()
            })?;
            let old = self.clone.replace(next);
            catch_panic(AllocatorCall::Clone, 0, 0, || drop(old))?;
        }
        let original = random.up_to(1) == 0;
        Ok(if original { self.original } else { self.clone.as_ref().unwrap_or(self.original) })
    }
}

/// What an allocator returns for a block.
type AllocatorResult = Result<NonNull<[u8]>, AllocError>;

/// Runs a call of the allocator under test, and reports a panic as a fault.
fn catch_panic<R>(
    call: AllocatorCall,
    size: usize,
    returned: usize,
    work: impl FnOnce() -> R,
) -> Result<R, ContractFault> {
    // The closure changes no state of the run, so a panic leaves it consistent.
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| ContractFault::Unwound {
        call,
        size,
        returned,
    })
}

struct SuiteRun<'r> {
    suite: &'r Suite,
    random: Random,
    ledger: Ledger<'r>,
    last: AllocatorCall,
}

impl SuiteRun<'_> {
    fn layout(&mut self) -> Layout {
        let size = self.random.size(self.suite.largest);
        self.aligned(size)
    }

    /// Returns a layout of this size. Small alignments are more likely than large ones.
    fn aligned(&mut self, size: usize) -> Layout {
        let most = self.suite.alignment.ilog2() as usize;
        let drawn = self.random.up_to(most).min(self.random.up_to(most));
        Layout::from_size_align(size, 1 << drawn).unwrap_or(Layout::new::<u8>())
    }

    /// Tests empty blocks.
    fn test_empty_blocks<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
    ) -> Result<(), ContractFault> {
        for shift in 0..=self.suite.alignment.ilog2() {
            for call in [AllocatorCall::Allocate, AllocatorCall::AllocateZeroed] {
                let empty = Layout::from_size_align(0, 1 << shift).unwrap_or(Layout::new::<()>());
                let Ok(returned) = self.call_allocate(source, call, empty)? else {
                    return Err(ContractFault::ZeroSizeRefused { call, align: empty.align() });
                };
                self.ledger.register(call, returned, empty)?;
                let grown = self.layout();
                self.grow(source, AllocatorCall::Grow, grown)?;
                let Some(block) = self.ledger.live.last().copied() else { continue };
                let none =
                    Layout::from_size_align(0, block.layout.align()).unwrap_or(Layout::new::<()>());
                self.shrink(source, none)?;
                self.deallocate(source)?;
            }
        }
        // These empty allocations do not count as served.
        self.ledger.allocations = 0;
        Ok(())
    }

    fn step<A: Allocator>(&mut self, source: &mut impl Source<A>) -> Result<(), ContractFault> {
        if !self.ledger.live.is_empty() {
            // The operation uses the last block of the list.
            let at = self.random.up_to(self.ledger.live.len() - 1);
            let last = self.ledger.live.len() - 1;
            // Half of the time the newest block is used, because arenas handle it specially.
            if self.random.up_to(1) == 0 {
                self.ledger.live.swap(at, last);
            }
        }
        let full = self.ledger.live.len() >= MAX_LIVE;
        match self.random.up_to(99) {
            0..36 if !full => self.allocate(source, AllocatorCall::Allocate),
            36..48 if !full => self.allocate(source, AllocatorCall::AllocateZeroed),
            0..66 => self.deallocate(source),
            66..76 => {
                let layout = self.larger();
                self.grow(source, AllocatorCall::Grow, layout)
            }
            76..84 => {
                let layout = self.larger();
                self.grow(source, AllocatorCall::GrowZeroed, layout)
            }
            84..94 => self.shrink_random(source),
            94..97 => self.grow_impossible(source),
            _ => self.ledger.verify(self.last),
        }
    }

    fn allocate<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
        call: AllocatorCall,
    ) -> Result<(), ContractFault> {
        let layout = self.layout();
        match self.call_allocate(source, call, layout)? {
            // A full allocator may refuse.
            Err(AllocError) => Ok(()),
            Ok(returned) => self.ledger.register(call, returned, layout),
        }
    }

    fn call_allocate<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
        call: AllocatorCall,
        layout: Layout,
    ) -> Result<AllocatorResult, ContractFault> {
        self.last = call;
        let allocator = source.select(&mut self.random)?;
        catch_panic(call, layout.size(), 0, || match call {
            AllocatorCall::AllocateZeroed => allocator.allocate_zeroed(layout),
            _ => allocator.allocate(layout),
        })
    }

    fn deallocate<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
    ) -> Result<(), ContractFault> {
        let Some(block) = self.ledger.live.last().copied() else { return Ok(()) };
        verify(self.last, &block)?;
        self.last = AllocatorCall::Deallocate;
        let layout = self.fitting_layout(&block);
        let allocator = source.select(&mut self.random)?;
        self.ledger.live.pop();
        catch_panic(AllocatorCall::Deallocate, layout.size(), block.bytes, || {
            // SAFETY: 1. The block is live in this allocator or a clone of it, and the ledger has
            // removed it. 2. The layout fits it.
            unsafe { allocator.deallocate(block.start, layout) };
        })
    }

    /// Returns a layout that fits the block.
    fn fitting_layout(&mut self, block: &Block) -> Layout {
        let spare = block.bytes - block.layout.size();
        // The smallest and the largest size are more likely than those between.
        let extra = match self.random.up_to(2) {
            0 => 0,
            1 => spare,
            _ => self.random.up_to(spare),
        };
        block.fitting_layout(extra)
    }

    /// Returns a layout at least as large as the last block.
    fn larger(&mut self) -> Layout {
        let least = self.ledger.live.last().map_or(0, |block| block.bytes);
        let more = self.random.up_to(self.suite.largest);
        self.aligned(least.saturating_add(more).max(1))
    }

    fn grow<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
        call: AllocatorCall,
        new: Layout,
    ) -> Result<(), ContractFault> {
        let Some(block) = self.ledger.live.last().copied() else { return Ok(()) };
        // Limits the size, because growth would otherwise be unbounded.
        if new.size() > self.suite.largest.saturating_mul(2) || new.size() < block.bytes {
            return Ok(());
        }
        verify(self.last, &block)?;
        let (old, returned) = self.call_grow(source, call, &block, new)?;
        match returned {
            Err(AllocError) => verify(call, &block),
            Ok(returned) => {
                self.ledger.live.pop();
                self.ledger.register_resized(call, &block, old.size(), returned, new)
            }
        }
    }

    /// Calls `grow` or `grow_zeroed` for a live block, with a `new` layout that is not smaller.
    /// Returns the layout that was passed as the old one, and the answer.
    fn call_grow<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
        call: AllocatorCall,
        block: &Block,
        new: Layout,
    ) -> Result<(Layout, AllocatorResult), ContractFault> {
        self.last = call;
        let old = self.fitting_layout(block);
        let allocator = source.select(&mut self.random)?;
        // SAFETY: 1. The block is live in this allocator or a clone of it. 2. `old` fits it. 3.
        // `new` is not smaller.
        let returned = catch_panic(call, old.size(), block.bytes, || unsafe {
            match call {
                AllocatorCall::GrowZeroed => allocator.grow_zeroed(block.start, old, new),
                _ => allocator.grow(block.start, old, new),
            }
        })?;
        Ok((old, returned))
    }

    fn shrink_random<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
    ) -> Result<(), ContractFault> {
        let Some(block) = self.ledger.live.last().copied() else { return Ok(()) };
        let size = self.random.up_to(block.layout.size());
        let new = self.aligned(size);
        self.shrink(source, new)
    }

    fn shrink<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
        new: Layout,
    ) -> Result<(), ContractFault> {
        let Some(block) = self.ledger.live.last().copied() else { return Ok(()) };
        verify(self.last, &block)?;
        self.last = AllocatorCall::Shrink;
        let old = self.fitting_layout(&block);
        let allocator = source.select(&mut self.random)?;
        // SAFETY: 1. The block is live in this allocator or a clone of it. 2. `old` fits it. 3.
        // `new` is not larger.
        let returned = catch_panic(AllocatorCall::Shrink, old.size(), block.bytes, || unsafe {
            allocator.shrink(block.start, old, new)
        })?;
        match returned {
            Ok(returned) => {
                self.ledger.live.pop();
                self.ledger.register_resized(
                    AllocatorCall::Shrink,
                    &block,
                    new.size(),
                    returned,
                    new,
                )
            }
            Err(AllocError) if new.size() == 0 => Err(ContractFault::ZeroSizeRefused {
                call: AllocatorCall::Shrink,
                align: new.align(),
            }),
            Err(AllocError) => verify(AllocatorCall::Shrink, &block),
        }
    }

    /// Tests a growth that must be refused and must leave the block unchanged.
    fn grow_impossible<A: Allocator>(
        &mut self,
        source: &mut impl Source<A>,
    ) -> Result<(), ContractFault> {
        let (Some(block), Some(impossible)) =
            (self.ledger.live.last().copied(), self.suite.impossible)
        else {
            return Ok(());
        };
        // The largest layout: its size rounded up to the alignment is at most `isize::MAX`.
        let size = impossible.min(isize::MAX as usize - (block.layout.align() - 1));
        let Ok(new) = Layout::from_size_align(size, block.layout.align()) else { return Ok(()) };
        if block.bytes == 0 || new.size() < block.bytes {
            return Ok(());
        }
        let call =
            if self.random.up_to(1) == 0 { AllocatorCall::Grow } else { AllocatorCall::GrowZeroed };
        let (_, returned) = self.call_grow(source, call, &block, new)?;
        if let Ok(returned) = returned {
            // The allocator granted it after all. Filling so many bytes would take too long, so the
            // block is only checked and freed.
            self.ledger.live.pop();
            self.ledger.check_placement(call, returned, new)?;
            let allocator = source.select(&mut self.random)?;
            return catch_panic(AllocatorCall::Deallocate, new.size(), returned.len(), || {
                // SAFETY: the block is live and has this layout.
                unsafe { allocator.deallocate(returned.cast(), new) };
            });
        }
        verify(call, &block)?;
        // If the failed growth freed the block, the next allocation of its layout is likely to
        // return it.
        let Ok(probe) = self.call_allocate(source, AllocatorCall::Allocate, block.layout)? else {
            return Ok(());
        };
        if block_overlaps(&block, probe) {
            return Err(ContractFault::FailedGrowFreed {
                address: block.address(),
                bytes: block.bytes,
            });
        }
        self.ledger.register(AllocatorCall::Allocate, probe, block.layout)
    }

    /// Frees all blocks.
    fn drain<A: Allocator>(&mut self, source: &mut impl Source<A>) -> Result<(), ContractFault> {
        self.ledger.verify(self.last)?;
        while !self.ledger.live.is_empty() {
            self.deallocate(source)?;
        }
        if self.ledger.allocations == 0 { Err(ContractFault::NothingServed) } else { Ok(()) }
    }
}

fn block_overlaps(block: &Block, returned: NonNull<[u8]>) -> bool {
    let (start, end) = (returned.addr().get(), returned.addr().get() + returned.len());
    block.address() < end && start < block.address() + block.bytes
}

/// `SplitMix64`. Runs must be reproducible on every machine, and statistical quality matters
/// little.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..=max`.
    pub(crate) fn up_to(&mut self, max: usize) -> usize {
        let max = max as u64;
        // Slightly biased for a huge `max`, which does not matter.
        let value = if max == u64::MAX { self.next() } else { self.next() % (max + 1) };
        // At most `max`, which was a `usize`.
        usize::try_from(value).unwrap_or(usize::MAX)
    }

    /// Returns a size in `1..=max`, with small and large sizes equally likely.
    pub(crate) fn size(&mut self, max: usize) -> usize {
        let bits = usize::BITS - max.leading_zeros();
        let shift = self.up_to(bits.saturating_sub(1) as usize);
        (1 + self.up_to(max.saturating_sub(1))).min((2usize << shift) - 1).max(1)
    }
}
