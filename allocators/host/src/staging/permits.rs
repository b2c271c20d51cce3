//! The number of permits, which bounds the number of transfers in flight.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
};

/// The permits of one stager.
pub(super) struct Permits {
    pub(super) state: Mutex<PermitState>,
    /// Signalled when a permit is returned.
    pub(super) changed: Condvar,
}

/// The permits that are free, and the tasks that wait for one.
pub(super) struct PermitState {
    pub(super) free: usize,
    pub(super) wakers: Vec<Waker>,
}

impl Permits {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            state: Mutex::new(PermitState { free: depth, wakers: Vec::new() }),
            changed: Condvar::new(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PermitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
