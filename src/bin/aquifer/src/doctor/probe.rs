//! A short test of what a program will do: create a pinned region for each device and each node,
//! and copy between it and the device.
#![expect(unsafe_code, reason = "queues copies on raw addresses")]

use super::facts::Facts;
use aquifer_benches::console::gpu::Gpus;
use aquifer_core::Budget;
use aquifer_driver::{DeviceId, Driver, DriverError, RawStream};
use aquifer_host::{
    kernel::Kernel,
    region::{Host, Region, RegionError, RegionReport, RegionRequest},
    topology::{NodeId, Topology},
};
use std::{
    fmt,
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

/// The size of a region and of a copy.
pub(crate) const PROBE_BYTES: usize = 64 << 20;

/// The target that memory is allocated for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    /// A device, with the best node for it if that is known.
    Device(DeviceId, Option<NodeId>),
    /// A node that is not next to any device.
    Node(NodeId),
    /// No target: the machine has neither devices nor nodes.
    Anywhere,
}

impl Target {
    /// Returns every device, then every NUMA node that has memory for this process and is not next
    /// to any device.
    fn all(facts: &Facts, host: &Topology) -> Vec<Self> {
        let devices =
            facts.gpus.iter().flatten().map(|gpu| Self::Device(gpu.info.device, gpu.memory_node));
        let mut all: Vec<Self> = devices.collect();
        let tried: Vec<_> = all.iter().filter_map(|target| target.node()).collect();
        let nodes =
            host.host_nodes().filter(|node| node.memory_allowed && !tried.contains(&node.id));
        all.extend(nodes.map(|node| Self::Node(node.id)));
        if all.is_empty() {
            all.push(Self::Anywhere);
        }
        all
    }

    /// Returns the node that the memory should be on.
    pub(crate) fn node(self) -> Option<NodeId> {
        match self {
            Self::Device(_, node) => node,
            Self::Node(node) => Some(node),
            Self::Anywhere => None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device, _) => write!(f, "host memory for {device}"),
            Self::Node(node) => write!(f, "host memory on {node}"),
            Self::Anywhere => f.write_str("host memory"),
        }
    }
}

/// The result of a probe.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    /// The target.
    pub(crate) target: Target,
    /// The region, or why it could not be created.
    pub(crate) region: Result<ProbeResult, RegionError>,
    /// The speed of the device's link, or none without a device or without pinned memory.
    pub(crate) link: Option<Result<Link, DriverError>>,
}

/// A region that was created.
#[derive(Clone, Debug)]
pub(crate) struct ProbeResult {
    /// Its properties and shortfalls.
    pub(crate) report: RegionReport,
    /// Bytes per second of its creation: populating, pinning, querying its placement.
    pub(crate) make: f64,
    /// Bytes per second of a copy into it from other host memory, by one thread.
    pub(crate) fill: f64,
}

/// Copies between the region and the device, in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Link {
    /// To the device.
    pub(crate) up: f64,
    /// From the device.
    pub(crate) down: f64,
}

impl Probe {
    /// Probes all targets, one after another.
    pub(crate) fn run_all(topology: &Topology, gpus: Option<&Gpus>, facts: &Facts) -> Vec<Self> {
        let host = Host::new(topology.clone(), Kernel::new());
        let with_driver = |device| match gpus {
            Some(gpus) => host.clone().with_driver(gpus.driver.clone(), device),
            None => host.clone(),
        };
        let targets = Target::all(facts, topology).into_iter();
        targets
            .map(|target| match (target, gpus) {
                (Target::Device(device, _), Some(gpus)) => {
                    // The first call creates the device's context, which must not be timed.
                    let _ = gpus.driver.memory_info(device);
                    Self::run(&with_driver(device), target, Some((&gpus.driver, device)))
                }
                // Memory of a node without a device is pinned through the first device.
                _ => Self::run(&with_driver(DeviceId(0)), target, None),
            })
            .collect()
    }

    /// Creates a region, and copies if there is a device.
    fn run(host: &Host, target: Target, device: Option<(&Arc<dyn Driver>, DeviceId)>) -> Self {
        let budget = Budget::new("the probe", 2 * PROBE_BYTES as u64);
        let mut request = RegionRequest::bytes(PROBE_BYTES);
        request.node = target.node();
        let begun = Instant::now();
        let mut region = match Region::new(host, &budget, &request) {
            Ok(region) => region,
            Err(error) => return Self { target, region: Err(error), link: None },
        };
        let make = per_second(begun.elapsed());
        let source = vec![1_u8; PROBE_BYTES];
        let begun = Instant::now();
        let bytes = region.bytes_mut();
        let len = bytes.len().min(source.len());
        bytes[..len].copy_from_slice(&black_box(&source)[..len]);
        let fill = per_second(begun.elapsed());
        let link = match device {
            Some((driver, device)) if region.is_pinned() => Some(link(driver, device, &region)),
            _ => None,
        };
        let report = region.report().clone();
        // If closing fails, the memory is freed when the process ends.
        let _ = region.close();
        Self { target, region: Ok(ProbeResult { report, make, fill }), link }
    }
}

fn per_second(took: Duration) -> f64 {
    PROBE_BYTES as f64 / took.as_secs_f64().max(1e-9)
}

/// Driver resources of the probe. Freed on drop.
struct Taken<'a> {
    driver: &'a Arc<dyn Driver>,
    device: DeviceId,
    memory: u64,
    stream: Option<RawStream>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // What the driver does not free stays until the process ends soon after.
        let _ = self.driver.device_synchronize(self.device);
        if let Some(stream) = self.stream {
            // SAFETY: 1. the handle was created for this value and is not used afterwards.
            let _ = unsafe { self.driver.stream_destroy(stream) };
        }
        // SAFETY: 1. it came from `mem_alloc` and is freed here only. 2. the device is idle.
        let _ = unsafe { self.driver.mem_free(self.device, self.memory) };
    }
}

fn link(driver: &Arc<dyn Driver>, device: DeviceId, region: &Region) -> Result<Link, DriverError> {
    // A copy must not cross from one registration to the next. Memory allocated by the driver is
    // one registration.
    let host = region.start();
    let bytes =
        region.registrations().first().map_or(PROBE_BYTES, |first| first.len.min(PROBE_BYTES));
    let memory = driver.mem_alloc(device, bytes as u64)?;
    let mut taken = Taken { driver, device, memory, stream: None };
    let stream = *taken.stream.insert(driver.stream_create(device, 0)?);
    let timed = |up: bool| -> Result<f64, DriverError> {
        let mut best = Duration::MAX;
        // The first round is a warm-up.
        for _ in 0..3 {
            let begun = Instant::now();
            if up {
                // SAFETY: 1. both sides have `bytes` and outlive `taken`, which waits for the
                // device. 2. one stream orders all copies, and the host does not access either side
                // meanwhile.
                unsafe { driver.copy_to_device(stream, memory, host, bytes)? };
            } else {
                // SAFETY: 1. and 2. as above; `region` is borrowed, but no slice of it exists.
                unsafe { driver.copy_to_host(stream, host, memory, bytes)? };
            }
            driver.stream_synchronize(stream)?;
            best = best.min(begun.elapsed());
        }
        Ok(bytes as f64 / best.as_secs_f64().max(1e-9))
    };
    let up = timed(true)?;
    let down = timed(false)?;
    drop(taken);
    Ok(Link { up, down })
}
