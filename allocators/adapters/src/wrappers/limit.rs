//! A limit on live bytes, charged to a budget.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{LiveBlock, Rule};
use aquifer_core::{
    Budget, Charge, DeviceId, MemoryError, Opaque, OpaqueBlock, OutOfBudget, OutOfMemory,
    PoolStats, Request, Result as MemoryResult,
};
use std::{
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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

    fn rule(&self) -> &Account {
        &self.account
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

impl Account {
    fn lock(&self) -> MutexGuard<'_, Option<Charge>> {
        // Nothing unwinds while the lock is held.
        self.total.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rule for Account {
    type Grant = Charge;

    fn admit(&self, bytes: usize) -> Option<Charge> {
        self.budget.charge(bytes as u64).ok()
    }

    fn keep(&self, charge: Charge, _fresh: bool) {
        let mut total = self.lock();
        match total.as_mut() {
            None => *total = Some(charge),
            // Both are charges of `self.budget`, so merging them cannot fail.
            Some(all) => drop(all.merge(charge)),
        }
    }

    fn release(&self, bytes: usize, _gone: bool) {
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

adapter_with_rule!(Limit);

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
        let budget = &self.account.budget;
        let charge = match budget.charge(bytes as u64) {
            Ok(charge) => charge,
            Err(_) => {
                // Blocks whose last use has ended may still be charged, because their frees were
                // not collected yet. A refused request never reaches the pool, so collect them
                // here.
                self.inner.trim(u64::MAX)?;
                budget.charge(bytes as u64).map_err(|refused| self.refuse(bytes, refused))?
            }
        };
        let mut block = self.inner.allocate(stream, request)?;
        self.account.keep(charge, true);
        block.keep_until_free(Box::new(LiveBlock { rule: self.account.clone(), bytes }));
        Ok(block)
    }

    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        self.inner.trim(keep)
    }
}
