//! Giving memory back to the driver, and taking it ahead of need.

use super::{
    PoolCore,
    fences::{FenceScope, WaitScope},
};
use crate::{
    base::released::Released,
    stream_cache::{StreamCache, close::retry_teardowns},
};
use aquifer_core::{DriverError, MemoryError, Result, Tag, event::BlockKind};
use aquifer_driver::leftovers;
use aquifer_stream::AfterSynchronize;
use std::sync::{Arc, Weak, atomic::Ordering};

impl PoolCore {
    /// Returns the free memory of features to the driver.
    pub(crate) fn release_free(&self) -> Released {
        let mut released = Released::default();
        self.hooks().for_each(|hook| released += hook.release_free());
        released
    }

    /// Releases free memory until at most `keep` bytes are held, but not the warm reserve. Returns
    /// the bytes.
    ///
    /// # Errors
    /// The driver's first refusal to release memory, after all other memory has been tried. Its
    /// errors in waits and polls, which end the trim.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let mut released = Released::from(self.retry_releases());
        self.hooks().for_each(|hook| hook.release_charges());
        released += self.dedicated.repeat_until_stable(|| {
            self.dedicated.synchronize_untracked()?;
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.wait_unfenceable(&pass, &caches, WaitScope::Abandoned)?;
            let mut released = self.dedicated.reap();
            self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
            if keep < self.held() {
                released += self.release_free();
            }
            Ok(released)
        })?;
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let keep = keep.saturating_sub(self.dedicated.held().now()).max(self.retention.reserve());
        released +=
            self.release_idle(&caches, keep.min(self.retention.bytes_to_retain(live(&caches))));
        // Retry what was refused just now. What is refused again stays charged and is reported.
        let (retried, swept) = self.retry_leftovers();
        released.bytes += retried;
        released
            .add_refusal(swept.map_err(|refused| MemoryError::driver(self.info.device, refused)));
        released.complete()
    }

    /// Retries what the driver has refused: the closing of caches, and releases. Returns the
    /// released bytes. What is refused again is left to the next sweep.
    pub(crate) fn retry_releases(&self) -> u64 {
        retry_teardowns();
        self.retry_leftovers().0
    }

    /// Retries releases that the driver has refused. Returns the bytes, and the driver's first
    /// refusal.
    fn retry_leftovers(&self) -> (u64, Result<(), DriverError>) {
        let before = self.stuck();
        let outcome = leftovers::sweep(&self.driver);
        let released = before.saturating_sub(self.stuck());
        if released > 0 {
            self.counters.reaped.fetch_add(released, Ordering::Relaxed);
            self.report_held(BlockKind::Cached);
        }
        (released, outcome)
    }

    /// Returns the bytes whose release the driver has refused.
    fn stuck(&self) -> u64 {
        self.memory.held().stuck() + self.dedicated.held().stuck()
    }

    /// As [`DevicePool::poll`](crate::DevicePool::poll).
    pub(crate) fn poll(&self) -> Result<()> {
        let rounds = self.dedicated.repeat_until_stable(|| {
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
            self.dedicated.reap_nonblocking();
            self.hooks().try_for_each(|hook| hook.poll())?;
            Ok(Released::default())
        });
        rounds.map(drop)
    }

    /// Trims under memory pressure: the warm reserve is released too. A refused release is no
    /// error: it concerns the refused memory alone, and not the request that needs room.
    ///
    /// # Errors
    /// The driver's in polls, and the loss of the device.
    pub(crate) fn trim_under_pressure(&self, keep: u64) -> Result<Released> {
        let mut released = Released::from(self.retry_releases());
        released += self.dedicated.repeat_until_stable(|| {
            let mut released = self.dedicated.reap();
            released += self.release_free();
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
            Ok(released)
        })?;
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        released += self.release_idle(&caches, keep.saturating_sub(self.dedicated.held().now()));
        released.bytes += self.retry_releases();
        released.device_lost()?;
        Ok(released)
    }

    /// As [`DevicePool::warm`](crate::DevicePool::warm).
    pub(crate) fn warm(&self, bytes: u64) -> Result<u64> {
        let taken = if bytes == 0 {
            0
        } else if !self.config.bypass {
            if let Some(error) = self.refuse_oversized(bytes, Tag::NONE) {
                return Err(error);
            }
            self.memory.warm(bytes).map_err(|error| self.explain_refusal(bytes, error))?
        } else {
            return Err(MemoryError::Unsupported {
                feature: "a warm reserve (cuMemMap, and no bypass)",
            });
        };
        self.retention.set_reserve(bytes);
        Ok(taken)
    }

    /// Enforces the release threshold, if this needs no waiting. A refused release is retried by
    /// the next trim.
    pub(crate) fn enforce_threshold(&self) {
        if self.retention.retains_all() {
            return;
        }
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let keep = self.retention.bytes_to_retain(live(&caches));
        if self.memory.held().now() > keep {
            // What the driver refuses is retried by the next trim.
            let _refused = self.release_idle(&caches, keep);
        }
    }

    /// Enforces the release threshold whenever a thread has waited for a stream of the pool, if
    /// there is a threshold.
    pub(crate) fn release_after_synchronize(self: &Arc<Self>) {
        if !self.retention.retains_all() {
            let hook: Weak<Self> = Arc::downgrade(self);
            self.streams().after_synchronize(hook);
        }
    }

    /// Releases free memory whose work is known to be done from the caches until they hold at most
    /// `keep` bytes.
    fn release_idle(&self, caches: &[&'static StreamCache], keep: u64) -> Released {
        let released = self.memory.trim(caches, keep);
        if released.bytes > 0 {
            self.counters.reaped.fetch_add(released.bytes, Ordering::Relaxed);
            self.report_held(BlockKind::Cached);
        }
        released
    }
}

impl AfterSynchronize for PoolCore {
    fn synchronized(&self) {
        // An error of the driver is left to the next call that returns one.
        let _ = self.poll();
        self.enforce_threshold();
        self.publish();
    }
}

/// Returns the bytes in live blocks of these caches.
fn live(caches: &[&'static StreamCache]) -> u64 {
    caches.iter().map(|cache| cache.with(|s| s.footprint().live)).sum()
}
