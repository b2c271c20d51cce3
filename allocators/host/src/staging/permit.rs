//! Permission to start a transfer.

use super::{StageError, Stager, StagerCore};
use crate::kernel::is_forked_child;
use aquifer_core::{MemoryError, panics::contain};
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll},
    time::Instant,
};

/// Permission to start one more transfer.
///
/// A transfer holds the permit until it is finished. A dropped permit is returned.
///
/// ```
/// # use aquifer::{Runtime, StagerConfig};
/// # let rt = Runtime::builder().or_sim_quietly().build()?;
/// let mut config = StagerConfig::default();
/// config.depth = 1;
/// let stager = rt.stager(0, config)?;
/// // This blocks. `try_permit` and `ready().await` do not, and `permit_until` has a deadline.
/// let permit = stager.permit();
/// assert!(stager.try_permit().is_none());
/// drop(permit);
/// assert!(stager.try_permit().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it goes back when it is dropped"]
pub struct Permit {
    pub(super) shared: Arc<StagerCore>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        if is_forked_child() {
            return;
        }
        let permits = &self.shared.permits;
        let wakers = {
            let mut state = permits.lock();
            state.free += 1;
            debug_assert!(state.free <= self.shared.config.depth, "more permits than there are");
            std::mem::take(&mut state.wakers)
        };
        permits.changed.notify_one();
        // Wakers run foreign code. A panic in one must not keep the others from being woken.
        for waker in wakers {
            contain(|| waker.wake());
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").finish_non_exhaustive()
    }
}

impl Stager {
    /// Returns a permit for one more transfer. Blocks while
    /// [`StagerConfig::depth`](super::StagerConfig::depth) transfers are in flight.
    ///
    /// In a forked child process a permit is always available, and transfers that use it are
    /// refused.
    pub fn permit(&self) -> Permit {
        if is_forked_child() {
            return Permit { shared: self.shared.clone() };
        }
        let permits = &self.shared.permits;
        let mut state = permits.lock();
        while state.free == 0 {
            state = permits.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.free -= 1;
        Permit { shared: self.shared.clone() }
    }

    /// Returns a permit if one is available. Never blocks.
    #[must_use]
    pub fn try_permit(&self) -> Option<Permit> {
        if is_forked_child() {
            return Some(self.permit());
        }
        let mut state = self.shared.permits.lock();
        state.free = state.free.checked_sub(1)?;
        Some(Permit { shared: self.shared.clone() })
    }

    /// Waits for a permit until `deadline`.
    ///
    /// # Errors
    /// [`MemoryError::TimedOut`].
    pub fn permit_until(&self, deadline: Instant) -> Result<Permit, StageError> {
        if is_forked_child() {
            return Ok(self.permit());
        }
        let permits = &self.shared.permits;
        let mut state = permits.lock();
        while state.free == 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(MemoryError::TimedOut.into());
            }
            state =
                permits.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.free -= 1;
        Ok(Permit { shared: self.shared.clone() })
    }

    /// Returns a future that waits for a permit, for any runtime. If it is dropped early, it has
    /// not taken a permit.
    pub fn ready(&self) -> PermitFuture<'_> {
        PermitFuture { stager: self }
    }
}

/// A future that resolves to a [`Permit`]. See [`Stager::ready`].
#[must_use = "a future does nothing unless it is polled"]
#[derive(Debug)]
pub struct PermitFuture<'a> {
    stager: &'a Stager,
}

impl Future for PermitFuture<'_> {
    type Output = Permit;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Permit> {
        if is_forked_child() {
            return Poll::Ready(self.stager.permit());
        }
        let permits = &self.stager.shared.permits;
        let mut state = permits.lock();
        if let Some(left) = state.free.checked_sub(1) {
            state.free = left;
            drop(state);
            return Poll::Ready(Permit { shared: self.stager.shared.clone() });
        }
        let waker = context.waker();
        if !state.wakers.iter().any(|known| known.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        Poll::Pending
    }
}
