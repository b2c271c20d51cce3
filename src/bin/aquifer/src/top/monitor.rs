//! The readings one after the other, and dead processes, which stay for a while.

use super::{
    driver::DriverCounts,
    reading::{EarlierCounts, Reading},
    sums::{self, DeviceSum, ProcessSum},
};
use aquifer_benches::console::foreign::printable;
use aquifer_status::{ProcessStatus, StatusError, StatusFolder};
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a process that has died is shown.
const DEAD_SHOWN: Duration = Duration::from_secs(10);

/// What is shown, and what it is made of.
pub(super) struct Monitor {
    folder: StatusFolder,
    /// Whether processes are shown that were dead before.
    shows_dead: bool,
    /// Whether files of dead processes are removed.
    sweeps: bool,
    driver: DriverCounts,
    /// The last reading, with dead processes whose files are gone.
    pub(super) last: Option<Reading>,
    /// When each dead process that is shown was first seen dead.
    dead: HashMap<PathBuf, Instant>,
    /// Dead processes that are not shown.
    pub(super) hidden_dead: usize,
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
    pub(super) fn new(folder: StatusFolder, shows_dead: bool, sweeps: bool) -> Self {
        Self {
            folder,
            shows_dead,
            sweeps,
            driver: DriverCounts::load(),
            last: None,
            dead: HashMap::new(),
            hidden_dead: 0,
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
        self.last = Some(reading);
        Ok(())
    }

    /// Leaves out dead processes, except those that have died in sight, which are shown for a while
    /// also if their files are gone, and all where that was asked for.
    fn keep_dead(&mut self, reading: &mut Reading) {
        let now = reading.at;
        let before = self.last.iter().flat_map(|last| &last.processes);
        let before: HashMap<&Path, &ProcessStatus> =
            before.map(|process| (&*process.path, process)).collect();
        let dead = |reading: &Reading| reading.processes.iter().filter(|p| !p.is_alive).count();
        for process in reading.processes.iter().filter(|process| !process.is_alive) {
            let was_alive = before.get(&*process.path).is_some_and(|before| before.is_alive);
            if was_alive || self.shows_dead {
                self.dead.entry(process.path.clone()).or_insert(now);
            }
        }
        let is_old = |since: &Instant| now.duration_since(*since) >= DEAD_SHOWN;
        let all = dead(reading);
        let sweep = self.sweeps && (all > self.dead.len() || self.dead.values().any(is_old));
        let present: HashSet<&Path> = reading.processes.iter().map(|p| &*p.path).collect();
        // Files that stay are shown as long as they are there, where that was asked for.
        let stays = self.shows_dead && !self.sweeps;
        self.dead.retain(|path, since| !is_old(since) || (stays && present.contains(&**path)));
        let before = self.last.iter().flat_map(|last| &last.processes);
        let gone: Vec<ProcessStatus> = before
            .filter(|process| !process.is_alive && self.dead.contains_key(&process.path))
            .filter(|process| !present.contains(&*process.path))
            .cloned()
            .collect();
        let shown = &self.dead;
        reading.processes.retain(|process| process.is_alive || shown.contains_key(&process.path));
        self.hidden_dead = all - dead(reading);
        reading.processes.extend(gone);
        if sweep {
            self.sweep_now();
        }
    }

    /// Removes the files of dead processes, if that was asked for.
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

#[cfg(test)]
mod tests {
    use super::{super::shared::SharedMemories, *};
    use std::{env, fs, process};

    #[test]
    fn a_process_that_has_died_in_sight_is_shown_for_ten_seconds_and_swept_after_them() {
        let path = env::temp_dir().join(format!("aquifer-top-died-{}", process::id()));
        let mut monitor = Monitor::new(StatusFolder::at(&path).unwrap(), false, true);
        // A sweep of what is no folder leaves an error.
        fs::write(&path, "").unwrap();
        let died = Instant::now();
        monitor.dead.insert(path.join("1.status"), died);
        for (seconds, is_over) in [(0, false), (9, false), (10, true)] {
            let at = died + Duration::from_secs(seconds);
            let (processes, errors, shared) = (Vec::new(), Vec::new(), SharedMemories::default());
            let mut reading = Reading { at, taken_ns: 0, processes, errors, shared };
            monitor.keep_dead(&mut reading);
            let ends = (monitor.dead.is_empty(), monitor.sweep_error.is_some());
            assert_eq!(ends, (is_over, is_over), "{seconds} s");
        }
        fs::remove_file(&path).unwrap();
    }
}
