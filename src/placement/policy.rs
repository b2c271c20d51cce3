//! Which of the devices that satisfy a request is taken: pure functions of what was seen of them.

use super::{Place, hash};
use aquifer_core::DeviceId;
use std::{
    cmp::{Ordering, Reverse},
    fmt,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

/// A device as a policy sees it.
///
/// Its example is that of [`Policy`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Candidate<'a> {
    /// Its place among the runtime's devices.
    pub index: usize,
    /// Which.
    pub device: DeviceId,
    /// 1 at first; one more each time the device was [put back](super::Placer::restore) after a
    /// loss.
    pub generation: u32,
    /// Bytes that its pool could give: what its budget has left, or the driver if that is less,
    /// and what its caches hold.
    pub free: u64,
    /// Bytes that its pool may have at all.
    pub total: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The devices whose memory its kernels could reach.
    pub peers: &'a [DeviceId],
    /// Its weight under [`Policy::weighted`], else 1.
    pub weight: u32,
    /// How far it is from what the request is to be near, under [`Policy::Near`], else 0.
    /// Comparable within one request only.
    pub far: u32,
    /// How long ago the driver was asked for its free memory, and the caches for what they hold.
    /// The rest is of this moment.
    pub age: Duration,
}

impl Candidate<'_> {
    /// A device of which only this is known; fill in the rest.
    #[must_use]
    pub fn new(index: usize, device: DeviceId, free: u64, total: u64) -> Self {
        let (generation, compute_capability, weight) = (1, (0, 0), 1);
        let (peers, far, age): (&[_], _, _) = (&[], 0, Duration::ZERO);
        Self { index, device, generation, free, total, compute_capability, peers, weight, far, age }
    }

    /// Whether its kernels could reach that device's memory.
    #[inline]
    #[must_use]
    pub fn reaches(&self, device: DeviceId) -> bool {
        self.device == device || self.peers.contains(&device)
    }
}

/// What the library's own policies ask of a device, each of them one or two things: a request looks
/// at every device, and finds out no more than it needs.
pub(super) trait Seen: Copy {
    fn index(&self) -> usize;
    fn device(&self) -> DeviceId;
    fn free(&self) -> u64;
    fn total(&self) -> u64;
    fn compute_capability(&self) -> (u32, u32);
    fn weight(&self) -> u32;
    fn far(&self) -> u32;
}

impl Seen for Candidate<'_> {
    fn index(&self) -> usize {
        self.index
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn free(&self) -> u64 {
        self.free
    }

    fn total(&self) -> u64 {
        self.total
    }

    fn compute_capability(&self) -> (u32, u32) {
        self.compute_capability
    }

    fn weight(&self) -> u32 {
        self.weight
    }

    fn far(&self) -> u32 {
        self.far
    }
}

/// Which of the devices that satisfy a request is taken.
///
/// Each is a pure function of what was seen of the devices and, where it says so, of how many
/// requests were placed before. Ties go to the lowest index.
#[derive(Clone, Default, Debug)]
#[non_exhaustive]
pub enum Policy {
    /// Each in turn.
    RoundRobin,
    /// The one of which the least part is used.
    LeastLoaded,
    /// The one with the most free bytes.
    #[default]
    MostFree,
    /// The one with the fewest free bytes that are enough, so that large requests find room later.
    BestFit,
    /// The one with the highest compute capability; of those the one with the most free bytes.
    BestCompute,
    /// In turn, by weights: [`Policy::weighted`].
    Weighted(Weights),
    /// The one to which the request's [key](Place::key) belongs, or, where that does not admit, the
    /// next for the key. Requests without a key go where the most bytes are free.
    Affinity,
    /// The one nearest to what the request is to be [near](Place::near); of those the one with the
    /// most free bytes.
    Near,
    /// By a function of the program: [`Policy::custom`].
    Custom(Custom),
}

/// Weights of devices, for [`Policy::Weighted`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Weights(Arc<[(DeviceId, u32)]>);

impl Weights {
    /// The weight of a device: 1 if it was given none.
    #[must_use]
    pub fn of(&self, device: DeviceId) -> u32 {
        self.0.iter().find(|(other, _)| *other == device).map_or(1, |&(_, weight)| weight)
    }
}

type Order = dyn Fn(&Place, &[Candidate<'_>]) -> Vec<DeviceId> + Send + Sync;

/// A program's own policy, for [`Policy::Custom`].
#[derive(Clone)]
pub struct Custom {
    pub(super) name: &'static str,
    order: Arc<Order>,
}

impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Custom").field(&self.name).finish()
    }
}

impl Custom {
    /// The indices of devices in the order in which they are to be tried. What is not among the
    /// candidates, or was named before, is passed over. `None` if the function has panicked.
    pub(super) fn order(&self, place: &Place, candidates: &[Candidate<'_>]) -> Option<Vec<usize>> {
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
    /// In turn, each as often as its weight says: of a device with weight 3 and one with weight 1
    /// the first is taken three times of four, and any run of requests keeps close to that. A
    /// device that is not listed has weight 1; one with weight 0 is taken only where no other
    /// admits.
    #[must_use]
    pub fn weighted(weights: impl IntoIterator<Item = (DeviceId, u32)>) -> Self {
        Self::Weighted(Weights(weights.into_iter().collect()))
    }

    /// By a pure function of the program's own: from the request and the devices that satisfy it to
    /// the devices in the order in which they are to be tried.
    ///
    /// Its answer is checked, never believed: a device that is unknown, does not satisfy the
    /// request or is named twice is passed over. Where it panics, the request is refused with
    /// [`PlaceError::PolicyPanicked`](super::PlaceError::PolicyPanicked).
    ///
    /// ```
    /// use aquifer::{Place, Policy, Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(3).symbolic().driver())?;
    /// let last = Policy::custom("last", |_, devices| devices.iter().rev().map(|d| d.device).collect());
    /// assert_eq!(rt.placer(last).place(&Place::bytes(1))?.device().0, 2);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn custom(
        name: &'static str,
        order: impl Fn(&Place, &[Candidate<'_>]) -> Vec<DeviceId> + Send + Sync + 'static,
    ) -> Self {
        Self::Custom(Custom { name, order: Arc::new(order) })
    }

    /// The index of the device that is taken, of `candidates` that satisfy `place`, when `turn`
    /// requests have been placed before on `devices` devices in all. `None` where there are no
    /// candidates, or a function of the program's own names none of them or panics.
    #[must_use]
    pub fn pick(
        &self,
        place: &Place,
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

    /// Whether the number of requests before counts.
    #[inline]
    pub(super) fn takes_turns(&self) -> bool {
        matches!(self, Self::RoundRobin | Self::Weighted(_))
    }

    /// The same over whatever yields devices in the order of their indices; of the library's own
    /// policies.
    #[inline]
    pub(super) fn pick_from<S: Seen>(
        &self,
        place: &Place,
        seen: impl Iterator<Item = S> + Clone,
        turn: u64,
        devices: usize,
    ) -> Option<S> {
        match self {
            Self::RoundRobin => {
                let first = (turn % devices.max(1) as u64) as usize;
                lowest(seen, |s| {
                    let index = s.index();
                    if index >= first { index - first } else { index + devices - first }
                })
            }
            Self::LeastLoaded => lowest(seen, |s| Load::of(s.free(), s.total())),
            Self::MostFree => lowest(seen, |s| Reverse(s.free())),
            Self::BestFit => lowest(seen, S::free),
            Self::BestCompute => lowest(seen, |s| Reverse((s.compute_capability(), s.free()))),
            Self::Weighted(_) => weighted(seen, turn),
            Self::Affinity => match place.key_asked() {
                Some(key) => lowest(seen, |s| Reverse(hash::score(key, s.device()))),
                None => lowest(seen, |s| Reverse(s.free())),
            },
            Self::Near => lowest(seen, |s| (s.far(), Reverse(s.free()))),
            Self::Custom(_) => None,
        }
    }
}

/// The part of a device that is used, compared as a fraction: a/b < c/d where a·d < c·b.
#[derive(Clone, Copy)]
struct Load {
    used: u64,
    total: u64,
}

impl Load {
    /// What cannot be had of it is used.
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

/// The first of those with the lowest key.
#[inline]
fn lowest<S: Seen, K: PartialOrd>(
    seen: impl Iterator<Item = S>,
    key: impl Fn(&S) -> K,
) -> Option<S> {
    let mut best: Option<(K, S)> = None;
    seen.for_each(|next| {
        let key = key(&next);
        if best.as_ref().is_none_or(|(best, _)| key < *best) {
            best = Some((key, next));
        }
    });
    best.map(|(_, taken)| taken)
}

/// 2⁶⁴ over the golden ratio: of the multiples of all numbers, modulo 1, its own lie most evenly.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Lays the weights end to end and takes the device under the turn's point. Points are multiples of
/// the golden ratio, so every stretch has its share of them in any run of turns (Weyl).
#[inline]
fn weighted<S: Seen>(seen: impl Iterator<Item = S> + Clone, turn: u64) -> Option<S> {
    let mut total = 0;
    seen.clone().for_each(|next| total += u64::from(next.weight()));
    let point = ((u128::from(turn.wrapping_mul(GOLDEN)) * u128::from(total)) >> 64) as u64;
    let (mut end, mut taken, mut last) = (0, None, None);
    seen.for_each(|next| {
        end += u64::from(next.weight());
        if point < end && taken.is_none() {
            taken = Some(next);
        }
        last = Some(next);
    });
    // All weigh nothing, or one has gone between the two passes.
    taken.or(last)
}

#[cfg(test)]
mod tests;
