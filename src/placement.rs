//! Placement chooses a device for a request and reserves the bytes there until they are used.
//!
//! A choice without a reservation can be outdated before the memory is allocated. [`Placer::place`]
//! chooses and reserves in one step and returns a [`Lease`] that allocates from its reservation. A
//! device is not chosen if its budget refuses the bytes. Of two requests for the last bytes, one
//! succeeds. The other one is placed elsewhere or fails.
//!
//! | module | contents |
//! |---|---|
//! | `request` | [`PlacementRequest`], [`Near`], [`Group`]: the request |
//! | `candidate` | what policies compare: a device with its free memory |
//! | `policy` | [`Policy`]: the choice among the devices that satisfy a request |
//! | `hash` | the hash of [`Policy::Affinity`], specified |
//! | `device_set` | the devices: current free memory, health, generations |
//! | `lease` | [`Lease`]: reserved bytes |
//! | `choice` | the devices of a group, and all of them held or none |
//! | `group` | several leases, all or none |
//! | `waiting` | waiting until there is room: queues, wake-ups, deadlines |
//! | `placing` | [`Placing`]: how one request waits; `grouping`, below `group`, how a group does |
//! | `source` | [`DeviceSource`], [`LedgerDevices`]: devices that are not this process's |
//! | `error` | [`PlaceError`]: each device and the reason why it was rejected |
//!
//! # Input of a policy
//! Free memory combines two sources. The first is the pool's own account at this moment, so that a
//! burst of requests spreads according to the policy. The second is the free memory that the driver
//! last reported, which other programs change too; see [`Candidate::age`]. A policy chooses among
//! the devices that satisfy every hint and are in service. A lost device is excluded as soon as any
//! call has returned the loss. A [drained](Placer::drain) device receives no new requests.

mod candidate;
mod choice;
mod device_set;
mod error;
mod group;
mod hash;
mod lease;
mod placing;
mod policy;
mod request;
mod source;
mod waiting;

pub use candidate::Candidate;
pub use device_set::Health;
pub(crate) use device_set::{DeviceSet, MAX_DEVICES};
pub use error::{NoFit, PlaceError, RejectReason};
pub use hash::key_of;
pub use lease::Lease;
pub use placing::Placing;
pub use policy::Policy;
pub use request::{Group, Near, PlacementRequest};
pub(crate) use source::memory_of;
pub use source::{DeviceSource, LedgerDevices};

use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_device::DevicePool;
use device_set::{Member, Target};
use error::RejectedDevice;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Chooses devices by one policy.
///
/// Clones share their state. All placers of a runtime share its devices: a device drained through
/// one placer is drained for all.
///
/// ```
/// use aquifer::{PlacementRequest, Policy, Runtime, sim::Sim};
/// let rt = Runtime::on(Sim::h200(2).driver())?;
/// let placer = rt.placer(Policy::RoundRobin);
/// let first = placer.place(&PlacementRequest::bytes(1 << 20))?;
/// let second = placer.place(&PlacementRequest::bytes(1 << 20))?;
/// assert_ne!(first.device(), second.device());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Placer {
    device_set: Arc<DeviceSet>,
    policy: Policy,
    /// Weights by device index. Empty if all devices weigh the same.
    weights: Arc<[u32]>,
    /// The number of placed requests: the position of round robin.
    turn: Arc<AtomicU64>,
}

/// A snapshot of one of a placer's devices.
///
/// ```
/// use aquifer::{Policy, Runtime, placement::Health, sim::Sim};
/// let rt = Runtime::on(Sim::h200(2).driver())?;
/// let placer = rt.placer(Policy::MostFree);
/// placer.drain(aquifer::DeviceId(1))?;
/// let health: Vec<_> = placer.devices().map(|device| device.health).collect();
/// assert_eq!(health, [Health::Serving, Health::Draining]);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Device<'a> {
    /// The values that a policy sees.
    pub seen: Candidate<'a>,
    /// The health of the device.
    pub health: Health,
    /// The pool of the device.
    pub pool: &'a DevicePool,
}

/// The devices that have rejected a request, as a set, and their errors.
#[derive(Default)]
struct Rejections {
    devices: u64,
    errors: Vec<(usize, MemoryError)>,
}

impl Rejections {
    #[cold]
    fn add(&mut self, index: usize, error: MemoryError) {
        self.devices |= 1 << index;
        self.errors.push((index, error));
    }

    fn reason(&self, index: usize) -> Option<RejectReason> {
        let (_, error) = self.errors.iter().find(|(device, _)| *device == index)?;
        Some(match error {
            MemoryError::OutOfBudget(refused) => RejectReason::Budget(*refused),
            MemoryError::DeviceLost { .. } => RejectReason::Lost,
            other => RejectReason::Pool(other.clone()),
        })
    }
}

impl Placer {
    pub(crate) fn new(device_set: Arc<DeviceSet>, policy: Policy) -> Self {
        let weights = match &policy {
            Policy::Weighted(weights) => {
                let pools = (0..device_set.len()).filter_map(|index| device_set.pool(index));
                pools.map(|pool| weights.of(pool.device())).collect()
            }
            _ => Arc::default(),
        };
        Self { device_set, policy, weights, turn: Arc::default() }
    }

    /// Chooses a device that satisfies `place` and reserves its bytes there, as [`Budget::reserve`]
    /// does.
    ///
    /// Does not block on memory or on streams, but may call the driver. If the budget lacks bytes
    /// that the pool's caches hold, the caches release them first (`cuMemUnmap`, `cuMemRelease`),
    /// then those of other devices that share the budget. The driver is queried for its free memory
    /// (`cuMemGetInfo`) if the last reading is too old.
    ///
    /// The policy's first choice is taken if its budget grants the bytes. Otherwise the policy
    /// chooses among the remaining devices.
    ///
    /// # Errors
    /// [`PlaceError`] lists every device and the reason why it was not taken.
    ///
    /// [`Budget::reserve`]: aquifer_core::Budget::reserve
    pub fn place(&self, place: &PlacementRequest) -> Result<Lease, PlaceError> {
        if place.size() == 0 {
            return Err(PlaceError::ZeroSize);
        }
        let now = self.device_set.poll();
        let turn = self.turn();
        let mut rejections = Rejections::default();
        // Ranking allocates. Only custom policies and `Near`, which inspects the topology first,
        // need it.
        if let Policy::Custom(_) | Policy::Near = self.policy {
            if let Some(lease) = self.try_ranked(place, turn, now, &mut rejections)? {
                return Ok(lease);
            }
        } else if let Some(lease) = self.try_each(place, turn, now, &mut rejections) {
            return Ok(lease);
        }
        self.place_slowly(place, turn, rejections)
    }

    #[inline]
    fn turn(&self) -> u64 {
        if self.policy.takes_turns() { self.turn.fetch_add(1, Ordering::Relaxed) } else { 0 }
    }

    fn weigh<'a>(&self, candidate: Candidate<'a>) -> Candidate<'a> {
        Candidate { weight: self.weights.get(candidate.index).copied().unwrap_or(1), ..candidate }
    }

    /// Tries the devices one after another, each time the best one that remains.
    #[inline]
    fn try_each(
        &self,
        place: &PlacementRequest,
        turn: u64,
        now: u64,
        rejections: &mut Rejections,
    ) -> Option<Lease> {
        loop {
            let admitted = self.device_set.admitted(place, rejections.devices, now, &self.weights);
            let best = self.policy.pick_from(place, admitted, turn, self.device_set.len())?;
            if let Some(lease) = self.reserve_on(place, best.index, best.member, rejections) {
                return Some(lease);
            }
        }
    }

    #[inline]
    fn reserve_on(
        &self,
        place: &PlacementRequest,
        index: usize,
        member: &Member,
        rejections: &mut Rejections,
    ) -> Option<Lease> {
        match member.reserve(place.size(), place.requested_priority()) {
            Ok(reservation) => {
                Some(Lease::new(self.device_set.clone(), index, member.generation, reservation))
            }
            Err(error) => {
                rejections.add(index, error);
                None
            }
        }
    }

    /// Returns the first of `rest`, devices in service that satisfy `place`, in the order of the
    /// policy.
    fn ranked<'a>(
        &'a self,
        place: &PlacementRequest,
        mut rest: Vec<Candidate<'a>>,
        turn: u64,
        most: usize,
    ) -> Result<Vec<Candidate<'a>>, PlaceError> {
        let target = match self.policy {
            Policy::Near => self.device_set.target(place.requested_near()),
            _ => Target::Anywhere,
        };
        for device in &mut rest {
            *device = self.weigh(*device);
            device.far = self.device_set.distance(device, target);
        }
        self.policy.ranked(place, rest, turn, self.device_set.len(), most)
    }

    #[cold]
    fn try_ranked(
        &self,
        place: &PlacementRequest,
        turn: u64,
        now: u64,
        rejections: &mut Rejections,
    ) -> Result<Option<Lease>, PlaceError> {
        let admitted = self.device_set.admitted(place, rejections.devices, now, &self.weights);
        let rest = admitted.map(|view| view.candidate(now)).collect();
        for best in self.ranked(place, rest, turn, usize::MAX)? {
            let member = self.device_set.at(best.index, best.generation);
            if let Some(lease) = self.reserve_on(place, best.index, member, rejections) {
                return Ok(Some(lease));
            }
        }
        Ok(None)
    }

    /// The slow path, when the known figures found no device: refreshes them and retries before it
    /// fails.
    #[cold]
    fn place_slowly(
        &self,
        place: &PlacementRequest,
        turn: u64,
        mut rejections: Rejections,
    ) -> Result<Lease, PlaceError> {
        let mut now = self.refresh();
        let mut lease = self.try_ranked(place, turn, now, &mut rejections)?;
        if lease.is_none() && self.device_set.reclaim_from_others(place, place.needs()) {
            (now, rejections) = (self.refresh(), Rejections::default());
            lease = self.try_ranked(place, turn, now, &mut rejections)?;
        }
        lease.ok_or_else(|| self.no_fit(place, 1, &rejections))
    }

    /// Refreshes the figures of caches and driver. Returns the time.
    fn refresh(&self) -> u64 {
        let now = self.device_set.poll();
        self.device_set.sample(now);
        (0..self.device_set.len())
            .filter_map(|index| self.device_set.current(index))
            .for_each(|member| member.count_caches());
        now
    }

    fn no_fit(
        &self,
        place: &PlacementRequest,
        shards: usize,
        rejections: &Rejections,
    ) -> PlaceError {
        let default_reason = if shards > 1 { RejectReason::Alone } else { RejectReason::NotNamed };
        let devices = self.device_set.rejected(place, |index, _| {
            rejections.reason(index).unwrap_or_else(|| default_reason.clone())
        });
        PlaceError::Nowhere(Box::new(NoFit { requested: place.size(), shards, devices }))
    }

    /// Stops placing new requests on a device. Its existing leases stay valid. Applies to all
    /// placers of the runtime.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`].
    pub fn drain(&self, device: DeviceId) -> Result<()> {
        self.device_set.set_draining(device, true)
    }

    /// Makes a [drained](Placer::drain) device available for requests again.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`].
    pub fn undrain(&self, device: DeviceId) -> Result<()> {
        self.device_set.set_draining(device, false)
    }

    /// Replaces the pool of a lost device by `pool`, which the application opened after it had
    /// reset the device.
    ///
    /// Returns the device's new generation. Leases of the old generation stay refused. Queries the
    /// driver for its free memory.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`] if the runtime does not have the device;
    /// [`MemoryError::BadSetting`] if it is not lost.
    pub fn restore(&self, pool: DevicePool) -> Result<u32> {
        self.device_set.poll();
        self.device_set.restore(pool)
    }

    /// Returns snapshots of all devices of this placer, including lost ones.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = Device<'_>> {
        let now = self.device_set.poll();
        let device_set = &self.device_set;
        device_set.members().enumerate().map(move |(index, member)| Device {
            seen: self.weigh(member.candidate(index, now, None)),
            health: member.health(),
            pool: &member.pool,
        })
    }

    /// Returns a snapshot of the device at `index`.
    #[must_use]
    pub fn device(&self, index: usize) -> Option<Device<'_>> {
        self.devices().nth(index)
    }

    /// Returns a snapshot of the device with this ordinal.
    #[must_use]
    pub fn by_ordinal(&self, device: DeviceId) -> Option<Device<'_>> {
        self.devices().find(|known| known.seen.device == device)
    }

    /// Returns the number of devices, including lost ones.
    #[must_use]
    pub fn count(&self) -> usize {
        self.device_set.len()
    }
}

impl fmt::Debug for Placer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placer")
            .field("policy", &self.policy)
            .field("device_set", &self.device_set)
            .finish_non_exhaustive()
    }
}

// Devices keep their state in atomics. A policy of the program is called with no lock held, and a
// panic there leaves the request unplaced.
aquifer_core::__unwind_safe! { [] Placer }
