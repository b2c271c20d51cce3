//! Requests for memory on some device.

use super::{Candidate, RejectReason};
use aquifer_core::{DeviceId, Tag};
use aquifer_host::topology::NodeId;

/// A request for bytes on some device. Its constraints are always met or the request fails.
///
/// ```
/// use aquifer::PlacementRequest;
/// let place = PlacementRequest::bytes(6 << 30).min_free(10 << 30).min_compute((9, 0));
/// assert_eq!(place.size(), 6 << 30);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacementRequest {
    bytes: u64,
    min_free: u64,
    min_compute: (u32, u32),
    allowed: Option<Vec<DeviceId>>,
    excluded: Vec<DeviceId>,
    reaching: Vec<DeviceId>,
    priority: Option<i32>,
    key: Option<u64>,
    near: Near,
}

/// The place that a request is to be near, under [`Policy::Near`](super::Policy::Near).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Near {
    /// The NUMA node of the CPU that runs the calling thread.
    #[default]
    Caller,
    /// This NUMA node of the host.
    Node(NodeId),
    /// This device: first itself, then those that can reach its memory, then the rest.
    Device(DeviceId),
    /// The device on which live blocks of this tag hold the most bytes, treated like
    /// [`Near::Device`]. Searches every pool's caches, which takes microseconds or longer.
    Data(Tag),
}

impl PlacementRequest {
    /// Creates a request for `bytes` on any device.
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self {
            bytes,
            min_free: 0,
            min_compute: (0, 0),
            allowed: None,
            excluded: Vec::new(),
            reaching: Vec::new(),
            priority: None,
            key: None,
            near: Near::Caller,
        }
    }

    /// Requires that this many bytes are free, including the requested ones.
    #[must_use]
    pub fn min_free(self, bytes: u64) -> Self {
        Self { min_free: bytes, ..self }
    }

    /// Requires this compute capability or a later one.
    #[must_use]
    pub fn min_compute(self, capability: (u32, u32)) -> Self {
        Self { min_compute: capability, ..self }
    }

    /// Allows only these devices.
    #[must_use]
    pub fn only(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { allowed: Some(devices.into_iter().collect()), ..self }
    }

    /// Excludes these devices.
    #[must_use]
    pub fn not_on(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { excluded: devices.into_iter().collect(), ..self }
    }

    /// Allows only devices that are among these, or whose kernels can reach their memory, for each
    /// of them.
    #[must_use]
    pub fn reaching(self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        Self { reaching: devices.into_iter().collect(), ..self }
    }

    /// Sets the priority of the charge and of the wait, instead of the budget's own. Higher
    /// priorities are served first.
    #[must_use]
    pub fn priority(self, priority: i32) -> Self {
        Self { priority: Some(priority), ..self }
    }

    /// Sets the key of the request. [`Policy::Affinity`](super::Policy::Affinity) always maps a key
    /// to the same device. [`key_of`](super::key_of) computes a key from a name.
    #[must_use]
    pub fn key(self, key: u64) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Sets what the request is to be near, under [`Policy::Near`](super::Policy::Near). The
    /// default is the caller's node.
    #[must_use]
    pub fn near(self, near: Near) -> Self {
        Self { near, ..self }
    }

    /// Returns the requested bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes that must be free: the requested ones, or more.
    #[inline]
    pub(super) fn needs(&self) -> u64 {
        self.bytes.max(self.min_free)
    }

    pub(super) fn requested_priority(&self) -> Option<i32> {
        self.priority
    }

    #[inline]
    pub(super) fn requested_key(&self) -> Option<u64> {
        self.key
    }

    pub(super) fn requested_near(&self) -> Near {
        self.near
    }

    /// Returns whether a device satisfies every constraint.
    #[inline]
    #[must_use]
    pub fn admits(&self, candidate: &Candidate<'_>) -> bool {
        candidate.free >= self.needs() && self.suits(candidate)
    }

    /// Returns whether a device satisfies every constraint except those on free bytes.
    pub(super) fn suits(&self, candidate: &Candidate<'_>) -> bool {
        candidate.compute_capability >= self.min_compute
            && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(&candidate.device))
            && !self.excluded.contains(&candidate.device)
            && self.reaching.iter().all(|&other| candidate.reaches(other))
    }

    /// Returns the first constraint that a device does not satisfy, if there is one.
    #[must_use]
    pub fn objection(&self, candidate: &Candidate<'_>) -> Option<RejectReason> {
        let device = candidate.device;
        let excluded = self.excluded.contains(&device)
            || self.allowed.as_ref().is_some_and(|allowed| !allowed.contains(&device));
        let (has, needs) = (candidate.compute_capability, self.min_compute);
        let unreachable = self.reaching.iter().find(|&&other| !candidate.reaches(other));
        match unreachable {
            _ if excluded => Some(RejectReason::Excluded),
            _ if has < needs => Some(RejectReason::Compute { has, needs }),
            Some(&peer) => Some(RejectReason::Unreachable { peer }),
            None if candidate.free < self.needs() => {
                Some(RejectReason::Free { needs: self.needs() })
            }
            None => None,
        }
    }
}

/// A request for several leases at once, all or none, such as for the shards of a model.
///
/// ```
/// use aquifer::{Group, PlacementRequest, Policy, Runtime, sim::Sim};
/// let rt = Runtime::on(Sim::h200(4).symbolic().driver())?;
/// let shards = rt.placer(Policy::MostFree).place_group(&Group::of(4, PlacementRequest::bytes(20 << 30)).on_peers())?;
/// assert_eq!(shards.len(), 4);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    pub(super) shards: usize,
    pub(super) each: PlacementRequest,
    pub(super) on_peers: bool,
    pub(super) packed: bool,
}

impl Group {
    /// Creates a request for this many shards, each as `each` describes, each on its own device.
    #[must_use]
    pub fn of(shards: usize, each: PlacementRequest) -> Self {
        Self { shards, each, on_peers: false, packed: false }
    }

    /// Requires devices each of which can reach every other's memory.
    #[must_use]
    pub fn on_peers(self) -> Self {
        Self { on_peers: true, ..self }
    }

    /// Uses as few devices as have room, with several shards on one device, instead of one on each.
    #[must_use]
    pub fn packed(self) -> Self {
        Self { packed: true, ..self }
    }
}
