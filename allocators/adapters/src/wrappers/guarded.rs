//! A debugging allocator with canaries around blocks and poison in them.
#![expect(unsafe_code, reason = "implements the allocator traits, writes around blocks")]

use super::{
    Owns,
    blocks::{copy_bytes, empty_block},
};
use aquifer_core::{DeferReuse, Gate, MemoryError, Result as MemoryResult, impl_allocator};
use std::{
    alloc::Layout,
    collections::BTreeMap,
    error, fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Bytes of each canary.
const CANARY: usize = 16;
/// The canary byte. An unlikely value, different from the poison.
const CANARY_BYTE: u8 = 0xC5;
/// The maximum number of findings that are kept.
const MAX_FINDINGS: usize = 64;

/// A debugging allocator that detects writes outside blocks and invalid frees, and exposes reads of
/// uninitialised or freed memory.
///
/// - Each block has a canary of 16 bytes before and after it. The canaries are checked when the
///   block is freed, grown or shrunk, and by [`check`](Guarded::check).
/// - New bytes are filled with [`FRESH`](Guarded::FRESH), bytes of a freed block with
///   [`FREED`](Guarded::FREED).
/// - Growing or shrinking a block always moves it, which exposes stale pointers.
/// - Freeing an address that is not a live block is refused and not forwarded to the upstream
///   allocator.
///
/// It neither unwinds nor prints. [`findings`](Guarded::findings) returns the results. It is a
/// debugging tool, not for the fast path: each call takes a lock and a lookup, and the table of
/// live blocks is allocated from the global allocator.
///
/// Bytes that a device may still read ([`DeferReuse`]) are not poisoned before their gates are
/// open. If a gate is still closed when the block is freed, the block is not poisoned.
///
/// ```
/// use aquifer_adapters::{Guarded, wrappers::GuardFinding};
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let guarded = Guarded::new(Global);
/// let mut list: Vec<u8, _> = Vec::with_capacity_in(10, &guarded);
/// assert!(guarded.check().is_ok());
/// // Overruns the block by one byte.
/// unsafe { list.as_mut_ptr().add(10).write(1) };
/// drop(list);
/// assert!(matches!(guarded.findings()[..], [GuardFinding::WrittenBehind { size: 10, offset: 0, .. }]));
/// ```
#[derive(Clone, Debug)]
pub struct Guarded<A> {
    inner: A,
    table: Arc<Mutex<BlockTable>>,
}

#[derive(Default, Debug)]
struct BlockTable {
    /// Live blocks by the address that the user holds.
    live: BTreeMap<usize, BlockRecord>,
    findings: Vec<GuardFinding>,
}

#[derive(Debug)]
struct BlockRecord {
    /// The block of the upstream allocator, with its provenance. The caller's pointer may be valid
    /// only for the user's bytes.
    base: NonNull<u8>,
    /// The layout that the user requested.
    layout: Layout,
    gates: Vec<Arc<dyn Gate>>,
}

// SAFETY: the table uses `base` only as an address. Only the allocator that returned it, or a clone
// of that, dereferences it. Gates are `Send`.
unsafe impl Send for BlockRecord {}

/// A problem detected by a [`Guarded`] allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum GuardFinding {
    /// A byte before a block was overwritten.
    WrittenBefore {
        /// Address of the block.
        address: usize,
        /// Bytes of the block.
        size: usize,
        /// The distance of the farthest overwritten byte before the block, in bytes.
        offset: usize,
    },
    /// A byte after a block was overwritten.
    WrittenBehind {
        /// Address of the block.
        address: usize,
        /// Bytes of the block.
        size: usize,
        /// The distance of the first overwritten byte from the block's end. 0 is the first byte
        /// after the block.
        offset: usize,
    },
    /// No live block begins at this address: it was already freed, or belongs to another allocator.
    /// The call was refused.
    NoBlock {
        /// The address passed to the call.
        address: usize,
    },
    /// A block was freed with a layout that differs from the requested one. The requested one was
    /// used.
    WrongLayout {
        /// Address of the block.
        address: usize,
        /// The layout of the allocation.
        asked: Layout,
        /// The layout of the free.
        given: Layout,
    },
}

impl fmt::Display for GuardFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::WrittenBefore { address, size, offset } => {
                write!(
                    f,
                    "{offset} bytes before the block of {size} bytes at {address:#x} were written"
                )
            }
            Self::WrittenBehind { address, size, offset } => {
                write!(
                    f,
                    "byte {offset} behind the block of {size} bytes at {address:#x} was written"
                )
            }
            Self::NoBlock { address } => {
                write!(
                    f,
                    "{address:#x} was given back and is no live block: freed before, or another allocator's"
                )
            }
            Self::WrongLayout { address, asked, given } => write!(
                f,
                "the block at {address:#x} was asked for as {} bytes aligned to {}, and given back as {} aligned to {}",
                asked.size(),
                asked.align(),
                given.size(),
                given.align()
            ),
        }
    }
}

impl error::Error for GuardFinding {}

impl BlockRecord {
    /// Returns the bytes before the user's: the canary, and padding for the alignment.
    fn prefix_size(layout: Layout) -> usize {
        layout.align().max(CANARY)
    }

    /// Returns the layout of the upstream block.
    fn outer_layout(layout: Layout) -> Option<Layout> {
        let bytes = layout.size().checked_add(Self::prefix_size(layout))?.checked_add(CANARY)?;
        Layout::from_size_align(bytes, layout.align()).ok()
    }

    /// Returns the user's first byte.
    fn start(&self) -> NonNull<u8> {
        // SAFETY: the upstream block is longer than its front.
        unsafe { self.base.add(Self::prefix_size(self.layout)) }
    }

    /// Returns the addresses of both canaries.
    fn canaries(&self) -> [NonNull<u8>; 2] {
        // SAFETY: the front has at least `CANARY` bytes, and `CANARY` bytes follow the user's.
        unsafe { [self.start().sub(CANARY), self.start().add(self.layout.size())] }
    }

    fn write_canaries(&self) {
        for canary in self.canaries() {
            // SAFETY: `CANARY` bytes of the upstream block, to which no user has a pointer.
            unsafe { canary.write_bytes(CANARY_BYTE, CANARY) };
        }
    }

    /// Returns a finding if a canary was overwritten.
    fn check_canaries(&self) -> Option<GuardFinding> {
        let changed = |canary: NonNull<u8>| {
            // SAFETY: 1. `CANARY` bytes of the upstream block, which `write_canaries` has
            // initialised. 2. No reference to them exists.
            (0..CANARY).find(|&at| unsafe { canary.add(at).read() } != CANARY_BYTE)
        };
        let (address, size) = (self.start().addr().get(), self.layout.size());
        let [before, behind] = self.canaries();
        let before = changed(before).map(|at| GuardFinding::WrittenBefore {
            address,
            size,
            offset: CANARY - at,
        });
        before.or_else(|| {
            changed(behind).map(|offset| GuardFinding::WrittenBehind { address, size, offset })
        })
    }

    fn has_closed_gate(&self) -> bool {
        self.gates.iter().any(|gate| !gate.is_open())
    }

    fn contains(&self, address: usize) -> bool {
        let start = self.start().addr().get();
        (start..start + self.layout.size()).contains(&address)
    }
}

impl BlockTable {
    fn report(&mut self, finding: GuardFinding) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    /// Returns the live block that contains this address.
    fn find(&mut self, address: usize) -> Option<&mut BlockRecord> {
        let (_, record) = self.live.range_mut(..=address).next_back()?;
        record.contains(address).then_some(record)
    }
}

impl<A> Guarded<A> {
    /// The value of the bytes of a new block, unless zeroed memory was requested.
    pub const FRESH: u8 = 0xCD;
    /// The value of the bytes of a block that is returned to the upstream allocator.
    pub const FREED: u8 = 0xDD;

    /// Creates a debugging allocator over `inner`.
    pub fn new(inner: A) -> Self {
        Self { inner, table: Arc::default() }
    }

    /// Returns the first 64 findings.
    #[must_use]
    pub fn findings(&self) -> Vec<GuardFinding> {
        self.lock().findings.clone()
    }

    /// Checks the canaries of every live block.
    ///
    /// # Errors
    /// The first finding. It is added to the [`findings`](Guarded::findings) only when the block is
    /// freed.
    pub fn check(&self) -> Result<(), GuardFinding> {
        self.lock().live.values().find_map(BlockRecord::check_canaries).map_or(Ok(()), Err)
    }

    /// Returns the number of live blocks. At the end of a program these are leaks.
    #[must_use]
    pub fn live(&self) -> usize {
        self.lock().live.len()
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }

    fn lock(&self) -> MutexGuard<'_, BlockTable> {
        // Nothing unwinds while the lock is held.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an upstream block and writes its canaries. The user's bytes must be initialised by
    /// the caller.
    fn register(&self, base: NonNull<u8>, layout: Layout) -> NonNull<[u8]> {
        let record = BlockRecord { base, layout, gates: Vec::new() };
        record.write_canaries();
        let start = record.start();
        self.lock().live.insert(start.addr().get(), record);
        NonNull::slice_from_raw_parts(start, layout.size())
    }

    /// Removes the record of a block that is freed with this layout.
    fn unregister(&self, block: NonNull<u8>, given: Layout) -> Option<BlockRecord> {
        let address = block.addr().get();
        let mut table = self.lock();
        let Some(record) = table.live.remove(&address) else {
            table.report(GuardFinding::NoBlock { address });
            return None;
        };
        if record.layout != given {
            table.report(GuardFinding::WrongLayout { address, asked: record.layout, given });
        }
        if let Some(finding) = record.check_canaries() {
            table.report(finding);
        }
        Some(record)
    }

    /// Returns whether this is a live block. Resizing any other block is refused.
    fn check_live(&self, block: NonNull<u8>) -> bool {
        let address = block.addr().get();
        let mut table = self.lock();
        let known = table.live.contains_key(&address);
        if !known {
            table.report(GuardFinding::NoBlock { address });
        }
        known
    }
}

/// Fills a new or a freed block.
///
/// # Safety
/// `start` is writable for `bytes`.
unsafe fn poison(start: NonNull<u8>, bytes: usize, with: u8) {
    // SAFETY: guaranteed by the caller.
    unsafe { start.write_bytes(with, bytes) };
}

impl_allocator! {
    // SAFETY: 1. Every block lies within an upstream block, which stays allocated until its record
    // is removed. 2. Clones contain clones of that allocator and share the table. 3. Every block
    // has exactly the requested size, so only one layout fits it.
    unsafe impl [A: Allocator] for Guarded<A> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(empty_block(layout));
            }
            let outer = BlockRecord::outer_layout(layout).ok_or(AllocError)?;
            let block = self.register(self.inner.allocate(outer)?.cast(), layout);
            // SAFETY: the block has that many bytes, and no other thread has its address.
            unsafe { poison(block.cast(), layout.size(), Self::FRESH) };
            Ok(block)
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(empty_block(layout));
            }
            let outer = BlockRecord::outer_layout(layout).ok_or(AllocError)?;
            Ok(self.register(self.inner.allocate_zeroed(outer)?.cast(), layout))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            if layout.size() == 0 {
                return;
            }
            let Some(record) = self.unregister(block, layout) else { return };
            let Some(outer) = BlockRecord::outer_layout(record.layout) else { return };
            if !record.has_closed_gate() {
                // SAFETY: the caller owns the block and gives it up, and no device reads it.
                unsafe { poison(record.start(), record.layout.size(), Self::FREED) };
            }
            // SAFETY: 1. The upstream allocator, or a clone of it, allocated the block with this
            // layout. 2. Its record was removed from the table, so it is deallocated once.
            unsafe { self.inner.deallocate(record.base, outer) };
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > 0 && !self.check_live(block) {
                return Err(AllocError);
            }
            let moved = self.allocate(new)?;
            // SAFETY: both are live and have `old.size()` bytes.
            unsafe { copy_bytes(block, moved, old.size()) };
            // SAFETY: the caller gives up the block, and nothing reads it any more.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > 0 && !self.check_live(block) {
                return Err(AllocError);
            }
            let moved = self.allocate_zeroed(new)?;
            // SAFETY: both are live and have `old.size()` bytes.
            unsafe { copy_bytes(block, moved, old.size()) };
            // SAFETY: the caller gives up the block, and nothing reads it any more.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > 0 && !self.check_live(block) {
                return Err(AllocError);
            }
            let moved = self.allocate(new)?;
            // SAFETY: both are live and have `new.size()` bytes.
            unsafe { copy_bytes(block, moved, new.size()) };
            // SAFETY: the caller gives up the block, and nothing reads it any more.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }
    }
}

// SAFETY: 1. The bytes are not reused before the gate is open: the upstream allocator, which gives
// this guarantee, holds back the block. 2. They are not written either: a freed block is poisoned
// only when its gates are open, a block that grows or shrinks moves, and canaries lie outside the
// user's bytes.
unsafe impl<A: DeferReuse> DeferReuse for Guarded<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        let foreign = MemoryError::ForeignBlock { address: address.addr().get() as u64 };
        let start = {
            let mut table = self.lock();
            let record = table.find(address.addr().get()).ok_or_else(|| foreign.clone())?;
            record.start()
        };
        // Outside the lock. The block is live, so it is still the same when the lock is taken
        // again.
        self.inner.defer(start, until.clone())?;
        match self.lock().find(start.addr().get()) {
            Some(record) => record.gates.push(until),
            None => return Err(foreign),
        }
        Ok(())
    }
}

// SAFETY: the table contains every live block of at least one byte, and nothing else.
unsafe impl<A> Owns for Guarded<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.lock().find(block.addr().get()).is_some()
    }
}
