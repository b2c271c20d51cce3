//! Tests of many tenants, streams and devices under budgets that are too small, for a bounded time,
//! with faults and the loss of a device.
//!
//! - Charged bytes never exceed a limit: a thread checks it continuously, and the budget's own peak
//!   proves it.
//! - Every wait ends, granted or refused by its deadline.
//! - No access is out of order, and all counts are zero at the end.

use crate::support::assert_silent;
use aquifer::{
    Budget, DeviceBuffer, DeviceId, DevicePool, Group, Lease, PlacementRequest, Placer, Policy,
    PoolConfig, Request, Runtime, driver::Call, placement::Health, sim::Sim,
};
use aquifer_core::random::SplitMix64;
use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
const DEVICES: u32 = 3;
const TENANTS: u64 = 8;
const ROUNDS: u64 = 600;
/// No round begins later than this.
const LONGEST: Duration = Duration::from_secs(8);
/// The limit of all devices together and of each tenant: one tenant alone could nearly fill them.
const DEVICE_LIMIT: u64 = 48 * MIB;
const PROCESS_LIMIT: u64 = 64 * MIB;
const TENANT_LIMIT: u64 = 24 * MIB;

/// Totals of all tenants.
#[derive(Default)]
struct Tally {
    begun: AtomicU64,
    granted: AtomicU64,
    refused: AtomicU64,
    copies: AtomicU64,
}

impl Tally {
    /// Counts a wait and its result.
    fn wait<T, E>(&self, wait: impl FnOnce() -> Result<T, E>) -> Option<T> {
        self.begun.fetch_add(1, Relaxed);
        let answer = wait().ok();
        let end = if answer.is_some() { &self.granted } else { &self.refused };
        end.fetch_add(1, Relaxed);
        answer
    }
}

/// Works on a lease with two streams and one buffer on each, filled, copied, and dropped while work
/// is queued. A failure is a planned fault or the loss.
fn work(lease: &Lease, bytes: u64, tally: &Tally) -> aquifer::error::Result<()> {
    let (s, u) = (lease.stream()?, lease.stream()?);
    let len = (bytes / 2) as usize;
    let mut x: DeviceBuffer<u8> = lease.buffer(&s, len)?;
    s.fill(&mut x, 7)?;
    let mut y: DeviceBuffer<u8> = lease.buffer(&u, len)?;
    u.copy(&x, &mut y)?;
    drop(x);
    let z: DeviceBuffer<u8> =
        DeviceBuffer::from_alloc(len / 2, |request: Request| lease.alloc(&s, request))?;
    s.copy_to_peer(&z, &mut y.slice_mut(0..len / 2)?, &u)?;
    tally.copies.fetch_add(2, Relaxed);
    Ok(())
}

fn tenant(number: u64, budget: &Budget, placers: &[Placer], tally: &Tally, begun: Instant) {
    let mut random = SplitMix64::new(number);
    let mut below = |end: u64| random.next_u64() % end;
    for _ in 0..ROUNDS {
        if begun.elapsed() > LONGEST {
            break;
        }
        let placer = &placers[below(placers.len() as u64) as usize];
        let deadline = Some(Instant::now() + Duration::from_millis(below(20)));
        let bytes = 2 * MIB * (1 + below(8));
        let place = PlacementRequest::bytes(bytes).key(number).priority(below(3) as i32);
        match below(8) {
            0..=2 => {
                if let Some(lease) = tally.wait(|| placer.place_by(&place, deadline)) {
                    let _ = work(&lease, bytes, tally);
                }
            }
            3 | 4 => {
                if let Ok(lease) = placer.place(&place) {
                    let _ = work(&lease, bytes, tally);
                }
            }
            5 => {
                let group = Group::of(2, place).on_peers();
                if let Some(leases) = tally.wait(|| placer.place_group_by(&group, deadline)) {
                    for lease in &leases {
                        let _ = work(lease, bytes, tally);
                    }
                }
            }
            6 => {
                // The tenant's own memory, beside that of the devices under one process.
                let held = tally.wait(|| budget.charge_by(bytes, deadline));
                thread::yield_now();
                drop(held);
            }
            _ => {
                let pool =
                    placer.device(below(DEVICES.into()) as usize).map(|device| device.pool.clone());
                let _ = pool.map(|pool| pool.trim(below(16) * MIB));
            }
        }
    }
}

#[test]
fn under_stress_no_limit_is_passed_no_wait_is_lost_and_nothing_is_left() {
    let (sim, back) =
        (Sim::h200(DEVICES).symbolic().seeded(5), Sim::h200(DEVICES).symbolic().seeded(6));
    let root = Budget::new("the process", PROCESS_LIMIT);
    let devices = root.child("the devices", DEVICE_LIMIT);
    let mut config = PoolConfig::with_budget(devices.clone());
    config.wait = Duration::from_millis(20);
    let rt = Runtime::builder().driver(sim.driver()).pools(config.clone()).build().unwrap();
    let policies =
        [Policy::MostFree, Policy::RoundRobin, Policy::BestFit, Policy::Affinity, Policy::Near];
    let placers = policies.map(|policy| rt.placer(policy));
    let tenants: Vec<_> = (0..TENANTS).map(|_| root.child("a tenant", TENANT_LIMIT)).collect();
    // Memory that turns out to be missing, and calls that fail in the middle of a step.
    sim.fail_every(Call::HandleCreate, 41, 2);
    sim.fail_every(Call::Map, 97, 999);
    sim.fail_every(Call::StreamWaitEvent, 53, 999);
    let (tally, over, begun) = (Tally::default(), AtomicBool::new(false), Instant::now());
    let samples = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut samples = 0u64;
            // At the end at the latest, because the thread may not run before.
            loop {
                let last = over.load(Relaxed);
                assert!(root.used() <= PROCESS_LIMIT && devices.used() <= DEVICE_LIMIT);
                assert!(tenants.iter().all(|tenant| tenant.used() <= TENANT_LIMIT));
                samples += 1;
                if last {
                    break samples;
                }
                thread::yield_now();
            }
        });
        let (placers, tally) = (&placers, &tally);
        let workers: Vec<_> = (0..TENANTS)
            .zip(&tenants)
            .map(|(number, budget)| {
                scope.spawn(move || tenant(number, budget, placers, tally, begun))
            })
            .collect();
        // In the middle a device is lost, and later added again with another driver.
        let half = |of: u64| TENANTS * ROUNDS / of;
        let done = || tally.begun.load(Relaxed) * 2;
        let wait_for = |many: u64| {
            while done() < many
                && begun.elapsed() < LONGEST
                && !workers.iter().all(|w| w.is_finished())
            {
                thread::yield_now();
            }
        };
        wait_for(half(4));
        sim.lose_device(DeviceId(1));
        assert!(sim.driver().memory_info(DeviceId(1)).is_err());
        assert_eq!(placers[0].device(1).unwrap().health, Health::Lost);
        wait_for(half(2));
        let pool = DevicePool::open(back.driver(), DeviceId(1), config.clone()).unwrap();
        assert_eq!(placers[0].restore(pool), Ok(2));
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        over.store(true, Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
        watch.join().unwrap()
    });
    let [waits, granted, refused, copies] =
        [&tally.begun, &tally.granted, &tally.refused, &tally.copies]
            .map(|count| count.load(Relaxed));
    assert_eq!(waits, granted + refused, "a wait was lost");
    assert!(
        samples > 0 && granted > 0 && copies > 0,
        "{samples} samples, {granted} granted, {copies} copies"
    );
    assert!(root.peak() <= PROCESS_LIMIT && devices.peak() <= DEVICE_LIMIT);
    assert!(tenants.iter().all(|tenant| tenant.peak() <= TENANT_LIMIT));
    assert_eq!((root.waiting(), devices.waiting()), (0, 0));
    for sim in [&sim, &back] {
        sim.clear_failures();
        sim.run_all();
    }
    for device in placers[0].devices() {
        assert_eq!(device.pool.stats().live, 0);
        device.pool.trim(0).unwrap();
    }
    drop((placers, rt));
    assert_eq!((root.used(), root.stranded()), (0, 0));
    for sim in [&sim, &back] {
        assert_silent(sim);
        assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    }
}
