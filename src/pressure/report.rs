//! What a watch has seen and done.

use aquifer_core::{DeviceId, DriverError, budget::Level, error::Tried};
use aquifer_host::topology::{Strain, TopologyError};
use std::time::Duration;

/// What the watches of a [`Runtime`](crate::Runtime) have seen and done so far; empty where none
/// was asked for.
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

/// The driver's word on a device's memory.
///
/// Its example is that of [`Pressure`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceReading {
    /// Bytes that nobody has.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
    /// How long ago it was read.
    pub age: Duration,
}

/// What was seen of a device, and done for its neighbours.
///
/// Its example is that of [`Pressure`].
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct DevicePressure {
    /// Which.
    pub device: DeviceId,
    /// Bytes that are to be free in the driver's hands; 0 for none.
    pub keep_free: u64,
    /// The last reading; none before the first.
    pub reading: Option<DeviceReading>,
    /// Bytes that this process's pools may hold of the device, by the last reading; `u64::MAX`
    /// where nothing is kept free.
    pub ceiling: u64,
    /// How often the driver was asked (a count).
    pub looks: u64,
    /// How often free memory fell below what is to be kept (a count).
    pub shortages: u64,
    /// Bytes that the pool and others under the same budgets have given back.
    pub given_back: u64,
    /// Who was asked last, in order, and what each gave.
    pub asked: Vec<Tried>,
    /// Bytes that were missing at the last look; 0 where enough is free.
    pub missing: u64,
    /// Why nobody looks any more: the driver did not answer, or the device is lost. Growth is not
    /// limited from then on.
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
/// Its example is that of [`Pressure`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HostReading {
    /// What the kernel told.
    pub strain: Strain,
    /// How long ago it was read.
    pub age: Duration,
}

/// What was seen of the host, and done.
///
/// Its example is that of [`Pressure`].
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct HostPressure {
    /// The level now.
    pub level: Level,
    /// The last reading; none before the first.
    pub reading: Option<HostReading>,
    /// Whether the kernel tells of stalls by itself; else its averages are read.
    pub alarmed: bool,
    /// How often the kernel was asked (a count).
    pub looks: u64,
    /// How often it told of a stall (a count).
    pub alarms: u64,
    /// How often the level has risen (a count).
    pub rises: u64,
    /// Bytes that pinned pools should give back at the next [quiet
    /// point](crate::Runtime::quiet_point).
    pub wanted: u64,
    /// Bytes of pinned memory that were given back.
    pub given_back: u64,
    /// How often a hook has panicked (a count).
    pub panics: u64,
    /// Why nobody looks any more: a file of the kernel's that cannot be understood.
    pub ended: Option<TopologyError>,
}

impl Default for HostPressure {
    fn default() -> Self {
        Self {
            level: Level::Nominal,
            reading: None,
            alarmed: false,
            looks: 0,
            alarms: 0,
            rises: 0,
            wanted: 0,
            given_back: 0,
            panics: 0,
            ended: None,
        }
    }
}
