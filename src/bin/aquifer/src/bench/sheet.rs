//! What a bench has found so far, and which of its rows are wanted.

use super::{
    host,
    lap::Failed,
    report::{Failure, LeftOut, Report},
    row::{Peer, Row, Unit},
};
use crate::{
    place::{NoPlace, Place},
    progress::Progress,
};
use aquifer_core::{Bytes, MemoryError};
use std::fmt;

/// Why there is nothing to report.
#[derive(Debug)]
pub(crate) enum Mistake {
    /// The device that was asked for is not there.
    Place(NoPlace),
    /// `--driver` where the driver is a simulated one.
    NoDriver,
    /// `--only` with a pattern that no row's name contains.
    NoRow {
        /// The pattern.
        pattern: String,
        /// Some names.
        names: Vec<String>,
    },
    /// The device does not answer.
    Device(MemoryError),
}

impl fmt::Display for Mistake {
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

impl std::error::Error for Mistake {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Place(e) => Some(e),
            Self::Device(e) => Some(e),
            Self::NoDriver | Self::NoRow { .. } => None,
        }
    }
}

/// Rows that are measured together, by a bench `B`.
pub(super) struct Group<B> {
    pub(super) names: fn(&B) -> Vec<String>,
    pub(super) measure: fn(&mut B) -> aquifer_core::Result<()>,
}

/// Measures the groups that have a row which is wanted, in their order. `sheet` is where the bench
/// notes what it finds.
///
/// # Errors
/// [`Mistake::NoRow`], before anything is measured.
pub(super) fn measure<B>(
    bench: &mut B,
    sheet: fn(&mut B) -> &mut Sheet,
    groups: &[Group<B>],
    progress: &mut Progress,
) -> Result<(), Mistake> {
    let names: Vec<_> = groups.iter().map(|group| (group.names)(bench)).collect();
    let all = || names.iter().flatten();
    if !all().any(|name| sheet(bench).wants(name)) {
        // One of each kind.
        let names = names.iter().filter_map(|names| names.last().cloned()).collect();
        return Err(Mistake::NoRow {
            pattern: sheet(bench).only.clone().unwrap_or_default(),
            names,
        });
    }
    progress.phase("measuring:");
    let count = all().count() as u64;
    let mut done = 0;
    for (group, names) in groups.iter().zip(&names) {
        progress.at(done, count);
        done += names.len() as u64;
        if !names.iter().any(|name| sheet(bench).wants(name)) {
            continue;
        }
        let before = sheet(bench).rows.len();
        if let Err(error) = (group.measure)(bench) {
            // What is missing now is missing because of it.
            let sheet = sheet(bench);
            let measured = &sheet.rows[before..];
            let missing = names
                .iter()
                .filter(|name| sheet.wants(name) && !measured.iter().any(|row| row.name == **name));
            let row = missing.cloned().collect::<Vec<_>>().join("; ");
            sheet.failures.push(Failure { row, count: 1, said: error.to_string() });
        }
    }
    Ok(())
}

/// The rows of a bench under way.
pub(super) struct Sheet {
    /// What a row's name must contain, in lower case.
    only: Option<String>,
    pub(super) rows: Vec<Row>,
    pub(super) failures: Vec<Failure>,
    pub(super) left_out: Vec<LeftOut>,
}

impl Sheet {
    /// An empty one, for rows whose name contains `only`, in either case.
    pub(super) fn new(only: Option<&str>) -> Self {
        let only = only.map(str::to_lowercase);
        Self { only, rows: Vec::new(), failures: Vec::new(), left_out: Vec::new() }
    }

    /// Whether a row is to be measured.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.to_lowercase().contains(only))
    }

    /// A row, if it is wanted.
    pub(super) fn add(&mut self, name: &str, unit: Unit, ns: f64, peer: Option<(&str, f64)>) {
        if self.wants(name) {
            let peer = peer.map(|(name, ns)| Peer { name: name.to_owned(), ns });
            self.rows.push(Row { name: name.to_owned(), ns, unit, peer, interval: None });
        }
    }

    /// A row with the interval that its figure lies in, if it is wanted.
    pub(super) fn add_within(&mut self, name: &str, unit: Unit, ns: f64, interval: [f64; 2]) {
        if self.wants(name) {
            let interval = Some(interval);
            self.rows.push(Row { name: name.to_owned(), ns, unit, peer: None, interval });
        }
    }

    /// Says why a row is not there, if it is wanted.
    pub(super) fn leave_out(&mut self, name: &str, why: String) {
        if self.wants(name) {
            self.left_out.push(LeftOut { row: name.to_owned(), why });
        }
    }

    /// Whether a row's memory is there; if not, the row says so.
    pub(super) fn has_room(&mut self, name: &str, needed: u64, room: u64) -> bool {
        if needed > room {
            self.leave_out(name, format!("needs {} of {}", Bytes(needed), Bytes(room)));
        }
        needed <= room
    }

    /// Notes what was refused while a row was measured.
    pub(super) fn note(&mut self, name: &str, failed: Failed) {
        if failed.count > 0 {
            let said = failed.first.unwrap_or_default();
            self.failures.push(Failure { row: name.to_owned(), count: failed.count, said });
        }
    }

    /// The whole of a bench that needs no device.
    pub(super) fn report_of_host(self, what: &'static str, quick: bool) -> Report {
        let (device, device_title) = ("none".to_owned(), "the host's memory".to_owned());
        self.taken_on(what, device, device_title, "no driver".to_owned(), quick)
    }

    /// The whole, with what it was taken on: a place whose driver has the interface `version`.
    pub(super) fn report(
        self,
        what: &'static str,
        place: &Place,
        version: u32,
        quick: bool,
    ) -> Report {
        let number = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        let driver = match place {
            Place::Sim(_) => format!("simulated, {number}"),
            Place::Cuda { .. } => number,
        };
        self.taken_on(what, place.name(), place.title(), driver, quick)
    }

    fn taken_on(
        self,
        what: &'static str,
        device: String,
        device_title: String,
        driver: String,
        quick: bool,
    ) -> Report {
        Report {
            what,
            device,
            device_title,
            driver,
            processor: host::processor(),
            processors: host::processors(),
            date: host::date(),
            quick,
            rows: self.rows,
            failures: self.failures,
            left_out: self.left_out,
        }
    }
}
