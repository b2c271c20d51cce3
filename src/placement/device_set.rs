//! The devices that requests are placed on, and their current figures.
//!
//! ```text
//!   free  =  what caches hold  +  min(what the budget has left, what the driver has left)
//!            ───── sampled ───        ──── this moment ────      ─ sampled, less what was charged since ─
//! ```
//!
//! The budget's part is read from its atomics for each request, so a lease that another thread has
//! just taken is counted. The rest is sampled at an interval, by the thread that finds it due. One
//! thread samples at a time, with no lock held; other threads use the older sample.
//!
//! Devices are stored in slots. A device that was lost and restored has a new pool and a new
//! generation in the same slot. Earlier generations remain linked before it, for leases that still
//! exist.

use super::{Candidate, Near, PlacementRequest, RejectReason};
use aquifer_core::{Budget, DeviceId, MemoryError, Reservation, Result, panics::contain};
use aquifer_device::DevicePool;
use aquifer_driver::losses;
use aquifer_host::{
    clock,
    topology::{NodeId, Topology},
};
use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{
            AtomicBool, AtomicU8, AtomicU64,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
    task::Waker,
    time::{Duration, Instant},
};

/// The maximum number of devices, so that a set of them fits in one word.
pub(crate) const MAX_DEVICES: usize = 64;

/// The health of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Health {
    /// Requests are placed there.
    Serving,
    /// No new requests are placed there. Existing leases stay valid.
    Draining,
    /// A call has reported it lost. Leases on it return [`MemoryError::DeviceLost`].
    Lost,
}

const DRAINING: u8 = 1;
const LOST: u8 = 2;

/// One generation of a device.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) pool: DevicePool,
    pub(super) generation: u32,
    /// [`DRAINING`] and [`LOST`].
    state: AtomicU8,
    budget: Budget,
    /// Whether no other device's pool is charged to the same budget.
    exclusive_budget: bool,
    /// Whether another device's pool is charged to the same budget or below a common root.
    shares_root: bool,
    /// The bytes in caches at the last count.
    cached: AtomicU64,
    /// The physical bytes of the pool at the last count, and the time of that count.
    physical: AtomicU64,
    counted: AtomicU64,
    /// The driver's free bytes at the last sample. If the budget belongs to this device alone, the
    /// pool's physical bytes at that time are added.
    ceiling: AtomicU64,
    /// The time of the last sample, in nanoseconds on the device set's clock.
    sampled: AtomicU64,
    node: Option<NodeId>,
    /// The generation that replaced this one.
    next: OnceLock<Box<Member>>,
}

/// What a request is to be near, resolved.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Anywhere,
    Node(NodeId),
    Device(DeviceId),
}

/// The devices of a runtime, shared by all of its placers.
#[derive(Debug)]
pub(crate) struct DeviceSet {
    slots: Box<[Member]>,
    topology: Arc<Topology>,
    /// The interval of samples in nanoseconds.
    interval: u64,
    now: fn() -> Duration,
    /// When the last sample began, by `now`.
    sampled: AtomicU64,
    sampling: AtomicBool,
    /// The number of losses that have been handled.
    losses: AtomicU64,
    /// The wakers of waiting requests.
    wakers: Mutex<Vec<(u64, Waker)>>,
    watchers: AtomicU64,
}

impl Member {
    /// `others` are the budgets of other devices' pools.
    fn new<'a>(
        pool: DevicePool,
        generation: u32,
        others: impl Iterator<Item = &'a Budget> + Clone,
        topology: &Topology,
    ) -> Self {
        let budget = pool.budget().clone();
        let top = budget.root();
        let exclusive_budget = !others.clone().any(|other| other.is(&budget));
        let shares_root = others.clone().any(|other| other.root().is(&top));
        let node = topology.node_of_device(pool.info()).ok().flatten();
        Self {
            pool,
            generation,
            state: AtomicU8::new(0),
            budget,
            exclusive_budget,
            shares_root,
            cached: AtomicU64::new(0),
            physical: AtomicU64::new(0),
            counted: AtomicU64::new(0),
            ceiling: AtomicU64::new(u64::MAX),
            sampled: AtomicU64::new(0),
            node,
            next: OnceLock::new(),
        }
    }

    pub(super) fn health(&self) -> Health {
        match self.state.load(Acquire) {
            0 => Health::Serving,
            state if state & LOST != 0 => Health::Lost,
            _ => Health::Draining,
        }
    }

    /// Returns an error unless the pool can be used.
    pub(super) fn check(&self) -> Result<()> {
        let device = self.pool.device();
        if self.pool.driver().is_lost(device) {
            return Err(MemoryError::DeviceLost { device });
        }
        Ok(())
    }

    /// Returns whether requests may be placed there.
    pub(super) fn is_serving(&self) -> bool {
        self.health() == Health::Serving && self.check().is_ok()
    }

    /// Returns the driver's free bytes at the last sample, less what was charged since.
    #[inline]
    fn driver_free(&self) -> u64 {
        let ceiling = self.ceiling.load(Relaxed);
        if self.exclusive_budget { ceiling.saturating_sub(self.budget.used()) } else { ceiling }
    }

    /// Returns the budget that its bytes are charged to.
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns whether its caches held anything at the last count.
    pub(super) fn has_cached(&self) -> bool {
        self.cached.load(Relaxed) > 0
    }

    /// Returns whether the driver has the bytes that are charged.
    pub(super) fn is_backed(&self) -> bool {
        let ceiling = self.ceiling.load(Relaxed).saturating_add(self.cached.load(Relaxed));
        !self.exclusive_budget || self.budget.used() <= ceiling
    }

    #[inline]
    fn free(&self, priority: Option<i32>) -> u64 {
        self.cached
            .load(Relaxed)
            .saturating_add(self.budget.estimate(priority).min(self.driver_free()))
    }

    /// Returns the candidate that a policy sees, for a request of this priority.
    pub(super) fn candidate(&self, index: usize, now: u64, priority: Option<i32>) -> Candidate<'_> {
        let info = self.pool.info();
        Candidate {
            index,
            device: info.device,
            generation: self.generation,
            free: self.free(priority),
            total: info.memory.min(self.budget.limit()),
            compute_capability: info.compute_capability,
            peers: &info.peers,
            far: 0,
            age: Duration::from_nanos(now.saturating_sub(self.sampled.load(Relaxed))),
        }
    }

    /// Recounts the caches if that could raise `free` to the needed bytes, and the pool's physical
    /// bytes or the clock have changed since the last count. Returns the free bytes.
    #[cold]
    fn recount(&self, free: u64, place: &PlacementRequest, now: u64) -> u64 {
        let physical = self.pool.physical();
        let most = self.budget.estimate(place.requested_priority()).saturating_add(physical);
        let known = physical == self.physical.load(Relaxed) && self.counted.load(Relaxed) == now;
        if known || most < place.needs() {
            return free;
        }
        self.counted.store(now, Relaxed);
        self.count_caches();
        self.free(place.requested_priority())
    }

    /// Counts what the caches hold. Makes no driver call.
    pub(super) fn count_caches(&self) {
        let stats = self.pool.stats();
        self.physical.store(stats.physical, Relaxed);
        self.cached.store(stats.cached, Relaxed);
    }

    /// Queries the driver's free memory (`cuMemGetInfo`). If that fails, the older sample stays.
    fn sample(&self, now: u64) {
        let device = self.pool.device();
        let Ok(info) = self.pool.driver().memory_info(device) else { return };
        self.count_caches();
        // `ceiling` is free plus held. Bytes charged but not held yet are to come from the driver
        // as well.
        let held = if self.exclusive_budget { self.physical.load(Relaxed) } else { 0 };
        self.ceiling.store(info.free.saturating_add(held), Relaxed);
        self.sampled.store(now, Relaxed);
    }

    /// Reserves `bytes` of its budget. If the budget lacks bytes, the caches release some first.
    pub(super) fn reserve(&self, bytes: u64, priority: Option<i32>) -> Result<Reservation> {
        let reserve = || match priority {
            None => self.budget.reserve(bytes),
            Some(priority) => self.budget.charge_as(bytes, priority).map(Reservation::from),
        };
        match reserve() {
            Ok(reservation) => Ok(reservation),
            Err(refused) => {
                self.make_room(bytes.saturating_sub(refused.remaining))?;
                Ok(reserve()?)
            }
        }
    }

    /// Makes others that share a budget with this device release what is missing for `bytes`: the
    /// caches of other devices, which are not among its own free bytes. Continues as long as this
    /// needs no waiting and until `enough` returns `true`. Returns whether there is enough.
    #[cold]
    pub(super) fn reclaim_from_others(&self, bytes: u64, mut enough: impl FnMut() -> bool) -> bool {
        // The deadline is now, so reclaimers that would wait are skipped.
        let now = Instant::now();
        let mut reclaim = self.budget.asking(None);
        // The budget also refuses bytes that earlier waiters are queued for. Reclaiming does not
        // help with those.
        let lacks = || {
            let refused = self.budget.refusal(bytes);
            refused.is_some_and(|refused| refused.current.saturating_add(bytes) > refused.limit)
        };
        loop {
            if enough() {
                return true;
            }
            if !self.shares_root || !lacks() || reclaim.for_charge(bytes, Some(now)).is_none() {
                return false;
            }
        }
    }

    /// Makes the caches release `bytes`, as far as that needs no waiting.
    #[cold]
    pub(super) fn make_room(&self, bytes: u64) -> Result<()> {
        self.pool.trim(self.pool.stats().physical.saturating_sub(bytes))?;
        self.count_caches();
        Ok(())
    }
}

impl DeviceSet {
    /// Creates the set of these pools' devices and takes the first sample of each.
    pub(crate) fn new(pools: &[DevicePool], topology: Arc<Topology>, interval: Duration) -> Self {
        let member = |(index, pool): (usize, &DevicePool)| {
            let others = pools.iter().enumerate().filter(move |(other, _)| *other != index);
            Member::new(pool.clone(), 1, others.map(|(_, other)| other.budget()), &topology)
        };
        let device_set = Self {
            slots: pools.iter().enumerate().map(member).collect(),
            topology,
            interval: u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX),
            now: clock::coarse,
            sampled: AtomicU64::new(0),
            sampling: AtomicBool::new(false),
            losses: AtomicU64::new(losses()),
            wakers: Mutex::default(),
            watchers: AtomicU64::new(0),
        };
        device_set.sample(device_set.now());
        device_set
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        let now = (self.now)();
        // 64 bits last for five hundred years.
        now.as_secs() * 1_000_000_000 + u64::from(now.subsec_nanos())
    }

    /// Returns the current generation of each device, in the order of their indices.
    pub(super) fn members(&self) -> impl ExactSizeIterator<Item = &Member> + Clone {
        self.slots.iter().map(newest)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the pool of the device at `index`.
    pub(crate) fn pool(&self, index: usize) -> Option<&DevicePool> {
        self.slots.get(index).map(|slot| &newest(slot).pool)
    }

    /// Returns the index and the current generation of a device.
    pub(super) fn find(&self, device: DeviceId) -> Result<(usize, &Member)> {
        let count = u32::try_from(self.len()).unwrap_or(u32::MAX);
        let mut members = self.members().enumerate();
        let found = members.find(|(_, member)| member.pool.device() == device);
        found.ok_or(MemoryError::NoDevice { asked: device.0, count })
    }

    /// Returns one generation of the device at `index`, which is one of the set's.
    pub(super) fn at(&self, index: usize, generation: u32) -> &Member {
        let mut member = &self.slots[index];
        while member.generation != generation {
            match member.next.get() {
                Some(next) => member = next,
                None => break,
            }
        }
        member
    }

    /// Handles new device losses and takes a sample if it is due. Returns the time.
    #[inline]
    pub(super) fn poll(&self) -> u64 {
        let now = self.now();
        if losses() != self.losses.load(Acquire) {
            self.record_losses();
        }
        if now.saturating_sub(self.sampled.load(Relaxed)) >= self.interval {
            self.sample(now);
        }
        now
    }

    #[cold]
    fn record_losses(&self) {
        let count = losses();
        let mut found = false;
        for member in self.members() {
            let lost = member.pool.driver().is_lost(member.pool.device());
            if lost && member.state.fetch_or(LOST, AcqRel) & LOST == 0 {
                found = true;
                // The device's memory is gone, but its caches are still charged to a budget that
                // others may share. Trimming ends these charges, since a lost device refuses every
                // call.
                let _ = member.pool.trim(0);
            }
        }
        self.losses.store(count, Release);
        if found {
            self.wake();
        }
    }

    /// Samples every device, unless another thread is sampling.
    #[cold]
    pub(super) fn sample(&self, now: u64) {
        /// Clears the flag, also when a pool or driver panics.
        struct SamplingGuard<'a>(&'a AtomicBool);
        impl Drop for SamplingGuard<'_> {
            fn drop(&mut self) {
                self.0.store(false, Release);
            }
        }
        if self.sampling.swap(true, AcqRel) {
            return;
        }
        let guard = SamplingGuard(&self.sampling);
        self.sampled.store(now, Relaxed);
        for member in self.members().filter(|member| member.health() != Health::Lost) {
            member.sample(now);
        }
        drop(guard);
        // A device whose sample failed may be lost.
        if losses() != self.losses.load(Acquire) {
            self.record_losses();
        }
    }

    /// Returns all devices as a policy sees them, in the order of their indices. Those on which no
    /// requests may be placed have nothing free. Caches are recounted if that could make room for
    /// `place`.
    pub(super) fn candidates(
        &self,
        place: &PlacementRequest,
        target: Target,
        now: u64,
    ) -> Vec<Candidate<'_>> {
        let candidates = self.members().enumerate().map(|(index, member)| {
            let mut candidate = member.candidate(index, now, place.requested_priority());
            if member.health() != Health::Serving {
                candidate.free = 0;
            } else if candidate.free < place.needs() {
                candidate.free = member.recount(candidate.free, place, now);
            }
            candidate.far = self.distance(&candidate, target);
            candidate
        });
        candidates.collect()
    }

    /// Returns the devices on which new requests may be placed.
    fn serving(&self) -> impl Iterator<Item = (usize, &Member)> {
        self.members().enumerate().filter(|(_, member)| member.health() == Health::Serving)
    }

    /// Makes others release what a shared budget lacks for `bytes` on a device that suits `place`;
    /// see [`Member::reclaim_from_others`]. Returns whether some device now has room.
    #[cold]
    pub(super) fn reclaim_from_others(&self, place: &PlacementRequest, bytes: u64) -> bool {
        let mut visited: Vec<&Budget> = Vec::new();
        self.serving().any(|(index, member)| {
            if visited.iter().any(|budget| budget.is(&member.budget)) {
                return false;
            }
            visited.push(&member.budget);
            let suits = place.suits(&member.candidate(index, 0, None));
            suits
                && member.shares_root
                && member.reclaim_from_others(bytes, || member.budget.refusal(bytes).is_none())
        })
    }

    /// Resolves what a request is to be near.
    #[cold]
    pub(super) fn target(&self, near: Near) -> Target {
        match near {
            Near::Caller => self.topology.node_of_caller().map_or(Target::Anywhere, Target::Node),
            Near::Node(node) => Target::Node(node),
            Near::Device(device) => Target::Device(device),
            Near::Data(tag) => {
                let held = |member: &Member| (member.pool.held_by(tag), member.pool.device());
                let most = self.members().map(held).max_by_key(|(bytes, _)| *bytes);
                most.filter(|(bytes, _)| *bytes > 0)
                    .map_or(Target::Anywhere, |(_, device)| Target::Device(device))
            }
        }
    }

    /// Returns the distance of a device from `target`: 0 for the same place, and the largest value
    /// if it is unknown.
    pub(super) fn distance(&self, candidate: &Candidate<'_>, target: Target) -> u32 {
        match target {
            Target::Anywhere => 0,
            Target::Node(to) => match newest(&self.slots[candidate.index]).node {
                Some(node) if node == to => 0,
                Some(node) => self.topology.distance(node, to).unwrap_or(u32::MAX - 1),
                None => u32::MAX,
            },
            Target::Device(to) if candidate.device == to => 0,
            Target::Device(to) => 2 - u32::from(candidate.peers.contains(&to)),
        }
    }

    /// Returns each device as a policy sees it, with the reason if it is out of service.
    pub(super) fn with_health(
        &self,
        place: &PlacementRequest,
    ) -> impl Iterator<Item = (Candidate<'_>, Option<RejectReason>)> {
        let (now, priority) = (self.now(), place.requested_priority());
        self.members().enumerate().map(move |(index, member)| {
            let reason = match member.health() {
                Health::Lost => Some(RejectReason::Lost),
                Health::Draining => Some(RejectReason::Draining),
                Health::Serving => None,
            };
            (member.candidate(index, now, priority), reason)
        })
    }

    /// Sets or clears the draining state of a device.
    pub(super) fn set_draining(&self, device: DeviceId, draining: bool) -> Result<()> {
        let (_, member) = self.find(device)?;
        if draining {
            member.state.fetch_or(DRAINING, AcqRel);
        } else {
            member.state.fetch_and(!DRAINING, AcqRel);
        }
        self.wake();
        Ok(())
    }

    /// Replaces the pool of a lost device. Returns the new generation.
    pub(super) fn restore(&self, pool: DevicePool) -> Result<u32> {
        let (index, _) = self.find(pool.device())?;
        let others = self.members().enumerate().filter(|(other, _)| *other != index);
        let others = others.map(|(_, member)| &member.budget);
        let mut next = Box::new(Member::new(pool, 0, others, &self.topology));
        let mut last = &self.slots[index];
        loop {
            last = newest(last);
            if last.health() != Health::Lost {
                let (name, value) = ("the device", last.pool.device().to_string());
                return Err(MemoryError::BadSetting { name, value, expected: "one that is lost" });
            }
            next.generation = last.generation + 1;
            next.sample(self.now());
            match last.next.set(next) {
                Ok(()) => break,
                Err(refused) => next = refused,
            }
        }
        self.wake();
        Ok(newest(last).generation)
    }

    /// Returns a new number for [`DeviceSet::watch`].
    pub(super) fn watcher(&self) -> u64 {
        self.watchers.fetch_add(1, Relaxed)
    }

    /// Registers the waker to be called when a device is lost, restored, drained or undrained.
    /// `None` removes it.
    pub(super) fn watch(&self, watcher: u64, waker: Option<&Waker>) {
        // Cloning and dropping wakers may run foreign code, so both happen outside the lock.
        let mut waker = waker.map(|waker| (watcher, waker.clone()));
        let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = wakers.iter().position(|(other, _)| *other == watcher);
        let before = match (known, waker.take()) {
            (Some(at), Some(next)) => Some(std::mem::replace(&mut wakers[at], next)),
            (Some(at), None) => Some(wakers.swap_remove(at)),
            (None, Some(next)) => {
                wakers.push(next);
                None
            }
            (None, None) => None,
        };
        drop(wakers);
        drop(before);
    }

    fn wake(&self) {
        let wakers =
            std::mem::take(&mut *self.wakers.lock().unwrap_or_else(PoisonError::into_inner));
        // Wakers are foreign code. A panic in one does not keep the others from being woken.
        for (_, waker) in wakers {
            contain(|| waker.wake());
        }
    }
}

#[inline]
fn newest(mut member: &Member) -> &Member {
    while let Some(next) = member.next.get() {
        member = next;
    }
    member
}
