//! When the gaps that moves leave are closed.

use crate::base::policy_params::policy;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How many allocations pass before gaps are tried again for which no handle was free.
const PAUSE: u64 = 64;

/// Whether a pool has gaps in its addresses that are worth closing.
///
/// Only where the budget leaves little beyond the high-water mark: elsewhere what is lost beside
/// gaps costs no block its place.
#[derive(Default, Debug)]
pub(crate) struct GapPolicy {
    /// The budget leaves little beyond the high-water mark.
    scant: AtomicBool,
    /// Handles have moved since memory became scant, and have left gaps.
    open: AtomicBool,
    /// Allocations until the next attempt to close gaps, since one has found no handle.
    pause: AtomicU64,
}

impl GapPolicy {
    /// Decides again, where the budget leaves `beyond` bytes more than the high-water mark `peak`.
    pub(super) fn update(&self, beyond: u64, peak: u64) {
        let scant = beyond < peak / policy().gap_part;
        // Written only on change: the flag is read far more often.
        if self.is_scant() != scant {
            self.scant.store(scant, Ordering::Relaxed);
        }
    }

    /// Returns whether the budget leaves so little that gaps matter.
    pub(crate) fn is_scant(&self) -> bool {
        self.scant.load(Ordering::Relaxed)
    }

    /// Records that handles have moved, which leaves gaps. Returns whether gaps are to be closed
    /// from now on, and were not before.
    pub(crate) fn open(&self, moves: u64) -> bool {
        moves > 0 && self.is_scant() && !self.open.swap(true, Ordering::Relaxed)
    }

    /// Records that no gap is left, or that gaps do not matter any more. Returns whether there were
    /// any before.
    pub(crate) fn end(&self) -> bool {
        self.open.swap(false, Ordering::Relaxed)
    }

    /// Returns whether gaps may be closed before a block of `bytes` is allocated. Counts the
    /// allocation.
    pub(crate) fn may_close(&self, bytes: u64) -> bool {
        if bytes <= policy().unbounded_max || !self.open.load(Ordering::Relaxed) {
            return false;
        }
        let pause = self.pause.load(Ordering::Relaxed);
        // Relaxed: two threads may count one allocation.
        self.pause.store(pause.saturating_sub(1), Ordering::Relaxed);
        pause == 0
    }

    /// Returns whether so much of what is held is free that gaps are worth closing.
    pub(crate) fn has_room(free: u64, held: u64) -> bool {
        free >= held / policy().gap_free_part
    }

    /// Postpones the next attempt.
    pub(crate) fn postpone(&self) {
        self.pause.store(PAUSE, Ordering::Relaxed);
    }
}
