//! Policies choose among the devices that satisfy a request. They are pure functions of the
//! devices' figures.

use super::{Candidate, PlaceError, PlacementRequest, hash};
use aquifer_core::DeviceId;
use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

/// The choice among the devices that satisfy a request.
///
/// Each policy is a pure function of the devices' figures and, for policies that take turns, of the
/// number of earlier requests. Ties go to the lowest index.
#[derive(Clone, Default, Debug)]
#[non_exhaustive]
pub enum Policy {
    /// Each device in turn.
    RoundRobin,
    /// The device with the smallest used share.
    LeastLoaded,
    /// The device with the most free bytes.
    #[default]
    MostFree,
    /// The device with the fewest free bytes that suffice, so that large requests find room later.
    BestFit,
    /// The device with the highest compute capability; of several the one with the most free bytes.
    BestCompute,
    /// In turn, by weight: see [`Policy::weighted`].
    Weighted(Weights),
    /// The device to which the request's [key](PlacementRequest::key) is mapped or, if that is not
    /// admitted, the next device for the key. Requests without a key go to the device with the most
    /// free bytes.
    Affinity,
    /// The device nearest to what the request is to be [near](PlacementRequest::near); of several
    /// the one with the most free bytes.
    Near,
    /// A function of the program: see [`Policy::custom`].
    Custom(Custom),
}

/// Weights of devices, for [`Policy::Weighted`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Weights(Arc<BTreeMap<DeviceId, u32>>);

impl Weights {
    /// Returns the weight of a device, 1 if none was set.
    #[must_use]
    pub fn of(&self, device: DeviceId) -> u32 {
        self.0.get(&device).copied().unwrap_or(1)
    }

    /// Lays the weights end to end and returns the position of the device at the turn's point.
    /// Points are multiples of the golden ratio, so every interval gets its share of the points in
    /// any run of turns (Weyl).
    fn position(&self, devices: &[Candidate<'_>], turn: u64) -> usize {
        let mut end = 0;
        let ends: Vec<u64> = devices
            .iter()
            .map(|candidate| {
                end += u64::from(self.of(candidate.device));
                end
            })
            .collect();
        let point = ((u128::from(turn.wrapping_mul(GOLDEN)) * u128::from(end)) >> 64) as u64;
        // Past the end only if all weights are 0.
        ends.partition_point(|&end| end <= point) % devices.len().max(1)
    }
}

/// 2⁶⁴ divided by the golden ratio: the constant whose multiples modulo 1 are spread most evenly.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

type OrderFn = dyn Fn(&PlacementRequest, &[Candidate<'_>]) -> Vec<DeviceId> + Send + Sync;

/// A custom policy of the program, for [`Policy::Custom`].
#[derive(Clone)]
pub struct Custom {
    pub(super) name: &'static str,
    order: Arc<OrderFn>,
}

impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Custom").field(&self.name).finish()
    }
}

impl Custom {
    /// Returns the devices in the order in which they are to be tried. Those that are not
    /// candidates, and repeated ones, are skipped.
    fn order<'a>(
        &self,
        place: &PlacementRequest,
        candidates: &[Candidate<'a>],
    ) -> Result<Vec<Candidate<'a>>, PlaceError> {
        let named = catch_unwind(AssertUnwindSafe(|| (self.order)(place, candidates)))
            .map_err(|_| PlaceError::PolicyPanicked { policy: self.name })?;
        let mut order = Vec::with_capacity(candidates.len());
        for device in named {
            let known = candidates.iter().find(|candidate| candidate.device == device);
            order.extend(known.filter(|known| !order.contains(*known)));
        }
        Ok(order)
    }
}

impl Policy {
    /// Creates a policy that takes devices in turn, in proportion to their weights. Of a device
    /// with weight 3 and one with weight 1, the first is chosen three times of four, and any run of
    /// requests is close to that ratio. A device that refuses is followed by the next ones. A
    /// device that is not listed has weight 1. A device with weight 0 is chosen only if no other
    /// has room.
    #[must_use]
    pub fn weighted(weights: impl IntoIterator<Item = (DeviceId, u32)>) -> Self {
        Self::Weighted(Weights(Arc::new(weights.into_iter().collect())))
    }

    /// Creates a policy from a pure function of the program. The function maps the request and the
    /// devices that satisfy it to the order in which devices are to be tried.
    ///
    /// The result is validated: devices that are unknown, do not satisfy the request or are
    /// repeated are skipped. If the function panics, the request fails with
    /// [`PlaceError::PolicyPanicked`].
    ///
    /// ```
    /// use aquifer::{PlacementRequest, Policy, Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(3).symbolic().driver())?;
    /// let last = Policy::custom("last", |_, devices| devices.iter().rev().map(|d| d.device).collect());
    /// assert_eq!(rt.placer(last).place(&PlacementRequest::bytes(1))?.device().0, 2);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn custom(
        name: &'static str,
        order: impl Fn(&PlacementRequest, &[Candidate<'_>]) -> Vec<DeviceId> + Send + Sync + 'static,
    ) -> Self {
        Self::Custom(Custom { name, order: Arc::new(order) })
    }

    /// Returns the index of the chosen device among `candidates`, which satisfy `place`. `turn` is
    /// the number of requests placed before, and `devices` the number of all devices. Returns
    /// `None` if there are no candidates, or if a custom function names none of them or panics.
    #[must_use]
    pub fn pick(
        &self,
        place: &PlacementRequest,
        candidates: &[Candidate<'_>],
        turn: u64,
        devices: usize,
    ) -> Option<usize> {
        let ranked = self.ranked(place, candidates.to_vec(), turn, devices).ok()?;
        ranked.first().map(|pick| pick.index)
    }

    /// Returns whether the policy depends on the number of earlier requests.
    pub(super) fn takes_turns(&self) -> bool {
        matches!(self, Self::RoundRobin | Self::Weighted(_))
    }

    /// Returns `devices`, which satisfy `place`, in the order in which they are to be tried.
    ///
    /// # Errors
    /// [`PlaceError::PolicyPanicked`].
    pub(super) fn ranked<'a>(
        &self,
        place: &PlacementRequest,
        mut devices: Vec<Candidate<'a>>,
        turn: u64,
        count: usize,
    ) -> Result<Vec<Candidate<'a>>, PlaceError> {
        match self {
            Self::Custom(custom) => return custom.order(place, &devices),
            Self::Weighted(weights) => {
                let first = weights.position(&devices, turn);
                devices.rotate_left(first);
                devices.sort_by_key(|candidate| weights.of(candidate.device) == 0);
            }
            _ => devices.sort_by(|a, b| self.compare(place, turn, count, a, b)),
        }
        Ok(devices)
    }

    /// Compares two of this many devices: the lesser one is tried first.
    fn compare(
        &self,
        place: &PlacementRequest,
        turn: u64,
        devices: usize,
        a: &Candidate<'_>,
        b: &Candidate<'_>,
    ) -> Ordering {
        let most_free = b.free.cmp(&a.free);
        match self {
            Self::RoundRobin => {
                let first = (turn % devices.max(1) as u64) as usize;
                let place = |at: usize| (at + devices - first) % devices.max(1);
                place(a.index).cmp(&place(b.index))
            }
            Self::LeastLoaded => {
                // a/b < c/d where a·d < c·b. Bytes that are not free count as used.
                let used = |c: &Candidate<'_>| u128::from(c.total.saturating_sub(c.free));
                let total = |c: &Candidate<'_>| u128::from(c.total.max(1));
                (used(a) * total(b)).cmp(&(used(b) * total(a)))
            }
            Self::MostFree => most_free,
            Self::BestFit => a.free.cmp(&b.free),
            Self::BestCompute => b.compute_capability.cmp(&a.compute_capability).then(most_free),
            Self::Affinity => place.requested_key().map_or(most_free, |key| {
                hash::score(key, b.device).cmp(&hash::score(key, a.device))
            }),
            Self::Near => a.far.cmp(&b.far).then(most_free),
            Self::Weighted(_) | Self::Custom(_) => Ordering::Equal,
        }
    }
}

#[cfg(test)]
mod tests;
