//! The results of a benchmark so far, and the selection of its rows.

use crate::console::{
    place::{NoPlace, Place, Session},
    progress::ProgressLine,
};
use crate::{
    host,
    lap::{Contender, Failed, Outcome, Pace, contest},
    report::{BenchReport, Failure, LeftOut},
    row::{Peer, Row, Unit},
};
use aquifer_core::{Bytes, MemoryError};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Why there is no report.
#[derive(Debug)]
pub enum BenchError {
    /// The requested device does not exist.
    Place(NoPlace),
    /// `--driver` with a simulated device.
    NoDriver,
    /// `--only` with a pattern that no row's name contains.
    NoRow {
        /// The pattern.
        pattern: String,
        /// Examples of names.
        names: Vec<String>,
    },
    /// The device returned an error.
    Device(MemoryError),
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place(e) => e.fmt(f),
            Self::NoDriver => f.write_str(
                "--driver times the calls of a GPU's driver, and the simulated one takes no real time",
            ),
            Self::NoRow { pattern, names } => {
                write!(f, "no row's name contains '{pattern}'; there are {}, and more", names.join("; "))
            }
            Self::Device(e) => write!(f, "the bench cannot begin: {e}"),
        }
    }
}

impl std::error::Error for BenchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Place(e) => Some(e),
            Self::Device(e) => Some(e),
            Self::NoDriver | Self::NoRow { .. } => None,
        }
    }
}

/// Rows of a benchmark `B` that are measured together.
pub(super) struct RowGroup<B> {
    pub(super) names: fn(&B) -> Vec<String>,
    pub(super) measure: fn(&mut B) -> aquifer_core::Result<()>,
}

/// Measures the groups with selected rows, in order. `sheet` returns the sheet on which the
/// benchmark notes its results.
///
/// # Errors
/// [`BenchError::NoRow`], before anything is measured.
pub(super) fn measure<B>(
    bench: &mut B,
    sheet: fn(&mut B) -> &mut Sheet,
    groups: &[RowGroup<B>],
    progress: &mut ProgressLine,
) -> Result<(), BenchError> {
    let names: Vec<_> = groups.iter().map(|group| (group.names)(bench)).collect();
    let all = || names.iter().flatten();
    if !all().any(|name| sheet(bench).wants(name)) {
        // One name of each group.
        let names = names.iter().filter_map(|names| names.last().cloned()).collect();
        return Err(BenchError::NoRow {
            pattern: sheet(bench).only.clone().unwrap_or_default(),
            names,
        });
    }
    let count = all().filter(|name| sheet(bench).wants(name)).count() as u64;
    progress.phase("measuring:");
    sheet(bench).done = progress.count_to(count);
    measure_groups(bench, sheet, groups, &names);
    progress.clear();
    Ok(())
}

/// Measures the groups with selected rows, whose `names` these are.
fn measure_groups<B>(
    bench: &mut B,
    sheet: fn(&mut B) -> &mut Sheet,
    groups: &[RowGroup<B>],
    names: &[Vec<String>],
) {
    let mut before_group = 0;
    for (group, names) in groups.iter().zip(names) {
        let wanted = names.iter().filter(|name| sheet(bench).wants(name)).count() as u64;
        if wanted == 0 {
            continue;
        }
        let before = sheet(bench).rows.len();
        if let Err(error) = (group.measure)(bench) {
            // Rows missing at this point are missing because of the error.
            let sheet = sheet(bench);
            let measured = &sheet.rows[before..];
            let missing = names
                .iter()
                .filter(|name| sheet.wants(name) && !measured.iter().any(|row| row.name == **name));
            let row = missing.cloned().collect::<Vec<_>>().join("; ");
            sheet.failures.push(Failure { row, count: 1, said: error.to_string() });
        }
        // A row that is neither measured nor left out counts at the end of its group.
        before_group += wanted;
        sheet(bench).done.store(before_group, Ordering::Relaxed);
    }
}

/// The rows of a running benchmark.
pub(super) struct Sheet {
    /// The text that a row's name must contain, in lower case.
    only: Option<String>,
    pub(super) rows: Vec<Row>,
    pub(super) failures: Vec<Failure>,
    pub(super) left_out: Vec<LeftOut>,
    /// Whether a selected row needs a peer that this program was built without.
    lacks_peers: bool,
    /// How many selected rows are measured or left out, for the display.
    done: Arc<AtomicU64>,
}

impl Sheet {
    /// Creates an empty sheet for rows whose name contains `only`, ignoring case.
    pub(super) fn new(only: Option<&str>) -> Self {
        let only = only.map(str::to_lowercase);
        Self {
            only,
            rows: Vec::new(),
            failures: Vec::new(),
            left_out: Vec::new(),
            lacks_peers: false,
            done: Arc::default(),
        }
    }

    /// Counts a row for the display.
    fn count(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether a row is selected.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.to_lowercase().contains(only))
    }

    /// Adds a row if it is selected.
    pub(super) fn add(&mut self, name: &str, unit: Unit, ns: f64, peer: Option<(&str, f64)>) {
        if self.wants(name) {
            let peer = peer.map(|(name, ns)| Peer { name: name.to_owned(), ns });
            self.rows.push(Row { name: name.to_owned(), ns, unit, peer, interval: None });
            self.count();
        }
    }

    /// Adds the rows of several threads, over all and each. An outcome has the time of an
    /// operation, two of which are a pair.
    pub(super) fn add_crew(
        &mut self,
        rows: &[String; 2],
        unit: Unit,
        own: &Outcome,
        peer: Option<(&str, &Outcome)>,
    ) {
        let operations = if unit == Unit::NsPerPair { 2.0 } else { 1.0 };
        let figures: [fn(&Outcome) -> f64; 2] =
            [|outcome| outcome.over_all, |outcome| outcome.each];
        for (row, figure) in rows.iter().zip(figures) {
            let peer = peer.map(|(name, outcome)| (name, figure(outcome) * operations));
            self.add(row, unit, figure(own) * operations, peer);
        }
    }

    /// Lets a contender and its peer, if any, take turns, and returns both outcomes. Notes failed
    /// calls.
    pub(super) fn compete<'c>(
        &mut self,
        pace: Pace,
        name: &str,
        own: Contender<'c>,
        peer: Option<Contender<'c>>,
    ) -> (Outcome, Option<Outcome>) {
        let contenders = std::iter::once(own).chain(peer).collect();
        let mut outcomes = contest(pace, contenders).into_iter();
        let mut next = |who: &str| {
            let mut outcome = outcomes.next()?;
            self.note(&format!("{name}{who}"), std::mem::take(&mut outcome.failed));
            Some(outcome)
        };
        (next("").unwrap_or_default(), next(" (peer)"))
    }

    /// Adds a row with a confidence interval if it is selected.
    pub(super) fn add_within(&mut self, name: &str, unit: Unit, ns: f64, interval: [f64; 2]) {
        if self.wants(name) {
            let interval = Some(interval);
            self.rows.push(Row { name: name.to_owned(), ns, unit, peer: None, interval });
            self.count();
        }
    }

    /// Notes why a row is missing if it is selected.
    pub(super) fn leave_out(&mut self, name: &str, why: String) {
        if self.wants(name) {
            self.left_out.push(LeftOut { row: name.to_owned(), why });
            self.count();
        }
    }

    /// Notes that these rows need peers that this program was built without, if one is selected.
    pub(super) fn lack_peers<'n>(&mut self, names: impl IntoIterator<Item = &'n String>) {
        let wanted = names.into_iter().filter(|name| self.wants(name)).count();
        self.lacks_peers |= wanted > 0;
        self.done.fetch_add(wanted as u64, Ordering::Relaxed);
    }

    /// Returns whether there is memory for a row. Otherwise notes why the row is missing.
    pub(super) fn has_room(&mut self, name: &str, needed: u64, room: u64) -> bool {
        if needed > room {
            self.leave_out(name, format!("needs {} of {}", Bytes(needed), Bytes(room)));
        }
        needed <= room
    }

    /// Notes the calls that failed while a row was measured.
    pub(super) fn note(&mut self, name: &str, failed: Failed) {
        if failed.count > 0 {
            let said = failed.first.unwrap_or_default();
            self.failures.push(Failure { row: name.to_owned(), count: failed.count, said });
        }
    }

    /// Returns the report of a benchmark that needs no device.
    pub(super) fn report_of_host(self, what: &'static str, quick: bool) -> BenchReport {
        let (device, device_title) = ("none".to_owned(), "the host's memory".to_owned());
        self.taken_on(what, device, device_title, ("no driver".to_owned(), None), quick)
    }

    /// Returns the report with its machine.
    ///
    /// # Errors
    /// [`BenchError::Device`] if the driver does not tell its version.
    pub(super) fn report(
        self,
        what: &'static str,
        place: &Place,
        quick: bool,
    ) -> Result<BenchReport, BenchError> {
        let Session { driver, device, .. } = place.begin();
        let lost = |e| BenchError::Device(MemoryError::driver(device, e));
        let version = driver.driver_version().map_err(lost)?;
        let number = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        let driver = match place {
            Place::Sim(_) => (format!("simulated, {number}"), None),
            Place::Cuda { .. } => (number, host::driver_release()),
        };
        Ok(self.taken_on(what, place.name(), place.title(), driver, quick))
    }

    fn taken_on(
        self,
        what: &'static str,
        device: String,
        device_title: String,
        (driver, driver_release): (String, Option<String>),
        quick: bool,
    ) -> BenchReport {
        BenchReport {
            what,
            device,
            device_title,
            driver,
            driver_release,
            processor: host::processor(),
            processors: host::processors(),
            date: host::date(),
            quick,
            rows: self.rows,
            failures: self.failures,
            left_out: self.left_out,
            lacks_peers: self.lacks_peers,
        }
    }
}
