//! What the driver and the kernel report, and one conclusion from it.

use super::transports::{self, Transport, TransportTrial};
use aquifer_benches::console::gpu::{Gpus, NoUsableGpu};
use aquifer_driver::{DeviceInfo, Driver, MemoryInfo};
use aquifer_host::topology::{Found, NodeId, Topology, TopologyError};
use std::sync::Arc;

/// Facts on this machine.
#[derive(Debug)]
pub(crate) struct Facts {
    /// The GPUs, or why there are none.
    pub(crate) gpus: Result<Vec<Gpu>, NoUsableGpu>,
    /// The CUDA version that the driver supports, times a thousand: 13000 for 13.0.
    pub(crate) version: Option<u32>,
    /// The host, or the error in the file that could not be parsed.
    pub(crate) host: Result<Topology, TopologyError>,
}

/// One GPU.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    /// Its properties.
    pub(crate) info: DeviceInfo,
    /// Its current memory, or none if the driver reported an error.
    pub(crate) memory: Option<MemoryInfo>,
    /// The NUMA node next to it.
    pub(crate) node: Option<NodeId>,
    /// The node for its host memory: the nearest with memory for this process.
    pub(crate) memory_node: Option<NodeId>,
    /// The most that administrators let this process take of its memory, or the error in what they
    /// have set.
    pub(crate) cap: Option<Result<Found<u64>, TopologyError>>,
    /// What came of trying each way to other processes, devices and machines.
    pub(crate) transports: Vec<(Transport, TransportTrial)>,
}

impl Facts {
    pub(crate) fn gather(gpus: &Result<Gpus, NoUsableGpu>) -> Self {
        let devices = gpus.as_ref().map_or(&[][..], |gpus| &gpus.devices);
        let host = Topology::read().map(|host| host.with_devices(devices));
        let version = gpus.as_ref().ok().and_then(|gpus| gpus.driver.driver_version().ok());
        let look = |gpus: &Gpus| {
            gpus.devices
                .iter()
                .map(|info| Gpu::look(&gpus.driver, info.clone(), host.as_ref().ok()))
                .collect()
        };
        let gpus = gpus.as_ref().map(look).map_err(Clone::clone);
        Self { gpus, version, host }
    }
}

impl Gpu {
    fn look(driver: &Arc<dyn Driver>, info: DeviceInfo, host: Option<&Topology>) -> Self {
        let memory = driver.memory_info(info.device).ok();
        let node = host.and_then(|host| host.node_of_device(&info).ok().flatten());
        let memory_node = host.and_then(|host| host.memory_near_device(&info).ok().flatten());
        let cap = host.map(|host| host.device_cap(&info));
        let transports = transports::attempt_all(driver, &info);
        Self { info, memory, node, memory_node, cap, transports }
    }
}

/// The kind of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// What a program gets.
    Gets,
    /// Why it does not get more. Not a problem.
    Limit,
    /// A problem.
    Warning,
}

/// One finding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Finding {
    /// Its kind.
    pub(crate) kind: Kind,
    /// The fact and its consequence.
    pub(crate) says: String,
    /// How to fix it, or none if there is no fix. Only for warnings.
    pub(crate) fix: Option<String>,
}

impl Finding {
    pub(super) fn gets(says: impl Into<String>) -> Self {
        Self { kind: Kind::Gets, says: says.into(), fix: None }
    }

    pub(super) fn limit(says: impl Into<String>) -> Self {
        Self { kind: Kind::Limit, says: says.into(), fix: None }
    }

    pub(super) fn mend(says: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, says: says.into(), fix: Some(fix.into()) }
    }

    pub(super) fn accept(says: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, says: says.into(), fix: None }
    }
}

/// Formats a rate in decimal units, as vendors do.
pub(super) fn gigabytes(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}
