//! A limit on live bytes, charged to a budget.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{Owns, cut};
use aquifer_core::{
    Budget, Charge, DeferReuse, DeviceId, Gate, MemoryError, Opaque, OpaqueBlock, OutOfBudget,
    OutOfMemory, PoolStats, Request, Result as MemoryResult, impl_allocator,
};
use std::{
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

/// An allocator, or a source of [`Opaque`] memory, whose live bytes are charged to a [`Budget`].
///
/// - The requested size is charged before the upstream allocator is called. It is released after
///   the upstream allocator has freed the block.
/// - Several limits may share a budget. Clones of a limit share its account.
/// - A leaked block stays charged, even after the limit is dropped.
/// - A block of device memory is charged until its memory is actually free. If another stream still
///   uses it, this is later than its drop.
/// - Before a request for device memory is refused, the pool collects its completed frees once. It
///   is not asked for the block. The refusal is [`MemoryError::OutOfMemory`], as from the pool
///   itself.
///
/// A pool charges its physical memory itself. Use this adapter to bound live bytes.
///
/// ```
/// use aquifer::{Budget, Limit};
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
    /// The charge for all live blocks. `None` only before the first charge and in `drop`.
    total: Mutex<Option<Charge>>,
}

impl<A> Limit<A> {
    /// Creates an adapter that charges allocations from `inner` to `budget`.
    pub fn new(inner: A, budget: Budget) -> Self {
        Self { inner, account: Arc::new(Account { budget, total: Mutex::new(None) }) }
    }

    /// Returns the budget. It may have other users.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.account.budget
    }

    /// Returns the bytes in live blocks of this limit and its clones.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.account.lock().as_ref().map_or(0, Charge::bytes)
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

impl Account {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Charge>> {
        // Nothing unwinds while the lock is held.
        self.total.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn charge(&self, bytes: usize) -> Result<Charge, OutOfBudget> {
        self.budget.charge(bytes as u64)
    }

    /// Adds the charge of a new live block.
    fn add(&self, charge: Charge) {
        let mut total = self.lock();
        match total.as_mut() {
            None => *total = Some(charge),
            // Both are charges of `self.budget`, so merging them cannot fail.
            Some(all) => drop(all.merge(charge)),
        }
    }

    fn release(&self, bytes: usize) {
        let released = self.lock().as_mut().and_then(|all| all.split(bytes as u64));
        debug_assert!(
            released.is_some() || bytes == 0,
            "{bytes} bytes freed that were not charged"
        );
        drop(released);
    }
}

/// Charges for leaked blocks of dropped limits.
static LEAKED: Mutex<Vec<Charge>> = Mutex::new(Vec::new());

impl Drop for Account {
    fn drop(&mut self) {
        let total = self.total.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(leaked) = total.filter(|charge| charge.bytes() > 0) {
            LEAKED.lock().unwrap_or_else(PoisonError::into_inner).push(leaked);
        }
    }
}

impl_allocator! {
    // SAFETY: 1. Every block belongs to the upstream allocator, cut to the requested size, which
    // fits it. 2. A clone contains a clone of that allocator.
    unsafe impl [A: Allocator] for Limit<A> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(layout.size()).map_err(|_| AllocError)?;
            let block = self.inner.allocate(layout)?;
            self.account.add(charge);
            Ok(cut(block, layout.size()))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(layout.size()).map_err(|_| AllocError)?;
            let block = self.inner.allocate_zeroed(layout)?;
            self.account.add(charge);
            Ok(cut(block, layout.size()))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            // SAFETY: guaranteed by the caller. The block belongs to the upstream allocator.
            unsafe { self.inner.deallocate(block, layout) };
            self.account.release(layout.size());
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(new.size() - old.size()).map_err(|_| AllocError)?;
            // SAFETY: guaranteed by the caller.
            let block = unsafe { self.inner.grow(block, old, new)? };
            self.account.add(charge);
            Ok(cut(block, new.size()))
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            let charge = self.account.charge(new.size() - old.size()).map_err(|_| AllocError)?;
            // SAFETY: guaranteed by the caller. `old` is exact, so all bytes after it become zero.
            let block = unsafe { self.inner.grow_zeroed(block, old, new)? };
            self.account.add(charge);
            Ok(cut(block, new.size()))
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            let block = unsafe { self.inner.shrink(block, old, new)? };
            self.account.release(old.size() - new.size());
            Ok(cut(block, new.size()))
        }
    }
}

// SAFETY: all blocks belong to the upstream allocator, which gives this guarantee.
unsafe impl<A: DeferReuse> DeferReuse for Limit<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.inner.defer(address, until)
    }
}

// SAFETY: all blocks belong to the upstream allocator.
unsafe impl<A: Owns> Owns for Limit<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.inner.owns(block)
    }
}

/// The charge of a live opaque block. Dropped when its memory is free.
struct BlockCharge {
    account: Arc<Account>,
    bytes: usize,
}

impl Drop for BlockCharge {
    fn drop(&mut self) {
        self.account.release(self.bytes);
    }
}

impl<M: Opaque> Limit<M> {
    /// Returns the out-of-memory error that every source of device memory uses.
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
                // Blocks whose last use has ended may still be charged, because their frees were
                // not collected yet. A refused request never reaches the pool, so collect them
                // here.
                self.inner.trim(u64::MAX)?;
                self.account.charge(bytes).map_err(|refused| self.refuse(bytes, refused))?
            }
        };
        let mut block = self.inner.allocate(stream, request)?;
        self.account.add(charge);
        block.keep_until_free(Box::new(BlockCharge { account: self.account.clone(), bytes }));
        Ok(block)
    }

    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        self.inner.trim(keep)
    }
}
