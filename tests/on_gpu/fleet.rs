//! Tests of a fleet of real GPUs, with a table of the results: each policy with memory behind its
//! leases, copies between devices, tenants under budgets that are too small beside a process that
//! takes and frees memory, and a device that is lost meanwhile.
//!
//! A kernel that traps loses the device, which ends the context of the process for good. It
//! therefore runs in a separate process, and another one then shows that the GPU still works.
//! Ignored tests are those processes.
//!
//! Run it with `--nocapture` for the table.
#![expect(unsafe_code, reason = "launches kernels, and takes memory beside the pools")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod shown;

use crate::{
    first_gpu::{self, gpu},
    itself::itself,
};
use aquifer::{
    DeviceBuffer, DeviceId, Driver, MemoryError, Runtime, RuntimeBuilder, Stream,
    cuda::{CudaDriver, Lend},
    sim::Sim,
};
use aquifer_driver::{Devices, Memory};
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg},
    nvrtc::Ptx,
};
use shown::{Scale, Table, assert_empty, copies, each_policy, stress};
use std::{
    io::{self, BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The limit of each device where memory is not short.
const LIMIT: u64 = 4 * GIB;
/// The memory that the neighbour leaves on a device, which is less than the limits.
const LEFT: u64 = 2 * GIB;
/// Longer than the stress test takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(80);
/// The prefix of each row that another process adds to the table.
const ROW: &str = "row: ";

/// A kernel that ends its context.
const TRAP: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry lose()
{
    trap;
    ret;
}
";

/// A device through cudarc.
struct Kernels {
    stream: Arc<CudaStream>,
    fill: CudaFunction,
    lose: CudaFunction,
}

impl Kernels {
    fn on(device: DeviceId) -> Self {
        let context = CudaContext::new(device.0 as usize).unwrap();
        let load = |text: String, name| {
            context.load_module(Ptx::from_src(text)).unwrap().load_function(name).unwrap()
        };
        let (fill, lose) = (load(gpu::fill(), "fill"), load(TRAP.to_owned(), "lose"));
        Self { stream: context.new_stream().unwrap(), fill, lose }
    }

    fn fill(
        &self,
        home: &Stream,
        x: &mut DeviceBuffer<u32>,
        number: u32,
    ) -> aquifer::error::Result<()> {
        let n = x.len() as u32;
        let mut lent = x.on_mut(&self.stream)?;
        let mut launch = self.stream.launch_builder(&self.fill);
        launch.arg(&mut lent).arg(&number).arg(&n).arg(&0u64);
        // SAFETY: 1. the kernel's four arguments, in order. 2. it accesses `n` elements lent to
        // this stream.
        match unsafe { launch.launch(LaunchConfig::for_num_elems(n)) } {
            Ok(_) => Ok(()),
            // The test ignores cudarc's error and checks the one that the driver reports to this
            // library.
            Err(_) => {
                home.synchronize()?;
                Err(MemoryError::DeviceLost { device: home.device() })
            }
        }
    }

    fn lose(&self) {
        let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: 1. it has no arguments. 2. it accesses no memory.
        unsafe { self.stream.launch_builder(&self.lose).launch(one) }.unwrap();
        assert!(self.stream.synchronize().is_err(), "a kernel that traps ends its context");
    }
}

/// Returns a command for another process, which runs one of the ignored tests of this file.
fn process(name: &str) -> Command {
    itself(&format!("fleet::{name}"))
}

/// A process that repeatedly takes nearly all memory of every device and frees it, until it is told
/// to end.
struct Neighbour(Child);

impl Neighbour {
    fn start() -> Self {
        let mut child = process("child_allocates_and_frees")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("ready")), "the neighbour did not come up");
        Self(child)
    }

    /// Ends the process and returns its output.
    fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        // Reads to the end, because writing to a closed pipe fails.
        let said = lines
            .filter_map(|line| Some(line.unwrap().split_once("neighbour: ")?.1.to_owned()))
            .last();
        assert!(self.0.wait().unwrap().success());
        said.unwrap()
    }
}

#[test]
#[ignore = "another process of a test"]
fn child_allocates_and_frees() {
    let driver = CudaDriver::open().unwrap();
    let devices = driver.device_count().unwrap();
    (0..devices).for_each(|device| _ = driver.memory_info(DeviceId(device)).unwrap());
    println!("ready");
    let over = Arc::new(AtomicBool::new(false));
    let told = over.clone();
    // The parent writes nothing, and closes the pipe at the end.
    thread::spawn(move || {
        io::stdin().lines().for_each(drop);
        told.store(true, Ordering::Relaxed);
    });
    let (mut times, mut refused, mut most) = (0u64, 0u64, 0u64);
    while !over.load(Ordering::Relaxed) {
        let take = |device| {
            let free = driver.memory_info(DeviceId(device)).unwrap().free;
            let bytes = free.saturating_sub(LEFT) / (2 * MIB) * (2 * MIB);
            (bytes > 0)
                .then(|| driver.mem_alloc(DeviceId(device), bytes).map(|at| (device, at, bytes)))
        };
        let taken: Vec<_> = (0..devices).filter_map(take).collect();
        thread::sleep(Duration::from_millis(50));
        for held in taken {
            match held {
                Ok((device, address, bytes)) => {
                    (times, most) = (times + 1, most.max(bytes));
                    // SAFETY: 1. it was allocated above, once. 2. nothing uses it.
                    unsafe { driver.mem_free(DeviceId(device), address) }.unwrap();
                }
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    refused += 1;
                }
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    println!(
        "neighbour: took up to {} GiB of a device {times} times, was refused {refused} times",
        most / GIB
    );
}

#[test]
#[ignore = "another process of a test"]
fn child_is_stressed_and_loses_a_device() {
    // A thread that waits for a device that never answers cannot be woken.
    thread::spawn(|| {
        thread::sleep(PATIENCE);
        println!("it hangs: somebody waits for what the lost device never did");
        std::process::exit(1);
    });
    let driver = CudaDriver::open().unwrap();
    let kernels: Vec<_> =
        (0..driver.device_count().unwrap()).map(|n| Kernels::on(DeviceId(n))).collect();
    let neighbour = Neighbour::start();
    let scale = Scale {
        unit: 64 * MIB,
        devices: 3 * GIB,
        process: 4 * GIB,
        tenant: 3 * GIB / 2,
        longest: Duration::from_secs(20),
    };
    let mut table = Table::default();
    let fill =
        |index: usize, s: &Stream, x: &mut DeviceBuffer<u32>, n: u32| kernels[index].fill(s, x, n);
    stress(driver, &scale, &fill, |device| kernels[device.0 as usize].lose(), &mut table);
    let on = kernels.len();
    table.row("a neighbour beside it", on, neighbour.end());
    table.0.iter().for_each(|row| println!("{ROW}{row}"));
}

/// Returns a runtime whose policies see what is free now, not at a sample before.
fn exact_runtime(builder: RuntimeBuilder) -> Runtime {
    builder.sample_every(Duration::ZERO).build().unwrap()
}

#[test]
fn a_fleet_of_gpus_places_copies_and_goes_on_without_a_device_that_is_lost() {
    let _turn = first_gpu::turn();
    let rt = exact_runtime(Runtime::builder().device_budget(LIMIT));
    let ids: Vec<DeviceId> = rt.devices().iter().map(|pool| pool.device()).collect();
    if ids.len() < 2 {
        gpu::skip(format!("{} GPUs, two are needed", ids.len()));
        return;
    }
    let mut table = Table::default();
    each_policy(&rt, 64 * MIB, &mut table);
    copies(rt.driver().unwrap(), &ids, 256 * MIB, &mut table);
    let name = rt.devices()[0].info().name.clone();
    drop(rt);

    let child =
        process("child_is_stressed_and_loses_a_device").stderr(Stdio::inherit()).output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}");
    table.0.extend(said.lines().filter_map(|line| Some(line.split_once(ROW)?.1.to_owned())));

    // The context was lost with its process, but the GPU was not.
    let rt = exact_runtime(Runtime::builder().device_budget(LIMIT));
    let mut again = Table::default();
    each_policy(&rt, 64 * MIB, &mut again);
    assert_empty(&rt);
    table.row(
        "afterwards, in another process",
        rt.devices().len(),
        "every device places and computes",
    );
    println!("\n| {} × {name} | devices | found |\n|---|---|---|", ids.len());
    table.0.iter().for_each(|row| println!("{row}"));
    for row in ["near", "copy", "stress", "lost", "neighbour", "at the end"] {
        assert!(table.0.iter().any(|line| line.contains(row)), "no row on {row}");
    }
}

/// The same on simulated devices, so that the table is also tested without GPUs.
#[test]
fn what_the_table_shows_holds_on_a_simulated_fleet() {
    let mut table = Table::default();
    let sim = Sim::h200(2);
    let rt = exact_runtime(Runtime::builder().driver(sim.driver()).device_budget(64 * MIB));
    each_policy(&rt, MIB, &mut table);
    let driver: Arc<dyn Driver> = sim.driver();
    copies(&driver, &[DeviceId(0), DeviceId(1)], MIB, &mut table);
    drop((rt, driver));
    let sim = Sim::h200(3);
    let scale = Scale {
        unit: MIB,
        devices: 24 * MIB,
        process: 32 * MIB,
        tenant: 12 * MIB,
        longest: Duration::from_millis(500),
    };
    let fill = |_: usize, s: &Stream, x: &mut DeviceBuffer<u32>, number: u32| s.fill(x, number);
    stress(sim.driver(), &scale, &fill, |device| sim.lose_device(device), &mut table);
    table.0.iter().for_each(|row| println!("{row}"));
    let violations = sim.violations();
    assert!(violations.is_empty(), "{}", violations[0]);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}
