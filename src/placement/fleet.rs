//! The devices that requests go to, and what is known of each at this moment.
//!
//! ```text
//!   free  =  what caches hold  +  min(what the budget has left, what the driver has left)
//!            ───── sampled ───        ──── this moment ────      ─ sampled, less what was charged since ─
//! ```
//!
//! The budget's part is read from its atomics for each request, so a lease that another thread has
//! just taken counts. The rest is asked for on a clock, by whichever thread finds that it is due,
//! one at a time and with no lock held; others go on with the older sample.
//!
//! The devices stand in slots. A device that was lost and put back has a new pool and a new
//! generation in the same slot; earlier generations stay behind it, for the leases that are still
//! about.

use super::{Candidate, Near, Passed, Place, Why, lease::Lease, policy::Seen};
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

/// Devices of one fleet at most: a set of them is a word.
pub(crate) const MAX_DEVICES: usize = 64;

/// How it stands with a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Health {
    /// Requests go there.
    Serving,
    /// Nothing new goes there; what is leased lives on.
    Draining,
    /// A call has answered that it is lost. Leases on it answer with [`MemoryError::DeviceLost`].
    Lost,
}

const DRAINING: u8 = 1;
const LOST: u8 = 2;

/// One generation of a device.
#[derive(Debug)]
pub(super) struct Member {
    /// What a policy sees comes first, and from here: the pool's own lies two pointers away.
    device: DeviceId,
    compute_capability: (u32, u32),
    peers: Box<[DeviceId]>,
    pub(super) pool: DevicePool,
    pub(super) generation: u32,
    /// [`DRAINING`] and [`LOST`].
    state: AtomicU8,
    budget: Budget,
    /// No other device's pool is charged to the same budget.
    alone: bool,
    /// Another one is charged to a budget above it, or to the same.
    shares: bool,
    total: u64,
    /// What caches held when they were asked.
    cached: AtomicU64,
    /// What the pool held in all then, and when that was.
    physical: AtomicU64,
    counted: AtomicU64,
    /// What the driver had left then; where the budget is the device's own, with what was charged
    /// to it then.
    ceiling: AtomicU64,
    /// Nanoseconds on the fleet's clock.
    sampled: AtomicU64,
    node: Option<NodeId>,
    /// The generation that has taken its place.
    next: OnceLock<Box<Member>>,
}

/// A device at a glance: what it has free, and where the rest can be found out.
#[derive(Clone, Copy)]
pub(super) struct Glimpse<'a> {
    pub(super) member: &'a Member,
    pub(super) index: usize,
    free: u64,
    weights: &'a [u32],
}

impl<'a> Glimpse<'a> {
    /// All of it.
    pub(super) fn candidate(&self, now: u64) -> Candidate<'a> {
        Candidate {
            free: self.free,
            weight: self.weight(),
            ..self.member.candidate(self.index, now, None)
        }
    }
}

impl Seen for Glimpse<'_> {
    #[inline]
    fn index(&self) -> usize {
        self.index
    }

    #[inline]
    fn device(&self) -> DeviceId {
        self.member.device
    }

    #[inline]
    fn free(&self) -> u64 {
        self.free
    }

    #[inline]
    fn total(&self) -> u64 {
        self.member.total()
    }

    #[inline]
    fn compute_capability(&self) -> (u32, u32) {
        self.member.compute_capability
    }

    #[inline]
    fn weight(&self) -> u32 {
        self.weights.get(self.index).copied().unwrap_or(1)
    }

    /// Who asks for it looks at candidates.
    #[inline]
    fn far(&self) -> u32 {
        0
    }
}

/// What a request is to be near.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Anywhere,
    Node(NodeId),
    Device(DeviceId),
}

/// The devices of a runtime, for all of its placers.
#[derive(Debug)]
pub(crate) struct Fleet {
    slots: Box<[Member]>,
    topology: Arc<Topology>,
    /// Nanoseconds between samples.
    interval: u64,
    now: fn() -> Duration,
    /// When the last sample began, by `now`.
    sampled: AtomicU64,
    sampling: AtomicBool,
    /// The losses that have been looked into.
    losses: AtomicU64,
    /// Who waits for a device to come back.
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
        let alone = !others.clone().any(|other| other.is(&budget));
        let shares = others.clone().any(|other| other.root().is(&top));
        let node = topology.node_of_device(pool.info()).ok().and_then(|found| found.value);
        Self {
            device: pool.device(),
            compute_capability: pool.info().compute_capability,
            peers: pool.info().peers.clone().into(),
            total: pool.info().memory,
            pool,
            generation,
            state: AtomicU8::new(0),
            budget,
            alone,
            shares,
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

    /// That its pool can be used.
    pub(super) fn check(&self) -> Result<()> {
        let device = self.pool.device();
        if self.next.get().is_some() || self.pool.driver().is_lost(device) {
            return Err(MemoryError::DeviceLost { device });
        }
        Ok(())
    }

    /// Whether requests may go there.
    pub(super) fn serves(&self) -> bool {
        self.health() == Health::Serving && self.check().is_ok()
    }

    /// Bytes that the driver had left when it was asked, less what was charged since.
    #[inline]
    fn drivers(&self) -> u64 {
        let ceiling = self.ceiling.load(Relaxed);
        if self.alone { ceiling.saturating_sub(self.budget.used()) } else { ceiling }
    }

    /// What its bytes are charged to.
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Whether its caches held anything when they were asked.
    pub(super) fn holds_free(&self) -> bool {
        self.cached.load(Relaxed) > 0
    }

    /// Whether the driver has what has been charged.
    pub(super) fn is_covered(&self) -> bool {
        let ceiling = self.ceiling.load(Relaxed).saturating_add(self.cached.load(Relaxed));
        !self.alone || self.budget.used() <= ceiling
    }

    #[inline]
    fn free(&self, priority: Option<i32>) -> u64 {
        self.cached.load(Relaxed).saturating_add(self.budget.estimate(priority).min(self.drivers()))
    }

    /// Bytes that its pool may have at all.
    #[inline]
    fn total(&self) -> u64 {
        self.total.min(self.budget.limit())
    }

    /// As a policy sees it, to a request of this priority.
    #[inline]
    pub(super) fn candidate(&self, index: usize, now: u64, priority: Option<i32>) -> Candidate<'_> {
        Candidate {
            index,
            device: self.device,
            generation: self.generation,
            free: self.free(priority),
            total: self.total(),
            compute_capability: self.compute_capability,
            peers: &self.peers,
            weight: 1,
            far: 0,
            age: Duration::from_nanos(now.saturating_sub(self.sampled.load(Relaxed))),
        }
    }

    /// The free bytes after a closer look, if it satisfies `place` then.
    #[inline(never)]
    fn admit(&self, index: usize, free: u64, place: &Place, now: u64) -> Option<u64> {
        let free = if free < place.needs() { self.recount(free, place, now) } else { free };
        place.admits(&Candidate { free, ..self.candidate(index, now, None) }).then_some(free)
    }

    /// Counts what caches hold once more, if that could make `free` bytes as many as are needed,
    /// and the pool has grown or shrunk since or the clock has ticked. Answers with the free bytes.
    #[cold]
    fn recount(&self, free: u64, place: &Place, now: u64) -> u64 {
        let physical = self.pool.physical();
        let most = self.budget.estimate(place.priority_asked()).saturating_add(physical);
        let known = physical == self.physical.load(Relaxed) && self.counted.load(Relaxed) == now;
        if known || most < place.needs() {
            return free;
        }
        self.counted.store(now, Relaxed);
        self.count();
        self.free(place.priority_asked())
    }

    /// Asks the caches what they hold. No driver call.
    pub(super) fn count(&self) {
        let stats = self.pool.stats();
        self.physical.store(stats.physical, Relaxed);
        self.cached.store(stats.cached, Relaxed);
    }

    /// Asks the driver what it has left (`cuMemGetInfo`). One that does not answer leaves the older
    /// sample.
    fn sample(&self, now: u64) {
        let device = self.pool.device();
        let Ok(info) = self.pool.driver().memory_info(device) else { return };
        self.count();
        // What is charged and not held yet is to be had of the driver as well.
        let held = if self.alone { self.physical.load(Relaxed) } else { 0 };
        self.ceiling.store(info.free.saturating_add(held), Relaxed);
        self.sampled.store(now, Relaxed);
    }

    /// Takes `bytes` of its budget, having its caches make room where that is what lacks.
    pub(super) fn reserve(&self, bytes: u64, priority: Option<i32>) -> Result<Reservation> {
        let reserve = || match priority {
            None => self.budget.reserve(bytes),
            Some(priority) => self.budget.charge_as(bytes, priority).map(Reservation::from),
        };
        match reserve() {
            Ok(held) => Ok(held),
            Err(refused) => {
                self.make_room(bytes.saturating_sub(refused.remaining))?;
                Ok(reserve()?)
            }
        }
    }

    /// Has whoever shares a budget with this device give back what `bytes` lack there: caches of
    /// other devices, which are not among its own free bytes. As far as that needs no waiting, and
    /// until there is `enough`; whether there is.
    #[cold]
    pub(super) fn ask_others(&self, bytes: u64, mut enough: impl FnMut() -> bool) -> bool {
        // A deadline that has passed: nobody is asked who would wait.
        let now = Instant::now();
        let mut asking = self.budget.asking(None);
        // What others wait for is refused as well, and nobody can give that back.
        let lacks = || {
            let refused = self.budget.refusal(bytes);
            refused.is_some_and(|refused| refused.current.saturating_add(bytes) > refused.limit)
        };
        loop {
            if enough() {
                return true;
            }
            if !self.shares || !lacks() || asking.for_charge(bytes, Some(now)).is_none() {
                return false;
            }
        }
    }

    /// Has the caches give `bytes` back, as far as that needs no waiting.
    #[cold]
    pub(super) fn make_room(&self, bytes: u64) -> Result<()> {
        self.pool.trim(self.pool.stats().physical.saturating_sub(bytes))?;
        self.count();
        Ok(())
    }
}

impl Fleet {
    /// The devices of these pools, and the first sample of each.
    pub(crate) fn new(pools: &[DevicePool], topology: Arc<Topology>, interval: Duration) -> Self {
        let member = |(index, pool): (usize, &DevicePool)| {
            let others = pools.iter().enumerate().filter(move |(other, _)| *other != index);
            Member::new(pool.clone(), 1, others.map(|(_, other)| other.budget()), &topology)
        };
        let fleet = Self {
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
        fleet.sample(fleet.now());
        fleet
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        let now = (self.now)();
        // In 64 bits, for five hundred years.
        now.as_secs() * 1_000_000_000 + u64::from(now.subsec_nanos())
    }

    /// The generation that stands of each device, in the order of their indices.
    pub(super) fn members(&self) -> impl ExactSizeIterator<Item = &Member> + Clone {
        self.slots.iter().map(newest)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The generation of the device at `index` that stands.
    #[inline]
    pub(super) fn current(&self, index: usize) -> Option<&Member> {
        self.slots.get(index).map(newest)
    }

    /// The pool of the device at `index`.
    pub(crate) fn pool(&self, index: usize) -> Option<&DevicePool> {
        self.current(index).map(|member| &member.pool)
    }

    /// Where a device stands.
    pub(super) fn find(&self, device: DeviceId) -> Result<(usize, &Member)> {
        let count = u32::try_from(self.len()).unwrap_or(u32::MAX);
        let mut members = self.members().enumerate();
        let found = members.find(|(_, member)| member.pool.device() == device);
        found.ok_or(MemoryError::NoDevice { asked: device.0, count })
    }

    /// One generation of the device at `index`.
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

    /// Sees whether devices have been lost and whether a sample is due. Answers with the time.
    #[inline]
    pub(super) fn look(&self) -> u64 {
        let now = self.now();
        if losses() != self.losses.load(Acquire) {
            self.note_losses();
        }
        if now.saturating_sub(self.sampled.load(Relaxed)) >= self.interval {
            self.sample(now);
        }
        now
    }

    #[cold]
    fn note_losses(&self) {
        let count = losses();
        let mut found = false;
        for member in self.members() {
            let lost = member.pool.driver().is_lost(member.pool.device());
            if lost && member.state.fetch_or(LOST, AcqRel) & LOST == 0 {
                found = true;
                // Its memory is gone, and what its caches are charged for is anybody's under the
                // same budget. A lost device refuses every call, which is what ends the charges.
                let _ = member.pool.trim(0);
            }
        }
        self.losses.store(count, Release);
        if found {
            self.wake();
        }
    }

    /// Samples every device, unless another thread is at it.
    #[cold]
    pub(super) fn sample(&self, now: u64) {
        /// Ends the turn, also when a pool or driver panics.
        struct Turn<'a>(&'a AtomicBool);
        impl Drop for Turn<'_> {
            fn drop(&mut self) {
                self.0.store(false, Release);
            }
        }
        if self.sampling.swap(true, AcqRel) {
            return;
        }
        let turn = Turn(&self.sampling);
        self.sampled.store(now, Relaxed);
        for member in self.members().filter(|member| member.health() != Health::Lost) {
            member.sample(now);
        }
        drop(turn);
        // What did not answer may be lost.
        if losses() != self.losses.load(Acquire) {
            self.note_losses();
        }
    }

    /// Those that new requests may go to and that satisfy `place`, in the order of their indices,
    /// but for the set `tried`.
    #[inline]
    pub(super) fn admitted<'a>(
        &'a self,
        place: &'a Place,
        tried: u64,
        now: u64,
        weights: &'a [u32],
    ) -> impl Iterator<Item = Glimpse<'a>> + Clone {
        self.serving(tried).filter_map(move |(index, member)| {
            let mut free = member.free(place.priority_asked());
            if free < place.needs() || place.is_choosy() {
                free = member.admit(index, free, place, now)?;
            }
            Some(Glimpse { member, index, free, weights })
        })
    }

    /// Those that new requests may go to.
    #[inline]
    pub(super) fn serving(&self, tried: u64) -> impl Iterator<Item = (usize, &Member)> + Clone {
        self.slots.iter().enumerate().filter_map(move |(index, slot)| {
            let serves = |member: &Member| member.state.load(Acquire) == 0;
            // What has been replaced was lost before.
            let member = if serves(slot) {
                slot
            } else {
                Some(newest(slot)).filter(|newest| serves(newest))?
            };
            (tried >> index & 1 == 0).then_some((index, member))
        })
    }

    /// Has others give back what a common budget lacks for `bytes` on a device that suits `place`;
    /// see [`Member::ask_others`]. Whether there is room somewhere now.
    #[cold]
    pub(super) fn ask_others(&self, place: &Place, bytes: u64) -> bool {
        let mut asked: Vec<&Budget> = Vec::new();
        self.serving(0).any(|(index, member)| {
            if asked.iter().any(|budget| budget.is(&member.budget)) {
                return false;
            }
            asked.push(&member.budget);
            let suits = place.suits(&member.candidate(index, 0, None));
            suits
                && member.shares
                && member.ask_others(bytes, || member.budget.refusal(bytes).is_none())
        })
    }

    /// What a request is to be near, found out now.
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

    /// How far a device is from there: 0 there, and unknown farthest.
    pub(super) fn far(&self, candidate: &Candidate<'_>, target: Target) -> u32 {
        match target {
            Target::Anywhere => 0,
            Target::Node(to) => {
                match self.current(candidate.index).and_then(|member| member.node) {
                    Some(node) if node == to => 0,
                    Some(node) => self.topology.distance(node, to).unwrap_or(u32::MAX - 1),
                    None => u32::MAX,
                }
            }
            Target::Device(to) if candidate.device == to => 0,
            Target::Device(to) => 2 - u32::from(candidate.peers.contains(&to)),
        }
    }

    /// Each device, and why it was not taken: what the others say is asked of `why`.
    pub(super) fn passed(
        &self,
        place: &Place,
        mut why: impl FnMut(usize, &Candidate<'_>) -> Why,
    ) -> Vec<Passed> {
        let now = self.now();
        let members = self.members().enumerate();
        members
            .map(|(index, member)| {
                let candidate = member.candidate(index, now, place.priority_asked());
                let why = match member.health() {
                    Health::Lost => Why::Lost,
                    Health::Draining => Why::Draining,
                    Health::Serving => {
                        place.objection(&candidate).unwrap_or_else(|| why(index, &candidate))
                    }
                };
                let Candidate { device, generation, free, age, .. } = candidate;
                Passed { device, generation, free, age, why }
            })
            .collect()
    }

    /// Lets nothing new go to a device, or again.
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

    /// Puts a new pool in the place of a lost one. Answers with its generation.
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

    /// A number for [`Fleet::watch`].
    pub(super) fn watcher(&self) -> u64 {
        self.watchers.fetch_add(1, Relaxed)
    }

    /// Has the waker of a watcher called when a device comes or goes, or no longer.
    pub(super) fn watch(&self, watcher: u64, waker: Option<&Waker>) {
        // Clones and drops of wakers may be anybody's code, so they happen outside.
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
        // Code of others, and the rest is woken all the same.
        for (_, waker) in wakers {
            contain(|| waker.wake());
        }
    }

    /// A lease of what was reserved.
    #[inline]
    pub(super) fn lease(
        self: &Arc<Self>,
        index: usize,
        generation: u32,
        held: Reservation,
    ) -> Lease {
        Lease::new(self.clone(), index, generation, held)
    }
}

#[inline]
fn newest(mut member: &Member) -> &Member {
    while let Some(next) = member.next.get() {
        member = next;
    }
    member
}
