//! A cache of freed blocks per thread.
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

/// The default number of bytes that a slot keeps.
const SLOT_CAPACITY: usize = 256 << 10;
/// The maximum number of slots. On a machine with more processors, threads share slots.
const MAX_SLOTS: usize = 64;

/// An allocator that caches the blocks a thread frees, for later requests of that thread with the
/// same layout.
///
/// It pays off over an allocator whose calls take a lock, search, or count: a cached block needs
/// none of that. Blocks are cached by their exact layout. A cached block is reused for exactly the
/// layout it was requested with, and the cache writes no byte of it.
///
/// - Each thread has a slot. There are about as many slots as processors, and more threads share
///   them. A slot that another thread is using is skipped, so no call waits.
/// - A slot keeps at most its capacity in bytes, 32 blocks of a layout, and 64 layouts. Other
///   blocks are returned to the upstream allocator immediately.
/// - When the upstream allocator refuses, all cached blocks are returned to it, and the request is
///   retried.
/// - Cached blocks are returned when the last clone is dropped, or by [`trim`](Cached::trim). Until
///   then a [`Limit`](super::Limit) below still counts them.
/// - A block that a device may still read ([`DeferReuse`]) is never cached. It goes to the upstream
///   allocator, which holds it back.
///
/// ```
/// use aquifer_adapters::{Cached, CountingAllocator};
/// use allocator_api2::{alloc::Global, boxed::Box};
/// let below = CountingAllocator::new(Global);
/// let cached = Cached::new(&below);
/// for step in 0..100u64 {
///     drop(Box::new_in(step, &cached));
/// }
/// assert_eq!((below.stats().allocations, below.stats().frees), (1, 0));
/// drop(cached);
/// assert_eq!(below.stats().frees, 1);
/// ```
pub struct Cached<A: UpstreamAllocator> {
    shared: Arc<SharedCache<A>>,
}

struct SharedCache<A: UpstreamAllocator> {
    inner: A,
    /// The number of slots is a power of two.
    slots: Box<[Slot]>,
    /// The capacity of each slot in bytes.
    capacity: usize,
    /// Addresses in live blocks that a device may still read.
    deferred: Mutex<Vec<usize>>,
    /// The number of these addresses. Relaxed: freeing a block happens after deferring it, and the
    /// count stays above zero until that free.
    deferrals: AtomicUsize,
}

/// The current contents of a [`Cached`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct CacheStats {
    /// Number of cached blocks.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
}

/// Returns the number of this thread, which selects its slot.
fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // No destructor, so it stays accessible as long as the thread allocates.
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
    /// Creates a cache over `inner` with a capacity of 256 KiB in each slot.
    pub fn new(inner: A) -> Self {
        Self::with_room(inner, SLOT_CAPACITY)
    }

    /// Creates a cache over `inner` with a capacity of `capacity` bytes in each slot.
    pub fn with_room(inner: A, capacity: usize) -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let slots = (0..threads.next_power_of_two().min(MAX_SLOTS)).map(|_| Slot::new()).collect();
        let (deferred, deferrals) = (Mutex::default(), AtomicUsize::new(0));
        Self { shared: Arc::new(SharedCache { inner, slots, capacity, deferred, deferrals }) }
    }

    /// Returns all cached blocks to the upstream allocator, except those of a slot that another
    /// thread is using.
    pub fn trim(&self) {
        self.shared.trim();
    }

    /// Returns the current contents, except those of a slot that another thread is using.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats::default();
        for (blocks, bytes) in self.shared.slots.iter().filter_map(Slot::usage) {
            stats.blocks += blocks;
            stats.bytes += bytes;
        }
        stats
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.shared.inner
    }
}

impl<A: UpstreamAllocator> SharedCache<A> {
    fn slot(&self) -> &Slot {
        // There is at least one slot, and the number of slots is a power of two.
        &self.slots[thread_number() & (self.slots.len() - 1)]
    }

    fn reuse(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.size() == 0 { None } else { self.slot().pop(layout) }
    }

    fn release(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the block belongs to `inner` and was freed with this layout, and it has been
        // removed from its slot.
        unsafe { self.inner.deallocate(block, layout) };
    }

    fn trim(&self) {
        for slot in &self.slots {
            slot.drain(|block, layout| self.release(block, layout));
        }
    }

    /// Calls the upstream allocator. If it refuses, returns the cached blocks to it and retries.
    fn retry_after_trim<T, E>(&self, call: impl Fn(&A) -> Result<T, E>) -> Result<T, E> {
        call(&self.inner).or_else(|_| {
            self.trim();
            call(&self.inner)
        })
    }

    fn deferred(&self) -> MutexGuard<'_, Vec<usize>> {
        // Nothing unwinds while the lock is held.
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the recorded addresses that lie in a block, before the upstream allocator can give
    /// the block to another owner. Returns how many there were.
    fn remove_deferrals(&self, block: NonNull<u8>, bytes: usize) -> usize {
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

    /// Restores the addresses of a block that stayed in place. They are set to its first byte, so
    /// that a block that shrank still contains them.
    fn restore_deferrals(&self, block: NonNull<u8>, count: usize) {
        if count == 0 {
            return;
        }
        let mut deferred = self.deferred();
        deferred.extend(iter::repeat_n(block.addr().get(), count));
        self.deferrals.store(deferred.len(), Ordering::Relaxed);
    }

    /// Resizes a block with `call`. Its addresses are removed while the upstream allocator works:
    /// once the block has moved, its old address may belong to another owner that defers it
    /// before this call returns.
    fn resize<E>(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
        call: impl Fn(&A) -> Result<NonNull<[u8]>, E>,
    ) -> Result<NonNull<[u8]>, E> {
        let count = self.remove_deferrals(block, old.size());
        let resized = self.retry_after_trim(call);
        let remaining = match &resized {
            Ok(resized) if resized.cast() != block => 0,
            // An empty block always goes to the upstream allocator when it is freed.
            Ok(_) if new.size() == 0 => 0,
            _ => count,
        };
        self.restore_deferrals(block, remaining);
        resized.map(|resized| exact_block(resized.cast(), new))
    }
}

impl<A: UpstreamAllocator> Drop for SharedCache<A> {
    fn drop(&mut self) {
        self.trim();
    }
}

/// Cuts a block to the requested size, by which it is cached.
fn exact_block(block: NonNull<u8>, layout: Layout) -> NonNull<[u8]> {
    NonNull::slice_from_raw_parts(block, layout.size())
}

impl_allocator! {
    // SAFETY: 1. Every block belongs to the upstream allocator, cut to the requested size. 2. A
    // block in a slot has no owner: it was freed, and it is removed from its slot before it is
    // returned. Its pointer is the one that it was freed with, valid for the bytes of its layout,
    // and it is reused only for that layout. 3. Clones share the slots and the upstream allocator.
    unsafe impl [A: UpstreamAllocator] for Cached<A> {
        #[inline]
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if let Some(block) = self.shared.reuse(layout) {
                return Ok(exact_block(block, layout));
            }
            let block = self
                .shared
                .retry_after_trim(|inner| inner.allocate(layout))
                .map_err(|_| AllocError)?;
            Ok(exact_block(block.cast(), layout))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if let Some(block) = self.shared.reuse(layout) {
                // SAFETY: the block has that many bytes, and no other owner.
                unsafe { block.write_bytes(0, layout.size()) };
                return Ok(exact_block(block, layout));
            }
            let block = self
                .shared
                .retry_after_trim(|inner| inner.allocate_zeroed(layout))
                .map_err(|_| AllocError)?;
            Ok(exact_block(block.cast(), layout))
        }

        #[inline]
        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            let shared = &*self.shared;
            let was_deferred = shared.remove_deferrals(block, layout.size()) > 0;
            if was_deferred || layout.size() == 0 {
                shared.release(block, layout);
            } else {
                shared.slot().push(block, layout, shared.capacity, |block, layout| {
                    shared.release(block, layout);
                });
            }
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller. A refused call has left the block unchanged.
            self.shared.resize(block, old, new, |inner| unsafe { inner.grow(block, old, new) }).map_err(|_| AllocError)
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: as in `grow`. `old` is exact, so all bytes after it become zero.
            let grown = self.shared.resize(block, old, new, |inner| unsafe { inner.grow_zeroed(block, old, new) });
            grown.map_err(|_| AllocError)
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: as in `grow`.
            self.shared.resize(block, old, new, |inner| unsafe { inner.shrink(block, old, new) }).map_err(|_| AllocError)
        }
    }
}

// SAFETY: 1. a deferred block goes to the upstream allocator, which gives this guarantee, and not
// into a slot: its address is recorded from before the deferral until its owner frees or resizes
// it, and again after a resize that left it in place. No other call of the owner runs meanwhile.
unsafe impl<A: DeferReuse> DeferReuse for Cached<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        let raw_address = address.addr().get();
        {
            let mut deferred = self.shared.deferred();
            deferred.push(raw_address);
            self.shared.deferrals.store(deferred.len(), Ordering::Relaxed);
        }
        let outcome = self.shared.inner.defer(address, until);
        if outcome.is_err() {
            let mut deferred = self.shared.deferred();
            // Remove only one: the block may have been deferred before.
            if let Some(at) = deferred.iter().rposition(|&other| other == raw_address) {
                deferred.swap_remove(at);
            }
            self.shared.deferrals.store(deferred.len(), Ordering::Relaxed);
        }
        outcome
    }
}

// SAFETY: all blocks belong to the upstream allocator.
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
