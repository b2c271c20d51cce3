//! Where a command runs: a GPU, or the simulated one.

use crate::{
    cli::DeviceChoice,
    gpu::{Gpus, NoGpu},
};
use aquifer_driver::{DeviceId, DeviceInfo, Driver, sim::Sim};
use std::{error, fmt, sync::Arc};

/// The seed by which the simulated GPU runs its queues: work lags behind the host by some of it,
/// the same each time.
const SEED: u64 = 1;

/// A device that falls behind looks at its queues at one in so many calls only, and runs a random
/// share of a few then: some tens of items of each stream are still to come at any time, as under a
/// program that a GPU's speed bounds.
const PACE: u32 = 64;

/// A device to run on.
#[derive(Debug)]
pub(crate) enum Place {
    /// The simulated one, made anew for each pass.
    Sim(DeviceInfo),
    /// A GPU.
    Cuda {
        /// The driver.
        driver: Arc<dyn Driver>,
        /// Which.
        info: DeviceInfo,
    },
}

/// A device that is not there.
#[derive(Clone, Debug)]
pub(crate) enum NoPlace {
    /// There is no GPU at all.
    NoGpu(NoGpu),
    /// There are fewer.
    NoDevice {
        /// The one asked for.
        asked: u32,
        /// How many there are.
        count: usize,
    },
    /// The simulated GPU does not tell about itself, which cannot happen.
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
pub(crate) struct Session {
    /// Its driver.
    pub(crate) driver: Arc<dyn Driver>,
    /// Which.
    pub(crate) device: DeviceId,
    /// The simulator behind it, if it is one.
    pub(crate) sim: Option<Sim>,
}

impl Place {
    /// The device that was asked for.
    ///
    /// # Errors
    /// [`NoPlace`] if it is not there. `auto` always finds one.
    pub(crate) fn choose(choice: DeviceChoice) -> Result<Self, NoPlace> {
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

    /// As on the command line.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Sim(_) => "sim".to_owned(),
            Self::Cuda { info, .. } => format!("cuda:{}", info.device.0),
        }
    }

    /// In words.
    pub(crate) fn title(&self) -> String {
        match self {
            Self::Sim(info) => info.name.clone(),
            Self::Cuda { info, .. } => format!("{} (cuda:{})", info.name, info.device.0),
        }
    }

    /// What the device is and can do.
    pub(crate) fn info(&self) -> &DeviceInfo {
        match self {
            Self::Sim(info) | Self::Cuda { info, .. } => info,
        }
    }

    /// Its memory, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.info().memory
    }

    /// The step in which physical memory is had, in bytes.
    pub(crate) fn granularity(&self) -> u64 {
        self.info().granularity.max(2 << 20)
    }

    /// The device for one pass. Only with `checked` does the simulator watch.
    pub(crate) fn begin(&self, checked: bool) -> Session {
        self.session(simulator(), checked)
    }

    /// The device for a pass that counts waits: the simulator does not watch, and its device falls
    /// behind the host.
    pub(crate) fn begin_behind(&self) -> Session {
        self.session(simulator().paced(PACE), false)
    }

    /// The device for a pass that looks at bytes.
    pub(crate) fn begin_with_bytes(&self) -> Session {
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

/// One H200 without bytes.
fn simulator() -> Sim {
    Sim::h200(1).symbolic().seeded(SEED)
}
