//! How far the live bytes of a part of a pool may rise: see [`crate::peaks`].

use super::live_bytes::LiveBytes;
use std::sync::atomic::{AtomicU64, Ordering};

/// The two numbers that a part has beside its live bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct PartBounds {
    /// The maximum of the live bytes since the last settlement. Never above the limit.
    pub(crate) highest: LiveBytes,
    limit: LiveBytes,
}

impl PartBounds {
    /// Returns whether the part has live bytes, or had any since the last settlement.
    pub(crate) fn is_in_use(&self, now: LiveBytes) -> bool {
        now != LiveBytes::default() || self.highest != LiveBytes::default()
    }

    /// Settles a part with `now` live bytes: it may rise by `rise`, or without a limit if no other
    /// part is in use. One that is not in use may not rise.
    pub(crate) fn settle(&mut self, now: LiveBytes, rise: Option<LiveBytes>) {
        let limit = match rise {
            _ if !self.is_in_use(now) => LiveBytes::default(),
            None => LiveBytes::MAX,
            Some(rise) => now + rise,
        };
        *self = Self { highest: now, limit };
    }

    /// As [`PartBounds::raise`]. If `now` is above the limit, raises this out of the reserve first,
    /// as far as that has enough. A part that is not in use takes nothing.
    pub(crate) fn extend(&mut self, now: LiveBytes, reserve: &LimitReserve) -> bool {
        if self.raise(now) {
            return true;
        }
        if self.limit != LiveBytes::default()
            && let Some(taken) = reserve.take(now.above(self.limit))
        {
            self.limit += taken;
        }
        self.raise(now)
    }

    /// Sets no limit.
    pub(crate) fn lift(&mut self) {
        self.limit = LiveBytes::MAX;
    }

    /// Raises the highest to `now`. Returns whether `now` is within the limit; nothing changes if
    /// it is not.
    pub(crate) fn raise(&mut self, now: LiveBytes) -> bool {
        let is_within = now.is_within(self.limit);
        if is_within {
            self.highest = self.highest.max(now);
        }
        is_within
    }
}

/// What a part takes at once, in bytes, if there is as much.
const STEP: u64 = 1 << 20;

/// Bytes by which limits may rise before the next settlement.
///
/// A part takes from it under its own lock, and a settlement sets it under the locks of all parts.
#[derive(Default)]
pub(crate) struct LimitReserve {
    live: AtomicU64,
    requested: AtomicU64,
}

impl LimitReserve {
    pub(crate) fn set(&self, bytes: LiveBytes) {
        self.live.store(bytes.live, Ordering::Relaxed);
        self.requested.store(bytes.requested, Ordering::Relaxed);
    }

    /// Takes at least `least` of both numbers. Returns what it took, or `None` if there is less.
    fn take(&self, least: LiveBytes) -> Option<LiveBytes> {
        let live = take(&self.live, least.live)?;
        let Some(requested) = take(&self.requested, least.requested) else {
            self.live.fetch_add(live, Ordering::Relaxed);
            return None;
        };
        Some(LiveBytes { live, requested })
    }
}

/// Takes at least `least` bytes, rounded up to steps as far as there are as many. Returns how many,
/// or `None` if there are fewer.
fn take(from: &AtomicU64, least: u64) -> Option<u64> {
    let taken = |have: u64| least.next_multiple_of(STEP).min(have);
    let left = |have: u64| (have >= least).then(|| have - taken(have));
    from.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).ok().map(taken)
}
