//! The configuration of the simulator.

use super::reporting::OnViolation;
use crate::{DeviceId, DeviceInfo, ExportTypes};

/// What device addresses refer to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Bytes in a memory file of this process: copies copy, kernels compute, contents can be
    /// compared. A page uses memory after it is first written.
    Bytes,
    /// Nothing: only the order and ownership of accesses are checked. Any capacity, and the
    /// fastest.
    Symbolic,
}

/// When queued work runs. Checks do not depend on it, since they are made when work is queued.
///
/// ```
/// use aquifer::{DeviceId, Driver, sim::Sim};
/// let eager = Sim::h200(1);                 // work runs as it is queued
/// let by_seed = Sim::h200(1).seeded(7);     // in an order given by the seed, partly later
/// for sim in [eager, by_seed] {
///     let stream = sim.driver().stream_create(DeviceId(0), 0)?;
///     sim.driver().stream_synchronize(stream)?;
///     assert!(sim.violations().is_empty());
/// }
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Schedule {
    /// As soon as possible, inside the call that queues it.
    Eager,
    /// Only when a test [steps](super::Sim::step), or when the host waits. Then exactly the work
    /// that it waits for runs.
    Stepped,
    /// Partly at each call, by random numbers from this seed. The same calls with the same seed run
    /// the same way.
    Seeded(u64),
}

/// The configuration of a simulated device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// The properties it reports. `memory` is its capacity. `device` is set to its position in the
    /// list.
    pub info: DeviceInfo,
}

/// The capacity of an H200, in bytes, as reported by the driver.
pub(crate) const H200_MEMORY: u64 = 143_771 << 20;

/// The default capacity of a device in [`Mode::Bytes`]. Each 2 MiB of it may need a mapping of the
/// process, and Linux allows 65,530.
const BYTES_MEMORY: u64 = 16 << 30;

/// Granularity of physical memory, in bytes.
const GRANULARITY: u64 = 2 << 20;

impl DeviceConfig {
    /// Returns the configuration of an H200.
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

    /// Returns a device without virtual memory management, as in the Windows Subsystem for Linux.
    #[must_use]
    pub fn without_virtual_memory() -> Self {
        let mut device = Self::h200();
        device.info.name = "GPU without virtual memory management (simulated)".into();
        device.info.virtual_memory = false;
        device.info.granularity = 0;
        device.info.export_types = ExportTypes::NONE;
        device
    }

    /// Returns a device that shares the host's memory.
    #[must_use]
    pub fn integrated() -> Self {
        let mut device = Self::h200();
        device.info.name = "integrated GPU (simulated)".into();
        device.info.memory = 32 << 30;
        device.info.integrated = true;
        device
    }
}

/// The full configuration of a simulator. The methods of [`Sim`](super::Sim) change its common
/// parts.
///
/// ```
/// use aquifer::sim::{DeviceConfig, Mode, Sim, SimConfig};
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
    /// What addresses refer to.
    pub mode: Mode,
    /// When work runs.
    pub schedule: Schedule,
    /// With a seed, work runs at one in this many driver calls, so that the device lags behind a
    /// host that makes many calls. 0 and 1 mean at each call.
    pub pace: u32,
    /// Whether devices can access each other's memory:
    /// [`DeviceInfo::peers`](crate::DeviceInfo::peers).
    pub peers: bool,
    /// The capacity of each device, in bytes. `None` means the capacity of its model, and at most
    /// 16 GiB in [`Mode::Bytes`].
    pub capacity: Option<u64>,
    /// What happens with violations that the program does not take. `None` means the value of
    /// `AQUIFER_SIM_VIOLATIONS`, or the default of [`OnViolation`] if that is unset.
    pub on_violation: Option<OnViolation>,
    /// The version of the driver's interface, such as 13000 for CUDA 13.0.
    pub driver_version: u32,
}

impl SimConfig {
    /// The maximum number of devices of a machine.
    pub const MOST_DEVICES: u32 = 64;

    /// Returns `devices` H200s that can access each other's memory, in [`Mode::Bytes`] and
    /// [`Schedule::Eager`]. At most [`MOST_DEVICES`](Self::MOST_DEVICES).
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
            peers: true,
            capacity: None,
            on_violation: None,
            driver_version: 13_000,
        }
    }

    /// Returns the properties that each device reports.
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
