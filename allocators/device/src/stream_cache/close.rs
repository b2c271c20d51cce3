//! Closing the caches of a pool that ends.

use super::{
    CacheHost, StreamCache,
    pending::CollectMode,
    retire::{DEFERRED, DeferredTeardown, defer_teardown},
};
use crate::base::released;
use aquifer_core::MemoryError;
use aquifer_stream::{LastUse, Timeline};
use std::{
    mem,
    sync::{Arc, PoisonError},
};

/// Drops values whose graphs the driver has released, and retries the closing of caches that the
/// driver has refused.
pub(crate) fn sweep_released() {
    retry_teardowns();
    released::sweep();
}

/// Retries the closing of caches that the driver refused. What it refuses again is kept for the
/// next call.
fn retry_teardowns() {
    let deferred = mem::take(&mut *DEFERRED.lock().unwrap_or_else(PoisonError::into_inner));
    for one in deferred {
        match one {
            DeferredTeardown::Close(cache, pool) => cache.close(&pool),
            DeferredTeardown::Finish(cache, retired) => cache.finish(*retired),
        }
    }
}

/// A cache of a closed pool, registered to be notified when a use of a pending block ends.
struct CloseOnLastUse(&'static StreamCache, Arc<dyn CacheHost>);

impl LastUse for CloseOnLastUse {
    fn ended(&self) {
        self.0.close(&self.1);
    }
}

impl StreamCache {
    /// Closes the cache if it is still bound to `pool`: it retires when its last block has been
    /// returned, perhaps now.
    pub(crate) fn close(&'static self, pool: &Arc<dyn CacheHost>) {
        // Open uses cannot be waited for. Their blocks and this cache stay until the last open use
        // ends and notifies this object. By then another use's end may have recycled the cache for
        // another pool, hence the check.
        let listener: Arc<dyn LastUse> = Arc::new(CloseOnLastUse(self, pool.clone()));
        let serves = self.with(|s| {
            let serves = s.is_bound_to(pool);
            for pending in s.pending.iter().filter(|_| serves) {
                let _open = pending.uses.tell(&listener);
            }
            serves
        });
        if !serves {
            return;
        }
        // The memory of a pending block cannot be released while other streams use it, so their
        // uses are waited for.
        loop {
            match self.wait_for_pending(None) {
                Ok(true) => {}
                Ok(false) => break,
                Err(MemoryError::DeviceLost { .. }) => {
                    // After the loss of the device no work runs on it.
                    let users: Vec<Arc<Timeline>> = self.with(|s| {
                        s.pending
                            .iter()
                            .flat_map(|p| p.uses.iter())
                            .map(|u| u.on().clone())
                            .collect()
                    });
                    users.iter().for_each(|user| user.abandon());
                    let _ = self.collect_pending(CollectMode::Completed);
                    break;
                }
                Err(MemoryError::Driver(_)) => {
                    defer_teardown(DeferredTeardown::Close(self, pool.clone()));
                    break;
                }
                Err(_) => break,
            }
        }
        let retired = self.with(|s| {
            if !s.is_bound_to(pool) {
                return None;
            }
            if let Some(binding) = &mut s.binding {
                binding.open = false;
            }
            s.needs_follow_up = true;
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
    }
}
