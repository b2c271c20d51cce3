//! The readings one after the other, and dead processes, which stay for a while.

use super::{
    driver::DriverCounts,
    history::Histories,
    rates::EarlierCounts,
    reading::Reading,
    sums::{self, DeviceSum, ProcessSum},
};
use aquifer_console::foreign::printable;
use aquifer_status::{ProcessStatus, StatusError, StatusFolder};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a dead process is shown. Its file is swept after that.
const DEAD_SHOWN: Duration = Duration::from_secs(10);

/// What is shown, and what it is made of.
pub(super) struct Monitor {
    folder: StatusFolder,
    sweeps: bool,
    driver: DriverCounts,
    /// The last reading, with dead processes whose files are gone.
    pub(super) last: Option<Reading>,
    /// When each dead process was first seen dead.
    dead: HashMap<PathBuf, Instant>,
    pub(super) histories: Histories,
    /// The processes of the last reading, in its order.
    pub(super) processes: Vec<ProcessSum>,
    pub(super) devices: Vec<DeviceSum>,
    /// Seconds between the last two readings.
    pub(super) seconds: Option<f64>,
    /// Files removed so far.
    pub(super) swept: usize,
    /// Why the last sweep failed, in one harmless line.
    pub(super) sweep_error: Option<String>,
}

impl Monitor {
    pub(super) fn new(folder: StatusFolder, sweeps: bool) -> Self {
        Self {
            folder,
            sweeps,
            driver: DriverCounts::load(),
            last: None,
            dead: HashMap::new(),
            histories: Histories::default(),
            processes: Vec::new(),
            devices: Vec::new(),
            seconds: None,
            swept: 0,
            sweep_error: None,
        }
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns why the driver's counts are not known.
    pub(super) fn no_driver(&self) -> Option<String> {
        self.driver.missing()
    }

    /// Reads all processes.
    ///
    /// # Errors
    /// [`StatusError`] if the folder cannot be listed. The last reading stays.
    pub(super) fn read(&mut self) -> Result<(), StatusError> {
        let mut reading = Reading::take(&self.folder)?;
        self.keep_dead(&mut reading);
        let before = self.last.take();
        let earlier = EarlierCounts::of(before.as_ref(), &reading);
        self.processes =
            reading.processes.iter().map(|process| ProcessSum::of(process, &earlier)).collect();
        self.seconds = before.as_ref().map(|before| (reading.at - before.at).as_secs_f64());
        self.devices = sums::devices(reading.processes.iter(), &self.driver.read());
        for process in &self.processes {
            // A dead process holds nothing.
            let physical = if process.is_alive { process.shown().physical } else { 0 };
            self.histories.add(&process.path, reading.at, physical);
        }
        let shown = &self.processes;
        self.histories.retain(|path| shown.iter().any(|process| process.path == path));
        self.last = Some(reading);
        Ok(())
    }

    /// Adds dead processes of the last reading whose files another program has swept, and sweeps
    /// those that were shown long enough.
    fn keep_dead(&mut self, reading: &mut Reading) {
        let now = reading.at;
        for process in reading.processes.iter().filter(|process| !process.is_alive) {
            self.dead.entry(process.path.clone()).or_insert(now);
        }
        let is_old = |since: &Instant| now.duration_since(*since) >= DEAD_SHOWN;
        if self.sweeps && self.dead.values().any(is_old) {
            self.sweep_now();
        }
        let sweeps = self.sweeps;
        let is_present = |path: &Path| reading.processes.iter().any(|found| found.path == path);
        // Without sweeping a dead process is shown as long as its file is there.
        self.dead.retain(|path, since| !is_old(since) || (!sweeps && is_present(path)));
        let before = self.last.iter().flat_map(|last| &last.processes);
        let gone: Vec<ProcessStatus> = before
            .filter(|process| !process.is_alive && self.dead.contains_key(&process.path))
            .filter(|process| !is_present(&process.path))
            .cloned()
            .collect();
        reading.processes.extend(gone);
        let dead = &self.dead;
        reading.processes.retain(|process| process.is_alive || dead.contains_key(&process.path));
    }

    /// Removes the files of dead processes, unless that is turned off.
    pub(super) fn sweep_now(&mut self) {
        if !self.sweeps {
            return;
        }
        match self.folder.sweep() {
            Ok(swept) => {
                self.swept += swept;
                self.sweep_error = None;
            }
            Err(error) => self.sweep_error = Some(printable(&error.to_string())),
        }
    }
}
