//! Lists of registered hooks, and their calls; the trait [`Reclaim`] of reclaimers, what they could
//! release ([`Offer`]), and what a call has gained ([`Tried`]).

use crate::{
    ids::MemoryLocation,
    panics::contain,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        lock,
    },
};
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// All hooks, with their numbers.
type HookList<H> = Option<Arc<[(u64, H)]>>;

/// A list of hooks that is read without allocating, since the allocator itself may charge a budget.
pub(super) struct Hooks<H> {
    /// Immutable lists, replaced as a whole.
    list: Mutex<HookList<H>>,
    /// Serialises `add` and `remove`. Holds the last number issued.
    last_number: Mutex<u64>,
    panics: AtomicU64,
}

impl<H: Clone> Hooks<H> {
    pub(super) fn new() -> Self {
        Self { list: Mutex::new(None), last_number: Mutex::new(0), panics: AtomicU64::new(0) }
    }

    /// Returns the current hooks.
    pub(super) fn snapshot(&self) -> HookList<H> {
        lock(&self.list).clone()
    }

    /// Adds a hook and returns its unique number.
    pub(super) fn add(&self, hook: H) -> u64 {
        let mut number = lock(&self.last_number);
        *number += 1;
        let all = self.snapshot();
        let next =
            all.iter().flat_map(|all| all.iter().cloned()).chain([(*number, hook)]).collect();
        self.replace(Some(next));
        *number
    }

    pub(super) fn remove(&self, number: u64) {
        let removed = {
            let _last_number = lock(&self.last_number);
            let all = self.snapshot();
            let next = all
                .iter()
                .flat_map(|all| all.iter())
                .filter(|(n, _)| *n != number)
                .cloned()
                .collect();
            (self.replace(Some(next)), all)
        };
        // Dropping a hook may run foreign code, so it happens outside the lock.
        drop(removed);
    }

    pub(super) fn clear(&self) {
        let removed = self.replace(None);
        drop(removed);
    }

    fn replace(&self, next: HookList<H>) -> HookList<H> {
        std::mem::replace(&mut *lock(&self.list), next)
    }

    /// Calls a hook. A panic is caught and counted.
    pub(super) fn call<R>(&self, hook: impl FnOnce() -> R) -> Option<R> {
        let result = contain(hook);
        if result.is_none() {
            self.panics.fetch_add(1, Relaxed);
        }
        result
    }

    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Relaxed)
    }
}

/// What a reclaimer could release.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Offer {
    /// The approximate number of bytes.
    pub bytes: u64,
    /// The approximate duration of releasing all of it, including later costs: memory to be
    /// allocated again, work to be repeated.
    pub cost: Duration,
}

impl Offer {
    /// Returns the cost of `bytes` of this offer; of all of it, if it has fewer.
    pub(super) fn cost_of(&self, bytes: u64) -> u128 {
        let part = u128::from(bytes.min(self.bytes));
        self.cost.as_nanos().saturating_mul(part) / u128::from(self.bytes.max(1))
    }
}

/// A holder of charged memory that can release some of it.
pub trait Reclaim: Send + Sync {
    /// Returns the name that errors show: `cache of stream 3`.
    fn name(&self) -> &'static str;

    /// Returns what can be released now, or soon if it [waits](Reclaim::waits). Must not block, nor
    /// take a lock that is held over a driver call.
    fn offer(&self) -> Offer;

    /// Releases about `bytes`. May wait for a device or a thread only while `deadline` has not
    /// passed (`None`: no deadline).
    ///
    /// Called with no lock of the budget held. It may charge and release. A panic is counted and
    /// otherwise ignored. One search calls it again only if the last call has lowered its offer, if
    /// the offer has changed since, or if the last call came after the deadline and this one does
    /// not. A search within this call waits for no other reclaimer.
    fn reclaim(&self, bytes: u64, deadline: Option<Instant>);

    /// Returns whether it can release memory only by waiting. Such a reclaimer is called last, and
    /// only before the deadline.
    fn waits(&self) -> bool {
        false
    }

    /// Returns where the memory is. When the driver of a device is out of memory, reclaimers of
    /// other places are skipped. With the default, `None`, it is called wherever memory is short.
    fn place(&self) -> Option<MemoryLocation> {
        None
    }
}

/// A registered reclaimer.
pub(super) struct Reclaimer {
    pub(super) holder: Weak<dyn Reclaim>,
    /// Set while a thread runs it. This may be the current thread, in an outer call.
    pub(super) busy: AtomicBool,
}

/// One step that was tried before failing, and its gain.
///
/// See the example of [`OutOfMemory`](crate::OutOfMemory).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Tried {
    /// The name of the step in the slow allocation path.
    pub step: &'static str,
    /// Bytes that it made usable for the request.
    pub gave: u64,
}
