//! The device watch: keeps the driver's free memory above a mark, so that another process finds it
//! when it retries.
//!
//! When less is free, the pool and all others that hold memory of the device under the same budgets
//! are asked to release some, the cheapest first ([`DevicePool::give_back`]). There is no time to
//! wait for work of the device. So segments of devices without virtual memory mapping, and pinned
//! memory, are kept unless stalls are allowed.

use super::{
    Ceiling,
    report::{DevicePressure, DeviceReading, Pressure},
    thread::{Calls, Next, Watch},
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
const SHORTEST: Duration = Duration::from_millis(10);
/// The interval of readings while nothing changes.
const LONGEST: Duration = Duration::from_millis(50);
/// Bytes released in one step. A concurrent allocation waits for at most one step, some 30 ms with
/// handles of 2 MiB.
const PIECE: u64 = 2 << 30;
/// How long reclaimers that wait for the device may take, where stalls are allowed.
const PATIENCE: Duration = Duration::from_millis(100);

/// Returns the bytes beyond the mark at which a shortage ends. Another process needs slightly more
/// than it allocates, for its context and for the driver's own tables.
fn slack(keep_free: u64) -> u64 {
    (keep_free / 16).clamp(32 << 20, 1 << 30).min(keep_free)
}

/// Returns the bytes to release, given the free bytes. `giving` is set if some have already been
/// released for this shortage, which ends only somewhat above the mark.
pub(super) fn missing(keep_free: u64, free: u64, giving: bool) -> u64 {
    let enough = keep_free.saturating_add(slack(keep_free));
    if free < keep_free || giving { enough.saturating_sub(free) } else { 0 }
}

/// Returns the interval after a reading, given the interval before it and whether anything has
/// changed.
fn pause(before: Duration, changed: bool) -> Duration {
    if changed { SHORTEST } else { (before * 2).min(LONGEST) }
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
    watch: Watch,
    bytes: Arc<AtomicU64>,
    seen: Vec<Arc<Mutex<Seen>>>,
}

/// What was seen and done, and when.
struct Seen {
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
        let mut all: Vec<Looker> = devices.into_iter().map(Looker::new).collect();
        let seen = all.iter().map(|looker| looker.seen.clone()).collect();
        let mark = bytes.clone();
        let watch = Watch::start(kernel, "aq-keep-free", None, move |calls, _| {
            // Relaxed: it guards no memory, and `set` wakes the thread after storing it.
            let keep_free = mark.load(Ordering::Relaxed);
            all.retain_mut(|looker| looker.look(keep_free, calls));
            all.iter().map(|looker| looker.pause).min().map_or(Next::Over, Next::In)
        });
        Ok(Self { watch: watch.map_err(MemoryError::System)?, bytes, seen })
    }

    /// Sets how many bytes are kept free from now on.
    pub(crate) fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.watch.call();
    }

    pub(crate) fn report(&self, pressure: &mut Pressure) {
        let now = Instant::now();
        pressure.devices = self
            .seen
            .iter()
            .map(|seen| {
                let seen = lock(seen);
                let mut report = seen.report.clone();
                report.keep_free = self.bytes.load(Ordering::Relaxed);
                if let (Some(reading), Some(at)) = (&mut report.reading, seen.at) {
                    reading.age = now.saturating_duration_since(at);
                }
                report
            })
            .collect();
    }
}

/// The watch of one device.
struct Looker {
    device: WatchedDevice,
    seen: Arc<Mutex<Seen>>,
    /// The free bytes at the last reading.
    free: Option<u64>,
    /// Whether a shortage is being served.
    giving: bool,
    pause: Duration,
}

impl Looker {
    fn new(device: WatchedDevice) -> Self {
        let report = DevicePressure::new(device.pool.device());
        let seen = Arc::new(Mutex::new(Seen { report, at: None }));
        Self { device, seen, free: None, giving: false, pause: SHORTEST }
    }

    /// Takes one reading and reacts to it. Returns whether there will be another one.
    fn look(&mut self, keep_free: u64, calls: &Calls) -> bool {
        let outcome = self.keep(keep_free, calls);
        if let Err(error) = outcome {
            self.device.ceiling.lift();
            let mut seen = lock(&self.seen);
            seen.report.ended = Some(error);
            seen.report.ceiling = u64::MAX;
        }
        outcome.is_ok()
    }

    fn keep(&mut self, keep_free: u64, calls: &Calls) -> Result<(), DriverError> {
        let (mut changed, mut given) = (false, false);
        loop {
            let free = self.read(keep_free)?;
            let before = self.free.replace(free);
            changed |= before != Some(free);
            let missing = if keep_free == 0 { 0 } else { missing(keep_free, free, self.giving) };
            {
                let mut seen = lock(&self.seen);
                seen.report.missing = missing;
                seen.report.shortages += u64::from(missing > 0 && !self.giving);
            }
            self.giving = missing > 0;
            // If memory was released but free memory did not grow, it was taken again at once. The
            // next attempt is made at the next reading.
            let futile = given && before.is_some_and(|before| free <= before);
            given = missing > 0 && !futile && !calls.stopped() && self.give(missing) > 0;
            if !given {
                self.pause = pause(self.pause, changed);
                return Ok(());
            }
        }
    }

    /// Queries the driver and moves the ceiling.
    fn read(&self, keep_free: u64) -> Result<u64, DriverError> {
        let WatchedDevice { pool, ceiling, .. } = &self.device;
        let ask = || pool.driver().memory_info(pool.device()).map(|memory| (memory, memory.free));
        let memory = if keep_free > 0 {
            ceiling.follow(keep_free, ask)?
        } else {
            ceiling.lift();
            ask()?.0
        };
        let mut seen = lock(&self.seen);
        seen.at = Some(Instant::now());
        seen.report.looks += 1;
        seen.report.ceiling = ceiling.budget().limit();
        let (free, total) = (memory.free, memory.total);
        seen.report.reading = Some(DeviceReading { free, total, age: Duration::ZERO });
        Ok(free)
    }

    /// Releases some of the missing bytes. Returns how many.
    fn give(&self, missing: u64) -> u64 {
        let now = Instant::now();
        let deadline = if self.device.may_stall { now.checked_add(PATIENCE) } else { Some(now) };
        let piece = missing.min(PIECE);
        let room = self.device.pool.give_back(piece, deadline);
        let given = piece.saturating_sub(room.missing);
        let mut seen = lock(&self.seen);
        seen.report.given_back += given;
        seen.report.asked = room.tried;
        given
    }
}

impl Drop for Looker {
    /// What outlives the watch must not stay limited by its last reading.
    fn drop(&mut self) {
        self.device.ceiling.lift();
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_missing_up_to_a_little_above_the_mark_and_only_once_below_it() {
        const G: u64 = 1 << 30;
        const M: u64 = 1 << 20;
        // Bytes to keep free, free bytes, already giving, and the expected missing bytes.
        for (keep_free, free, giving, expected) in [
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
            assert_eq!(missing(keep_free, free, giving), expected, "{keep_free} {free} {giving}");
        }
    }

    #[test]
    fn looks_are_closest_while_something_changes() {
        let mut pauses = vec![LONGEST];
        for changed in [true, true, false, false, false, false, true] {
            pauses.push(pause(*pauses.last().unwrap(), changed));
        }
        let ms: Vec<u128> = pauses.iter().map(Duration::as_millis).collect();
        assert_eq!(ms, [50, 10, 10, 20, 40, 50, 50, 10]);
    }
}
