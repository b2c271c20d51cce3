//! The time to start and drop a runtime: reading the environment and the machine, creating budgets
//! and pools, and dropping all of it.
//!
//! Measured over simulated devices, whose driver takes no time, and over this machine's GPUs. There
//! it is compared with opening the driver and creating a context on each device.

use super::{PlacementBench, over, simulated};
use crate::console::gpu::Gpus;
use crate::{lap::repeat, row::Unit};
use aquifer::Runtime;
use aquifer_core::{MemoryError, Result};
use aquifer_driver::Driver;
use std::{sync::Arc, time::Instant};

const DEVICES: [u32; 2] = [1, 8];
const HERE: &str = "start + end, this machine's GPUs";
const DRIVER: &str = "driver, with contexts";

pub(super) fn names(_: &PlacementBench) -> Vec<String> {
    let simulated = DEVICES.map(|devices| format!("start + end, {}", over(devices)));
    simulated.into_iter().chain([HERE.to_owned()]).collect()
}

pub(super) fn measure(bench: &mut PlacementBench) -> Result<()> {
    for (name, devices) in names(bench).iter().zip(DEVICES) {
        if bench.sheet.wants(name) {
            let [took] = repeat(bench.pace, || started(simulated(devices)).map(|ns| [ns]))?;
            bench.sheet.add(name, Unit::Us, took, None);
        }
    }
    if !bench.sheet.wants(HERE) {
        return Ok(());
    }
    // No other driver is open while one is timed.
    if let Some(none) = Gpus::open().err() {
        bench.sheet.leave_out(HERE, none.to_string());
        return Ok(());
    }
    let [own, driver] = repeat(bench.pace, opened_and_started)?;
    bench.sheet.add(HERE, Unit::Us, own, Some((DRIVER, driver)));
    Ok(())
}

/// Returns the nanoseconds of a runtime on an open driver.
fn started(driver: Arc<dyn Driver>) -> Result<f64> {
    let begun = Instant::now();
    drop(Runtime::builder().driver(driver).build()?);
    Ok(begun.elapsed().as_nanos() as f64)
}

/// Returns the nanoseconds of a runtime on this machine's driver, and of opening that driver
/// before.
fn opened_and_started() -> Result<[f64; 2]> {
    let begun = Instant::now();
    let Gpus { driver, devices } =
        Gpus::open().map_err(|_| MemoryError::NoDevice { asked: 0, count: 0 })?;
    for info in &devices {
        driver.memory_info(info.device).map_err(|e| MemoryError::driver(info.device, e))?;
    }
    let opened = begun.elapsed().as_nanos() as f64;
    Ok([started(driver)?, opened])
}
