//! Pinned memory under one registration.
#![expect(unsafe_code, reason = "copies from and to memory that peers write to")]

use crate::{
    FixedMemory, FixedRange, NixlAgent, NixlError, NixlRegistration, PinnedRange, RegisteredPart,
};
use aquifer_heap::{Config, Heap, HeapBlock, Range};
use aquifer_host::PinnedPool;
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

/// The alignment of all blocks: the lines of two processors' caches.
const ALIGN: u64 = 256;

/// Pinned memory as one block and one registration. Blocks are parts of it, so that none needs a
/// registration of its own, which takes a transport milliseconds.
///
/// The registration ends with the pool, its blocks, and the transfers of them. Allocations and
/// frees take a lock for some hundred instructions, and call neither the driver nor NIXL.
pub struct RegisteredPool(Arc<PoolInner>);

struct PoolInner {
    registration: NixlRegistration,
    heap: Mutex<Heap>,
}

impl RegisteredPool {
    /// Allocates a [`PinnedRange`] of a pinned pool, and registers it with an agent. Blocks while
    /// the pinned pool grows and while a transport pins the memory.
    ///
    /// # Errors
    /// As [`PinnedRange::new`]; as [`NixlAgent::register`].
    pub fn new(agent: &NixlAgent, pinned: &PinnedPool, bytes: u64) -> Result<Self, NixlError> {
        let memory = PinnedRange::new(pinned, bytes)?;
        let range = memory.fixed_range();
        let registration = agent.register(Arc::new(memory))?;
        let mut heap = Heap::new(Config::device());
        // Whole pages of an address that is mapped.
        if heap.add(Range::new(range.address, range.bytes), 0).is_err() {
            return Err(NixlError::OutOfBounds { offset: 0, bytes, within: 0 });
        }
        Ok(Self(Arc::new(PoolInner { registration, heap: Mutex::new(heap) })))
    }

    /// Allocates a block, not zeroed, which is aligned to 256 bytes.
    ///
    /// # Errors
    /// [`NixlError::OutOfBounds`] for no bytes; [`NixlError::PoolFull`].
    pub fn allocate(&self, bytes: u64) -> Result<RegisteredBlock, NixlError> {
        if bytes == 0 {
            let within = self.0.registration.range().bytes;
            return Err(NixlError::OutOfBounds { offset: 0, bytes, within });
        }
        let found = self.0.heap().alloc(bytes, ALIGN);
        let Some(block) = found else {
            return Err(NixlError::PoolFull { bytes, free: self.free_bytes() });
        };
        let registration = &self.0.registration;
        let range = FixedRange { address: block.address, bytes, ..registration.range() };
        let taken = Arc::new(Taken { pool: self.0.clone(), block });
        Ok(RegisteredBlock { part: registration.part_kept_by(range, taken) })
    }

    /// Returns the free bytes, in ranges of any size.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let heap = self.0.heap();
        heap.managed_bytes() - heap.live_bytes()
    }

    /// Returns the registration of the whole pool.
    #[must_use]
    pub fn registration(&self) -> &NixlRegistration {
        &self.0.registration
    }
}

impl PoolInner {
    fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A range of a pool, which is free again with the last part of it.
struct Taken {
    pool: Arc<PoolInner>,
    block: HeapBlock,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let freed = self.pool.heap().free_block(&self.block, 0);
        debug_assert!(freed.is_ok(), "{freed:?}");
    }
}

/// Memory of a [`RegisteredPool`]. Its range is free again with the block and the last clone of its
/// part, such as in a transfer.
///
/// A peer may write to it at any time, so there is no slice of it: use the copies, or the pointer.
pub struct RegisteredBlock {
    part: RegisteredPart,
}

impl RegisteredBlock {
    /// Returns the block as one range of a transfer.
    #[must_use]
    pub fn part(&self) -> &RegisteredPart {
        &self.part
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.part.range().bytes
    }

    /// Returns the address of its first byte, for copies by the driver and for code of others.
    /// Peers that know of the block may write to it meanwhile.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.part.range().address as usize)
    }

    /// Copies bytes into the block.
    ///
    /// # Errors
    /// [`NixlError::OutOfBounds`].
    pub fn copy_from(&self, offset: u64, bytes: &[u8]) -> Result<(), NixlError> {
        let to = self.within(offset, bytes.len())?;
        let whole = bytes_in_words(to, bytes.len());
        let (words, rest) = bytes.split_at(whole);
        for (at, word) in words.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: 1. the word is within the block, and aligned.
            unsafe { word_at(to, at) }.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (at, byte) in rest.iter().enumerate() {
            // SAFETY: 1. the range is within the block.
            unsafe { byte_at(to, whole + at) }.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies bytes out of the block.
    ///
    /// # Errors
    /// [`NixlError::OutOfBounds`].
    pub fn copy_to(&self, offset: u64, bytes: &mut [u8]) -> Result<(), NixlError> {
        let from = self.within(offset, bytes.len())?;
        let whole = bytes_in_words(from, bytes.len());
        let (words, rest) = bytes.split_at_mut(whole);
        for (at, word) in words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: 1. the word is within the block, and aligned.
            *word = unsafe { word_at(from, at) }.load(Ordering::Relaxed).to_ne_bytes();
        }
        for (at, byte) in rest.iter_mut().enumerate() {
            // SAFETY: 1. the range is within the block.
            *byte = unsafe { byte_at(from, whole + at) }.load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the address of a range in the block.
    fn within(&self, offset: u64, bytes: usize) -> Result<*mut u8, NixlError> {
        self.part.range().part(offset, bytes as u64)?;
        Ok(self.as_ptr().wrapping_add(offset as usize))
    }
}

/// Returns how many of `bytes` from `start` are copied as words: none where they are not aligned.
fn bytes_in_words(start: *mut u8, bytes: usize) -> usize {
    if start.addr().is_multiple_of(8) { bytes / 8 * 8 } else { 0 }
}

/// Returns a byte of a block.
///
/// # Safety
/// It is within the block, which lives as long as the result is used.
unsafe fn byte_at<'a>(start: *mut u8, at: usize) -> &'a AtomicU8 {
    // SAFETY: 1. the caller promises it. 2. this process reaches the bytes by atomic operations.
    unsafe { AtomicU8::from_ptr(start.wrapping_add(at)) }
}

/// Returns a word of a block.
///
/// # Safety
/// As [`byte_at`], of eight bytes. `start` is aligned to eight.
unsafe fn word_at<'a>(start: *mut u8, at: usize) -> &'a AtomicU64 {
    // SAFETY: 1. the caller promises it. 2. as above.
    unsafe { AtomicU64::from_ptr(start.wrapping_add(at * 8).cast()) }
}

impl fmt::Debug for RegisteredPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.0.registration.range();
        f.debug_struct("RegisteredPool").field("range", &range).finish_non_exhaustive()
    }
}

impl fmt::Debug for RegisteredBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredBlock").field("range", &self.part.range()).finish_non_exhaustive()
    }
}
