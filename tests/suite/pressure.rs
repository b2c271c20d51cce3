//! Tests of memory kept free for neighbours, and of a host that runs out of memory, on the
//! simulator and on synthetic machines.
//!
//! A neighbour is a program that allocates memory of the same device from the same driver outside
//! of every budget.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::machine::Machine;
use crate::support::{PATIENCE, assert_all_given_back, assert_silent, read, small};
use aquifer::{
    Block, Budget, DeviceId, DevicePool, Driver, MemoryError, PoolConfig, Request, Runtime,
    budget::{Charge, Offer, Reclaim},
    driver::Call,
    pressure::{DevicePressure, HostWatch, Level},
    sim::Sim,
};
use aquifer_host::kernel::{Faults, Kernel, SystemCall};
use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const GPU: DeviceId = DeviceId(0);

/// Retries an allocation until it succeeds, as other programs do. Returns the address and how long
/// it took.
#[track_caller]
fn neighbour(driver: &Arc<dyn Driver>, bytes: u64) -> (u64, Duration) {
    let begun = Instant::now();
    loop {
        match driver.mem_alloc(GPU, bytes) {
            Ok(address) => return (address, begun.elapsed()),
            Err(refused) => {
                assert!(refused.is_out_of_memory() && begun.elapsed() < PATIENCE, "{refused}");
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[track_caller]
fn eventually(mut what: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < PATIENCE, "this should be so by now");
        thread::sleep(Duration::from_millis(1));
    }
}

fn free(driver: &Arc<dyn Driver>) -> u64 {
    driver.memory_info(GPU).unwrap().free
}

/// Returns a runtime on a device of 4 GiB that it may use completely, except for what is kept free.
fn runtime(sim: &Sim, keep_free: u64) -> Runtime {
    let builder = Runtime::builder().driver(sim.driver()).pinned(small()).pinned_budget(64 << 20);
    builder.device_budget(4 * GIB).keep_free(keep_free).build().unwrap()
}

/// Allocates this many bytes in blocks of 64 MiB.
fn blocks(pool: &DevicePool, bytes: u64) -> Vec<Block> {
    let stream = pool.stream().unwrap();
    let block = |_| pool.alloc(&stream, Request::bytes(64 * MIB)).unwrap();
    (0..bytes / (64 * MIB)).map(block).collect()
}

fn seen(rt: &Runtime) -> DevicePressure {
    rt.pressure().devices[0].clone()
}

#[test]
fn a_neighbour_that_retries_gets_what_the_cache_held_and_live_blocks_stay() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let (driver, rt) = (sim.driver(), runtime(&sim, GIB));
    let pool = rt.device(0).unwrap();
    let stream = pool.stream().unwrap();
    let mut live = pool.buffer::<u8>(&stream, 1 << 20).unwrap();
    stream.scope(|c| c.upload(&[7; 1 << 20], &mut live)).unwrap().unwrap();
    drop(blocks(pool, 5 * GIB / 2));
    // The first takes what was kept free, and the others take what the cache releases.
    for round in 0..3 {
        let (_, took) = neighbour(&driver, GIB);
        println!("neighbour {round}: 1 GiB after {took:?}");
    }
    // The watch continues until nothing idle is left.
    eventually(|| pool.stats().physical < 128 * MIB && seen(&rt).given_back >= 3 * GIB / 2);
    assert_eq!(read(&stream, &live), [7; 1 << 20]);
    assert!(seen(&rt).shortages >= 1 && pool.stats().physical >= MIB);
    assert_silent(&sim);
}

#[test]
fn our_own_demand_ends_where_memory_is_kept_free_and_goes_on_when_neighbours_leave() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let (driver, rt) = (sim.driver(), runtime(&sim, GIB));
    let pool = rt.device(0).unwrap();
    let stream = pool.stream().unwrap();
    drop(blocks(pool, 2 * GIB));
    let (theirs, _) = neighbour(&driver, 2 * GIB);
    eventually(|| free(&driver) >= GIB && seen(&rt).ceiling <= GIB);
    // The watch is stalled within a sample from here on. A sample between a charge and its memory
    // would count that memory twice, as used and as free, and allow as much more until the next
    // one.
    let looking = sim.stall(Call::MemoryInfo);
    assert!(looking.wait_for(1, PATIENCE));
    // Released memory is not taken again. Larger requests are refused, and free memory stays.
    let mut held = Vec::new();
    while let Ok(block) = pool.alloc(&stream, Request::bytes(64 * MIB)) {
        held.push(block);
        assert!(pool.stats().physical <= GIB, "{:?}", pool.stats());
    }
    assert_eq!(
        pool.budget().charge(64 * MIB).unwrap_err().budget,
        "the device beside its neighbours"
    );
    drop(looking);
    assert!(free(&driver) >= GIB, "{}", free(&driver));
    assert!(held.len() >= 14, "up to the mark everything is ours: {}", held.len());
    // SAFETY: 1. allocated there and freed once. 2. it was not used.
    #[expect(unsafe_code, reason = "a neighbour leaves")]
    unsafe {
        driver.mem_free(GPU, theirs).unwrap();
    }
    eventually(|| {
        pool.alloc(&stream, Request::bytes(2 * GIB)).map(|block| held.push(block)).is_ok()
    });
    assert!(free(&driver) >= GIB);
    assert_silent(&sim);
}

#[test]
fn the_mark_can_be_moved_while_it_runs_and_taken_away() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let (driver, rt) = (sim.driver(), runtime(&sim, 64 * MIB));
    let pool = rt.device(0).unwrap();
    drop(blocks(pool, 7 * GIB / 2));
    assert!(free(&driver) < GIB);
    rt.set_keep_free(2 * GIB).unwrap();
    eventually(|| free(&driver) >= 2 * GIB);
    rt.set_keep_free(0).unwrap();
    eventually(|| seen(&rt).ceiling == u64::MAX);
    let all = blocks(pool, 4 * GIB - 64 * MIB);
    thread::sleep(Duration::from_millis(100));
    drop(all);
    assert!(free(&driver) < 128 * MIB, "nothing is kept free");
    let without = Runtime::builder().driver(sim.driver()).pinned(small()).build().unwrap();
    assert!(matches!(
        without.set_keep_free(1),
        Err(MemoryError::BadSetting { name: "keep_free", .. })
    ));
    assert_eq!(without.pressure(), aquifer::pressure::Pressure::default());
}

#[test]
fn memory_in_use_stays_and_the_shortage_is_reported() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let (driver, rt) = (sim.driver(), runtime(&sim, GIB));
    let pool = rt.device(0).unwrap();
    let held = blocks(pool, 2 * GIB);
    neighbour(&driver, 3 * GIB / 2);
    eventually(|| seen(&rt).missing > 0);
    let before = seen(&rt).looks;
    eventually(|| seen(&rt).looks > before + 3);
    let now = seen(&rt);
    assert_eq!((now.given_back, now.shortages, now.ended), (0, 1, None));
    assert_eq!(pool.stats().live, 2 * GIB);
    let reading = now.reading.unwrap();
    assert_eq!((reading.free, reading.total), (free(&driver), 4 * GIB));
    assert!(reading.age < PATIENCE);
    // Memory that becomes idle is released at the next sample.
    drop(held);
    // Reported when it is done, and therefore after the driver has it.
    eventually(|| free(&driver) >= GIB && seen(&rt).given_back >= GIB / 2);
}

/// A cache of the program, which holds memory of the driver and is charged for it.
struct Cache(Mutex<Vec<(u64, Charge)>>, Arc<dyn Driver>);

impl Reclaim for Cache {
    fn name(&self) -> &'static str {
        "a program's cache"
    }
    fn offer(&self) -> Offer {
        Offer {
            bytes: self.0.lock().unwrap().iter().map(|(_, charge)| charge.bytes()).sum(),
            ..Offer::default()
        }
    }
    fn reclaim(&self, _: u64, _: Option<Instant>) {
        for (address, charge) in self.0.lock().unwrap().drain(..) {
            // SAFETY: 1. allocated there and freed once. 2. it was not used.
            #[expect(unsafe_code, reason = "a program of its own")]
            unsafe {
                self.1.mem_free(GPU, address).unwrap();
            }
            drop(charge);
        }
    }
}

#[test]
fn others_under_the_same_budget_are_asked_when_the_pool_has_nothing_left() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let (driver, rt) = (sim.driver(), runtime(&sim, GIB));
    let budget = rt.device(0).unwrap().budget();
    let charge = budget.charge(2 * GIB).unwrap();
    let held = (driver.mem_alloc(GPU, 2 * GIB).unwrap(), charge);
    let cache = Arc::new(Cache(Mutex::new(vec![held]), driver.clone()));
    let _registration = budget.on_need(&cache);
    neighbour(&driver, 2 * GIB);
    neighbour(&driver, GIB);
    // The neighbour may have it before the cache has released its charge, and before any hook is
    // called.
    eventually(|| budget.used() == 0 && seen(&rt).given_back >= GIB);
    let now = seen(&rt);
    assert_eq!(now.asked[0].step, "a program's cache", "{now:?}");
}

#[test]
fn a_driver_that_does_not_answer_ends_the_watch_with_a_report_and_limits_nothing() {
    for lost in [false, true] {
        let sim = Sim::h200(1).capacity(4 * GIB);
        let rt = runtime(&sim, GIB);
        eventually(|| seen(&rt).looks > 0);
        if lost {
            sim.lose_device(GPU);
        } else {
            sim.fail(Call::MemoryInfo, 1, 999);
        }
        eventually(|| seen(&rt).ended.is_some());
        let now = seen(&rt);
        let error = now.ended.unwrap();
        assert_eq!((error.is_device_lost(), error.code), (lost, if lost { 700 } else { 999 }));
        assert_eq!(now.ceiling, u64::MAX);
        if !lost {
            drop(blocks(rt.device(0).unwrap(), 7 * GIB / 2));
        }
        // A watch that has ended is dropped like any other.
        drop(rt);
    }
}

#[test]
fn a_lost_device_does_not_end_the_watch_of_another() {
    let sim = Sim::h200(2).capacity(4 * GIB);
    let rt = runtime(&sim, GIB);
    sim.lose_device(DeviceId(1));
    eventually(|| rt.pressure().devices[1].ended.is_some());
    drop(blocks(rt.device(0).unwrap(), 2 * GIB));
    neighbour(&sim.driver(), 2 * GIB);
    eventually(|| free(&sim.driver()) >= GIB);
    assert_eq!(seen(&rt).ended, None);
}

#[test]
fn memory_whose_release_fails_is_offered_again() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let (driver, rt) = (sim.driver(), runtime(&sim, GIB));
    drop(blocks(rt.device(0).unwrap(), 5 * GIB / 2));
    sim.fail(Call::Unmap, 1, 999);
    neighbour(&driver, GIB);
    eventually(|| free(&driver) >= GIB);
    assert_eq!(seen(&rt).ended, None);
    assert_silent(&sim);
}

#[test]
fn the_thread_is_gone_with_the_runtime_and_pools_that_outlive_it_are_free() {
    let sim = Sim::h200(1).capacity(4 * GIB);
    let rt = runtime(&sim, 3 * GIB);
    eventually(|| seen(&rt).looks > 0);
    let outlives = rt.device(0).unwrap().clone();
    assert!(outlives.budget().charge(2 * GIB).is_err());
    let begun = Instant::now();
    drop(rt);
    assert!(begun.elapsed() < PATIENCE);
    assert!(outlives.budget().charge(2 * GIB).is_ok(), "nobody is there to lift the limit later");
    drop(blocks(&outlives, GIB));
    drop(outlives);
    // A thread that still held the pool would hold its memory.
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}

#[test]
fn a_refusal_by_the_system_is_an_error_of_the_build() {
    let faults = Arc::new(Faults::new());
    faults.fail(SystemCall::Spawn, 1, 11);
    let builder = Runtime::builder().driver(Sim::h200(1).driver()).pinned(small());
    let refused = builder.kernel(Kernel::with_faults(faults)).keep_free(GIB).build().unwrap_err();
    assert!(matches!(refused, MemoryError::System(e) if e.errno == 11), "{refused}");
}

#[test]
fn under_a_budget_that_devices_share_each_has_a_ceiling_of_its_own() {
    let sim = Sim::h200(2).capacity(4 * GIB);
    let shared = Budget::new("both", 8 * GIB);
    let config = PoolConfig::with_budget(shared.clone());
    let builder = Runtime::builder().driver(sim.driver()).pinned(small()).pools(config);
    let rt = builder.keep_free(GIB).build().unwrap();
    neighbour(&sim.driver(), 3 * GIB);
    eventually(|| seen(&rt).ceiling == 0 && rt.pressure().devices[1].ceiling == 3 * GIB);
    assert!(rt.device(0).unwrap().budget().charge(1).is_err());
    assert!(rt.device(1).unwrap().budget().charge(3 * GIB).is_ok());
    assert!(rt.device(1).unwrap().budget().parent().unwrap().is(&shared));
}

// ---- the host

/// Returns a machine with one node of 100 MiB, of which a group leaves some.
fn machine(name: &str, left: u64) -> Machine {
    let machine = Machine::new(name);
    machine.write("proc/self/cgroup", "0::/job\n");
    machine.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    machine.write("sys/fs/cgroup/job/memory.max", &format!("{}\n", 100 * MIB));
    leave(&machine, left);
    machine
}

fn leave(machine: &Machine, left: u64) {
    // Replaced as a whole, because it may be read at the same time.
    machine.swap("sys/fs/cgroup/job/memory.current", &format!("{}\n", (100 - left) * MIB));
}

#[test]
fn a_host_that_runs_out_holds_pinned_pools_and_has_them_give_back_at_a_quiet_point() {
    let machine = machine("runs-out", 80);
    let sim = Sim::h200(1);
    let told: Arc<Mutex<Vec<(Level, Level, u64)>>> = Arc::default();
    let hear = told.clone();
    let watch = HostWatch::default().on_level(move |from, to, headroom| {
        hear.lock().unwrap().push((from, to, headroom.value.unwrap() / MIB));
    });
    let builder = Runtime::builder().driver(sim.driver()).topology(machine.read()).pinned(small());
    let rt = builder.pinned_budget(64 << 20).watch_host(watch).build().unwrap();
    let host = || rt.pressure().host.unwrap();
    let pinned = rt.pinned_near(0);
    drop(pinned.buffer::<u8>(16 << 20).unwrap());
    assert!(pinned.stats().memory.cached >= 16 * MIB);
    eventually(|| host().looks > 0);
    assert_eq!((host().level, host().wanted), (Level::Nominal, 0));

    leave(&machine, 6);
    eventually(|| host().level == Level::Warning);
    assert_eq!(host().wanted, 6 * MIB, "up to 12 per cent");
    assert_eq!(host().reading.unwrap().headroom.value, Some(6 * MIB));
    assert!(pinned.stats().memory.cached >= 16 * MIB, "nobody has said that the devices are quiet");
    assert!(rt.quiet_point().unwrap() >= 6 * MIB);
    assert!(host().given_back >= 6 * MIB && pinned.stats().memory.cached <= 12 * MIB);

    leave(&machine, 3);
    eventually(|| host().level == Level::Critical);
    // Above the critical mark pinned memory does not grow, whatever its own budget permits.
    let refused = pinned.buffer::<u8>(32 << 20).unwrap_err();
    assert!(refused.to_string().contains("what the host has left"), "{refused}");
    rt.quiet_point().unwrap();
    assert_eq!(pinned.stats().memory.cached, 0);

    leave(&machine, 80);
    eventually(|| host().level == Level::Nominal);
    eventually(|| pinned.buffer::<u8>(32 << 20).is_ok());
    let all = [
        (Level::Nominal, Level::Warning, 6),
        (Level::Warning, Level::Critical, 3),
        (Level::Critical, Level::Warning, 80),
        (Level::Warning, Level::Nominal, 80),
    ];
    // A reported level is the current one.
    eventually(|| told.lock().unwrap().len() == all.len());
    assert_eq!(*told.lock().unwrap(), all);
    assert_eq!(host().rises, 2);
    drop(rt);
    assert_all_given_back(&sim);
}

#[test]
fn without_a_device_nothing_stalls_and_pinned_memory_goes_back_at_once() {
    let machine = machine("at-once", 80);
    let builder =
        Runtime::builder().driver(Sim::h200(0).driver()).topology(machine.read()).pinned(small());
    let watch = HostWatch::default()
        .on_level(|_, _, _| std::panic::resume_unwind(Box::new("a hook's own")));
    let rt = builder.pinned_budget(64 << 20).watch_host(watch).build().unwrap();
    drop(rt.pinned_near(0).buffer::<u8>(16 << 20).unwrap());
    leave(&machine, 1);
    eventually(|| rt.pinned_near(0).stats().memory.physical == 0);
    eventually(|| rt.pressure().host.unwrap().given_back >= 16 * MIB);
    assert_eq!(rt.pressure().host.unwrap().panics, 1);
}

#[test]
fn a_machine_that_tells_nothing_is_no_pressure_and_one_that_makes_no_sense_ends_the_watch() {
    let machine = Machine::new("tells-nothing");
    machine.write("proc/self/status", "");
    let builder =
        Runtime::builder().driver(Sim::h200(0).driver()).topology(machine.read()).pinned(small());
    let rt = builder.watch_host(HostWatch::default()).build().unwrap();
    let host = || rt.pressure().host.unwrap();
    eventually(|| host().looks > 0);
    assert_eq!((host().level, host().ended), (Level::Nominal, None));
    assert!(rt.pinned_near(0).buffer::<u8>(1 << 20).is_ok());
    machine.swap("proc/meminfo", "MemAvailable: plenty kB\n");
    eventually(|| host().ended.is_some());
    assert!(rt.pinned_near(0).buffer::<u8>(1 << 20).is_ok(), "its limit is lifted");
}
