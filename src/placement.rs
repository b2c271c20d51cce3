//! Which device a request goes to, and bytes that are held there until they are used.
//!
//! A pick that holds nothing is a guess: by the time the memory is asked for, others have taken it.
//! [`Placer::place`] picks and reserves in one step, and answers with a [`Lease`] that draws from
//! what it holds. A device whose budget refuses is not picked, so of two requests for the last
//! bytes one wins and the other goes elsewhere or is told.
//!
//! | module | holds |
//! |---|---|
//! | `request` | [`Place`], [`Near`], [`Group`]: what is asked |
//! | `policy` | [`Policy`]: which of those that satisfy it is taken |
//! | `hash` | the hash of [`Policy::Affinity`], written down |
//! | `fleet` | the devices: free memory by the moment, health, generations |
//! | `lease` | [`Lease`]: bytes that are held |
//! | `group` | several leases, all or nothing |
//! | `waiting` | [`Placing`], and of groups [`Grouping`]: waiting until there is room |
//! | `refusal` | [`PlaceError`]: each device, and why not |
//!
//! # What a policy sees
//! Free memory is the pool's own account at this moment, so that a burst of requests spreads as the
//! policy says, joined with what the driver had left when it was last asked, which other programs
//! change too; see [`Candidate::age`]. A policy picks among devices that satisfy every hint and
//! serve. A lost device leaves as soon as any call has met the loss; one that is
//! [drained](Placer::drain) takes nothing new.

mod fleet;
mod group;
mod hash;
mod lease;
mod policy;
mod refusal;
mod request;
mod waiting;

pub use fleet::Health;
pub(crate) use fleet::{Fleet, MAX_DEVICES};
pub use group::Grouping;
pub use hash::key_of;
pub use lease::Lease;
pub use policy::{Candidate, Custom, Policy, Weights};
pub use refusal::{Nowhere, Passed, PlaceError, Why};
pub use request::{Group, Near, Place};
pub use waiting::Placing;

use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_device::DevicePool;
use fleet::{Member, Target};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Picks devices by one policy.
///
/// Clones share it, and all placers of a runtime share its devices: what one drains, all pass over.
///
/// ```
/// use aquifer::{Place, Policy, Runtime, sim::Sim};
/// let rt = Runtime::on(Sim::h200(2).driver())?;
/// let placer = rt.placer(Policy::RoundRobin);
/// let first = placer.place(&Place::bytes(1 << 20))?;
/// let second = placer.place(&Place::bytes(1 << 20))?;
/// assert_ne!(first.device(), second.device());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Placer {
    fleet: Arc<Fleet>,
    policy: Policy,
    /// By index; none where all weigh the same.
    weights: Arc<[u32]>,
    /// Requests placed: where round robin stands.
    turn: Arc<AtomicU64>,
}

/// One of a placer's devices, as it is at this moment.
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
    /// What a policy sees of it.
    pub seen: Candidate<'a>,
    /// How it stands with it.
    pub health: Health,
    /// Its pool.
    pub pool: &'a DevicePool,
}

/// What a request met: the set of devices that refused, and what they said.
#[derive(Default)]
struct Met {
    refused: u64,
    said: Vec<(usize, MemoryError)>,
}

impl Met {
    #[cold]
    fn note(&mut self, index: usize, error: MemoryError) {
        self.refused |= 1 << index;
        self.said.push((index, error));
    }

    fn why(&self, index: usize) -> Option<Why> {
        let said = self.said.iter().find(|(device, _)| *device == index)?;
        Some(match &said.1 {
            MemoryError::OutOfBudget(refused) => Why::Budget(*refused),
            MemoryError::DeviceLost { .. } => Why::Lost,
            other => Why::Pool(other.clone()),
        })
    }
}

impl Placer {
    pub(crate) fn new(fleet: Arc<Fleet>, policy: Policy) -> Self {
        let weights = match &policy {
            Policy::Weighted(weights) => {
                let pools = (0..fleet.len()).filter_map(|index| fleet.pool(index));
                pools.map(|pool| weights.of(pool.device())).collect()
            }
            _ => Arc::default(),
        };
        Self { fleet, policy, weights, turn: Arc::default() }
    }

    /// Picks a device that satisfies `place` and reserves its bytes there, as [`Budget::reserve`]
    /// does. Does not block: a pool whose caches hold what its budget lacks is made to give that
    /// back first (`cuMemUnmap`, `cuMemRelease`), then those of other devices where they share a
    /// budget, and the driver is asked for its free memory when that is due (`cuMemGetInfo`).
    ///
    /// The device that the policy picks is taken if its budget grants the bytes; else the one that
    /// it picks of the rest.
    ///
    /// # Errors
    /// [`PlaceError`], with every device and why it was not taken.
    ///
    /// [`Budget::reserve`]: aquifer_core::Budget::reserve
    pub fn place(&self, place: &Place) -> Result<Lease, PlaceError> {
        if place.size() == 0 {
            return Err(PlaceError::ZeroSize);
        }
        let now = self.fleet.look();
        let turn = self.turn();
        let mut met = Met::default();
        // Custom policies, and those that have to look around first, allocate.
        if let Policy::Custom(_) | Policy::Near = self.policy {
            if let Some(lease) = self.try_ranked(place, turn, now, &mut met)? {
                return Ok(lease);
            }
        } else if let Some(lease) = self.try_each(place, turn, now, &mut met) {
            return Ok(lease);
        }
        self.place_slowly(place, turn, met)
    }

    #[inline]
    fn turn(&self) -> u64 {
        if self.policy.takes_turns() { self.turn.fetch_add(1, Ordering::Relaxed) } else { 0 }
    }

    fn weigh<'a>(&self, candidate: Candidate<'a>) -> Candidate<'a> {
        Candidate { weight: self.weights.get(candidate.index).copied().unwrap_or(1), ..candidate }
    }

    /// Tries the devices one after another, each the best of those that are left.
    #[inline]
    fn try_each(&self, place: &Place, turn: u64, now: u64, met: &mut Met) -> Option<Lease> {
        loop {
            let admitted = self.fleet.admitted(place, met.refused, now, &self.weights);
            let best = self.policy.pick_from(place, admitted, turn, self.fleet.len())?;
            if let Some(lease) = self.hold(place, best.index, best.member, met) {
                return Some(lease);
            }
        }
    }

    #[inline]
    fn hold(&self, place: &Place, index: usize, member: &Member, met: &mut Met) -> Option<Lease> {
        match member.reserve(place.size(), place.priority_asked()) {
            Ok(held) => Some(self.fleet.lease(index, member.generation, held)),
            Err(error) => {
                met.note(index, error);
                None
            }
        }
    }

    /// Devices that serve and satisfy `place`, `rest`, in the order in which the policy would take
    /// them.
    fn ranked<'a>(
        &'a self,
        place: &Place,
        rest: impl Iterator<Item = Candidate<'a>>,
        turn: u64,
    ) -> Result<Vec<Candidate<'a>>, PlaceError> {
        let target = match self.policy {
            Policy::Near => self.fleet.target(place.near_asked()),
            _ => Target::Anywhere,
        };
        let mut rest: Vec<_> =
            rest.map(|c| Candidate { far: self.fleet.far(&c, target), ..self.weigh(c) }).collect();
        let mut ranked = Vec::with_capacity(rest.len());
        if let Policy::Custom(custom) = &self.policy {
            let order = custom.order(place, &rest);
            let Some(order) = order else {
                return Err(PlaceError::PolicyPanicked { policy: custom.name });
            };
            ranked.extend(order.iter().filter_map(|index| rest.iter().find(|c| c.index == *index)));
            return Ok(ranked);
        }
        while let Some(pick) =
            self.policy.pick_from(place, rest.iter().copied(), turn, self.fleet.len())
        {
            ranked.extend(rest.extract_if(.., |candidate| candidate.index == pick.index));
        }
        Ok(ranked)
    }

    #[cold]
    fn try_ranked(
        &self,
        place: &Place,
        turn: u64,
        now: u64,
        met: &mut Met,
    ) -> Result<Option<Lease>, PlaceError> {
        let admitted = self.fleet.admitted(place, met.refused, now, &self.weights);
        let rest: Vec<_> = admitted.map(|seen| seen.candidate(now)).collect();
        for best in self.ranked(place, rest.into_iter(), turn)? {
            let member = self.fleet.at(best.index, best.generation);
            if let Some(lease) = self.hold(place, best.index, member, met) {
                return Ok(Some(lease));
            }
        }
        Ok(None)
    }

    /// Nothing was found by what was known: finds out anew, and tries again before it says so.
    #[cold]
    fn place_slowly(&self, place: &Place, turn: u64, mut met: Met) -> Result<Lease, PlaceError> {
        let mut now = self.find_out();
        let mut lease = self.try_ranked(place, turn, now, &mut met)?;
        if lease.is_none() && self.fleet.ask_others(place, place.needs()) {
            (now, met) = (self.find_out(), Met::default());
            lease = self.try_ranked(place, turn, now, &mut met)?;
        }
        lease.ok_or_else(|| self.nowhere(place, 1, &met))
    }

    /// Asks caches and driver anew. Answers with the time.
    fn find_out(&self) -> u64 {
        let now = self.fleet.look();
        self.fleet.sample(now);
        (0..self.fleet.len())
            .filter_map(|index| self.fleet.current(index))
            .for_each(|member| member.count());
        now
    }

    fn nowhere(&self, place: &Place, shards: usize, met: &Met) -> PlaceError {
        let unsaid = if shards > 1 { Why::Alone } else { Why::NotNamed };
        let devices =
            self.fleet.passed(place, |index, _| met.why(index).unwrap_or_else(|| unsaid.clone()));
        PlaceError::Nowhere(Box::new(Nowhere { requested: place.size(), shards, devices }))
    }

    /// Lets nothing new go to a device; what is leased there lives on. For all placers of the
    /// runtime.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`].
    pub fn drain(&self, device: DeviceId) -> Result<()> {
        self.fleet.set_draining(device, true)
    }

    /// Lets requests go to a device again that was [drained](Placer::drain).
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`].
    pub fn undrain(&self, device: DeviceId) -> Result<()> {
        self.fleet.set_draining(device, false)
    }

    /// Puts a lost device back: `pool`, opened on it after the application has reset it, takes its
    /// place in a new generation, which is answered. Leases of the one before stay refused. Asks
    /// the driver for its free memory.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`] for a device that is none of the runtime's;
    /// [`MemoryError::BadSetting`] for one that is not lost.
    pub fn restore(&self, pool: DevicePool) -> Result<u32> {
        self.fleet.look();
        self.fleet.restore(pool)
    }

    /// The devices it picks from, as they are now, lost ones too.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = Device<'_>> {
        let now = self.fleet.look();
        let fleet = &self.fleet;
        fleet.members().enumerate().map(move |(index, member)| Device {
            seen: self.weigh(member.candidate(index, now, None)),
            health: member.health(),
            pool: &member.pool,
        })
    }

    /// The device at `index`.
    #[must_use]
    pub fn device(&self, index: usize) -> Option<Device<'_>> {
        self.devices().nth(index)
    }

    /// The device with this ordinal.
    #[must_use]
    pub fn by_ordinal(&self, device: DeviceId) -> Option<Device<'_>> {
        self.devices().find(|known| known.seen.device == device)
    }

    /// How many devices there are, lost ones too.
    #[must_use]
    pub fn count(&self) -> usize {
        self.fleet.len()
    }
}

impl fmt::Debug for Placer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placer")
            .field("policy", &self.policy)
            .field("fleet", &self.fleet)
            .finish_non_exhaustive()
    }
}
