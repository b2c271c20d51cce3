//! The true peaks of a pool, beside those that it reports.

use aquifer_core::PoolStats;
use aquifer_device::DevicePool;
use std::cell::Cell;

/// The error of a reported peak for each stream of several, in bytes.
const SLACK: u64 = 1 << 20;

/// After how many observations the peaks are reset.
const RESET_AFTER: u64 = 48;

/// The true peaks of a pool whose live bytes are known after every operation. An operation that has
/// more in between [notes](TruePeaks::note) it.
#[derive(Default)]
pub(crate) struct TruePeaks {
    live: Cell<u64>,
    requested: Cell<u64>,
    observations: Cell<u64>,
}

impl TruePeaks {
    /// Notes live bytes in the middle of an operation.
    pub(crate) fn note(&self, live: u64) {
        self.live.set(self.live.get().max(live));
    }

    /// Checks what a pool of `streams` streams reports after an operation. The model knows its
    /// live bytes, its requested bytes, or both. Resets the peaks from time to time.
    ///
    /// # Panics
    /// If a reported peak is below the true one, or above it by more than the error that is
    /// promised.
    pub(crate) fn check(
        &self,
        pool: &DevicePool,
        stats: &PoolStats,
        streams: usize,
        (live, requested): (Option<u64>, Option<u64>),
    ) {
        let error = if streams > 1 { streams as u64 * SLACK } else { 0 };
        let known = [
            (&self.live, live, stats.peak_live),
            (&self.requested, requested, stats.peak_requested),
        ];
        for (peak, now, told) in known {
            if let Some(now) = now {
                peak.set(peak.get().max(now));
                let bounds = peak.get()..=peak.get() + error;
                assert!(bounds.contains(&told), "{told} is no peak in {bounds:?}: {stats:?}");
            }
        }
        self.observations.set(self.observations.get() + 1);
        if self.observations.get().is_multiple_of(RESET_AFTER) {
            pool.reset_peaks();
            self.live.set(live.unwrap_or(0));
            self.requested.set(requested.unwrap_or(0));
        }
    }
}
