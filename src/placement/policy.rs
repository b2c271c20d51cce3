//! What a request asks of a device, and in which order devices are tried.

use aquifer_core::DeviceId;

/// A request for bytes on some device, with hints that are always honoured.
///
/// ```
/// use aquifer::Place;
/// let place = Place::bytes(6 << 30).min_free(10 << 30).min_compute((9, 0));
/// assert_eq!(place.size(), 6 << 30);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    bytes: u64,
    min_free: u64,
    min_compute: (u32, u32),
    allowed: Option<Vec<DeviceId>>,
    excluded: Vec<DeviceId>,
}

impl Place {
    /// `bytes` on any device.
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, min_free: 0, min_compute: (0, 0), allowed: None, excluded: Vec::new() }
    }

    /// Only where so many bytes are free, those asked for among them.
    #[must_use]
    pub fn min_free(self, bytes: u64) -> Self {
        Self { min_free: bytes, ..self }
    }

    /// Only on devices of this compute capability or later.
    #[must_use]
    pub fn min_compute(self, capability: (u32, u32)) -> Self {
        Self { min_compute: capability, ..self }
    }

    /// Only on these devices.
    #[must_use]
    pub fn only(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { allowed: Some(devices.into_iter().collect()), ..self }
    }

    /// On none of these devices.
    #[must_use]
    pub fn not_on(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { excluded: devices.into_iter().collect(), ..self }
    }

    /// Bytes asked for.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Whether a device satisfies every hint.
    #[must_use]
    pub fn admits(&self, candidate: &Candidate) -> bool {
        candidate.free >= self.bytes.max(self.min_free)
            && candidate.compute_capability >= self.min_compute
            && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(&candidate.device))
            && !self.excluded.contains(&candidate.device)
    }
}

/// A device as a policy sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Its place among the runtime's devices.
    pub index: usize,
    /// Which.
    pub device: DeviceId,
    /// Bytes that its pool could give: what its budget has left and what its caches hold.
    pub free: u64,
    /// Bytes that its pool may have at all.
    pub total: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
}

/// In which order devices that satisfy a request are tried.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Policy {
    /// Each in turn.
    RoundRobin,
    /// The one with the most free bytes first; the lower ordinal among equals.
    #[default]
    MostFree,
}

impl Policy {
    /// Puts the candidates in the order in which they are tried: a pure function of its arguments. `turn` counts
    /// requests, `devices` is how many devices there are in all.
    pub fn order(self, candidates: &mut [Candidate], turn: usize, devices: usize) {
        match self {
            Self::RoundRobin => {
                let devices = devices.max(1);
                let first = turn % devices;
                candidates.sort_by_key(|c| (c.index + devices - first) % devices);
            }
            Self::MostFree => candidates.sort_by_key(|c| (std::cmp::Reverse(c.free), c.index)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(free: &[u64]) -> Vec<Candidate> {
        let candidate = |(index, &free)| Candidate {
            index,
            device: DeviceId(index as u32),
            free,
            total: 100,
            compute_capability: (9, 0),
        };
        free.iter().enumerate().map(candidate).collect()
    }

    fn first(policy: Policy, free: &[u64], turn: usize) -> usize {
        let mut candidates = candidates(free);
        policy.order(&mut candidates, turn, free.len());
        candidates[0].index
    }

    #[test]
    fn round_robin_takes_each_in_turn() {
        let picks: Vec<_> = (0..4).map(|turn| first(Policy::RoundRobin, &[50, 50], turn)).collect();
        assert_eq!(picks, [0, 1, 0, 1]);
    }

    #[test]
    fn round_robin_skips_those_that_are_not_admitted_and_keeps_its_place() {
        let mut some = candidates(&[10, 50, 50]);
        some.retain(|c| Place::bytes(20).admits(c));
        Policy::RoundRobin.order(&mut some, 0, 3);
        assert_eq!(some.iter().map(|c| c.index).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn most_free_takes_the_freest_and_the_lowest_of_equals() {
        assert_eq!(first(Policy::MostFree, &[10, 30, 30], 5), 1);
    }

    #[test]
    fn every_hint_is_honoured() {
        let [small, large] = candidates(&[10, 90])[..] else { unreachable!() };
        assert!(!Place::bytes(20).admits(&small) && Place::bytes(20).admits(&large));
        assert!(!Place::bytes(1).min_free(95).admits(&large));
        assert!(!Place::bytes(1).min_compute((10, 0)).admits(&large));
        assert!(!Place::bytes(1).only([small.device]).admits(&large));
        assert!(!Place::bytes(1).not_on([large.device]).admits(&large));
    }
}
