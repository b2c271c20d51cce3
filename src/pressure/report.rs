//! Reports of what a watch has seen and done.

use aquifer_core::{DeviceId, DriverError, error::Tried};
use aquifer_host::topology::{Strain, TopologyError};
use std::time::Duration;

/// How close memory is to its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub enum Level {
    /// There is enough.
    #[default]
    Nominal,
    /// Cached memory that is cheap to release should be released.
    Warning,
    /// The next request may be refused.
    Critical,
}

/// What the watches of a [`Runtime`](crate::Runtime) have seen and done so far. Empty if none is
/// enabled.
///
/// ```
/// use aquifer::{Runtime, sim::Sim};
/// let rt = Runtime::builder().driver(Sim::h200(1).driver()).keep_free(1 << 30).build()?;
/// let seen = &rt.pressure().devices[0];
/// assert_eq!((seen.keep_free, seen.given_back), (1 << 30, 0));
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct Pressure {
    /// The devices, in the runtime's order.
    pub devices: Vec<DevicePressure>,
    /// The host.
    pub host: Option<HostPressure>,
}

/// The driver's figures for a device's memory.
///
/// [`Pressure`] has an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceReading {
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
    /// The age of this reading.
    pub age: Duration,
}

/// What was seen of a device, and what was released for other processes.
///
/// [`Pressure`] has an example.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct DevicePressure {
    /// The device.
    pub device: DeviceId,
    /// Bytes that are to be kept free in the driver; 0 for none.
    pub keep_free: u64,
    /// The last reading. `None` before the first.
    pub reading: Option<DeviceReading>,
    /// Bytes of the device that this process's pools may hold, as of the last reading. `u64::MAX`
    /// if nothing is kept free.
    pub ceiling: u64,
    /// The number of readings.
    pub looks: u64,
    /// How often free memory fell below the amount to be kept.
    pub shortages: u64,
    /// Bytes that the pool and others under the same budgets have released.
    pub given_back: u64,
    /// The reclaimers that were called last, in order, with the bytes that each released.
    pub asked: Vec<Tried>,
    /// Bytes that were missing at the last reading; 0 if enough is free.
    pub missing: u64,
    /// Why the watch has ended: the driver returned an error, or the device is lost. From then on
    /// growth is not limited.
    pub ended: Option<DriverError>,
}

impl DevicePressure {
    pub(super) fn new(device: DeviceId) -> Self {
        Self {
            device,
            keep_free: 0,
            reading: None,
            ceiling: u64::MAX,
            looks: 0,
            shortages: 0,
            given_back: 0,
            asked: Vec::new(),
            missing: 0,
            ended: None,
        }
    }
}

/// How scarce the host's memory was.
///
/// [`Pressure`] has an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HostReading {
    /// The kernel's figures.
    pub strain: Strain,
    /// The age of this reading.
    pub age: Duration,
}

/// What was seen of the host, and what was done.
///
/// [`Pressure`] has an example.
#[derive(Clone, PartialEq, Default, Debug)]
#[non_exhaustive]
pub struct HostPressure {
    /// The current level.
    pub level: Level,
    /// The last reading. `None` before the first.
    pub reading: Option<HostReading>,
    /// The number of readings.
    pub looks: u64,
    /// How often the level has risen.
    pub rises: u64,
    /// Bytes that pinned pools should release at the next [quiet
    /// point](crate::Runtime::quiet_point).
    pub wanted: u64,
    /// Bytes of pinned memory that were released.
    pub given_back: u64,
    /// How often a hook has panicked.
    pub panics: u64,
    /// Why the watch has ended: a file of the kernel could not be parsed.
    pub ended: Option<TopologyError>,
}
