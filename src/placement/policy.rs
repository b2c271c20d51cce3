//! Policies choose among the devices that satisfy a request. They are pure functions of the
//! devices' figures.

use super::{
    PlaceError, PlacementRequest,
    candidate::{Candidate, PolicyInput},
    hash,
};
use aquifer_core::DeviceId;
use std::{
    cmp::{Ordering, Reverse},
    fmt,
    panic::AssertUnwindSafe,
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
pub struct Weights(Arc<[(DeviceId, u32)]>);

impl Weights {
    /// Returns the weight of a device, 1 if none was set.
    #[must_use]
    pub fn of(&self, device: DeviceId) -> u32 {
        self.0.iter().find(|(other, _)| *other == device).map_or(1, |&(_, weight)| weight)
    }
}

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
    /// Returns the indices of devices in the order in which they are to be tried. Devices that are
    /// not candidates, and repeated ones, are skipped. Returns `None` if the function panicked.
    pub(super) fn order(
        &self,
        place: &PlacementRequest,
        candidates: &[Candidate<'_>],
    ) -> Option<Vec<usize>> {
        let named =
            std::panic::catch_unwind(AssertUnwindSafe(|| (self.order)(place, candidates))).ok()?;
        let mut order = Vec::with_capacity(candidates.len());
        for device in named {
            let known = candidates.iter().find(|candidate| candidate.device == device);
            if let Some(index) =
                known.map(|known| known.index).filter(|index| !order.contains(index))
            {
                order.push(index);
            }
        }
        Some(order)
    }
}

impl Policy {
    /// Creates a policy that takes devices in turn, in proportion to their weights. Of a device
    /// with weight 3 and one with weight 1, the first is chosen three times of four, and any run of
    /// requests is close to that ratio. A device that is not listed has weight 1. A device with
    /// weight 0 is chosen only if no other is admitted.
    #[must_use]
    pub fn weighted(weights: impl IntoIterator<Item = (DeviceId, u32)>) -> Self {
        Self::Weighted(Weights(weights.into_iter().collect()))
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
        match self {
            Self::Custom(custom) => custom.order(place, candidates)?.first().copied(),
            _ => self
                .pick_from(place, candidates.iter().copied(), turn, devices)
                .map(|pick| pick.index),
        }
    }

    /// Returns whether the policy depends on the number of earlier requests.
    #[inline]
    pub(super) fn takes_turns(&self) -> bool {
        matches!(self, Self::RoundRobin | Self::Weighted(_))
    }

    /// Like [`pick`](Self::pick), for built-in policies, over an iterator in the order of device
    /// indices.
    #[inline]
    pub(super) fn pick_from<S: PolicyInput>(
        &self,
        place: &PlacementRequest,
        views: impl Iterator<Item = S> + Clone,
        turn: u64,
        devices: usize,
    ) -> Option<S> {
        match self {
            Self::Weighted(_) => weighted(views, turn),
            _ => self.by_key(place, turn, devices, Lowest(views))?,
        }
    }

    /// Returns the first `most` of `devices`, which satisfy `place`, in the order in which they are
    /// to be tried.
    ///
    /// # Errors
    /// [`PlaceError::PolicyPanicked`].
    pub(super) fn ranked<'a>(
        &self,
        place: &PlacementRequest,
        mut devices: Vec<Candidate<'a>>,
        turn: u64,
        count: usize,
        most: usize,
    ) -> Result<Vec<Candidate<'a>>, PlaceError> {
        if let Self::Custom(custom) = self {
            let panicked = PlaceError::PolicyPanicked { policy: custom.name };
            let order = custom.order(place, &devices).ok_or(panicked)?;
            let find = |index: usize| devices.iter().find(|device| device.index == index).copied();
            return Ok(order.into_iter().filter_map(find).take(most).collect());
        }
        if !matches!(self, Self::Weighted(_)) {
            return Ok(self.by_key(place, turn, count, First(devices, most)).unwrap_or_default());
        }
        let mut ranked = Vec::new();
        while ranked.len() < most
            && let Some(pick) = weighted(devices.iter().copied(), turn)
        {
            ranked.extend(devices.extract_if(.., |device| device.index == pick.index));
        }
        Ok(ranked)
    }

    /// Calls `visitor` with the key by which the policy compares devices: the lowest comes first.
    /// Returns `None` if the policy has none.
    #[inline]
    fn by_key<S: PolicyInput, V: KeyVisitor<S>>(
        &self,
        place: &PlacementRequest,
        turn: u64,
        devices: usize,
        visitor: V,
    ) -> Option<V::Output> {
        Some(match self {
            Self::RoundRobin => {
                let first = (turn % devices.max(1) as u64) as usize;
                visitor.visit(|s| {
                    let index = s.index();
                    if index >= first { index - first } else { index + devices - first }
                })
            }
            Self::LeastLoaded => visitor.visit(|s| Load::of(s.free(), s.total())),
            Self::MostFree => visitor.visit(|s| Reverse(s.free())),
            Self::BestFit => visitor.visit(S::free),
            Self::BestCompute => visitor.visit(|s| Reverse((s.compute_capability(), s.free()))),
            Self::Affinity => match place.requested_key() {
                Some(key) => visitor.visit(|s| Reverse(hash::score(key, s.device()))),
                None => visitor.visit(|s| Reverse(s.free())),
            },
            Self::Near => visitor.visit(|s| (s.distance(), Reverse(s.free()))),
            Self::Weighted(_) | Self::Custom(_) => return None,
        })
    }
}

/// What is done with devices and the key by which they are compared.
trait KeyVisitor<S> {
    type Output;

    fn visit<K: PartialOrd>(self, key: impl Fn(&S) -> K) -> Self::Output;
}

/// Returns the first device with the lowest key.
struct Lowest<I>(I);

impl<S: PolicyInput, I: Iterator<Item = S>> KeyVisitor<S> for Lowest<I> {
    type Output = Option<S>;

    #[inline]
    fn visit<K: PartialOrd>(self, key: impl Fn(&S) -> K) -> Option<S> {
        let mut best: Option<(K, S)> = None;
        self.0.for_each(|next| {
            let key = key(&next);
            if best.as_ref().is_none_or(|(best, _)| key < *best) {
                best = Some((key, next));
            }
        });
        best.map(|(_, chosen)| chosen)
    }
}

/// Returns this many devices with the lowest keys, in their order.
struct First<S>(Vec<S>, usize);

impl<S: PolicyInput> KeyVisitor<S> for First<S> {
    type Output = Vec<S>;

    fn visit<K: PartialOrd>(self, key: impl Fn(&S) -> K) -> Vec<S> {
        let Self(devices, most) = self;
        let mut keyed: Vec<_> = devices
            .into_iter()
            .enumerate()
            .map(|(at, device)| (key(&device), at, device))
            .collect();
        let order = |a: &(K, usize, S), b: &(K, usize, S)| {
            a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
        };
        if most < keyed.len() {
            keyed.select_nth_unstable_by(most, order);
            keyed.truncate(most);
        }
        keyed.sort_unstable_by(order);
        keyed.into_iter().map(|(_, _, device)| device).collect()
    }
}

/// The used share of a device, compared as a fraction: a/b < c/d where a·d < c·b.
#[derive(Clone, Copy)]
struct Load {
    used: u64,
    total: u64,
}

impl Load {
    /// Bytes that are not free count as used.
    #[inline]
    fn of(free: u64, total: u64) -> Self {
        Self { used: total.saturating_sub(free), total }
    }
}

impl PartialEq for Load {
    fn eq(&self, other: &Self) -> bool {
        self.partial_cmp(other) == Some(Ordering::Equal)
    }
}

impl PartialOrd for Load {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        let part = |a: &Self, b: &Self| u128::from(a.used) * u128::from(b.total);
        part(self, other).partial_cmp(&part(other, self))
    }
}

/// 2⁶⁴ divided by the golden ratio: the constant whose multiples modulo 1 are spread most evenly.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Lays the weights end to end and returns the device at the turn's point. Points are multiples of
/// the golden ratio, so every interval gets its share of the points in any run of turns (Weyl).
#[inline]
fn weighted<S: PolicyInput>(views: impl Iterator<Item = S> + Clone, turn: u64) -> Option<S> {
    let mut total = 0;
    views.clone().for_each(|next| total += u64::from(next.weight()));
    let point = ((u128::from(turn.wrapping_mul(GOLDEN)) * u128::from(total)) >> 64) as u64;
    let (mut end, mut chosen, mut last) = (0, None, None);
    views.for_each(|next| {
        end += u64::from(next.weight());
        if point < end && chosen.is_none() {
            chosen = Some(next);
        }
        last = Some(next);
    });
    // All weights are 0, or a device disappeared between the two passes.
    chosen.or(last)
}

#[cfg(test)]
mod tests;
