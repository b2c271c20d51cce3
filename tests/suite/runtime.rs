//! Tests of the parts of a runtime, its resources, its environment variables, and that everything
//! can be dropped in any order.
//!
//! Ignored tests are the child parts of others, which run them in separate processes: environment
//! variables and the number of threads belong to the whole process.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use crate::{
    itself::{itself, texts},
    support::{self, MIB, assert_silent, runtime, small},
};
use aquifer::{
    Access, Block, Budget, DeviceBuffer, DeviceId, DevicePool, MemoryError, Operand, Park,
    PinnedAllocator, PinnedPool, PoolConfig, Request, Runtime, StagerConfig, Stream, Tag,
    driver::Call,
    error::NoGpu,
    host::{NodeId, Topology},
    sim::{DeviceConfig, Mode, Sim, SimConfig},
    vec::Vec as PinnedVec,
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process, thread,
    time::Instant,
};

#[test]
fn every_device_has_a_pool_and_one_that_is_not_there_is_an_error() {
    let rt = runtime(&Sim::h200(3));
    let ordinals: Vec<u32> = rt.devices().iter().map(|pool| pool.device().0).collect();
    assert_eq!(ordinals, [0, 1, 2]);
    for index in 0..3 {
        assert_eq!(rt.device(index).unwrap().device(), DeviceId(index as u32));
        assert_eq!(rt.by_ordinal(DeviceId(index as u32)).unwrap().device(), DeviceId(index as u32));
    }
    assert_eq!(rt.device(3).unwrap_err(), MemoryError::NoDevice { asked: 3, count: 3 });
    assert_eq!(
        rt.by_ordinal(DeviceId(7)).unwrap_err(),
        MemoryError::NoDevice { asked: 7, count: 3 }
    );
}

#[test]
fn chosen_devices_come_in_the_order_in_which_they_were_chosen() {
    let sim = Sim::h200(4);
    let rt = Runtime::builder()
        .driver(sim.driver())
        .devices([DeviceId(2), DeviceId(0)])
        .build()
        .unwrap();
    let ordinals: Vec<u32> = rt.devices().iter().map(|pool| pool.device().0).collect();
    assert_eq!(ordinals, [2, 0]);
    assert_eq!(rt.device(0).unwrap().device(), DeviceId(2));
    assert_eq!(rt.by_ordinal(DeviceId(0)).unwrap().device(), DeviceId(0));
    assert_eq!(
        rt.by_ordinal(DeviceId(1)).unwrap_err(),
        MemoryError::NoDevice { asked: 1, count: 2 }
    );
    let block =
        rt.device(0).unwrap().alloc(&rt.device(0).unwrap().stream().unwrap(), Request::bytes(1));
    assert_eq!(block.unwrap().device(), DeviceId(2));

    let absent =
        Runtime::builder().driver(sim.driver()).devices([DeviceId(1), DeviceId(9)]).build();
    assert_eq!(absent.unwrap_err(), MemoryError::NoDevice { asked: 9, count: 4 });
    let none = Runtime::builder().driver(sim.driver()).devices([]).build().unwrap();
    assert_eq!(none.device(0).unwrap_err(), MemoryError::NoDevice { asked: 0, count: 0 });
}

#[test]
fn pinned_memory_near_a_device_lies_on_the_hosts_nearest_memory_and_never_on_the_devices_own() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("allocators/host/tests/fixtures");
    for (machine, pci, memory_node, near, budget) in [
        ("grace", "0009:01:00.0", Some(1), Some(0), 480_000_000 * 1024),
        ("memoryless-node", "0000:61:00.0", None, Some(0), 3 * 60_000_000 * 1024),
        ("power9", "0035:03:00.0", Some(252), Some(8), (2 * 250_000_000 + 3 * 16_515_072) * 1024),
        ("wsl", "0000:01:00.0", None, None, 16 << 30),
    ] {
        let mut config = SimConfig::h200(1);
        config.devices[0].info.pci_address = Some(pci.into());
        config.devices[0].info.memory_node = memory_node;
        let topology = Topology::read_under(&fixtures.join(machine)).unwrap();
        let rt = Runtime::builder()
            .driver(Sim::new(config).driver())
            .topology(topology)
            .build()
            .unwrap();
        assert_eq!(rt.pinned_near(0).node(), near.map(NodeId), "{machine}");
        assert_eq!(rt.pinned_near(0).budget().limit(), budget / 2, "{machine}");
    }
}

#[test]
fn without_a_device_host_memory_is_served_and_reported_as_pageable() {
    let sim = Sim::h200(0);
    let rt = Runtime::builder().driver(sim.driver()).pinned(small()).build().unwrap();
    assert!(rt.devices().is_empty());
    assert_eq!(
        rt.device(0).unwrap_err(),
        MemoryError::NoGpu { asked: 0, why: Box::new(NoGpu::NoDevices) }
    );
    assert_eq!(rt.no_gpu(), Some(NoGpu::NoDevices));
    let buffer = rt.pinned_near(0).buffer::<u8>(100).unwrap();
    assert!(!buffer.is_pinned());
}

#[test]
fn without_a_gpu_a_simulated_one_is_available_on_request() {
    let rt = Runtime::builder().or_sim().pinned(small()).build().unwrap();
    assert!(!rt.devices().is_empty(), "a real one or a simulated one");
    assert!(rt.driver().is_some());
    assert!(Runtime::builder().pinned(small()).build().is_ok(), "that there is none is no error");
}

#[test]
fn each_device_has_a_budget_of_its_own_unless_one_is_shared() {
    let sim = Sim::h200(2);
    let fill = |pool: &DevicePool, bytes| pool.alloc(&pool.stream()?, Request::bytes(bytes));
    let rt = Runtime::builder().driver(sim.driver()).device_budget(8 << 20).build().unwrap();
    let [one, two] = rt.devices() else { panic!("two devices") };
    assert!(!one.budget().is(two.budget()));
    let _held = [fill(one, 8 << 20).unwrap(), fill(two, 8 << 20).unwrap()];
    assert!(matches!(fill(one, 1), Err(MemoryError::OutOfMemory(_))));

    let shared = Budget::new("both", 8 << 20);
    let config = PoolConfig::with_budget(shared.clone());
    let rt = Runtime::builder().driver(sim.driver()).pools(config).build().unwrap();
    let [one, two] = rt.devices() else { panic!("two devices") };
    assert!(one.budget().is(two.budget()));
    let _held = fill(one, 6 << 20).unwrap();
    assert_eq!(shared.used(), 6 << 20);
    assert!(matches!(fill(two, 6 << 20), Err(MemoryError::OutOfMemory(_))));
    assert!(fill(two, 2 << 20).is_ok());

    let rt = Runtime::on(Sim::h200(1).capacity(10 << 30).driver()).unwrap();
    assert_eq!(rt.device(0).unwrap().budget().limit(), 8 << 30, "four fifths of what is free");
    let nothing = Runtime::builder().driver(sim.driver()).device_budget(0).build();
    assert!(matches!(nothing, Err(MemoryError::BadSetting { name: "budget", .. })), "{nothing:?}");
}

#[test]
fn pinned_memory_is_limited_in_all() {
    let sim = Sim::h200(1);
    let rt = Runtime::builder()
        .driver(sim.driver())
        .pinned(small())
        .pinned_budget(4 << 20)
        .build()
        .unwrap();
    let pinned = rt.pinned_near(0);
    let held = pinned.buffer::<u8>(4 * MIB).unwrap();
    assert_eq!(pinned.budget().used(), 4 << 20);
    assert!(matches!(pinned.buffer::<u8>(1), Err(MemoryError::OutOfMemory(_))));
    drop(held);
    assert!(pinned.buffer::<u8>(1).is_ok());
    let unlimited = Runtime::builder().driver(sim.driver()).build().unwrap();
    let limit = unlimited.pinned_near(0).budget().limit();
    assert!(limit > 0 && limit < 1 << 50, "half of what is left of the machine: {limit}");
}

#[test]
fn where_no_pool_is_installed_a_stager_has_its_slots_near_its_device() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let mut config = StagerConfig::default();
    (config.up_workers, config.down_workers, config.slot, config.slots) = (1, 1, MIB, 1);
    let stager = rt.stager(0, config).unwrap();
    assert_eq!(rt.pinned_near(0).stats().memory.live, 0, "none yet");
    stager.warm().unwrap();
    assert!(rt.pinned_near(0).stats().memory.live >= 2 * MIB as u64, "one for each direction");
    drop(stager);
    assert_eq!(rt.pinned_near(0).stats().memory.live, 0);
    assert_silent(&sim);
}

#[test]
fn a_device_without_virtual_memory_serves_like_any_other() {
    let mut config = SimConfig::h200(1);
    config.devices.push(DeviceConfig::without_virtual_memory());
    let sim = Sim::new(config);
    let rt = runtime(&sim);
    for pool in rt.devices() {
        let s = pool.stream().unwrap();
        let mut x: DeviceBuffer<u8> = pool.buffer(&s, 1000).unwrap();
        s.fill(&mut x, 7).unwrap();
        assert!(support::read(&s, &x).iter().all(|&byte| byte == 7));
    }
    drop(rt);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_silent(&sim);
}

/// One object of every kind that a runtime creates.
struct Everything {
    rt: Option<Runtime>,
    pool: Option<DevicePool>,
    stream: Option<Stream>,
    block: Option<Block>,
    pinned: Option<PinnedPool>,
    vector: Option<PinnedVec<u8, PinnedAllocator>>,
}

impl Everything {
    fn new(sim: &Sim) -> Self {
        // Copies in flight are waited for by the last owner of pinned memory.
        let mut pinned = small();
        pinned.patience = support::PATIENCE;
        let builder = Runtime::builder().driver(sim.driver()).pinned(pinned);
        let rt = builder.pinned_budget(64 << 20).device_budget(256 << 20).build().unwrap();
        let pool = rt.device(0).unwrap().clone();
        let stream = pool.stream().unwrap();
        // Short: tests are not optimised, and there are hundreds of orders.
        let bytes = MIB / 16;
        let mut x: DeviceBuffer<u8> = pool.buffer(&stream, bytes).unwrap();
        let pinned = rt.pinned_near(0).clone();
        let mut vector = PinnedVec::new_in(pinned.allocator());
        vector.resize(bytes, 1);
        // The vector has been to the device and back, and another is in flight.
        let vector = stream.upload(vector, &mut x).unwrap().wait().unwrap();
        drop(stream.upload(vector.clone(), &mut x).unwrap());
        let block = Some(x.into_block());
        Self {
            rt: Some(rt),
            pool: Some(pool),
            stream: Some(stream),
            block,
            pinned: Some(pinned),
            vector: Some(vector),
        }
    }

    fn drop_one(&mut self, which: usize) {
        match which {
            0 => drop(self.rt.take()),
            1 => drop(self.pool.take()),
            2 => drop(self.stream.take()),
            3 => drop(self.block.take()),
            4 => drop(self.pinned.take()),
            _ => drop(self.vector.take()),
        }
    }
}

/// Calls `each` with every permutation of `rest` after `order`.
fn orders(order: &mut Vec<usize>, rest: &[usize], each: &mut impl FnMut(&[usize])) {
    if rest.is_empty() {
        each(order);
    }
    for &next in rest {
        order.push(next);
        let others: Vec<usize> = rest.iter().copied().filter(|&other| other != next).collect();
        orders(order, &others, each);
        order.pop();
    }
}

#[test]
fn everything_may_be_dropped_in_any_order_and_nothing_is_left() {
    let drop_all = |order: &[usize]| {
        // A fifth of the orders, with each order of any four parts.
        if !(order[2] + 2 * order[4]).is_multiple_of(5) {
            return;
        }
        let sim = Sim::h200(1).paced(100);
        let mut all = Everything::new(&sim);
        order.iter().for_each(|&which| all.drop_one(which));
        // Nothing sweeps here. The pools of another thread may, and be about to release the rest.
        let begun = Instant::now();
        while !sim.outstanding().is_empty() {
            assert!(begun.elapsed() < support::PATIENCE, "{order:?}: {}", sim.outstanding());
            thread::yield_now();
        }
        assert_silent(&sim);
    };
    let parts = [0, 1, 2, 3, 4, 5];
    thread::scope(|scope| {
        for first in parts {
            let rest: Vec<usize> = parts.into_iter().filter(|&part| part != first).collect();
            scope.spawn(move || orders(&mut vec![first], &rest, &mut { drop_all }));
        }
    });
}

#[test]
#[expect(unsafe_code, reason = "parks a block")]
fn contents_that_are_parked_in_pinned_memory_leave_it_registered_in_no_order_of_drops() {
    for runtime_first in [true, false] {
        let sim = Sim::h200(1);
        let rt = runtime(&sim);
        let pool = rt.device(0).unwrap().clone();
        let stream = pool.stream().unwrap();
        let tag = Tag::named("parked");
        let block: DeviceBuffer<u8> = pool.parkable(tag).unwrap().buffer(&stream, MIB).unwrap();
        // SAFETY: 1. no work was queued on the block.
        unsafe { pool.park(tag, Park::save_in(rt.pinned_near(0).allocator())) }.unwrap();
        assert!(sim.outstanding().registrations > 0);
        if runtime_first {
            drop((rt, pool, stream, block));
        } else {
            drop((block, stream, pool, rt));
        }
        assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    }
}

#[test]
fn memory_that_a_device_shares_with_the_host_is_counted_once() {
    let mut config = SimConfig::h200(1);
    config.devices = vec![DeviceConfig::integrated(), DeviceConfig::h200()];
    config.mode = Mode::Symbolic;
    let driver = Sim::new(config).driver();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("allocators/host/tests/fixtures");
    for keep_free in [0, 1 << 30] {
        let topology = Topology::read_under(&fixtures.join("cpuset-container-v2")).unwrap();
        let builder =
            Runtime::builder().driver(driver.clone()).topology(topology).keep_free(keep_free);
        let rt = builder.pinned_budget(30 << 30).pinned(small()).build().unwrap();
        let root = |budget: &Budget| {
            std::iter::successors(Some(budget.clone()), Budget::parent).last().unwrap()
        };
        let (shares, apart) = (rt.device(0).unwrap().budget(), rt.device(1).unwrap().budget());
        let pinned = rt.pinned_near(0).budget();
        assert!(root(shares).is(&root(pinned)) && !root(apart).is(&root(pinned)));
        assert_eq!(
            root(pinned).limit(),
            32 << 30,
            "what the device has, of which the group leaves 3 GiB to the host"
        );
        assert_eq!((shares.limit(), pinned.limit()), ((32 << 30) / 5 * 4, 30 << 30));
        let _most = shares.charge(20 << 30).unwrap();
        assert!(pinned.charge(12 << 30).is_ok());
        let refused = pinned.charge((12 << 30) + 1).unwrap_err();
        assert_eq!((refused.budget, refused.remaining), ("the machine's memory", 12 << 30));
    }
}

#[test]
fn a_runtime_on_a_simulator_leads_to_it() {
    let sim = Sim::h200(2);
    let rt = Runtime::on(sim.driver()).unwrap();
    sim.fail(Call::StreamCreate, 1, 999);
    let refused = rt.device(0).unwrap().stream().unwrap_err();
    assert!(matches!(refused, MemoryError::Driver(error) if error.code == 999));
    let same = rt.simulator().unwrap();
    assert_eq!(same.config().devices.len(), 2);
    let (stream, pool) = (rt.device(1).unwrap().stream().unwrap(), rt.device(1).unwrap());
    let block = pool.alloc(&stream, Request::bytes(1000)).unwrap();
    assert_eq!(same.outstanding().is_empty(), sim.outstanding().is_empty());
    assert!(!same.outstanding().is_empty());
    drop((block, stream));
}

// ---- in separate processes

/// A runtime that falls back to the simulator, with a race that is not taken.
#[test]
#[ignore = "half of another test"]
fn child_races() {
    let builder = Runtime::builder().pinned(small());
    let builder = match env::var("RUNTIME_FALLBACK").as_deref() {
        Ok("quiet") => builder.or_sim_quietly(),
        Ok("none") => builder,
        _ => builder.or_sim(),
    };
    let rt = builder.build().unwrap();
    println!("no gpu: {:?}", rt.device(0).map(|_| ()).map_err(|error| error.to_string()));
    drop(Runtime::builder().or_sim().pinned(small()).build().unwrap());
    let Some(sim) = rt.simulator() else { return };
    let pool = rt.device(0).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let mut x: DeviceBuffer<u8> = pool.buffer(&s, 4096).unwrap();
    s.fill(&mut x, 1).unwrap();
    sim.access(u.raw(), x.range(), Access::Read, None).unwrap();
    u.synchronize().unwrap();
    drop((sim, x, s, u));
    drop(rt);
    eprintln!("the runtime is gone");
}

#[test]
fn a_runtime_reports_its_fallback_the_reason_and_violations() {
    let run = |environment: &[(&str, &str)]| {
        let mut command = itself("runtime::child_races");
        for variable in ["DEBUG", "SIM_VIOLATIONS", "SIM_FALLBACK"] {
            command.env_remove(format!("AQUIFER_{variable}"));
        }
        // A GPU is hidden if there is one.
        let output =
            command.env("CUDA_VISIBLE_DEVICES", "").envs(environment.iter().copied()).output();
        let output = output.unwrap();
        let [said, told] = texts(&output);
        (output.status.code(), said, told)
    };
    for debug in ["", "all"] {
        let (status, _, told) = run(&[("AQUIFER_DEBUG", debug)]);
        assert_eq!(status, Some(86), "{told}");
        assert_eq!(told.matches("aquifer: a simulated GPU is used, since ").count(), 1, "{told}");
        assert!(told.contains("libcuda") || told.contains("CUDA"), "{told}");
        let (found, gone) =
            (told.find("found 1 violation").unwrap(), told.find("is gone").unwrap());
        assert!(found < gone, "it is reported when the runtime ends: {told}");
        assert!(
            told.matches("tests/suite/runtime.rs:").count() == 2,
            "both lines are the program's: {told}"
        );
    }
    for quiet in
        [[("RUNTIME_FALLBACK", "quiet"), ("A", "")], [("AQUIFER_SIM_FALLBACK", "quiet"), ("A", "")]]
    {
        let (status, _, told) = run(&quiet);
        assert_eq!(status, Some(86), "{told}");
        let said = told.contains("is used, since");
        assert_eq!(
            said,
            quiet[0].0 == "RUNTIME_FALLBACK",
            "the other runtime of the process says it: {told}"
        );
    }
    let (status, _, told) = run(&[("AQUIFER_SIM_VIOLATIONS", "exit=9")]);
    assert_eq!(status, Some(9), "{told}");
    let (status, _, told) = run(&[("AQUIFER_SIM_VIOLATIONS", "quiet")]);
    assert!(status == Some(0) && !told.contains("violation"), "{told}");
    let (status, said, told) = run(&[("RUNTIME_FALLBACK", "none")]);
    assert_eq!(status, Some(0), "{told}");
    let reasons = ["libcuda.so.1", "CUDA_VISIBLE_DEVICES", "no CUDA"];
    assert!(
        said.contains("no GPU is available: ") && reasons.iter().any(|why| said.contains(why)),
        "{said}"
    );
}

/// Runs one of the ignored tests below in a separate process, and returns its output if it
/// succeeded.
#[track_caller]
fn child(name: &str, environment: &[(&str, &str)]) -> String {
    let mut command = itself(&format!("runtime::{name}"));
    for variable in [
        "TRACE",
        "BYPASS",
        "DEBUG",
        "NUMA",
        "KEEP_FREE",
        "WATCH_HOST",
        "SIM_VIOLATIONS",
        "SIM_FALLBACK",
    ] {
        command.env_remove(format!("AQUIFER_{variable}"));
    }
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let told = texts(&output).concat();
    assert!(output.status.success(), "{told}");
    assert!(told.contains("1 passed"), "there is no test {name}: {told}");
    told
}

#[test]
fn a_misspelt_variable_is_reported_with_the_name_that_was_meant() {
    let told = child("child_builds", &[("AQUIFER_KEEPFREE", "1GiB"), ("AQUIFER_FLOW", "1")]);
    let line = "aquifer: the environment variable AQUIFER_KEEPFREE has no effect; did you mean AQUIFER_KEEP_FREE?\n";
    assert_eq!(
        (told.matches(line).count(), told.matches("AQUIFER_FLOW").count()),
        (1, 0),
        "{told}"
    );
}

#[test]
#[ignore = "half of another test"]
fn child_builds() {
    match Runtime::builder().driver(Sim::h200(1).driver()).build() {
        Ok(rt) => {
            println!("built: {}", rt.devices().len());
            rt.pressure()
                .devices
                .iter()
                .for_each(|device| println!("keeps free: {}", device.keep_free));
            rt.pressure().host.iter().for_each(|_| println!("watches the host"));
        }
        Err(error) => println!("refused: {error:?}\n{error}"),
    }
}

#[test]
fn an_invalid_variable_is_an_error_with_its_name_and_value() {
    for (name, value, expected) in [
        ("AQUIFER_BYPASS", "banana", "0 or 1"),
        ("AQUIFER_BYPASS", " 1", "0 or 1"),
        ("AQUIFER_TRACE", "/nonexistent/x", "the path of a file that can be written"),
        ("AQUIFER_TRACE", "/", "the path of a file that can be written"),
        ("AQUIFER_KEEP_FREE", "banana", "an amount like 512MiB or 20GiB, or 0"),
        ("AQUIFER_KEEP_FREE", "20GB", "an amount like 512MiB or 20GiB, or 0"),
        ("AQUIFER_WATCH_HOST", "yes", "0 or 1"),
        ("AQUIFER_NUMA", "banana", "on or off"),
        ("AQUIFER_SIM_FALLBACK", "loud", "tell or quiet"),
        ("AQUIFER_SIM_VIOLATIONS", "loud", "report, exit, exit=STATUS with 1 to 255, or quiet"),
    ] {
        let told = child("child_builds", &[(name, value)]);
        let refused = MemoryError::BadSetting { name, value: value.to_owned(), expected };
        assert!(told.contains(&format!("refused: {refused:?}\n{refused}\n")), "{told}");
    }
    // A plan's value also says why.
    let told = child("child_builds", &[("AQUIFER_PLAN", "/no/such.plan")]);
    assert!(told.contains("refused: AQUIFER_PLAN is \"/no/such.plan: "), "{told}");
    for (name, value) in [
        ("AQUIFER_BYPASS", ""),
        ("AQUIFER_BYPASS", "0"),
        ("AQUIFER_BYPASS", "on"),
        ("AQUIFER_TRACE", ""),
        ("AQUIFER_NUMA", ""),
        ("AQUIFER_PLAN", ""),
    ] {
        assert!(child("child_builds", &[(name, value)]).contains("built: 1\n"), "{name}={value:?}");
    }
    for (value, told) in [("", ""), ("0", ""), ("off", ""), ("20GiB", "keeps free: 21474836480\n")]
    {
        let built = child("child_builds", &[("AQUIFER_KEEP_FREE", value)]);
        assert!(built.contains(&format!("built: 1\n{told}")), "{value:?}: {built}");
        assert_eq!(built.contains("keeps free"), !told.is_empty(), "{value:?}: {built}");
    }
    for (value, watches) in [("", false), ("0", false), ("off", false), ("1", true), ("on", true)] {
        let built = child("child_builds", &[("AQUIFER_WATCH_HOST", value)]);
        assert_eq!(built.contains("watches the host"), watches, "{value:?}: {built}");
    }
}

#[test]
#[ignore = "half of another test"]
fn child_allocates() {
    let sim = Sim::h200(2);
    let (one, other) = (runtime(&sim), runtime(&sim));
    let pool = one.device(0).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let a = pool.alloc(&s, Request::bytes(1000)).unwrap();
    let b = pool.alloc(&u, Request::bytes(3 << 20)).unwrap();
    let addresses = [a.address(), b.address()];
    drop(a);
    // Another runtime of the process, and another device.
    let there = other.device(1).unwrap();
    let c = there.alloc(&there.stream().unwrap(), Request::bytes(77)).unwrap();
    // Used on another stream when it is freed: complete only when that use is.
    let used = b.prepare(&s, Access::Read).unwrap();
    drop(b);
    drop(c);
    used.finish().unwrap();
    drop(pool.alloc(&s, Request::bytes(2 << 20)).unwrap());
    pool.trim(0).unwrap();
    let calls = sim.driver();
    let made = |call| calls.calls().get(call);
    println!(
        "allocations {} frees {} handles {} apart {}",
        made(Call::MemAlloc),
        made(Call::MemFree),
        made(Call::HandleCreate),
        addresses[0] != addresses[1]
    );
    drop((s, u, one, other));
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_silent(&sim);
}

#[test]
fn with_bypass_each_block_is_an_allocation_of_its_own() {
    let told = child("child_allocates", &[("AQUIFER_BYPASS", "1")]);
    assert!(told.contains("allocations 4 frees 4 handles 0 apart true"), "{told}");
    let told = child("child_allocates", &[]);
    assert!(told.contains("allocations 0 frees 0 handles"), "{told}");
}

/// Returns a file name that no other test uses.
fn scratch(name: &str) -> PathBuf {
    env::temp_dir().join(format!("aquifer-{}-{name}", process::id()))
}

struct Row {
    op: char,
    id: u64,
    bytes: u64,
    stream: u64,
}

/// Reads a trace in its documented format.
fn rows(path: &Path) -> Vec<Row> {
    let text = fs::read_to_string(path).unwrap();
    fs::remove_file(path).unwrap();
    assert!(text.ends_with('\n'), "the last row is whole");
    let mut lines = text.lines();
    assert_eq!(
        lines.next(),
        Some("t_us,op,id,bytes,stream,kind,device,tag,address,thread,refused_by")
    );
    let mut last = 0;
    lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let [t_us, op, id, bytes, stream, kind, _device, _tag, address, thread, _refused_by] =
                cells[..]
            else {
                panic!("eleven cells: {line}")
            };
            // Pinned pools are opened too, and record their limit.
            assert!(kind == "cached" || (op, kind) == ("l", "pinned"), "{line}");
            assert_eq!(address.starts_with("0x"), "afc".contains(op), "{line}");
            assert!(thread.parse::<u32>().unwrap() > 0, "{line}");
            let t_us: u64 = t_us.parse().unwrap();
            assert!(t_us >= last, "time goes on: {line}");
            last = t_us;
            let number = |cell: &str| cell.parse().unwrap();
            Row {
                op: op.parse().unwrap(),
                id: number(id),
                bytes: number(bytes),
                stream: number(stream),
            }
        })
        .collect()
}

#[test]
fn a_trace_records_every_block_of_the_process_in_order() {
    for bypass in ["0", "1"] {
        let path = scratch(&format!("trace-{bypass}.csv"));
        child(
            "child_allocates",
            &[("AQUIFER_TRACE", path.to_str().unwrap()), ("AQUIFER_BYPASS", bypass)],
        );
        let rows = rows(&path);
        let of = |op| rows.iter().filter(move |row| row.op == op);
        let asked: Vec<(u64, u64, u64)> =
            of('a').map(|row| (row.id, row.bytes, row.stream)).collect();
        let expected = [(1, 1000, 0), (2, 3 << 20, 1), (3, 77, 0), (4, 2 << 20, 0)];
        assert_eq!(asked, expected, "ids in order, bytes as asked, streams");
        if bypass == "0" {
            assert_eq!(
                of('f').map(|row| row.id).collect::<Vec<_>>(),
                [1, 2, 3, 4],
                "as their owners freed them"
            );
        }
        // In addition to the limit, what is in use outside, and the memory that the pool took from
        // the driver and returned.
        assert_eq!(
            rows.iter().filter(|row| !"gsmlo".contains(row.op)).count(),
            12,
            "and nothing else"
        );
        for id in 1..=4 {
            let life: String = rows.iter().filter(|row| row.id == id).map(|row| row.op).collect();
            assert_eq!(life, "afc");
        }
        let at = |op, id| rows.iter().position(|row| row.op == op && row.id == id);
        assert!(
            at('c', 2) > at('f', 3),
            "the use on the other stream ended later: bypass {bypass}"
        );
    }
}

#[test]
#[ignore = "half of another test"]
fn child_counts() {
    let threads = || fs::read_dir("/proc/self/task").unwrap().count();
    let sim = Sim::h200(4);
    let free = || (0..4).map(|d| sim.driver().memory_info(DeviceId(d)).unwrap().free).sum::<u64>();
    let before = (threads(), free(), sim.outstanding());
    let rt = Runtime::on(sim.driver()).unwrap();
    let after = sim.outstanding();
    assert_eq!((threads(), free()), (before.0, before.1), "threads, and bytes that are free");
    let taken = [
        after.streams,
        after.events,
        after.handles,
        after.mappings,
        after.allocations,
        after.pools,
    ];
    assert_eq!(taken, [0; 6], "{after}");
    assert_eq!((after.host_allocations, after.registrations), (0, 0));
    assert_eq!(rt.pinned_near(0).budget().used(), 0);
    assert!(rt.devices().iter().all(|pool| pool.budget().used() == 0));
    drop(rt);
    assert_eq!(sim.outstanding(), before.2);
}

#[test]
fn building_takes_no_memory_and_starts_no_thread() {
    child("child_counts", &[]);
}
