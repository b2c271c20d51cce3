//! No more live bytes than a budget grants.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::Owns;
use aquifer_core::{
    Budget, Charge, DeferReuse, DeviceId, Gate, MemoryError, Opaque, OpaqueBlock, OutOfBudget,
    OutOfMemory, PoolStats, Request, Result as MemoryResult, impl_allocator,
};
use std::{
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

/// An allocator whose live bytes are charged to a [`Budget`], each to the byte; or a source of
/// [`Opaque`] memory.
///
/// What is counted is what was asked for, from the moment before the allocator below is called
/// until the moment after it took the block back. Several limits may share a budget; clones of one
/// share its account. A block that is leaked stays charged, even when the limit itself is gone.
///
/// A block of a device's memory is charged until its bytes are really free, which for one that
/// another stream still uses is later than its drop. Before a request is refused the pool looks
/// once which work is done; it is not asked for the block. The refusal is
/// [`MemoryError::OutOfMemory`], as the pool's own.
///
/// A pool that holds physical memory charges that itself; use this one where live bytes are the
/// thing to bound.
///
/// ```
/// use aquifer_adapters::Limit;
/// use aquifer_core::Budget;
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let budget = Budget::new("uploads", 1000);
/// let limit = Limit::new(Global, budget.clone());
/// let mut body: Vec<u8, _> = Vec::new_in(&limit);
/// assert!(body.try_reserve_exact(1000).is_ok());
/// assert!(Vec::<u8, _>::new_in(&limit).try_reserve_exact(1).is_err());
/// drop(body);
/// assert_eq!(budget.used(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct Limit<A> {
    inner: A,
    account: Arc<Account>,
}

#[derive(Debug)]
struct Account {
    budget: Budget,
    /// The charge for all live blocks. `None` never, but in `drop`.
    held: Mutex<Option<Charge>>,
}

impl<A> Limit<A> {
    /// Charges what is allocated from `inner` to `budget`.
    pub fn new(inner: A, budget: Budget) -> Self {
        Self { inner, account: Arc::new(Account { budget, held: Mutex::new(None) }) }
    }

    /// The budget that is charged. Others may charge it too.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.account.budget
    }

    /// Bytes in live blocks of this limit and its clones.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.account.lock().as_ref().map_or(0, Charge::bytes)
    }

    /// The allocator below.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

impl Account {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Charge>> {
        // Nothing unwinds while it is held.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn charge(&self, bytes: usize) -> Result<Charge, OutOfBudget> {
        self.budget.charge(bytes as u64)
    }

    /// Keeps what has become a live block.
    fn keep(&self, charge: Charge) {
        let mut held = self.lock();
        match held.as_mut() {
            None => *held = Some(charge),
            // Both are of `self.budget`, so none is refused.
            Some(all) => drop(all.merge(charge)),
        }
    }

    fn release(&self, bytes: usize) {
        let released = self.lock().as_mut().and_then(|all| all.split(bytes as u64));
        drop(released);
    }
}

/// Charges for blocks that are still there, and that nobody is left to take back.
static LEAKED: Mutex<Vec<Charge>> = Mutex::new(Vec::new());

impl Drop for Account {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(leaked) = held.filter(|charge| charge.bytes() > 0) {
            LEAKED.lock().unwrap_or_else(PoisonError::into_inner).push(leaked);
        }
    }
}

impl_allocator! {
    // SAFETY: 1. Every block is one of the allocator below, cut to the size that was asked for, which fits it. 2. A
    // clone has a clone of that allocator.
    unsafe impl [A: Allocator] for Limit<A> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(layout.size()).map_err(|_| AllocError)?;
            let block = self.inner.allocate(layout)?;
            self.account.keep(charge);
            Ok(NonNull::slice_from_raw_parts(block.cast(), layout.size()))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(layout.size()).map_err(|_| AllocError)?;
            let block = self.inner.allocate_zeroed(layout)?;
            self.account.keep(charge);
            Ok(NonNull::slice_from_raw_parts(block.cast(), layout.size()))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            // SAFETY: the caller's promise; the block is one of the allocator below.
            unsafe { self.inner.deallocate(block, layout) };
            self.account.release(layout.size());
        }

        unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(new.size() - old.size()).map_err(|_| AllocError)?;
            // SAFETY: the caller's promise.
            let block = unsafe { self.inner.grow(block, old, new)? };
            self.account.keep(charge);
            Ok(NonNull::slice_from_raw_parts(block.cast(), new.size()))
        }

        unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(new.size() - old.size()).map_err(|_| AllocError)?;
            // SAFETY: the caller's promise. `old` is exact, so everything after it becomes zero.
            let block = unsafe { self.inner.grow_zeroed(block, old, new)? };
            self.account.keep(charge);
            Ok(NonNull::slice_from_raw_parts(block.cast(), new.size()))
        }

        unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: the caller's promise.
            let block = unsafe { self.inner.shrink(block, old, new)? };
            self.account.release(old.size() - new.size());
            Ok(NonNull::slice_from_raw_parts(block.cast(), new.size()))
        }
    }
}

// SAFETY: blocks are those of the allocator below, whose promise this is.
unsafe impl<A: DeferReuse> DeferReuse for Limit<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.inner.defer(address, until)
    }
}

// SAFETY: blocks are those of the allocator below.
unsafe impl<A: Owns> Owns for Limit<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.inner.owns(block)
    }
}

/// What a block that the host cannot reach has been charged for, as long as it is kept.
struct Charged {
    account: Arc<Account>,
    bytes: usize,
}

impl Drop for Charged {
    fn drop(&mut self) {
        self.account.release(self.bytes);
    }
}

impl<M: Opaque> Limit<M> {
    /// The error of every source of device memory that has no room.
    fn refuse(&self, bytes: usize, refused: OutOfBudget) -> MemoryError {
        let (stats, bytes) = (self.inner.stats(), bytes as u64);
        let mut error = OutOfMemory::new(self.inner.device().to_string(), bytes);
        (error.refused, error.of_live_bytes) = (Some(refused), true);
        error.raise = self.account.budget.raises(bytes, 0);
        (error.live, error.cached) = (stats.live, stats.cached);
        (error.pending, error.physical) = (stats.pending, stats.physical);
        MemoryError::OutOfMemory(Box::new(error))
    }
}

impl<M: Opaque> Opaque for Limit<M> {
    type Stream = M::Stream;
    type Block = M::Block;

    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    #[track_caller]
    fn allocate(&self, stream: &M::Stream, request: Request) -> MemoryResult<M::Block> {
        let bytes = request.size() as usize;
        let charge = match self.account.charge(bytes) {
            Ok(charge) => charge,
            Err(_) => {
                // Blocks whose last use is over may be charged still: nothing has looked since. A
                // refused request would never reach the pool, and so nothing ever would.
                self.inner.trim(u64::MAX)?;
                self.account.charge(bytes).map_err(|refused| self.refuse(bytes, refused))?
            }
        };
        let mut block = self.inner.allocate(stream, request)?;
        self.account.keep(charge);
        block.keep_until_free(Box::new(Charged { account: self.account.clone(), bytes }));
        Ok(block)
    }

    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        self.inner.trim(keep)
    }
}
