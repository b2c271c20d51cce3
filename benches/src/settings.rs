//! What to run, and with which settings.

use crate::console::place::DeviceChoice;
use aquifer_host::StagerConfig;
use std::path::PathBuf;

/// A benchmark, with the settings that only it has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Benchmark {
    /// Arenas.
    Arena {
        /// The device that the pinned memory serves.
        device: DeviceChoice,
    },
    /// Charges to budgets.
    Budget,
    /// The caching device pool.
    Device {
        /// The device to run on.
        device: DeviceChoice,
        /// Whether the driver's own calls are timed too. Needs a GPU.
        driver: bool,
    },
    /// The global allocator.
    Global,
    /// Pools of pinned host memory.
    Pinned {
        /// The device that the pinned memory serves.
        device: DeviceChoice,
    },
    /// Choosing a device.
    Placement,
    /// Staging of pageable memory and files.
    Stage(StageOptions),
}

/// Settings of [`Benchmark::Stage`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StageOptions {
    /// The device to run on.
    pub device: DeviceChoice,
    /// Bytes of the largest transfer. By default 8 GiB, less in a quick run and on the simulated
    /// device.
    pub most: Option<u64>,
    /// The folder for the files that are written and read. By default that for temporary files.
    pub folder: Option<PathBuf>,
    /// Settings of the stager.
    pub stager: StagerConfig,
}

/// Which rows are measured, and how precisely.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RowSelection {
    /// Text that a row's name must contain, ignoring case. All rows are measured by default.
    pub only: Option<String>,
    /// Whether everything runs within seconds, with rough figures.
    pub quick: bool,
}
