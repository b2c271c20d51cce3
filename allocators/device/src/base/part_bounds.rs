//! How far the live bytes of a part of a pool may rise: see [`crate::peaks`].

use super::usage::LiveBytes;
use std::sync::atomic::{AtomicU64, Ordering};

/// By how many bytes the sum of the limits may exceed the known peak for each part in use.
pub(crate) const SLACK: u64 = 1 << 20;

/// The part of the reserve by which a limit exceeds the live bytes after a change.
const RISE_PART: u64 = 32;

/// What bounds the live bytes of a part.
#[derive(Clone, Copy, Default)]
pub(crate) struct PartBounds {
    window: LiveWindow,
    /// The maximum of the live bytes since the last settlement.
    pub(crate) highest: LiveBytes,
    limit: LiveBytes,
}

/// The live bytes at which an allocation changes no bounds: at least `lowest`, and at most the
/// highest and the limit.
#[derive(Clone, Copy, Default)]
struct LiveWindow {
    lowest: u64,
    /// The maximum of live bytes, less `lowest`.
    width: u64,
    /// The maximum of requested bytes.
    requested: u64,
}

impl PartBounds {
    /// Returns whether the part has live bytes, or had any since the last settlement.
    pub(crate) fn is_in_use(&self, now: LiveBytes) -> bool {
        now != LiveBytes::default() || self.highest != LiveBytes::default()
    }

    /// Settles a part with `now` live bytes: it may rise by `rise`, or without a limit if no other
    /// part is in use. One that is not in use may not rise.
    pub(crate) fn settle(&mut self, now: LiveBytes, rise: Option<LiveBytes>) {
        let (limit, lowest) = match rise {
            _ if !self.is_in_use(now) => (LiveBytes::default(), 0),
            None => (LiveBytes::MAX, 0),
            Some(rise) => (now + rise, now.live.saturating_sub(rise.live)),
        };
        (self.highest, self.limit) = (now, limit);
        self.set_window(lowest);
        debug_assert!(self.contains(now), "a settled part is outside of its window");
    }

    /// Sets no limit.
    pub(crate) fn lift(&mut self) {
        self.limit = LiveBytes::MAX;
        self.set_window(0);
    }

    /// Returns whether a part with `now` live bytes after an allocation has nothing to change here.
    #[inline]
    pub(crate) fn contains(&self, now: LiveBytes) -> bool {
        let LiveWindow { lowest, width, requested } = self.window;
        now.live.wrapping_sub(lowest) <= width && now.requested <= requested
    }

    /// Returns whether a part with `now` live bytes after a free should give bytes of its limit.
    #[inline]
    pub(crate) fn has_surplus(&self, now: LiveBytes) -> bool {
        now.live < self.window.lowest
    }

    /// Takes into account that the part has `now` live bytes. Gives bytes of the limit to the
    /// reserve if the part has fallen far below it, and raises the limit out of the reserve if the
    /// part is above it. Returns whether it is within the limit then. If not, the highest stays.
    #[cold]
    pub(crate) fn admit(&mut self, now: LiveBytes, reserve: &LimitReserve) -> bool {
        let mut lowest = self.window.lowest;
        let is_low = self.has_surplus(now);
        if is_low || !now.is_within(self.limit) {
            let rise = reserve.rise();
            lowest = now.live.saturating_sub(rise.live);
            let wanted = now + rise;
            if is_low {
                let given = self.limit.above(wanted);
                self.limit -= given;
                reserve.give(given);
            }
            if !now.is_within(self.limit)
                && let Some(taken) = reserve.take(now.above(self.limit), wanted.above(self.limit))
            {
                self.limit += taken;
            }
        }
        let is_within = now.is_within(self.limit);
        if is_within {
            self.highest = self.highest.max(now);
        }
        self.set_window(lowest);
        debug_assert!(
            !is_within || self.contains(now),
            "an admitted part is outside of its window"
        );
        debug_assert!(!self.has_surplus(now), "a part keeps what it should give");
        is_within
    }

    fn set_window(&mut self, lowest: u64) {
        let most = self.highest.min(self.limit);
        // Without live bytes the window is `0..=0`.
        let lowest = lowest.min(most.live);
        self.window = LiveWindow { lowest, width: most.live - lowest, requested: most.requested };
    }
}

/// Bytes by which limits may rise before the next settlement.
///
/// A part changes it under its own lock, and a settlement sets it under the locks of all parts. A
/// part lowers its limit before it gives bytes, and raises it after it has taken them. So limits
/// and reserve never have more together than a settlement gave them.
#[derive(Default)]
pub(crate) struct LimitReserve {
    live: AtomicU64,
    requested: AtomicU64,
}

impl LimitReserve {
    /// Sets what there is.
    pub(crate) fn set(&self, bytes: LiveBytes) {
        self.live.store(bytes.live, Ordering::Release);
        self.requested.store(bytes.requested, Ordering::Release);
    }

    /// Returns by how much a limit should exceed the live bytes of its part: the less there is, the
    /// less.
    fn rise(&self) -> LiveBytes {
        let rise = |bytes: &AtomicU64| (bytes.load(Ordering::Acquire) / RISE_PART).max(SLACK / 2);
        LiveBytes { live: rise(&self.live), requested: rise(&self.requested) }
    }

    fn give(&self, bytes: LiveBytes) {
        self.live.fetch_add(bytes.live, Ordering::AcqRel);
        self.requested.fetch_add(bytes.requested, Ordering::AcqRel);
    }

    /// Takes `wanted` of both numbers, or what there is, but at least `least`. Returns what it
    /// took, or `None` if there is less.
    fn take(&self, least: LiveBytes, wanted: LiveBytes) -> Option<LiveBytes> {
        let live = take(&self.live, least.live, wanted.live)?;
        let Some(requested) = take(&self.requested, least.requested, wanted.requested) else {
            self.give(LiveBytes { live, requested: 0 });
            return None;
        };
        Some(LiveBytes { live, requested })
    }
}

/// Takes `wanted` bytes, or what there is, but at least `least`. Returns how many, or `None` if
/// there are fewer.
fn take(from: &AtomicU64, least: u64, wanted: u64) -> Option<u64> {
    debug_assert!(least <= wanted, "takes less than it needs");
    let left = |have: u64| (have >= least).then(|| have.saturating_sub(wanted));
    let have = from.fetch_update(Ordering::AcqRel, Ordering::Acquire, left).ok()?;
    Some(wanted.min(have))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_core::random::SplitMix64;

    fn both(bytes: u64) -> LiveBytes {
        LiveBytes { live: bytes, requested: bytes }
    }

    /// Returns parts with a limit of 0, and what they can take.
    fn parts_and_reserve(parts: usize, reserve: u64) -> (Vec<PartBounds>, LimitReserve) {
        let shared = LimitReserve::default();
        shared.set(both(reserve));
        (vec![PartBounds::default(); parts], shared)
    }

    #[test]
    fn limits_and_reserve_have_what_a_settlement_gave_them() {
        for seed in 0..32 {
            let mut random = SplitMix64::new(seed);
            let mut below = |end: u64| random.next_u64() % end;
            let given = below(64 * SLACK);
            let (mut parts, reserve) = parts_and_reserve(8, given);
            let mut live = [LiveBytes::default(); 8];
            for step in 0..2000 {
                let at = below(8) as usize;
                let (part, now) = (&mut parts[at], &mut live[at]);
                if below(5) < 3 {
                    let bits = 12 + below(12);
                    let size = 1 + below(1 << bits);
                    let new =
                        *now + LiveBytes { live: size.next_multiple_of(512), requested: size };
                    let fits = part.contains(new) || part.admit(new, &reserve);
                    // A refused block is not handed out.
                    *now = if fits { new } else { *now };
                } else {
                    *now = now.map(|bytes| bytes / 2);
                    if part.has_surplus(*now) {
                        assert!(part.admit(*now, &reserve), "seed {seed}, step {step}");
                    }
                }
                assert!(now.is_within(part.limit), "seed {seed}, step {step}");
                let mut sum = LiveBytes {
                    live: reserve.live.load(Ordering::Acquire),
                    requested: reserve.requested.load(Ordering::Acquire),
                };
                parts.iter().for_each(|part| sum += part.limit);
                assert_eq!(sum, both(given), "seed {seed}, step {step}");
            }
        }
    }

    #[test]
    fn a_part_that_falls_gives_so_that_another_one_rises() {
        let (mut parts, reserve) = parts_and_reserve(2, 64 * SLACK);
        let (most, some) = (both(60 * SLACK), both(SLACK));
        assert!(parts[0].admit(most, &reserve));
        assert!(parts[1].admit(some, &reserve));
        assert!(!parts[1].admit(most, &reserve));
        assert!(parts[0].has_surplus(some) && parts[0].admit(some, &reserve));
        assert!(parts[1].admit(most, &reserve));
        assert!(!parts[0].admit(most, &reserve));
    }
}
