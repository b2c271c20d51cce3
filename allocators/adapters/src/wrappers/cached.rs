//! Blocks kept by the thread that gave them back.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::Owns;
use allocator_api2::alloc::Allocator as UpstreamAllocator;
use aquifer_core::{DeferReuse, Gate, Result as MemoryResult, impl_allocator};
use slot::Slot;
use std::{
    alloc::Layout,
    cell::Cell,
    fmt, iter,
    num::NonZero,
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

mod slot;

/// Bytes that a slot keeps, unless set.
const ROOM: usize = 256 << 10;
/// Slots at most: what a machine with more processors is spread over.
const MAX_SLOTS: usize = 64;

/// An allocator that keeps what a thread gives back, for when that thread asks for the same again.
///
/// It is worth its while over an allocator whose calls take a lock, a search, or count something: a
/// block that is kept costs neither. Blocks are kept by their exact layout, and so handed out to
/// the byte: what the allocator below was asked for is what there is, and no byte of it is written
/// here.
///
/// - Each thread has a slot; there are as many as processors, and threads beyond that share. A slot
///   that another thread is in at this moment is passed by: no call waits.
/// - A slot keeps at most its room in bytes, 32 blocks of a layout and 64 layouts. What does not
///   fit goes down at once.
/// - When the allocator below refuses, all that is kept is given back to it and it is asked again.
/// - What is kept is returned when the last clone goes, or by [`trim`](Cached::trim). Until then a
///   [`Limit`](super::Limit) below still counts it.
/// - A block that a device may still read ([`DeferReuse`]) is never kept: it goes to the allocator
///   below, which waits.
///
/// ```
/// use aquifer_adapters::{Cached, Counted};
/// use allocator_api2::{alloc::Global, boxed::Box};
/// let below = Counted::new(Global);
/// let cached = Cached::new(&below);
/// for step in 0..100u64 {
///     drop(Box::new_in(step, &cached));
/// }
/// assert_eq!((below.stats().allocations, below.stats().frees), (1, 0));
/// drop(cached);
/// assert_eq!(below.stats().frees, 1);
/// ```
pub struct Cached<A: UpstreamAllocator> {
    shared: Arc<Shared<A>>,
}

struct Shared<A: UpstreamAllocator> {
    inner: A,
    /// A power of two of them.
    slots: Box<[Slot]>,
    /// Bytes that each may keep.
    room: usize,
    /// Addresses in live blocks that a device may still read.
    deferred: Mutex<Vec<usize>>,
    /// How many these are. Relaxed: whoever frees a block comes after whoever deferred it, and the
    /// count stays above zero until that free.
    deferrals: AtomicUsize,
}

/// What a [`Cached`] keeps at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct CacheStats {
    /// Blocks (a count).
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
}

/// This thread's number, from which its slot follows.
fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // No destructor, so that it is there for as long as the thread allocates.
        static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

impl<A: UpstreamAllocator> Cached<A> {
    /// Keeps blocks of `inner`, up to 256 KiB in each slot.
    pub fn new(inner: A) -> Self {
        Self::with_room(inner, ROOM)
    }

    /// Keeps blocks of `inner`, up to `room` bytes in each slot.
    pub fn with_room(inner: A, room: usize) -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let slots = (0..threads.next_power_of_two().min(MAX_SLOTS)).map(|_| Slot::new()).collect();
        let (deferred, deferrals) = (Mutex::default(), AtomicUsize::new(0));
        Self { shared: Arc::new(Shared { inner, slots, room, deferred, deferrals }) }
    }

    /// Gives what is kept back to the allocator below, but for a slot that another thread is in at
    /// this moment.
    pub fn trim(&self) {
        self.shared.trim();
    }

    /// What is kept, but for a slot that another thread is in at this moment.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats::default();
        for (blocks, bytes) in self.shared.slots.iter().filter_map(Slot::held) {
            stats.blocks += blocks;
            stats.bytes += bytes;
        }
        stats
    }

    /// The allocator below.
    pub fn inner(&self) -> &A {
        &self.shared.inner
    }
}

impl<A: UpstreamAllocator> Shared<A> {
    fn slot(&self) -> &Slot {
        // There is one at least, and their number is a power of two.
        &self.slots[thread_number() & (self.slots.len() - 1)]
    }

    fn take(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.size() == 0 { None } else { self.slot().take(layout) }
    }

    fn give_back(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the block is one of `inner` that was given back with this layout, and it has left
        // its slot.
        unsafe { self.inner.deallocate(block, layout) };
    }

    fn trim(&self) {
        for slot in &self.slots {
            slot.drain(|block, layout| self.give_back(block, layout));
        }
    }

    /// Asks the allocator below; again when it refuses and something could be given back to it.
    fn ask<T, E>(&self, call: impl Fn(&A) -> Result<T, E>) -> Result<T, E> {
        call(&self.inner).or_else(|_| {
            self.trim();
            call(&self.inner)
        })
    }

    fn deferred(&self) -> MutexGuard<'_, Vec<usize>> {
        // Nothing unwinds while it is held.
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the notes that lie in a block, before the allocator below can hand the block to
    /// another owner. Returns how many there were.
    fn take_deferrals(&self, block: NonNull<u8>, bytes: usize) -> usize {
        if self.deferrals.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let start = block.addr().get();
        let mut deferred = self.deferred();
        let before = deferred.len();
        deferred.retain(|address| !(start..start + bytes).contains(address));
        self.deferrals.store(deferred.len(), Ordering::Relaxed);
        before - deferred.len()
    }

    /// Puts notes back that were taken out of a block which has stayed where it is. They go to its
    /// first byte, so that a block that has shrunk still holds them.
    fn put_deferrals(&self, block: NonNull<u8>, notes: usize) {
        if notes == 0 {
            return;
        }
        let mut deferred = self.deferred();
        deferred.extend(iter::repeat_n(block.addr().get(), notes));
        self.deferrals.store(deferred.len(), Ordering::Relaxed);
    }

    /// Resizes a block by `call`. Its notes are out of the list while the allocator below works:
    /// once the block has moved, its old address may belong to another owner, who may defer it
    /// before this call is back.
    fn resize<E>(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
        call: impl Fn(&A) -> Result<NonNull<[u8]>, E>,
    ) -> Result<NonNull<[u8]>, E> {
        let notes = self.take_deferrals(block, old.size());
        let resized = self.ask(call);
        let left = match &resized {
            Ok(resized) if resized.cast() != block => 0,
            // A block of no bytes goes below when it is freed, whatever is noted.
            Ok(_) if new.size() == 0 => 0,
            _ => notes,
        };
        self.put_deferrals(block, left);
        resized.map(|resized| exact(resized.cast(), new))
    }
}

impl<A: UpstreamAllocator> Drop for Shared<A> {
    fn drop(&mut self) {
        self.trim();
    }
}

/// A block, as long as it was asked for: it is kept under that length.
fn exact(block: NonNull<u8>, layout: Layout) -> NonNull<[u8]> {
    NonNull::slice_from_raw_parts(block, layout.size())
}

impl_allocator! {
    // SAFETY: 1. Every block is one of the allocator below, cut to the size that was asked for. 2. A block in a slot is
    // nobody's: it was given back, and leaves its slot when it is handed out. Its pointer is the one that it came back
    // with, good for the bytes of its layout, and it is handed out for that layout alone. 3. Clones share the slots and the
    // allocator below.
    unsafe impl [A: UpstreamAllocator] for Cached<A> {
        #[inline]
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if let Some(block) = self.shared.take(layout) {
                return Ok(exact(block, layout));
            }
            let block = self.shared.ask(|inner| inner.allocate(layout)).map_err(|_| AllocError)?;
            Ok(exact(block.cast(), layout))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if let Some(block) = self.shared.take(layout) {
                // SAFETY: the block has as many bytes, and is nobody else's.
                unsafe { block.write_bytes(0, layout.size()) };
                return Ok(exact(block, layout));
            }
            let block = self.shared.ask(|inner| inner.allocate_zeroed(layout)).map_err(|_| AllocError)?;
            Ok(exact(block.cast(), layout))
        }

        #[inline]
        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            let shared = &*self.shared;
            let is_deferred = shared.take_deferrals(block, layout.size()) > 0;
            if is_deferred || layout.size() == 0 {
                shared.give_back(block, layout);
            } else {
                shared.slot().keep(block, layout, shared.room, |block, layout| shared.give_back(block, layout));
            }
        }

        unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: the caller's promise; a call that was refused has left the block as it was.
            self.shared.resize(block, old, new, |inner| unsafe { inner.grow(block, old, new) }).map_err(|_| AllocError)
        }

        unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: as in `grow`. `old` is exact, so everything after it becomes zero.
            let grown = self.shared.resize(block, old, new, |inner| unsafe { inner.grow_zeroed(block, old, new) });
            grown.map_err(|_| AllocError)
        }

        unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: as in `grow`.
            self.shared.resize(block, old, new, |inner| unsafe { inner.shrink(block, old, new) }).map_err(|_| AllocError)
        }
    }
}

// SAFETY: 1. a block with a deferral goes to the allocator below, whose promise this is, and not
// into a slot: the note of it stands from before the deferral until its owner gives the block back
// or has it resized, and again behind a resize that left the block in place. No other call of the
// owner runs meanwhile.
unsafe impl<A: DeferReuse> DeferReuse for Cached<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        let note = address.addr().get();
        {
            let mut deferred = self.shared.deferred();
            deferred.push(note);
            self.shared.deferrals.store(deferred.len(), Ordering::Relaxed);
        }
        let outcome = self.shared.inner.defer(address, until);
        if outcome.is_err() {
            let mut deferred = self.shared.deferred();
            // One of them: the block may have been deferred before.
            if let Some(at) = deferred.iter().rposition(|&other| other == note) {
                deferred.swap_remove(at);
            }
            self.shared.deferrals.store(deferred.len(), Ordering::Relaxed);
        }
        outcome
    }
}

// SAFETY: blocks are those of the allocator below.
unsafe impl<A: UpstreamAllocator + Owns> Owns for Cached<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.shared.inner.owns(block)
    }
}

impl<A: UpstreamAllocator> Clone for Cached<A> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<A: UpstreamAllocator + fmt::Debug> fmt::Debug for Cached<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached").field("inner", self.inner()).field("stats", &self.stats()).finish()
    }
}
