//! Permission to start a transfer.

use super::{Stager, StagerCore};
use crate::kernel::is_forked_child;
use aquifer_core::panics::contain;
use std::{
    fmt,
    future::{self, Future},
    sync::{Arc, PoisonError},
    task::{Poll, Waker},
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
/// // This blocks. `try_permit` and `ready().await` do not.
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
        let permits = &self.shared.permits;
        if !is_forked_child() {
            let mut state = permits.lock();
            while state.free == 0 {
                state = permits.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.free -= 1;
        }
        Permit { shared: self.shared.clone() }
    }

    /// Returns a permit if one is available. Never blocks.
    #[must_use]
    pub fn try_permit(&self) -> Option<Permit> {
        self.take_permit(None)
    }

    /// Takes a permit, or has `waker` woken when one is returned.
    fn take_permit(&self, waker: Option<&Waker>) -> Option<Permit> {
        if !is_forked_child() {
            let mut state = self.shared.permits.lock();
            let Some(left) = state.free.checked_sub(1) else {
                let known =
                    |waker: &&Waker| state.wakers.iter().any(|known| known.will_wake(waker));
                let new = waker.filter(|waker| !known(waker)).cloned();
                state.wakers.extend(new);
                return None;
            };
            state.free = left;
        }
        Some(Permit { shared: self.shared.clone() })
    }

    /// Returns a future that waits for a permit, for any runtime. If it is dropped early, it has
    /// not taken a permit.
    pub fn ready(&self) -> impl Future<Output = Permit> + Send + '_ {
        future::poll_fn(|context| {
            self.take_permit(Some(context.waker())).map_or(Poll::Pending, Poll::Ready)
        })
    }
}
