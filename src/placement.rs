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
//! | `choice` | the devices of a request or group, and all of them held or none |
//! | `placing` | [`Placing`]: waiting until there is room: queues, wake-ups, deadlines |
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
mod hash;
mod lease;
mod placing;
mod policy;
mod request;
mod source;

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

use aquifer_core::{DeviceId, Reservation, Result};
use aquifer_device::DevicePool;
use choice::{Choice, Grant, Refusals, only};
use device_set::Target;
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

impl Placer {
    pub(crate) fn new(device_set: Arc<DeviceSet>, policy: Policy) -> Self {
        Self { device_set, policy, turn: Arc::default() }
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
        only(self.place_group(&Group::of(1, place.clone()))?)
    }

    /// Places every shard of a group as [`Placer::place`] does, or none. Leases are in the order in
    /// which the policy takes the devices. Does not block.
    ///
    /// # Errors
    /// [`PlaceError`] with every device and the reason why it was not taken. Nothing is reserved.
    pub fn place_group(&self, group: &Group) -> Result<Vec<Lease>, PlaceError> {
        self.try_group(group, self.turn(), &mut None)
    }

    fn turn(&self) -> u64 {
        if self.policy.takes_turns() { self.turn.fetch_add(1, Ordering::Relaxed) } else { 0 }
    }

    /// Places a group. It may use what is `granted`. If the known figures give no choice, they are
    /// refreshed, and then others release what they can.
    fn try_group(
        &self,
        group: &Group,
        turn: u64,
        granted: &mut Option<Grant<Reservation>>,
    ) -> Result<Vec<Lease>, PlaceError> {
        if group.is_empty() {
            return Err(PlaceError::ZeroSize);
        }
        let (set, place) = (&self.device_set, &group.each);
        let choice = Choice { policy: &self.policy, group, turn };
        let target = match self.policy {
            Policy::Near => set.target(place.requested_near()),
            _ => Target::Anywhere,
        };
        let reserve = |device: &Candidate<'_>| {
            let member = set.at(device.index, device.generation);
            member.reserve(place.size(), place.requested_priority()).map_err(RejectReason::from)
        };
        let mut refusals = Refusals::new();
        let mut attempt = |now| {
            refusals.clear();
            let devices = || set.candidates(place, target, now);
            choice.hold_all(devices, granted, &mut refusals, reserve)
        };
        let mut held = attempt(set.poll())?;
        if held.is_none() {
            held = attempt(self.refresh())?;
        }
        if held.is_none() {
            let all = place.size().saturating_mul(group.shards as u64);
            set.reclaim_from_others(place, all.max(place.needs()));
            held = attempt(self.refresh())?;
        }
        let Some(held) = held else {
            let devices = set.with_health(place);
            return Err(PlaceError::Nowhere(Box::new(group.no_fit(devices, &refusals))));
        };
        let lease = |(device, mut reserved): (Candidate<'_>, Reservation)| {
            // `min_free` beyond the size was a condition only. It is not kept.
            let more = reserved.remaining().saturating_sub(place.size());
            if more > 0 {
                drop(reserved.draw(more));
            }
            Lease::new(set.clone(), device.index, device.generation, reserved)
        };
        Ok(held.into_iter().map(lease).collect())
    }

    /// Refreshes the figures of caches and driver. Returns the time.
    fn refresh(&self) -> u64 {
        let now = self.device_set.poll();
        self.device_set.sample(now);
        self.device_set.members().for_each(|member| member.count_caches());
        now
    }

    /// Stops placing new requests on a device. Its existing leases stay valid. Applies to all
    /// placers of the runtime.
    ///
    /// # Errors
    /// [`NoDevice`](aquifer_core::MemoryError::NoDevice).
    pub fn drain(&self, device: DeviceId) -> Result<()> {
        self.device_set.set_draining(device, true)
    }

    /// Makes a [drained](Placer::drain) device available for requests again.
    ///
    /// # Errors
    /// [`NoDevice`](aquifer_core::MemoryError::NoDevice).
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
    /// [`NoDevice`](aquifer_core::MemoryError::NoDevice) if the runtime does not have the device;
    /// [`BadSetting`](aquifer_core::MemoryError::BadSetting) if it is not lost.
    pub fn restore(&self, pool: DevicePool) -> Result<u32> {
        self.device_set.poll();
        self.device_set.restore(pool)
    }

    /// Returns snapshots of all devices of this placer, including lost ones.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = Device<'_>> {
        let now = self.device_set.poll();
        let device_set = &self.device_set;
        device_set.members().enumerate().map(move |(index, member)| Device {
            seen: member.candidate(index, now, None),
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
