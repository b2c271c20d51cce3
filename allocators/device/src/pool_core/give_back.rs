//! Giving memory back to the driver.

use super::{
    PoolCore,
    fences::{FenceScope, WaitScope},
};
use crate::stream_cache::{StreamCache, close::sweep_released};
use aquifer_core::{Action, DriverError, MemoryError, Result, Tag};
use aquifer_driver::leftovers;
use std::sync::atomic::Ordering;

impl PoolCore {
    /// Returns the free memory of features to the driver. Returns the bytes.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn release_free(&self) -> Result<u64> {
        self.hooks().try_fold(0, |sum, hook| Ok(sum + hook.release_free()?))
    }

    /// Releases free memory until at most `keep` bytes are held, but not the warm reserve.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let mut released = self.retry_releases();
        self.hooks().for_each(|hook| hook.release_charges());
        let mut excess = false;
        released += self.dedicated.repeat_until_stable(|| {
            self.dedicated.synchronize_untracked()?;
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.wait_unfenceable(&pass, &caches, WaitScope::Abandoned)?;
            let released = self.dedicated.reap()?;
            self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
            excess |= keep < self.held();
            Ok(released + if excess { self.release_free()? } else { 0 })
        })?;
        if excess {
            self.retention.reset();
        }
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let keep = keep.saturating_sub(self.dedicated.held().now()).max(self.retention.reserve());
        let from_caches =
            self.release_idle(&caches, keep.min(self.retention.bytes_to_retain(live(&caches))))?;
        if !excess {
            self.retention.record_release(from_caches);
        }
        // Retry what was refused just now. What is refused again stays charged and is reported.
        let (retried, swept) = self.retry_leftovers();
        released += retried;
        swept.map_err(|refused| MemoryError::driver(self.info.device, refused))?;
        Ok(released + from_caches)
    }

    /// Drops what drivers keep for graphs that no longer exist, and retries releases that the
    /// driver has refused. Returns the released bytes. What is refused again is left to the next
    /// sweep.
    pub(crate) fn retry_releases(&self) -> u64 {
        sweep_released();
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
            self.report_pool(Action::Reap, released, Tag::NONE);
        }
        (released, outcome)
    }

    /// Returns the bytes whose release the driver has refused.
    fn stuck(&self) -> u64 {
        self.physical.held().stuck() + self.dedicated.held().stuck()
    }

    /// As [`DevicePool::poll`](crate::DevicePool::poll).
    pub(crate) fn poll(&self) -> Result<()> {
        let rounds = self.dedicated.repeat_until_stable(|| {
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
            self.dedicated.reap_nonblocking();
            self.hooks().try_for_each(|hook| hook.poll())?;
            Ok(0)
        });
        rounds.map(drop)
    }

    /// Trims under memory pressure: the warm reserve is released too.
    pub(crate) fn trim_under_pressure(&self, keep: u64) -> Result<u64> {
        let mut released = self.retry_releases();
        released += self.dedicated.repeat_until_stable(|| {
            let released = self.dedicated.reap()? + self.release_free()?;
            let pass = self.scratch.begin();
            let caches = self.caches(&pass);
            self.poll_fences(&pass, &caches, FenceScope::FreeAndPending)?;
            Ok(released)
        })?;
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let from_caches =
            self.release_idle(&caches, keep.saturating_sub(self.dedicated.held().now()))?;
        Ok(released + from_caches + self.retry_releases())
    }

    /// Enforces the release threshold, if this needs no waiting. A refused release is retried by
    /// the next trim.
    pub(crate) fn enforce_threshold(&self) {
        if !self.physical.is_mapped() || self.retention.retains_all() {
            return;
        }
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let keep = self.retention.bytes_to_retain(live(&caches));
        if self.physical.held().now() > keep {
            self.retention.record_release(self.release_idle(&caches, keep).unwrap_or(0));
        }
    }

    /// Releases free memory whose work is known to be done from the caches until they hold at most
    /// `keep` bytes.
    fn release_idle(&self, caches: &[&'static StreamCache], keep: u64) -> Result<u64> {
        let released = self.physical.trim(caches, keep)?;
        if released > 0 {
            self.counters.reaped.fetch_add(released, Ordering::Relaxed);
            self.report_pool(Action::Reap, released, Tag::NONE);
        }
        Ok(released)
    }
}

/// Returns the bytes in live blocks of these caches.
fn live(caches: &[&'static StreamCache]) -> u64 {
    caches.iter().map(|cache| cache.with(|s| s.footprint().live)).sum()
}
