//! The device watch: keeps the driver's free memory above a mark, so that another process finds it
//! when it retries.
//!
//! When less is free, the pool and all others that hold memory of the device under the same budgets
//! are asked to release some, the cheapest first ([`DevicePool::give_back`]). There is no time to
//! wait for work of the device. So pinned memory is kept unless stalls are allowed.

use super::{
    Ceiling,
    report::{DevicePressure, DeviceReading, Pressure},
    watch_thread::{Next, StopFlag, WatchThread},
};
use aquifer_core::{DriverError, MemoryError, Result};
use aquifer_device::DevicePool;
use aquifer_host::kernel::Kernel;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The interval of readings while the free memory changes, and the first one after that.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// The interval of readings while nothing changes.
const MAX_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes released in one step. A concurrent allocation waits for at most one step, some 30 ms with
/// handles of 2 MiB.
const STEP: u64 = 2 << 30;
/// How long reclaimers that wait for the device may take, where stalls are allowed.
const RECLAIM_TIMEOUT: Duration = Duration::from_millis(100);

/// Returns the bytes beyond the mark at which a shortage ends. Another process needs slightly more
/// than it allocates, for its context and for the driver's own tables.
fn slack(keep_free: u64) -> u64 {
    (keep_free / 16).clamp(32 << 20, 1 << 30).min(keep_free)
}

/// Returns the bytes to release, given the free bytes. `releasing` is set if some have already been
/// released for this shortage, which ends only somewhat above the mark.
pub(super) fn missing(keep_free: u64, free: u64, releasing: bool) -> u64 {
    let enough = keep_free.saturating_add(slack(keep_free));
    if free < keep_free || releasing { enough.saturating_sub(free) } else { 0 }
}

/// Returns the interval after a reading, given the interval before it and whether anything has
/// changed.
fn next_interval(before: Duration, changed: bool) -> Duration {
    if changed { MIN_INTERVAL } else { (before * 2).min(MAX_INTERVAL) }
}

/// A watched device.
pub(crate) struct WatchedDevice {
    pub(crate) pool: DevicePool,
    /// The budget above all charges for the device.
    pub(crate) ceiling: Ceiling,
    /// Release memory even if the device first has to finish its work.
    pub(crate) may_stall: bool,
}

/// Keeps memory of devices free for other processes until it is dropped.
pub(crate) struct KeepFree {
    watch: WatchThread,
    bytes: Arc<AtomicU64>,
    status: Vec<Arc<Mutex<DeviceStatus>>>,
}

/// What was read and done, and when.
struct DeviceStatus {
    report: DevicePressure,
    at: Option<Instant>,
}

impl KeepFree {
    /// Starts to watch these devices, on one thread for all.
    ///
    /// # Errors
    /// The system's error, if no more threads or files can be had.
    pub(crate) fn start(kernel: &Kernel, bytes: u64, devices: Vec<WatchedDevice>) -> Result<Self> {
        let bytes = Arc::new(AtomicU64::new(bytes));
        let mut all: Vec<DeviceMonitor> = devices.into_iter().map(DeviceMonitor::new).collect();
        let status = all.iter().map(|monitor| monitor.status.clone()).collect();
        let mark = bytes.clone();
        let watch = WatchThread::start(kernel, "aq-keep-free", move |stop| {
            // Relaxed: it guards no memory, and `set` wakes the thread after storing it.
            let keep_free = mark.load(Ordering::Relaxed);
            all.retain_mut(|monitor| monitor.run(keep_free, stop));
            all.iter().map(|monitor| monitor.interval).min().map_or(Next::Stop, Next::After)
        });
        Ok(Self { watch: watch.map_err(MemoryError::System)?, bytes, status })
    }

    /// Sets how many bytes are kept free from now on.
    pub(crate) fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.watch.run_now();
    }

    pub(crate) fn report(&self, pressure: &mut Pressure) {
        let now = Instant::now();
        pressure.devices = self
            .status
            .iter()
            .map(|status| {
                let status = lock(status);
                let mut report = status.report.clone();
                report.keep_free = self.bytes.load(Ordering::Relaxed);
                if let (Some(reading), Some(at)) = (&mut report.reading, status.at) {
                    reading.age = now.saturating_duration_since(at);
                }
                report
            })
            .collect();
    }
}

/// The watch of one device.
struct DeviceMonitor {
    device: WatchedDevice,
    status: Arc<Mutex<DeviceStatus>>,
    /// The free bytes at the last reading.
    free: Option<u64>,
    /// Whether a shortage is being served.
    releasing: bool,
    interval: Duration,
}

impl DeviceMonitor {
    fn new(device: WatchedDevice) -> Self {
        let report = DevicePressure::new(device.pool.device());
        let status = Arc::new(Mutex::new(DeviceStatus { report, at: None }));
        Self { device, status, free: None, releasing: false, interval: MIN_INTERVAL }
    }

    /// Takes one reading and reacts to it. Returns whether there will be another one.
    fn run(&mut self, keep_free: u64, stop: &StopFlag) -> bool {
        let outcome = self.read_and_release(keep_free, stop);
        if let Err(error) = outcome {
            self.device.ceiling.lift();
            let mut status = lock(&self.status);
            status.report.ended = Some(error);
            status.report.ceiling = u64::MAX;
        }
        outcome.is_ok()
    }

    fn read_and_release(&mut self, keep_free: u64, stop: &StopFlag) -> Result<(), DriverError> {
        let (mut changed, mut released) = (false, false);
        loop {
            let free = self.read(keep_free)?;
            let before = self.free.replace(free);
            changed |= before != Some(free);
            let missing = if keep_free == 0 { 0 } else { missing(keep_free, free, self.releasing) };
            {
                let mut status = lock(&self.status);
                status.report.missing = missing;
                status.report.shortages += u64::from(missing > 0 && !self.releasing);
            }
            self.releasing = missing > 0;
            // If memory was released but free memory did not grow, it was taken again at once. The
            // next attempt is made at the next reading.
            let futile = released && before.is_some_and(|before| free <= before);
            released = missing > 0 && !futile && !stop.is_set() && self.release(missing) > 0;
            if !released {
                self.interval = next_interval(self.interval, changed);
                return Ok(());
            }
        }
    }

    /// Queries the driver and moves the ceiling.
    fn read(&self, keep_free: u64) -> Result<u64, DriverError> {
        let WatchedDevice { pool, ceiling, .. } = &self.device;
        let query = || pool.driver().memory_info(pool.device()).map(|memory| (memory, memory.free));
        let memory = if keep_free > 0 {
            ceiling.follow(keep_free, query)?
        } else {
            ceiling.lift();
            query()?.0
        };
        let mut status = lock(&self.status);
        status.at = Some(Instant::now());
        status.report.looks += 1;
        status.report.ceiling = ceiling.budget().limit();
        let (free, total) = (memory.free, memory.total);
        status.report.reading = Some(DeviceReading { free, total, age: Duration::ZERO });
        Ok(free)
    }

    /// Releases some of the missing bytes. Returns how many.
    fn release(&self, missing: u64) -> u64 {
        let now = Instant::now();
        let deadline =
            if self.device.may_stall { now.checked_add(RECLAIM_TIMEOUT) } else { Some(now) };
        let step = missing.min(STEP);
        let room = self.device.pool.give_back(step, deadline);
        let released = step.saturating_sub(room.missing);
        let mut status = lock(&self.status);
        status.report.given_back += released;
        status.report.asked = room.tried;
        released
    }
}

impl Drop for DeviceMonitor {
    /// What outlives the watch must not stay limited by its last reading.
    fn drop(&mut self) {
        self.device.ceiling.lift();
    }
}

fn lock(status: &Mutex<DeviceStatus>) -> MutexGuard<'_, DeviceStatus> {
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_begins_below_the_mark_and_ends_slightly_above_it() {
        const G: u64 = 1 << 30;
        const M: u64 = 1 << 20;
        // Bytes to keep free, free bytes, already releasing, and the expected missing bytes.
        for (keep_free, free, releasing, expected) in [
            (16 * G, 100 * G, false, 0),
            (16 * G, 16 * G, false, 0),
            (16 * G, 16 * G - 1, false, G + 1),
            (16 * G, 0, false, 17 * G),
            (16 * G, 16 * G, true, G),
            (16 * G, 17 * G, true, 0),
            (16 * G, 18 * G, true, 0),
            (256 * M, 0, false, 288 * M),
            (100 * G, 0, false, 101 * G),
            // A mark below the minimum slack asks for at most twice itself.
            (M, 0, false, 2 * M),
        ] {
            assert_eq!(
                missing(keep_free, free, releasing),
                expected,
                "{keep_free} {free} {releasing}"
            );
        }
    }

    #[test]
    fn readings_are_most_frequent_while_free_memory_changes() {
        let mut intervals = vec![MAX_INTERVAL];
        for changed in [true, true, false, false, false, false, true] {
            intervals.push(next_interval(*intervals.last().unwrap(), changed));
        }
        let ms: Vec<u128> = intervals.iter().map(Duration::as_millis).collect();
        assert_eq!(ms, [50, 10, 10, 20, 40, 50, 50, 10]);
    }
}
