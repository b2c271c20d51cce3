//! The state of the benchmark, and its devices.

use crate::{lap::Pace, sheet::Sheet};
use aquifer::sim::Sim;
use aquifer_driver::Driver;
use std::sync::Arc;

/// The memory of each device. Small enough that there are addresses for the largest number of
/// devices.
const MEMORY: u64 = 16 << 30;

/// The state of a benchmark.
pub(super) struct PlacementBench {
    pub(super) pace: Pace,
    pub(super) sheet: Sheet,
}

/// Returns a driver of this many simulated devices.
pub(super) fn simulated(devices: u32) -> Arc<dyn Driver> {
    Sim::h200(devices).symbolic().capacity(MEMORY).driver()
}

/// Returns the number of devices, as named in rows.
pub(super) fn over(devices: u32) -> String {
    format!("{devices} device{}", if devices == 1 { "" } else { "s" })
}
