//! Canaries around blocks, and poison in them.
#![expect(unsafe_code, reason = "implements the allocator traits, writes around blocks")]

use super::{
    Owns,
    blocks::{copy, nothing},
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
/// What canaries are made of. No byte of it is a likely value, nor equal to the poison.
const CANARY_BYTE: u8 = 0xC5;
/// Findings that are kept.
const KEPT: usize = 64;

/// An allocator that finds writes outside of blocks, frees of what is no block, and shows reads of
/// what was never written or has been freed.
///
/// - Each block has 16 bytes before it and behind it that nobody may write; they are looked at when
///   the block is given back, grown or shrunk, and by [`check`](Guarded::check).
/// - Fresh bytes are [`FRESH`](Guarded::FRESH), those of a block that is given back
///   [`FREED`](Guarded::FREED).
/// - A block that grows or shrinks always moves, so that a stale pointer to it shows.
/// - What is given back and is no live block is refused: the allocator below never hears of it.
///
/// Nothing unwinds and nothing is printed: [`findings`](Guarded::findings) tells. A tool, not for
/// the fast path: each call takes a lock and a lookup, and the table of live blocks comes from the
/// process's own allocator.
///
/// Bytes that a device may still read ([`DeferReuse`]) are not poisoned before its gate is open;
/// then only the allocator below touches them.
///
/// ```
/// use aquifer_adapters::{Guarded, wrappers::Finding};
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let guarded = Guarded::new(Global);
/// let mut list: Vec<u8, _> = Vec::with_capacity_in(10, &guarded);
/// assert!(guarded.check().is_ok());
/// // An overrun by one.
/// unsafe { list.as_mut_ptr().add(10).write(1) };
/// drop(list);
/// assert!(matches!(guarded.findings()[..], [Finding::WrittenBehind { size: 10, offset: 0, .. }]));
/// ```
#[derive(Clone, Debug)]
pub struct Guarded<A> {
    inner: A,
    table: Arc<Mutex<Table>>,
}

#[derive(Default, Debug)]
struct Table {
    /// Live blocks by the address that the user has.
    live: BTreeMap<usize, Record>,
    findings: Vec<Finding>,
}

#[derive(Debug)]
struct Record {
    /// The block of the allocator below, with its provenance: a caller's pointer reaches no
    /// further than the user's bytes.
    base: NonNull<u8>,
    /// As the user asked for it.
    layout: Layout,
    gates: Vec<Arc<dyn Gate>>,
}

// SAFETY: `base` is an address and nothing else to the table; it is followed by the allocator that
// it came from, or a clone of that, alone. Gates are `Send`.
unsafe impl Send for Record {}

/// Something that a [`Guarded`] allocator has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Finding {
    /// A byte before a block was written.
    WrittenBefore {
        /// Where the block begins.
        address: usize,
        /// Its bytes.
        size: usize,
        /// How many bytes before its start the write lies; the farthest one.
        offset: usize,
    },
    /// A byte behind a block was written.
    WrittenBehind {
        /// Where the block begins.
        address: usize,
        /// Its bytes.
        size: usize,
        /// How many bytes behind its end the first write lies: 0 for the first byte that is not
        /// its own.
        offset: usize,
    },
    /// No live block begins here: it was freed before, or is another allocator's. The call was
    /// refused.
    NoBlock {
        /// What was given back.
        address: usize,
    },
    /// A block was given back with another layout than it was asked for with. The right one was
    /// used.
    WrongLayout {
        /// Where the block begins.
        address: usize,
        /// As it was asked for.
        asked: Layout,
        /// As it was given back.
        given: Layout,
    },
}

impl fmt::Display for Finding {
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

impl error::Error for Finding {}

impl Record {
    /// Bytes before the user's: the canary, and what alignment needs.
    fn front(layout: Layout) -> usize {
        layout.align().max(CANARY)
    }

    /// The layout of the block below.
    fn outer(layout: Layout) -> Option<Layout> {
        let bytes = layout.size().checked_add(Self::front(layout))?.checked_add(CANARY)?;
        Layout::from_size_align(bytes, layout.align()).ok()
    }

    /// The user's first byte.
    fn start(&self) -> NonNull<u8> {
        // SAFETY: the block below is longer than its front.
        unsafe { self.base.add(Self::front(self.layout)) }
    }

    /// Both canaries: where they begin.
    fn canaries(&self) -> [NonNull<u8>; 2] {
        // SAFETY: the front has at least `CANARY` bytes, and as many lie behind the user's.
        unsafe { [self.start().sub(CANARY), self.start().add(self.layout.size())] }
    }

    fn write_canaries(&self) {
        for canary in self.canaries() {
            // SAFETY: `CANARY` bytes of the block below, which no user has a pointer to.
            unsafe { canary.write_bytes(CANARY_BYTE, CANARY) };
        }
    }

    /// What has been written around it.
    fn look(&self) -> Option<Finding> {
        let changed = |canary: NonNull<u8>| {
            // SAFETY: 1. `CANARY` bytes of the block below, which `write_canaries` has initialised.
            // 2. Nobody has a reference to them.
            (0..CANARY).find(|&at| unsafe { canary.add(at).read() } != CANARY_BYTE)
        };
        let (address, size) = (self.start().addr().get(), self.layout.size());
        let [before, behind] = self.canaries();
        let before =
            changed(before).map(|at| Finding::WrittenBefore { address, size, offset: CANARY - at });
        before.or_else(|| {
            changed(behind).map(|offset| Finding::WrittenBehind { address, size, offset })
        })
    }

    fn is_held(&self) -> bool {
        self.gates.iter().any(|gate| !gate.is_open())
    }

    fn holds(&self, address: usize) -> bool {
        let start = self.start().addr().get();
        (start..start + self.layout.size()).contains(&address)
    }
}

impl Table {
    fn note(&mut self, finding: Finding) {
        if self.findings.len() < KEPT {
            self.findings.push(finding);
        }
    }

    /// The live block that holds this address.
    fn holding(&mut self, address: usize) -> Option<&mut Record> {
        let (_, record) = self.live.range_mut(..=address).next_back()?;
        record.holds(address).then_some(record)
    }
}

impl<A> Guarded<A> {
    /// What the bytes of a fresh block are, unless zeroed ones were asked for.
    pub const FRESH: u8 = 0xCD;
    /// What the bytes of a block are when it goes back to the allocator below.
    pub const FREED: u8 = 0xDD;

    /// Guards what is allocated from `inner`.
    pub fn new(inner: A) -> Self {
        Self { inner, table: Arc::default() }
    }

    /// The first 64 things that were found.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.lock().findings.clone()
    }

    /// Looks around every live block.
    ///
    /// # Errors
    /// The first finding. It is not among the [`findings`](Guarded::findings) before the block is
    /// given back.
    pub fn check(&self) -> Result<(), Finding> {
        self.lock().live.values().find_map(Record::look).map_or(Ok(()), Err)
    }

    /// Live blocks: at the end of a program, what it has leaked.
    #[must_use]
    pub fn live(&self) -> usize {
        self.lock().live.len()
    }

    /// The allocator below.
    pub fn inner(&self) -> &A {
        &self.inner
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing unwinds while it is held.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a block of the allocator below in, whose user's bytes are what they are to be.
    fn admit(&self, base: NonNull<u8>, layout: Layout) -> NonNull<[u8]> {
        let record = Record { base, layout, gates: Vec::new() };
        record.write_canaries();
        let start = record.start();
        self.lock().live.insert(start.addr().get(), record);
        NonNull::slice_from_raw_parts(start, layout.size())
    }

    /// Takes a block out that is given back with this layout.
    fn take(&self, block: NonNull<u8>, given: Layout) -> Option<Record> {
        let address = block.addr().get();
        let mut table = self.lock();
        let Some(record) = table.live.remove(&address) else {
            table.note(Finding::NoBlock { address });
            return None;
        };
        if record.layout != given {
            table.note(Finding::WrongLayout { address, asked: record.layout, given });
        }
        if let Some(finding) = record.look() {
            table.note(finding);
        }
        Some(record)
    }

    /// Whether this is a live block: a growth or a shrinkage of another one is refused.
    fn knows(&self, block: NonNull<u8>) -> bool {
        let address = block.addr().get();
        let mut table = self.lock();
        let known = table.live.contains_key(&address);
        if !known {
            table.note(Finding::NoBlock { address });
        }
        known
    }
}

/// Fills a fresh block, or one that goes.
///
/// # Safety
/// `start` is writable for `bytes`.
unsafe fn poison(start: NonNull<u8>, bytes: usize, with: u8) {
    // SAFETY: the caller's promise.
    unsafe { start.write_bytes(with, bytes) };
}

impl_allocator! {
    // SAFETY: 1. Every block lies within one of the allocator below, which stays until the record that names it is taken.
    // 2. Clones have clones of that allocator and the same table. 3. Every block has exactly the bytes that were asked
    // for, so one layout fits it.
    unsafe impl [A: Allocator] for Guarded<A> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(nothing(layout));
            }
            let outer = Record::outer(layout).ok_or(AllocError)?;
            let block = self.admit(self.inner.allocate(outer)?.cast(), layout);
            // SAFETY: the block has as many bytes, and nobody else has seen it.
            unsafe { poison(block.cast(), layout.size(), Self::FRESH) };
            Ok(block)
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                return Ok(nothing(layout));
            }
            let outer = Record::outer(layout).ok_or(AllocError)?;
            Ok(self.admit(self.inner.allocate_zeroed(outer)?.cast(), layout))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            if layout.size() == 0 {
                return;
            }
            let Some(record) = self.take(block, layout) else { return };
            let Some(outer) = Record::outer(record.layout) else { return };
            if !record.is_held() {
                // SAFETY: the block is the caller's, who gives it up, and no device reads it.
                unsafe { poison(record.start(), record.layout.size(), Self::FREED) };
            }
            // SAFETY: 1. The block is one of the allocator below, or of a clone of it, asked for with this layout. 2. It has
            // left the table, so it is given back once.
            unsafe { self.inner.deallocate(record.base, outer) };
        }

        unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > 0 && !self.knows(block) {
                return Err(AllocError);
            }
            let moved = self.allocate(new)?;
            // SAFETY: both are live and have `old.size()` bytes.
            unsafe { copy(block, moved, old.size()) };
            // SAFETY: the caller hands the block over, and nothing reads it any more.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > 0 && !self.knows(block) {
                return Err(AllocError);
            }
            let moved = self.allocate_zeroed(new)?;
            // SAFETY: both are live and have `old.size()` bytes.
            unsafe { copy(block, moved, old.size()) };
            // SAFETY: the caller hands the block over, and nothing reads it any more.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if old.size() > 0 && !self.knows(block) {
                return Err(AllocError);
            }
            let moved = self.allocate(new)?;
            // SAFETY: both are live and have `new.size()` bytes.
            unsafe { copy(block, moved, new.size()) };
            // SAFETY: the caller hands the block over, and nothing reads it any more.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }
    }
}

// SAFETY: 1. Bytes go to nobody before the gate is open: the block below is held by the allocator
// that makes this promise.
// 2. They are not written either: a freed block is poisoned only when its gates are open, one that
//    grows or shrinks moves,
// and canaries lie outside of the user's bytes.
unsafe impl<A: DeferReuse> DeferReuse for Guarded<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        let foreign = MemoryError::ForeignBlock { address: address.addr().get() as u64 };
        let start = {
            let mut table = self.lock();
            let record = table.holding(address.addr().get()).ok_or_else(|| foreign.clone())?;
            record.start()
        };
        // Outside of the lock. The block is live, so it is the same one when the lock is taken
        // again.
        self.inner.defer(start, until.clone())?;
        match self.lock().holding(start.addr().get()) {
            Some(record) => record.gates.push(until),
            None => return Err(foreign),
        }
        Ok(())
    }
}

// SAFETY: the table holds every live block of at least one byte, and nothing else.
unsafe impl<A> Owns for Guarded<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.lock().holding(block.addr().get()).is_some()
    }
}
