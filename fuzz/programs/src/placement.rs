//! Programs over a placer and several simulated devices, checked against a simple model of each
//! device's use: leases, groups, waits, draws, drains, losses, devices that return, and changing
//! limits.
//!
//! Invariants after every operation:
//!
//! - the placer never charged a device above its limit;
//! - charged bytes are exactly those of the leases and of the pool;
//! - a lease holds what it was granted minus what was drawn;
//! - a device that a request excludes, that drains or is lost is never chosen;
//! - a request fails only if no device has room;
//! - a group over devices of others is held as a whole or not at all, and a placer of the same
//!   devices has room for it too.
//!
//! At the end nothing is charged.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    program::{Bytes, Process, Program},
    rig::assert_returned,
};
use aquifer::{
    Block, Budget, DeviceId, DevicePool, Group, Lease, MemoryError, PlaceError, PlacementRequest,
    Placer, Placing, Policy, PoolConfig, Request, Runtime, Stream,
    budget::Reservation,
    placement::{Candidate, Device as Seen, DeviceSource, Health, RejectReason},
    sim::Sim,
};
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

const DEVICES: usize = 4;
/// The size of a physical handle. All sizes are multiples of it, so that a draw from a lease equals
/// the size of the block.
const UNIT: u64 = 2 << 20;

/// A lease, and the bytes it should hold.
struct Held {
    lease: Lease,
    bytes: u64,
}

/// One generation of a device.
struct Device {
    /// The simulated machine that it belongs to.
    sim: usize,
    budget: Budget,
    pool: Option<DevicePool>,
    stream: Option<Stream>,
    limit: u64,
    used: u64,
    generation: u32,
    health: Health,
}

/// The devices of a placer as devices of others, which are held by their budgets alone.
struct Others<'a>(&'a Placer);

impl DeviceSource for Others<'_> {
    type Held = Reservation;

    fn candidates(&self) -> Vec<Candidate<'_>> {
        let devices = self.0.devices().map(|Seen { seen, health, pool, .. }| {
            let mut candidate = seen;
            // What the caches hold does not count. A placer counts it now and then, so that a
            // request for a minimum of free bytes may be refused a moment later.
            let free = pool.budget().remaining();
            candidate.free = if health == Health::Serving { free } else { 0 };
            candidate
        });
        devices.collect()
    }

    fn hold(&self, index: usize, bytes: u64) -> Result<Reservation, RejectReason> {
        let device = self.0.device(index).ok_or(RejectReason::NotNamed)?;
        device.pool.budget().reserve(bytes).map_err(RejectReason::Budget)
    }
}

pub(crate) struct World {
    sims: Vec<Sim>,
    placers: Vec<Placer>,
    devices: Vec<Device>,
    /// Earlier generations that still have leases or blocks.
    gone: Vec<Device>,
    held: Vec<Held>,
    blocks: Vec<(DeviceId, u32, Block)>,
    waits: Vec<(PlacementRequest, Placing)>,
}

fn config(budget: Budget) -> PoolConfig {
    let mut config = PoolConfig::with_budget(budget);
    config.handle_bytes = UNIT;
    // No work is queued, so no wait is needed.
    config.wait = Duration::ZERO;
    config
}

impl Program for World {
    const PROCESS: Process = Process::Alone;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let sim = Sim::h200(DEVICES as u32).symbolic();
        let limits: Vec<_> =
            (0..DEVICES).map(|_| UNIT * (4 + u64::from(bytes.choice(28)))).collect();
        let mut settings = PoolConfig::default();
        settings.handle_bytes = UNIT;
        settings.wait = Duration::ZERO;
        let rt =
            Runtime::builder().driver(sim.driver()).pools(settings).device_budget(UNIT).build();
        let rt = rt.expect("a simulated machine");
        let devices = rt.devices().iter().zip(limits).map(|(pool, limit)| {
            pool.budget().set_limit(limit);
            let (budget, pool) = (pool.budget().clone(), Some(pool.clone()));
            Device {
                sim: 0,
                budget,
                pool,
                stream: None,
                limit,
                used: 0,
                generation: 1,
                health: Health::Serving,
            }
        });
        let devices = devices.collect();
        let policies = [
            Policy::MostFree,
            Policy::RoundRobin,
            Policy::LeastLoaded,
            Policy::BestFit,
            Policy::BestCompute,
            Policy::weighted([(DeviceId(0), 3), (DeviceId(2), 0)]),
            Policy::Affinity,
            Policy::Near,
            Policy::custom("the last, and others", |_, devices| {
                let named = devices.iter().rev().map(|device| device.device);
                [DeviceId(77), DeviceId(0)].into_iter().chain(named).collect()
            }),
        ];
        let placers = policies.map(|policy| rt.placer(policy)).into();
        Some(Self {
            sims: vec![sim],
            placers,
            devices,
            gone: Vec::new(),
            held: Vec::new(),
            blocks: Vec::new(),
            waits: Vec::new(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(20) {
            0..=4 => self.place(bytes),
            5 | 6 => self.group(bytes),
            7..=9 => self.drop_lease(bytes),
            10..=12 => self.draw(bytes),
            13 | 14 => self.drop_block(bytes),
            15 => self.drain(bytes),
            16 => self.lose_or_restore(bytes),
            17 => self.limit(bytes),
            18 => self.wait(bytes),
            _ => self.poll(bytes),
        }
    }

    fn check(&mut self) {
        for held in &self.held {
            assert_eq!(held.lease.remaining(), held.bytes, "what a lease holds");
        }
        for (at, device) in self.devices.iter_mut().enumerate() {
            let used = device.budget.used();
            assert!(used <= device.limit.max(device.used), "{used} of {} at {at}", device.limit);
            device.used = used;
            if device.health == Health::Lost {
                continue;
            }
            let here = |held: &&Held| {
                (held.lease.index(), held.lease.generation()) == (at, device.generation)
            };
            let leased: u64 = self.held.iter().filter(here).map(|held| held.bytes).sum();
            let pool = device.pool.as_ref().expect("kept");
            let known = leased + pool.stats().physical;
            // Bytes granted to a wait but not taken are charged in addition.
            assert!(
                used == known || used > known && !self.waits.is_empty(),
                "{used} charged, {known} known at {at}"
            );
        }
    }

    fn finish(self) {
        let Self { sims, placers, devices, gone, held, blocks, waits } = self;
        drop((waits, held, blocks, placers));
        for mut device in devices.into_iter().chain(gone) {
            device.stream = None;
            if let Some(pool) = device.pool.take().filter(|_| device.health != Health::Lost) {
                pool.trim(0).expect("an idle device");
                assert_eq!(device.budget.used(), 0, "left behind");
            }
            assert_eq!(device.budget.used(), 0, "charged when all is gone");
            assert_eq!(device.budget.waiting(), 0, "a wait was lost");
        }
        sims.iter().for_each(assert_returned);
    }
}

impl World {
    fn device(bytes: &mut Bytes<'_>) -> usize {
        bytes.below(DEVICES)
    }

    fn asked(bytes: &mut Bytes<'_>) -> PlacementRequest {
        let place = PlacementRequest::bytes(UNIT * (1 + u64::from(bytes.choice(12))))
            .key(bytes.u8().into());
        let id = |bytes: &mut Bytes<'_>| DeviceId(bytes.choice(DEVICES as u8).into());
        match bytes.choice(8) {
            0 => place.not_on([id(bytes)]),
            1 => place.only([id(bytes), id(bytes)]),
            2 => place.min_free(UNIT * (1 + u64::from(bytes.choice(24)))),
            3 => place.min_compute((u32::from(bytes.choice(2)) + 9, 0)),
            4 => place.reaching([id(bytes)]).priority(1),
            _ => place,
        }
    }

    fn placer(&self, bytes: &mut Bytes<'_>) -> Placer {
        self.placers[usize::from(bytes.u8()) % self.placers.len()].clone()
    }

    /// Returns the devices that a request may be placed on in their current state.
    fn admitting(&self, place: &PlacementRequest) -> Vec<usize> {
        let seen: Vec<_> = self.placers[0].devices().collect();
        let serves = |at: &usize| self.devices[*at].health == Health::Serving;
        let admits = |at: &usize| {
            let budget = &self.devices[*at].budget;
            let mut candidate = seen[*at].seen;
            // Free bytes in caches do not count: their handles may be partly in use.
            candidate.free = budget.remaining();
            place.admits(&candidate)
        };
        (0..DEVICES).filter(serves).filter(admits).collect()
    }

    fn keep(&mut self, lease: Lease, place: &PlacementRequest) {
        let at = lease.index();
        let device = &self.devices[at];
        assert_eq!(device.health, Health::Serving, "chosen all the same");
        assert_eq!((lease.device().0 as usize, lease.generation()), (at, device.generation));
        let seen = self.placers[0].device(at).expect("it is there").seen;
        // The free bytes may have changed. Only the other hints are checked.
        let mut candidate = seen;
        candidate.free = u64::MAX;
        assert!(place.admits(&candidate), "{place:?} on {candidate:?}");
        assert_eq!(lease.remaining(), place.size());
        self.held.push(Held { bytes: place.size(), lease });
    }

    fn place(&mut self, bytes: &mut Bytes<'_>) {
        let (placer, place) = (self.placer(bytes), Self::asked(bytes));
        let room = self.admitting(&place);
        match placer.place(&place) {
            Ok(lease) => self.keep(lease, &place),
            Err(PlaceError::Nowhere(nowhere)) => {
                assert_eq!(nowhere.devices.len(), DEVICES);
                // Waiters can keep others from being served.
                assert!(room.is_empty() || !self.waits.is_empty(), "{room:?} had room: {nowhere}");
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn group(&mut self, bytes: &mut Bytes<'_>) {
        let (placer, place) = (self.placer(bytes), Self::asked(bytes));
        let shards = 1 + usize::from(bytes.choice(DEVICES as u8));
        let packed = bytes.flag();
        let group = Group::of(shards, place.clone()).on_peers();
        let group = if packed { group.packed() } else { group };
        let room = self.admitting(&place);
        let in_source = self.waits.is_empty() && self.group_in_source(&group);
        match placer.place_group(&group) {
            Ok(leases) => {
                assert_eq!(leases.len(), shards);
                let mut devices: Vec<_> = leases.iter().map(Lease::index).collect();
                leases.into_iter().for_each(|lease| self.keep(lease, &place));
                devices.sort_unstable();
                devices.dedup();
                assert!(packed || devices.len() == shards, "one on each");
            }
            Err(PlaceError::Nowhere(nowhere)) => {
                assert!(
                    !in_source && (room.len() < shards || !self.waits.is_empty()),
                    "{room:?} had room: {nowhere}"
                );
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// Places a group over the same devices as those of others, and drops it. Returns whether there
    /// was room.
    fn group_in_source(&self, group: &Group) -> bool {
        let used = || self.devices.iter().map(|device| device.budget.used()).collect::<Vec<_>>();
        let before = used();
        let source = Others(&self.placers[0]);
        let placed = Policy::MostFree.place_group_in(&source, group, 0);
        if let Ok(held) = &placed {
            let charged: u64 = used().iter().sum();
            let bytes: u64 = held.iter().map(|(_, reserved)| reserved.remaining()).sum();
            assert_eq!(charged, before.iter().sum::<u64>() + bytes, "charged for a group");
        } else {
            assert_eq!(used(), before, "a group that was refused has left bytes behind");
        }
        let is_placed = placed.is_ok();
        drop(placed);
        assert_eq!(used(), before, "a group that was dropped has left bytes behind");
        is_placed
    }

    fn drop_lease(&mut self, bytes: &mut Bytes<'_>) {
        drop(bytes.take(&mut self.held));
    }

    fn draw(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = bytes.index(self.held.len()) else { return };
        let asked = UNIT * (1 + u64::from(bytes.choice(6)));
        let held = &mut self.held[which];
        let at = held.lease.index();
        let stands = held.lease.generation() == self.devices[at].generation
            && self.devices[at].health != Health::Lost;
        if !stands {
            let device = held.lease.device();
            let refused = held.lease.stream().map(drop);
            assert_eq!(
                refused,
                Err(MemoryError::DeviceLost { device }),
                "a lease of a lost device"
            );
            return;
        }
        let device = &mut self.devices[at];
        let stream = device.stream.get_or_insert_with(|| held.lease.stream().expect("a stream"));
        match held.lease.alloc(stream, Request::bytes(asked)) {
            Ok(block) => {
                held.bytes = held.bytes.saturating_sub(asked);
                self.blocks.push((held.lease.device(), held.lease.generation(), block));
            }
            // What the lease holds can always be drawn. Beyond it the budget decides.
            Err(refused) => assert!(asked > held.bytes, "{asked} of {}: {refused}", held.bytes),
        }
    }

    fn drop_block(&mut self, bytes: &mut Bytes<'_>) {
        drop(bytes.take(&mut self.blocks));
    }

    fn drain(&mut self, bytes: &mut Bytes<'_>) {
        let at = Self::device(bytes);
        let (placer, id) = (&self.placers[0], DeviceId(at as u32));
        let device = &mut self.devices[at];
        match device.health {
            Health::Serving => {
                placer.drain(id).expect("it is there");
                device.health = Health::Draining;
            }
            Health::Draining => {
                placer.undrain(id).expect("it is there");
                device.health = Health::Serving;
            }
            _ => {}
        }
    }

    fn lose_or_restore(&mut self, bytes: &mut Bytes<'_>) {
        let at = Self::device(bytes);
        let id = DeviceId(at as u32);
        if self.devices[at].health != Health::Lost {
            let device = &mut self.devices[at];
            let sim = &self.sims[device.sim];
            sim.lose_device(id);
            assert!(sim.driver().memory_info(id).is_err(), "and somebody meets it");
            device.health = Health::Lost;
            assert_eq!(self.placers[0].device(at).expect("it is there").health, Health::Lost);
            return;
        }
        let sim = Sim::h200(DEVICES as u32).symbolic();
        let budget = Budget::new("a device that is back", self.devices[at].limit);
        let pool =
            DevicePool::open(sim.driver(), id, config(budget.clone())).expect("a simulated device");
        let generation = self.placers[0].restore(pool.clone()).expect("it is lost");
        assert_eq!(generation, self.devices[at].generation + 1);
        let limit = self.devices[at].limit;
        let (stream, health) = (None, Health::Serving);
        let (pool, used) = (Some(pool), 0);
        let device =
            Device { sim: self.sims.len(), budget, pool, stream, limit, used, generation, health };
        self.gone.push(std::mem::replace(&mut self.devices[at], device));
        self.sims.push(sim);
    }

    fn limit(&mut self, bytes: &mut Bytes<'_>) {
        let at = Self::device(bytes);
        let limit = UNIT * (1 + u64::from(bytes.choice(40)));
        self.devices[at].budget.set_limit(limit);
        self.devices[at].limit = limit;
        self.devices[at].used = self.devices[at].budget.used();
    }

    fn wait(&mut self, bytes: &mut Bytes<'_>) {
        let (placer, place) = (self.placer(bytes), Self::asked(bytes));
        if self.waits.len() < 4 {
            let placing = placer.place_async(place.clone());
            self.go_on(place, placing);
        }
    }

    fn poll(&mut self, bytes: &mut Bytes<'_>) {
        if !self.waits.is_empty() {
            let which = usize::from(bytes.u8()) % self.waits.len();
            let (place, placing) = self.waits.swap_remove(which);
            if bytes.choice(4) > 0 {
                self.go_on(place, placing);
            }
        }
    }

    fn go_on(&mut self, place: PlacementRequest, mut placing: Placing) {
        match Pin::new(&mut placing).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => self.waits.push((place, placing)),
            Poll::Ready(Ok(lease)) => self.keep(lease, &place),
            // No device could ever have room in its current state.
            Poll::Ready(Err(PlaceError::Nowhere(_))) => {}
            Poll::Ready(Err(other)) => panic!("{other}"),
        }
    }
}
