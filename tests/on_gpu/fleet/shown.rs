//! The properties shown for a fleet of two devices or more, and their table: on real GPUs, and on
//! simulated ones so that the parts are tested everywhere.

use aquifer::{
    Budget, DeviceBuffer, DeviceId, DevicePool, Driver, Group, Lease, MemoryError,
    PlacementRequest, Placer, Policy, PoolConfig, Runtime, Stream,
    placement::{Candidate, Health, key_of},
};
use std::{
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// Fills a buffer with a number on the device at that index, by a kernel where kernels exist.
pub(crate) type Fill<'a> =
    dyn Fn(usize, &Stream, &mut DeviceBuffer<u32>, u32) -> aquifer::error::Result<()> + Sync + 'a;

/// Rows of the table: what was done, on or between which devices, and the result.
#[derive(Default)]
pub(crate) struct Table(pub(crate) Vec<String>);

impl Table {
    pub(crate) fn row(&mut self, what: &str, on: impl ToString, found: impl ToString) {
        self.0.push(format!("| {what} | {} | {} |", on.to_string(), found.to_string()));
    }
}

/// Returns numbers that identify their origin.
fn pattern(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ seed).collect()
}

/// Returns a buffer with the pattern, drawn from the lease.
fn filled(lease: &Lease, stream: &Stream, seed: u32, len: usize) -> DeviceBuffer<u32> {
    let mut buffer = lease.buffer(stream, len).unwrap();
    let numbers = pattern(seed, len);
    stream.scope(|c| c.upload(&numbers, &mut buffer)).unwrap().unwrap();
    buffer
}

#[track_caller]
fn assert_filled(stream: &Stream, buffer: &DeviceBuffer<u32>, seed: u32) {
    let mut back = vec![0; buffer.len()];
    stream.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    assert!(back == pattern(seed, buffer.len()), "wrong bytes");
}

/// Releases everything, and asserts that nothing remains.
pub(crate) fn assert_empty(rt: &Runtime) {
    for pool in rt.devices() {
        pool.trim(0).unwrap();
        assert_eq!((pool.stats().live, pool.budget().used(), pool.budget().waiting()), (0, 0, 0));
    }
}

fn policies(ids: &[DeviceId]) -> [(&'static str, Policy); 9] {
    let last = |_: &PlacementRequest, devices: &[Candidate<'_>]| {
        devices.iter().rev().map(|d| d.device).collect()
    };
    let weights = ids.iter().enumerate().map(|(index, &id)| (id, if index == 0 { 3 } else { 1 }));
    [
        ("round robin", Policy::RoundRobin),
        ("least loaded", Policy::LeastLoaded),
        ("most free", Policy::MostFree),
        ("best fit", Policy::BestFit),
        ("best compute", Policy::BestCompute),
        ("weighted, the first by 3", Policy::weighted(weights)),
        ("affinity, one key", Policy::Affinity),
        ("near the last device", Policy::Near),
        ("custom, the last", Policy::custom("the last", last)),
    ]
}

/// Places by each policy, with real memory behind every lease, written and read back.
pub(crate) fn each_policy(rt: &Runtime, unit: u64, table: &mut Table) {
    let count = rt.devices().len();
    let ids: Vec<DeviceId> = rt.devices().iter().map(DevicePool::device).collect();
    let last = ids[count - 1];
    let len = (unit / 4) as usize;
    for (name, policy) in policies(&ids) {
        assert_empty(rt);
        let placer = rt.placer(policy.clone());
        let place = PlacementRequest::bytes(unit)
            .key(key_of(b"a session"))
            .near(aquifer::Near::Device(last));
        let leases: Vec<Lease> = (0..4 * count).map(|_| placer.place(&place).unwrap()).collect();
        let mut taken = vec![0; count];
        leases.iter().for_each(|lease| taken[lease.index()] += 1);
        match policy {
            Policy::RoundRobin | Policy::LeastLoaded | Policy::MostFree | Policy::BestCompute => {
                // The devices are equal.
                assert!(taken.iter().all(|&n| n > 0), "{name}: {taken:?}");
            }
            Policy::Weighted(_) => {
                assert!(taken[1..].iter().all(|&n| n > 0 && n < taken[0]), "{taken:?}");
            }
            Policy::BestFit | Policy::Affinity => {
                assert_eq!(taken.iter().filter(|&&n| n > 0).count(), 1, "{name}: {taken:?}");
            }
            _ => assert_eq!(taken[count - 1], leases.len(), "{name}: {taken:?}"),
        }
        for (seed, lease) in (0..).zip(&leases) {
            let s = lease.stream().unwrap();
            assert_filled(&s, &filled(lease, &s, seed, len), seed);
        }
        drop(leases);
        let lap = || {
            let begun = Instant::now();
            (0..500).for_each(|_| drop(placer.place(&place).unwrap()));
            begun.elapsed().as_nanos() / 500
        };
        let ns = (0..5).map(|_| lap()).min().unwrap_or_default();
        let found = format!(
            "{} leases of {} MiB written and read back; place + drop {ns} ns",
            4 * count,
            unit >> 20
        );
        table.row(name, format!("{taken:?}"), found);
    }
    assert_empty(rt);
}

/// Verifies copies from every device to every other one: with memory that is accessible to peers,
/// with memory that is not, and through the host.
pub(crate) fn copies(
    driver: &Arc<dyn Driver>,
    devices: &[DeviceId],
    bytes: u64,
    table: &mut Table,
) {
    let len = (bytes / 4) as usize;
    for open in [true, false] {
        let pool = |&device: &DeviceId| {
            let mut config = PoolConfig::with_budget(Budget::new("copies", 4 * bytes));
            let info = driver.device_info(device).unwrap();
            if open {
                // Whether the peer can access the memory.
                let reaches = |other: &&DeviceId| {
                    driver.device_info(**other).unwrap().peers.contains(&device)
                };
                config.peers = devices.iter().filter(reaches).copied().collect();
            }
            (DevicePool::open(driver.clone(), device, config).unwrap(), info.peers)
        };
        let pools: Vec<_> = devices.iter().map(pool).collect();
        for (seed, (from, peers)) in (0..).zip(&pools) {
            for (to, _) in pools.iter().filter(|(to, _)| to.device() != from.device()) {
                let reached = peers.contains(&to.device());
                let (s, t) = (from.stream().unwrap(), to.stream().unwrap());
                let mut x: DeviceBuffer<u32> = from.buffer(&s, len).unwrap();
                let numbers = pattern(seed, len);
                s.scope(|c| c.upload(&numbers, &mut x)).unwrap().unwrap();
                let mut y: DeviceBuffer<u32> = to.buffer(&t, len).unwrap();
                // The first copy between two devices also sets up the driver's path.
                let mut best = Duration::MAX;
                for _ in 0..3 {
                    t.fill(&mut y, 0).unwrap();
                    t.synchronize().unwrap();
                    let begun = Instant::now();
                    s.copy_to_peer(&x, &mut y, &t).unwrap();
                    t.synchronize().unwrap();
                    best = best.min(begun.elapsed());
                }
                assert_filled(&t, &y, seed);
                let how = match (reached, open) {
                    (true, true) => "copy between peers, memory open",
                    (true, false) => "copy between peers, memory closed",
                    (false, _) => "copy through the host, by the driver",
                };
                let rate = bytes as f64 / best.as_secs_f64() / 1e9;
                let pair = format!("{} → {}", from.device(), to.device());
                table.row(how, pair, format!("{} MiB verified, {rate:.0} GB/s", bytes >> 20));
                // A copy for one device refuses a buffer of another.
                let wrong =
                    MemoryError::WrongDevice { expected: from.device(), actual: to.device() };
                assert_eq!(s.copy(&x, &mut y).unwrap_err(), wrong);
            }
        }
        drop(pools);
    }
}

/// The memory and the duration of the stress test.
pub(crate) struct Scale {
    /// Leases have one to eight of these units.
    pub(crate) unit: u64,
    /// The limit of all devices together.
    pub(crate) devices: u64,
    /// The limit including the memory of tenants.
    pub(crate) process: u64,
    pub(crate) tenant: u64,
    pub(crate) longest: Duration,
}

/// Totals of all tenants.
#[derive(Default)]
struct Tally {
    begun: AtomicU64,
    granted: AtomicU64,
    refused: AtomicU64,
    /// Bytes that were compared and correct.
    right: AtomicU64,
    /// Work that ended with a lost device or a lack of memory.
    failed: AtomicU64,
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

    fn note(&self, done: aquifer::error::Result<u64>) {
        match done {
            Ok(bytes) => _ = self.right.fetch_add(bytes, Relaxed),
            Err(_) => _ = self.failed.fetch_add(1, Relaxed),
        }
    }
}

/// Compares the end of a buffer that should hold this number throughout. Returns the number of
/// bytes.
fn look(s: &Stream, buffer: &DeviceBuffer<u32>, number: u32) -> aquifer::error::Result<u64> {
    let mut back = vec![!number; buffer.len().min(1 << 16)];
    let from = buffer.len() - back.len();
    s.scope(|c| c.download(buffer.slice(from..buffer.len())?, &mut back))??;
    assert!(back.iter().all(|&n| n == number), "wrong bytes on {}", s.device());
    Ok(4 * back.len() as u64)
}

/// Works on a lease with two streams: a kernel on one and a copy on the other. The first buffer is
/// dropped while work is queued.
fn work(lease: &Lease, bytes: u64, number: u32, fill: &Fill<'_>) -> aquifer::error::Result<u64> {
    let (s, u) = (lease.stream()?, lease.stream()?);
    let len = (bytes / 8) as usize;
    let mut x: DeviceBuffer<u32> = lease.buffer(&s, len)?;
    fill(lease.index(), &s, &mut x, number)?;
    let mut y: DeviceBuffer<u32> = lease.buffer(&u, len)?;
    u.copy(&x, &mut y)?;
    drop(x);
    look(&u, &y, number)
}

/// The same from one device to another.
fn work_between(
    from: &Lease,
    to: &Lease,
    bytes: u64,
    number: u32,
    fill: &Fill<'_>,
) -> aquifer::error::Result<u64> {
    let (s, t) = (from.stream()?, to.stream()?);
    let len = (bytes / 8) as usize;
    let mut x: DeviceBuffer<u32> = from.buffer(&s, len)?;
    fill(from.index(), &s, &mut x, number)?;
    let mut y: DeviceBuffer<u32> = to.buffer(&t, len)?;
    s.copy_to_peer(&x, &mut y, &t)?;
    drop(x);
    look(&t, &y, number)
}

/// Pseudo-random numbers that are equal for equal seeds (Knuth's constants for a 64-bit generator).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// State that all tenants share.
struct Scene<'a> {
    placers: &'a [Placer],
    scale: &'a Scale,
    tally: &'a Tally,
    fill: &'a Fill<'a>,
    /// Held while one device waits for another. A stream may wait for ever for one whose context
    /// ends first, so no device is lost meanwhile.
    between: RwLock<()>,
}

/// Runs one tenant until the time is up.
fn tenant(number: u64, own: &Budget, scene: &Scene<'_>) {
    let Scene { placers, scale, tally, fill, between } = scene;
    let (mut random, begun) = (Random(number), Instant::now());
    let mut round = 0u32;
    while begun.elapsed() < scale.longest {
        round += 1;
        let mark = round << 8 | number as u32;
        let placer = &placers[random.below(placers.len() as u64) as usize];
        let deadline = Some(Instant::now() + Duration::from_millis(random.below(50)));
        let bytes = scale.unit * (1 + random.below(8));
        let place = PlacementRequest::bytes(bytes).key(number).priority(random.below(3) as i32);
        match random.below(8) {
            0..=2 => {
                if let Some(lease) = tally.wait(|| placer.place_by(&place, deadline)) {
                    tally.note(work(&lease, bytes, mark, fill));
                }
            }
            3 | 4 => {
                if let Ok(lease) = placer.place(&place) {
                    tally.note(work(&lease, bytes, mark, fill));
                }
            }
            5 | 6 => {
                let group = Group::of(2, place);
                if let Some(leases) = tally.wait(|| placer.place_group_by(&group, deadline)) {
                    let _between = between.read().unwrap();
                    tally.note(work_between(&leases[0], &leases[1], bytes, mark, fill));
                }
            }
            _ => {
                // The tenant's own memory, beside that of the devices under one process.
                let held = tally.wait(|| own.charge_by(bytes, deadline));
                thread::yield_now();
                drop(held);
            }
        }
    }
}

/// Runs many tenants under budgets that are too small, on every device. At half time the device at
/// index 1 is lost. Asserts that no limit is exceeded, no wait is lost, no byte is wrong, the
/// remaining devices continue, and all counts are zero at the end.
pub(crate) fn stress(
    driver: Arc<dyn Driver>,
    scale: &Scale,
    fill: &Fill<'_>,
    lose: impl FnOnce(DeviceId),
    table: &mut Table,
) {
    const TENANTS: u64 = 8;
    let root = Budget::new("the process", scale.process);
    let shared = root.child("the devices", scale.devices);
    let mut config = PoolConfig::with_budget(shared.clone());
    config.wait = Duration::from_millis(50);
    let rt = Runtime::builder().driver(driver).pools(config).build().unwrap();
    let kinds =
        [Policy::MostFree, Policy::RoundRobin, Policy::BestFit, Policy::Affinity, Policy::Near];
    let placers = kinds.map(|policy| rt.placer(policy));
    let tenants: Vec<_> = (0..TENANTS).map(|_| root.child("a tenant", scale.tenant)).collect();
    let (tally, over) = (Tally::default(), AtomicBool::new(false));
    let lost = rt.devices()[1].device();
    // Leased before the loss, to be used afterwards.
    let old = placers[0].place(&PlacementRequest::bytes(scale.unit).only([lost])).unwrap();
    let scene = &Scene { placers: &placers, scale, tally: &tally, fill, between: RwLock::new(()) };
    let mut seen = Duration::ZERO;
    let samples = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut samples = 0u64;
            // At the end at the latest, because the thread may not run before.
            loop {
                let last = over.load(Relaxed);
                assert!(root.used() <= scale.process && shared.used() <= scale.devices);
                assert!(tenants.iter().all(|tenant| tenant.used() <= scale.tenant));
                samples += 1;
                if last {
                    break samples;
                }
                thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..TENANTS)
            .zip(&tenants)
            .map(|(number, own)| scope.spawn(move || tenant(number, own, scene)))
            .collect();
        thread::sleep(scale.longest / 2);
        let begun = Instant::now();
        let alone = scene.between.write().unwrap();
        lose(lost);
        drop(alone);
        while placers[0].device(1).unwrap().health != Health::Lost {
            // Any call that reports the loss suffices. Tenants make some as well.
            let _ = old
                .stream()
                .and_then(|s| s.fill(&mut old.buffer::<u32>(&s, 1)?, 0).and(s.synchronize()));
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody has met the loss");
        }
        seen = begun.elapsed();
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        over.store(true, Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
        watch.join().unwrap()
    });
    let [waits, granted, refused, right, failed] =
        [&tally.begun, &tally.granted, &tally.refused, &tally.right, &tally.failed]
            .map(|n| n.load(Relaxed));
    assert_eq!(waits, granted + refused, "a wait was lost");
    assert!(
        samples > 0 && granted > 0 && right > 0,
        "{samples} samples, {granted} granted, {right} bytes right"
    );
    assert!(root.peak() <= scale.process && shared.peak() <= scale.devices);
    table.row(
        "stress: tenants with kernels, copies and waits",
        rt.devices().len(),
        format!(
            "{waits} waits, {granted} granted and {refused} refused by their deadlines; {} MiB looked at, none wrong; \
             {failed} ended by the loss or for want of memory; peak {} of {} MiB",
            right >> 20,
            shared.peak() >> 20,
            scale.devices >> 20
        ),
    );

    // Leases of a lost device are refused with an error of their own, and so are new ones.
    let gone = MemoryError::DeviceLost { device: lost };
    assert_eq!(old.stream().unwrap_err(), gone);
    drop(old);
    assert!(placers[0].place(&PlacementRequest::bytes(scale.unit).only([lost])).is_err());
    // Every other device continues with correct bytes. If the driver loses more than one device,
    // each of them reports it.
    let (mut serving, mut taken) = (0, 0);
    for device in placers[0].devices().filter(|device| device.seen.device != lost) {
        if device.health == Health::Lost {
            taken += 1;
            continue;
        }
        for round in 0..50 {
            let place = PlacementRequest::bytes(scale.unit).only([device.seen.device]);
            let lease = placers[0].place(&place).unwrap();
            work(&lease, scale.unit, round, fill).unwrap();
        }
        serving += 1;
    }
    let others = match taken {
        0 => format!("the other {serving} went on, with right bytes"),
        _ => format!(
            "{serving} went on; the driver lost {taken} more with it, which were refused as well"
        ),
    };
    table.row(
        "a device lost under load",
        lost,
        format!("passed over after {} ms; leases on it refused; {others}", seen.as_millis()),
    );
    for device in placers[0].devices() {
        assert_eq!(device.pool.stats().live, 0);
        // A lost device refuses the calls of this trim, and its charges end.
        let trimmed = device.pool.trim(0);
        assert!(trimmed.is_ok() || device.health == Health::Lost, "{trimmed:?}");
    }
    assert_eq!((root.waiting(), shared.waiting()), (0, 0));
    drop((placers, rt));
    assert_eq!((root.used(), root.stranded()), (0, 0));
    table.row("at the end", "all", "0 bytes charged, live or stranded, 0 waiting");
}
