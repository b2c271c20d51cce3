//! What is simulated, and how.

use super::{cost::Costs, reporting::OnViolation};
use crate::{DeviceId, DeviceInfo, ExportTypes};

/// What lies behind device addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Bytes, in a memory file of this process: copies copy, kernels compute, contents can be
    /// compared. A page costs memory when it is first written.
    Bytes,
    /// Nothing: only who may touch what when is checked. Any capacity, and the fastest.
    Symbolic,
}

/// When queued work runs. Checks do not depend on it: they are made when work is queued.
///
/// ```
/// use aquifer_driver::{DeviceId, Driver, sim::Sim};
/// let eager = Sim::h200(1);                 // work runs as it is queued
/// let by_seed = Sim::h200(1).seeded(7);     // in an order that the seed decides, some of it later
/// for sim in [eager, by_seed] {
///     let stream = sim.driver().stream_create(DeviceId(0), 0)?;
///     sim.driver().stream_synchronize(stream)?;
///     assert!(sim.violations().is_empty());
/// }
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Schedule {
    /// As soon as it can, inside the call that queues it.
    Eager,
    /// Only when a test [steps](super::Sim::step), or the host waits: then exactly what it waits
    /// for.
    Stepped,
    /// Some of it at each call, by a random number from this seed. The same calls with the same
    /// seed run the same way.
    Seeded(u64),
}

/// A device that is to be simulated.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// What it tells about itself. `memory` is its capacity; `device` is set to its place in the
    /// list.
    pub info: DeviceInfo,
}

/// The capacity of an H200, in bytes, as the driver tells it.
pub(crate) const H200_MEMORY: u64 = 143_771 << 20;

/// With bytes, a device has this much unless more is asked for: each 2 MiB of it may take a map of
/// the process, and Linux allows 65,530.
const BYTES_MEMORY: u64 = 16 << 30;

/// Granularity of physical memory, in bytes.
const GRANULARITY: u64 = 2 << 20;

impl DeviceConfig {
    /// An H200.
    #[must_use]
    pub fn h200() -> Self {
        let mut info = DeviceInfo::new(DeviceId(0), "NVIDIA H200 (simulated)".into(), H200_MEMORY);
        info.compute_capability = (9, 0);
        info.virtual_memory = true;
        info.granularity = GRANULARITY;
        info.async_pools = true;
        info.export_types = ExportTypes::POSIX_FD.with_rdma();
        Self { info }
    }

    /// A device as Windows' Linux subsystem shows it: without virtual memory management.
    #[must_use]
    pub fn without_virtual_memory() -> Self {
        let mut device = Self::h200();
        device.info.name = "GPU without virtual memory management (simulated)".into();
        device.info.virtual_memory = false;
        device.info.granularity = 0;
        device.info.export_types = ExportTypes::NONE;
        device
    }

    /// A device that shares the host's memory.
    #[must_use]
    pub fn integrated() -> Self {
        let mut device = Self::h200();
        device.info.name = "integrated GPU (simulated)".into();
        device.info.memory = 32 << 30;
        device.info.integrated = true;
        device
    }
}

/// Everything about a simulator. [`Sim`](super::Sim)'s own methods change the common parts of it.
///
/// ```
/// use aquifer_driver::sim::{DeviceConfig, Mode, Sim, SimConfig};
/// let mut config = SimConfig::h200(1);
/// config.devices.push(DeviceConfig::without_virtual_memory());
/// config.mode = Mode::Symbolic;
/// let sim = Sim::new(config);
/// assert_eq!(sim.driver().device_count(), Ok(2));
/// ```
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct SimConfig {
    /// The devices, by ordinal.
    pub devices: Vec<DeviceConfig>,
    /// What lies behind addresses.
    pub mode: Mode,
    /// When work runs.
    pub schedule: Schedule,
    /// With a seed: work runs at one in so many of the driver's calls, so that a device falls
    /// behind a host that asks much. 0 and 1: at each.
    pub pace: u32,
    /// How many host agents there are; at least one.
    pub host_agents: u32,
    /// Whether devices can reach each other's memory:
    /// [`DeviceInfo::peers`](crate::DeviceInfo::peers).
    pub peers: bool,
    /// The most memory that each device has, in bytes. `None`: what its kind has, and 16 GiB in
    /// [`Mode::Bytes`].
    pub capacity: Option<u64>,
    /// What happens with violations that the program does not take. `None`: what
    /// `AQUIFER_SIM_VIOLATIONS` says, and [`OnViolation::Report`] where it says nothing.
    pub on_violation: Option<OnViolation>,
    /// What calls cost on the machine that is simulated.
    pub costs: Costs,
    /// The version of the driver's interface: 13000 for CUDA 13.0.
    pub driver_version: u32,
}

impl SimConfig {
    /// How many devices a machine has at most.
    pub const MOST_DEVICES: u32 = 64;

    /// `devices` H200s that reach each other's memory, with bytes, eager. At most
    /// [`MOST_DEVICES`](Self::MOST_DEVICES).
    #[must_use]
    pub fn h200(devices: u32) -> Self {
        let devices = (0..devices.min(Self::MOST_DEVICES)).map(|ordinal| {
            let mut device = DeviceConfig::h200();
            device.info.pci_address = Some(format!("0000:{:02x}:00.0", 0x1b + ordinal));
            device
        });
        Self {
            devices: devices.collect(),
            mode: Mode::Bytes,
            schedule: Schedule::Eager,
            pace: 1,
            host_agents: 1,
            peers: true,
            capacity: None,
            on_violation: None,
            costs: Costs::h200(),
            driver_version: 13_000,
        }
    }

    /// What each device tells about itself.
    pub(crate) fn infos(&self) -> Vec<DeviceInfo> {
        let infos = self.devices.iter().enumerate().map(|(ordinal, device)| {
            let mut info = device.info.clone();
            info.device = DeviceId(ordinal as u32);
            info.memory = match (self.capacity, self.mode) {
                (Some(capacity), _) => capacity,
                (None, Mode::Bytes) => info.memory.min(BYTES_MEMORY),
                (None, Mode::Symbolic) => info.memory,
            };
            info
        });
        infos.collect()
    }
}
