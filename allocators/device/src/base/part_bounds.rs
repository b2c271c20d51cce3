//! How far the live bytes of a part of a pool may rise: see [`crate::peaks`].

use super::live_bytes::LiveBytes;

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

    /// Settles a part with `now` live bytes: it may rise by `share`, or by `least` if that is more,
    /// or without a limit if no other part is in use. One that is not in use may not rise.
    pub(crate) fn settle(&mut self, now: LiveBytes, share: Option<LiveBytes>, least: u64) {
        let limit = match share {
            _ if !self.is_in_use(now) => LiveBytes::default(),
            None => LiveBytes::MAX,
            Some(share) => now + share.map(|bytes| bytes.max(least)),
        };
        *self = Self { highest: now, limit };
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
