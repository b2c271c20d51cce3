//! A short try of what a program will do: make a pinned region, and copy from it and to it.
#![expect(unsafe_code, reason = "queues copies on raw addresses")]

use crate::gpu::Gpus;
use aquifer_core::Budget;
use aquifer_driver::{DeviceId, Driver, DriverError, RawStream};
use aquifer_host::{
    kernel::Kernel,
    region::{Host, Region, RegionError, RegionReport, RegionRequest},
    topology::{NodeId, Topology},
};
use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

/// How much is made and copied.
pub(crate) const PROBE_BYTES: usize = 64 << 20;

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    /// The region, near the first device if there is one; or why there is none.
    pub(crate) region: Result<Made, RegionError>,
    /// What the first device's link does; none without a device, or without pinned memory.
    pub(crate) link: Option<Result<Link, DriverError>>,
}

/// A region that was made.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    /// What it is, and what it is not.
    pub(crate) report: RegionReport,
    /// Bytes per second of making it: populating, pinning, asking where it is.
    pub(crate) make: f64,
    /// Bytes per second of a copy into it from other memory, by one thread.
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
    /// Makes a region on `node`, which is the first device's if there is one, and copies.
    pub(crate) fn run(topology: Topology, gpus: Option<&Gpus>, node: Option<NodeId>) -> Self {
        let mut host = Host::new(topology, Kernel::new());
        if let Some(gpus) = gpus {
            // The first call makes the device's context, which is not to be timed.
            let _ = gpus.driver.memory_info(DeviceId(0));
            host = host.with_driver(gpus.driver.clone(), DeviceId(0));
        }
        let budget = Budget::new("the probe", 2 * PROBE_BYTES as u64);
        let mut request = RegionRequest::bytes(PROBE_BYTES);
        request.node = node;
        let begun = Instant::now();
        let mut region = match Region::new(&host, &budget, &request) {
            Ok(region) => region,
            Err(error) => return Self { region: Err(error), link: None },
        };
        let make = per_second(begun.elapsed());
        let source = vec![1_u8; PROBE_BYTES];
        let begun = Instant::now();
        let bytes = region.bytes_mut();
        let len = bytes.len().min(source.len());
        bytes[..len].copy_from_slice(&black_box(&source)[..len]);
        let fill = per_second(begun.elapsed());
        let link = match gpus {
            Some(gpus) if region.is_pinned() => Some(link(&gpus.driver, DeviceId(0), &region)),
            _ => None,
        };
        let report = region.report().clone();
        // What cannot be given back goes with the process.
        let _ = region.close();
        Self { region: Ok(Made { report, make, fill }), link }
    }
}

fn per_second(took: Duration) -> f64 {
    PROBE_BYTES as f64 / took.as_secs_f64().max(1e-9)
}

/// What is taken from the driver for the probe, and given back.
struct Taken<'a> {
    driver: &'a Arc<dyn Driver>,
    device: DeviceId,
    memory: u64,
    stream: Option<RawStream>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // What the driver will not take back stays until the process ends, which is soon.
        let _ = self.driver.device_synchronize(self.device);
        if let Some(stream) = self.stream {
            // SAFETY: 1. the handle was made for this value and goes with it.
            let _ = unsafe { self.driver.stream_destroy(stream) };
        }
        // SAFETY: 1. it came from `mem_alloc` and is freed here only. 2. the device is idle.
        let _ = unsafe { self.driver.mem_free(self.device, self.memory) };
    }
}

fn link(driver: &Arc<dyn Driver>, device: DeviceId, region: &Region) -> Result<Link, DriverError> {
    // No copy may cross from one registration to the next; memory of the driver's own is one.
    let host = region.start();
    let bytes = region.registrations().first().map_or(PROBE_BYTES, |first| first.len.min(PROBE_BYTES));
    let memory = driver.mem_alloc(device, bytes as u64)?;
    let mut taken = Taken { driver, device, memory, stream: None };
    let stream = *taken.stream.insert(driver.stream_create(device, 0)?);
    let timed = |up: bool| -> Result<f64, DriverError> {
        let mut best = Duration::MAX;
        // The first round warms the link up.
        for _ in 0..3 {
            let begun = Instant::now();
            if up {
                // SAFETY: 1. both sides have `bytes` and outlive `taken`, which waits for the device. 2. one stream
                // orders all copies, and the host touches neither side meanwhile.
                unsafe { driver.copy_to_device(stream, memory, host, bytes)? };
            } else {
                // SAFETY: 1. and 2. as above; `region` is borrowed, but no slice of it is held.
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
