//! What a pool is opened with, and the holders of memory that it can take back: its own idle ones,
//! and others under its budget.

use super::{PinnedConfig, thread::InsidePool};
use crate::region::{Cause, Host, RegionError};
use aquifer_core::{
    Action, Budget, MemoryError, Tag,
    budget::{HookRegistration, Reclaim},
    error::Tried,
    event::MemoryLocation,
    scratch::{Bump, List, Scratch, list},
};
use aquifer_status::{PoolSlot, tightest_limit};
use std::{
    fmt,
    io::{self, Write},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

/// A holder of idle blocks of a pool.
pub(crate) trait IdleHolder: Send + Sync {
    /// Returns the bytes of idle blocks. Must not block.
    fn idle_bytes(&self) -> u64;

    /// Frees idle blocks. Must not allocate from the pool. Returns their bytes.
    fn release_idle(&self) -> u64;
}

/// A pool's registration with its budget.
pub(super) struct BudgetRegistration {
    pub(super) registration: HookRegistration,
    /// Keeps the reclaimer alive.
    pub(super) _reclaimer: Arc<dyn Reclaim>,
}

impl fmt::Debug for BudgetRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registration.fmt(f)
    }
}

/// State that is fixed when the pool is made.
#[derive(Debug)]
pub(super) struct PoolContext {
    pub(super) host: Host,
    pub(super) budget: Budget,
    pub(super) config: PinnedConfig,
    /// Whether an observer is notified of the host's accesses to pinned memory.
    pub(super) observed: bool,
    pub(super) registration: OnceLock<BudgetRegistration>,
    /// Holders of idle blocks that the pool can take back.
    pub(super) idle_holders: Mutex<Vec<Weak<dyn IdleHolder>>>,
    /// Scratch memory of reclaim passes.
    pub(super) scratch: Scratch,
    /// What other processes are shown.
    pub(super) status: PoolSlot,
    /// The limit that the recorder was told last: `u64::MAX` for none. No lock, since a child of a
    /// fork would wait for one that another thread of its parent held.
    pub(super) recorded_limit: AtomicU64,
    /// Whether a refusal was written to the standard error stream.
    pub(super) has_explained: AtomicBool,
}

impl PoolContext {
    /// Writes the first refusal to a collection to the standard error stream: the collection may
    /// end the process, with a message that has only the size.
    pub(super) fn explain_once(&self, refused: &MemoryError) {
        if !self.has_explained.swap(true, Ordering::Relaxed) {
            // The memory of the text must not come from this pool.
            let _inside = InsidePool::enter();
            let mut stderr = io::stderr().lock();
            // There is no other place to report that this failed.
            let _ = writeln!(
                stderr,
                "aquifer: a pinned allocation was refused (told once; `try_reserve` reports each refusal): {refused}"
            );
        }
    }

    pub(super) fn place(&self) -> MemoryLocation {
        MemoryLocation::Host(self.config.node.map(|node| node.0))
    }

    /// Returns the machine whose driver pins the pool's memory, if there is one.
    pub(super) fn machine(&self) -> Option<u64> {
        self.host.reach.as_ref().map(|reach| reach.driver.machine())
    }

    /// Records the limit of the pool's memory if it has changed since it was last recorded. Called
    /// when the pool is opened, and by growth, failures and trims, with no lock held.
    pub(super) fn report_limit(&self) {
        let Some(recorder) = &self.config.recorder else { return };
        let limit = tightest_limit(&self.budget).unwrap_or(u64::MAX);
        // Where a thread that read an older limit comes second, the next call records it again.
        if self.recorded_limit.swap(limit, Ordering::Relaxed) != limit {
            let event = recorder.event(Action::Limit, self.place(), 0, 0, limit, Tag::NONE);
            recorder.record(recorder.ticket(), event);
        }
    }

    /// Returns the idle holders. Their methods must be called outside the lock.
    pub(super) fn idle_holders<'s>(&self, bump: &'s Bump) -> List<'s, Arc<dyn IdleHolder>> {
        // The list's memory must not come from this pool.
        let _inside = InsidePool::enter();
        let all = self.idle_holders.lock().unwrap_or_else(PoisonError::into_inner);
        list(bump, all.iter().filter_map(Weak::upgrade))
    }

    /// Makes all idle holders free their idle blocks. Returns the bytes freed.
    pub(super) fn reclaim_idle(&self) -> u64 {
        self.idle_holders(&self.scratch.begin()).iter().map(|holder| holder.release_idle()).sum()
    }

    /// Retries `grow` while a budget refuses it and other pools below that budget give memory back.
    pub(super) fn reclaim_from_others<T>(
        &self,
        refused: RegionError,
        deadline: Instant,
        tried: &mut Vec<Tried>,
        mut grow: impl FnMut() -> Result<T, RegionError>,
    ) -> Result<T, RegionError> {
        let mut asking = self.budget.asking(self.registration.get().map(|held| &held.registration));
        let mut error = refused;
        while let Cause::Budget(refused) = &error.cause {
            let Some(asked) = asking.for_charge(refused.requested, Some(deadline)) else { break };
            match tried.iter_mut().find(|earlier| earlier.step == asked.step) {
                Some(earlier) => earlier.gave += asked.gave,
                None => tried.push(asked),
            }
            match grow() {
                Ok(grown) => return Ok(grown),
                Err(again) => error = again,
            }
        }
        Err(error)
    }
}
