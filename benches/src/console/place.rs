//! The device that a command runs on: a GPU, or the simulated one.

use crate::console::gpu::{Gpus, NoUsableGpu};
use aquifer_driver::{DeviceId, DeviceInfo, Driver, sim::Sim};
use std::{error, fmt, str::FromStr, sync::Arc};

/// The simulated GPU's seed. It determines when queued work runs, so that every run is the same.
const SEED: u64 = 1;

/// The device to run on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceChoice {
    /// The first GPU, or the simulated one if there is no GPU.
    Auto,
    /// The simulated device.
    Sim,
    /// A GPU by its ordinal.
    Cuda(u32),
}

/// A text that names no device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadDevice;

impl fmt::Display for BadDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a device is auto, sim, cuda or cuda:N")
    }
}

impl error::Error for BadDevice {}

impl FromStr for DeviceChoice {
    type Err = BadDevice;

    fn from_str(text: &str) -> Result<Self, BadDevice> {
        match text {
            "auto" => Ok(Self::Auto),
            "sim" => Ok(Self::Sim),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let ordinal =
                    text.strip_prefix("cuda:").filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
                ordinal.and_then(|n| n.parse().ok()).map(Self::Cuda).ok_or(BadDevice)
            }
        }
    }
}

/// A device to run on.
#[derive(Debug)]
pub enum Place {
    /// The simulated device, created for each pass.
    Sim(DeviceInfo),
    /// A GPU.
    Cuda {
        /// The driver.
        driver: Arc<dyn Driver>,
        /// The device.
        info: DeviceInfo,
    },
}

/// Why the requested device is not available.
#[derive(Clone, Debug)]
pub enum NoPlace {
    /// There is no GPU at all.
    NoGpu(NoUsableGpu),
    /// The ordinal is too large.
    NoDevice {
        /// The requested ordinal.
        asked: u32,
        /// The number of devices.
        count: usize,
    },
    /// The simulated GPU reported an error, which cannot happen.
    Sim(aquifer_driver::DriverError),
}

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoGpu(e) => write!(f, "{e} (--device sim needs no GPU)"),
            Self::NoDevice { asked, count } => {
                write!(f, "there is no cuda:{asked}: the driver shows {count}, counted from 0")
            }
            Self::Sim(e) => e.fmt(f),
        }
    }
}

impl error::Error for NoPlace {}

/// A device for one pass.
#[derive(Debug)]
pub struct Session {
    /// Its driver.
    pub driver: Arc<dyn Driver>,
    /// The device.
    pub device: DeviceId,
    /// The simulator, if the device is simulated.
    pub sim: Option<Sim>,
}

impl Place {
    /// Selects the requested device.
    ///
    /// # Errors
    /// [`NoPlace`] if it does not exist. `auto` always finds one.
    pub fn choose(choice: DeviceChoice) -> Result<Self, NoPlace> {
        let wanted = match choice {
            DeviceChoice::Sim => return Self::sim(),
            DeviceChoice::Auto => None,
            DeviceChoice::Cuda(ordinal) => Some(ordinal),
        };
        match (Gpus::open(), wanted) {
            (Err(_), None) => Self::sim(),
            (Err(e), Some(_)) => Err(NoPlace::NoGpu(e)),
            (Ok(Gpus { driver, devices }), wanted) => {
                let (asked, count) = (wanted.unwrap_or(0), devices.len());
                let info = devices
                    .into_iter()
                    .nth(asked as usize)
                    .ok_or(NoPlace::NoDevice { asked, count })?;
                Ok(Self::Cuda { driver, info })
            }
        }
    }

    fn sim() -> Result<Self, NoPlace> {
        simulator().driver().device_info(DeviceId(0)).map(Self::Sim).map_err(NoPlace::Sim)
    }

    /// Returns the device's name on the command line.
    pub fn name(&self) -> String {
        match self {
            Self::Sim(_) => "sim".to_owned(),
            Self::Cuda { info, .. } => format!("cuda:{}", info.device.0),
        }
    }

    /// Returns the device's display name.
    pub fn title(&self) -> String {
        match self {
            Self::Sim(info) => info.name.clone(),
            Self::Cuda { info, .. } => format!("{} (cuda:{})", info.name, info.device.0),
        }
    }

    /// Returns the device's properties.
    pub fn info(&self) -> &DeviceInfo {
        match self {
            Self::Sim(info) | Self::Cuda { info, .. } => info,
        }
    }

    /// Returns the bytes of the device's memory.
    pub fn memory(&self) -> u64 {
        self.info().memory
    }

    /// Returns the granularity of physical memory, in bytes.
    pub fn granularity(&self) -> u64 {
        self.info().granularity.max(2 << 20)
    }

    /// Opens the device for one pass, without the simulator's oracle.
    pub fn begin(&self) -> Session {
        self.session(simulator().seeded(SEED), false)
    }

    /// Opens the device for a pass that runs the work of the simulated device itself. The
    /// simulator's oracle is active only with `checked`.
    pub fn begin_stepped(&self, checked: bool) -> Session {
        self.session(simulator().stepped(), checked)
    }

    /// Opens the device for a pass that checks real bytes.
    pub fn begin_with_bytes(&self) -> Session {
        self.session(Sim::h200(1).seeded(SEED), false)
    }

    fn session(&self, sim: Sim, checked: bool) -> Session {
        match self {
            Self::Sim(info) => {
                sim.oracle(checked);
                Session { driver: sim.driver(), device: info.device, sim: Some(sim) }
            }
            Self::Cuda { driver, info } => {
                Session { driver: driver.clone(), device: info.device, sim: None }
            }
        }
    }
}

/// Creates a simulated H200 without bytes.
fn simulator() -> Sim {
    Sim::h200(1).symbolic()
}
