//! What the driver and the kernel say.

use crate::gpu::{Gpus, NoGpu};
use aquifer_driver::{DeviceInfo, Driver, MemoryInfo};
use aquifer_host::topology::{Found, NodeId, Topology, TopologyError};
use std::sync::Arc;

/// What there is.
#[derive(Debug)]
pub(crate) struct Facts {
    /// The GPUs, or why there are none.
    pub(crate) gpus: Result<Vec<Gpu>, NoGpu>,
    /// CUDA's version as the driver speaks it, times a thousand: 13000 for 13.0.
    pub(crate) version: Option<u32>,
    /// The host, or the file that could not be understood.
    pub(crate) host: Result<Topology, TopologyError>,
}

/// One GPU.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    /// What it is and can do.
    pub(crate) info: DeviceInfo,
    /// Its memory now; none if the driver would not say.
    pub(crate) memory: Option<MemoryInfo>,
    /// The host's node next to it.
    pub(crate) node: Option<Found<NodeId>>,
}

impl Facts {
    pub(crate) fn gather(gpus: &Result<Gpus, NoGpu>) -> Self {
        let host = Topology::read();
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

    /// The node next to the first device; without one, the first node that has memory for us.
    pub(crate) fn node(&self) -> Option<NodeId> {
        match &self.gpus {
            Ok(gpus) => gpus.first()?.node.as_ref()?.value,
            Err(_) => {
                self.host.as_ref().ok()?.nodes().iter().find(|node| node.memory_allowed).map(|node| node.id)
            }
        }
    }
}

impl Gpu {
    fn look(driver: &Arc<dyn Driver>, info: DeviceInfo, host: Option<&Topology>) -> Self {
        let memory = driver.memory_info(info.device).ok();
        let node = host.and_then(|host| host.node_of_device(&info).ok());
        Self { info, memory, node }
    }
}
