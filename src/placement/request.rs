//! What a request asks of a device.

use super::{Candidate, Why};
use aquifer_core::{DeviceId, Tag};
use aquifer_host::topology::NodeId;

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
    /// It has hints that not all devices satisfy, but for those on free bytes.
    choosy: bool,
    min_compute: (u32, u32),
    allowed: Option<Vec<DeviceId>>,
    excluded: Vec<DeviceId>,
    reaching: Vec<DeviceId>,
    priority: Option<i32>,
    key: Option<u64>,
    near: Near,
}

/// What a request is to be near, under [`Policy::Near`](super::Policy::Near).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Near {
    /// The NUMA node whose CPU the calling thread runs on.
    #[default]
    Caller,
    /// This NUMA node of the host.
    Node(NodeId),
    /// This device: itself first, then those that can reach its memory, then the rest.
    Device(DeviceId),
    /// The device on which live blocks of this tag hold the most bytes, as near a
    /// [device](Near::Device). Looks through every pool's caches, so it takes microseconds and
    /// more.
    Data(Tag),
}

impl Place {
    /// `bytes` on any device.
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self {
            bytes,
            min_free: 0,
            choosy: false,
            min_compute: (0, 0),
            allowed: None,
            excluded: Vec::new(),
            reaching: Vec::new(),
            priority: None,
            key: None,
            near: Near::Caller,
        }
    }

    /// Only where so many bytes are free, those asked for among them.
    #[must_use]
    pub fn min_free(self, bytes: u64) -> Self {
        Self { min_free: bytes, ..self }
    }

    /// Only on devices of this compute capability or later.
    #[must_use]
    pub fn min_compute(self, capability: (u32, u32)) -> Self {
        Self { min_compute: capability, choosy: true, ..self }
    }

    /// Only on these devices.
    #[must_use]
    pub fn only(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { allowed: Some(devices.into_iter().collect()), choosy: true, ..self }
    }

    /// On none of these devices.
    #[must_use]
    pub fn not_on(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { excluded: devices.into_iter().collect(), choosy: true, ..self }
    }

    /// Only on devices whose kernels can reach the memory of each of these, or are these
    /// themselves.
    #[must_use]
    pub fn reaching(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { reaching: devices.into_iter().collect(), choosy: true, ..self }
    }

    /// Charged, and waiting in line, by this priority instead of the budget's own; higher is served
    /// first.
    #[must_use]
    pub fn priority(self, priority: i32) -> Self {
        Self { priority: Some(priority), ..self }
    }

    /// Belonging to this key, which [`Policy::Affinity`](super::Policy::Affinity) gives always the
    /// same device; [`key_of`](super::key_of) makes one of a name.
    #[must_use]
    pub fn key(self, key: u64) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Near this, under [`Policy::Near`](super::Policy::Near); near the caller unless told
    /// otherwise.
    #[must_use]
    pub fn near(self, near: Near) -> Self {
        Self { near, ..self }
    }

    /// Bytes asked for.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Bytes that must be free: those asked for, or more.
    #[inline]
    pub(super) fn needs(&self) -> u64 {
        self.bytes.max(self.min_free)
    }

    pub(super) fn priority_asked(&self) -> Option<i32> {
        self.priority
    }

    #[inline]
    pub(super) fn key_asked(&self) -> Option<u64> {
        self.key
    }

    pub(super) fn near_asked(&self) -> Near {
        self.near
    }

    /// Whether a device satisfies every hint.
    #[inline]
    #[must_use]
    pub fn admits(&self, candidate: &Candidate<'_>) -> bool {
        candidate.free >= self.needs() && self.suits(candidate)
    }

    /// Whether it has hints that not all devices satisfy, but for those on free bytes.
    #[inline]
    pub(super) fn is_choosy(&self) -> bool {
        self.choosy
    }

    /// Whether a device satisfies every hint but those on free bytes.
    #[inline]
    pub(super) fn suits(&self, candidate: &Candidate<'_>) -> bool {
        !self.choosy || self.fits_hints(candidate)
    }

    fn fits_hints(&self, candidate: &Candidate<'_>) -> bool {
        candidate.compute_capability >= self.min_compute
            && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(&candidate.device))
            && !self.excluded.contains(&candidate.device)
            && self.reaching.iter().all(|&other| candidate.reaches(other))
    }

    /// Which hint a device does not satisfy, if there is one.
    #[must_use]
    pub fn objection(&self, candidate: &Candidate<'_>) -> Option<Why> {
        let device = candidate.device;
        let out = self.excluded.contains(&device)
            || self.allowed.as_ref().is_some_and(|allowed| !allowed.contains(&device));
        let (has, needs) = (candidate.compute_capability, self.min_compute);
        let beyond = self.reaching.iter().find(|&&other| !candidate.reaches(other));
        match beyond {
            _ if out => Some(Why::Excluded),
            _ if has < needs => Some(Why::Compute { has, needs }),
            Some(&peer) => Some(Why::Unreachable { peer }),
            None if candidate.free < self.needs() => Some(Why::Free { needs: self.needs() }),
            None => None,
        }
    }
}

/// Requests for several leases at once, all or nothing: the shards of a model.
///
/// ```
/// use aquifer::{Group, Place, Policy, Runtime, sim::Sim};
/// let rt = Runtime::on(Sim::h200(4).symbolic().driver())?;
/// let shards = rt.placer(Policy::MostFree).place_group(&Group::of(4, Place::bytes(20 << 30)).on_peers())?;
/// assert_eq!(shards.len(), 4);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    pub(super) shards: usize,
    pub(super) each: Place,
    pub(super) on_peers: bool,
    pub(super) packed: bool,
}

impl Group {
    /// So many shards, each as `each` asks, on a device of its own.
    #[must_use]
    pub fn of(shards: usize, each: Place) -> Self {
        Self { shards, each, on_peers: false, packed: false }
    }

    /// Only on devices of which each can reach every other's memory.
    #[must_use]
    pub fn on_peers(self) -> Self {
        Self { on_peers: true, ..self }
    }

    /// On as few devices as have room, several shards on one, instead of one on each.
    #[must_use]
    pub fn packed(self) -> Self {
        Self { packed: true, ..self }
    }
}
