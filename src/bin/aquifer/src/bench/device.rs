//! `aquifer bench device`: the caching pool beside the driver's own allocator and the host's `malloc`.
//!
//! | module | rows |
//! |---|---|
//! | `cached` | pairs, batches and random sizes on one thread |
//! | `threads` | the same on up to 16 threads, a stream each |
//! | `holes` | pairs in a cache that is full of free holes |
//! | `growth` | the first allocation, growing, trimming, moving handles |
//! | `calls` | the driver's own calls, with `--driver` |
//!
//! | module | holds |
//! |---|---|
//! | `work` | what is done, made before it is timed |
//! | `source` | who serves |
//! | `lane` | threads that do it |
//!
//! On a GPU the driver's own stream-ordered allocator does the same work in turn with the pool, with a release threshold
//! that keeps everything. On the simulated one there is nothing to hold a pool's speed against but the host's `malloc`,
//! since its calls cost what a simulation costs.

mod cached;
mod calls;
mod growth;
mod holes;
pub(super) mod lane;
pub(super) mod source;
mod threads;
pub(super) mod work;

use super::{
    host,
    lap::{Contender, Failed, Outcome, Pace, contest},
    report::{Failure, LeftOut, Report},
    row::{Peer, Row, Unit},
};
use crate::{
    cli,
    place::{NoPlace, Place, Session},
    progress::Progress,
};
use aquifer_core::{Bytes, MemoryError};
use source::AsyncPool;
use std::{fmt, sync::Arc};

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

/// Rows that are measured together.
struct Group {
    names: fn(&Bench<'_>) -> Vec<String>,
    measure: fn(&mut Bench<'_>) -> aquifer_core::Result<()>,
}

/// In the order in which they are measured and printed. The holes come last of those that hold memory: they take most.
const GROUPS: [Group; 7] = [
    Group { names: cached::pair_names, measure: cached::pairs },
    Group { names: cached::batch_names, measure: cached::batches },
    Group { names: cached::random_names, measure: cached::random },
    Group { names: threads::names, measure: threads::measure },
    Group { names: growth::names, measure: growth::measure },
    Group { names: holes::names, measure: holes::measure },
    Group { names: calls::names, measure: calls::measure },
];

/// Measures what was asked for. Takes most of a minute.
///
/// # Errors
/// [`Mistake`], before anything is measured.
pub(crate) fn run(args: &cli::BenchDevice) -> Result<Report, Mistake> {
    let place = Place::choose(args.device).map_err(Mistake::Place)?;
    if args.driver && matches!(place, Place::Sim(_)) {
        return Err(Mistake::NoDriver);
    }
    let pace = if args.quick { Pace::QUICK } else { Pace::FULL };
    let mut bench = Bench::new(&place, pace, args.only.as_deref(), args.driver)?;
    bench.measure(&GROUPS, &mut Progress::on_terminal())?;
    let Bench { rows, failures, left_out, version, .. } = bench;
    Ok(Report {
        what: "device",
        device: place.name(),
        device_title: place.title(),
        driver: match place {
            Place::Sim(_) => format!("simulated, CUDA {}.{}", version / 1000, version % 1000 / 10),
            Place::Cuda { .. } => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        },
        processor: host::processor(),
        processors: host::processors(),
        date: host::date(),
        quick: args.quick,
        rows,
        failures,
        left_out,
    })
}

/// A bench under way.
struct Bench<'a> {
    place: &'a Place,
    pace: Pace,
    /// What a row's name must contain, in lower case.
    only: Option<String>,
    /// Whether the driver's calls are wanted as well.
    driver: bool,
    /// The most bytes that a pool may hold: what it has by default.
    room: u64,
    /// Of the driver's interface.
    version: u32,
    /// How many devices there are.
    devices: u32,
    rows: Vec<Row>,
    failures: Vec<Failure>,
    left_out: Vec<LeftOut>,
}

impl<'a> Bench<'a> {
    fn new(place: &'a Place, pace: Pace, only: Option<&str>, driver: bool) -> Result<Self, Mistake> {
        let session = place.begin(false);
        let lost = |e| Mistake::Device(MemoryError::driver(session.device, e));
        let free = session.driver.memory_info(session.device).map_err(lost)?.free;
        Ok(Self {
            place,
            pace,
            only: only.map(str::to_lowercase),
            driver,
            room: free / 5 * 4,
            version: session.driver.driver_version().map_err(lost)?,
            devices: session.driver.device_count().map_err(lost)?,
            rows: Vec::new(),
            failures: Vec::new(),
            left_out: Vec::new(),
        })
    }

    fn measure(&mut self, groups: &[Group], progress: &mut Progress) -> Result<(), Mistake> {
        let names: Vec<_> = groups.iter().map(|group| (group.names)(self)).collect();
        let all = || names.iter().flatten();
        if !all().any(|name| self.wants(name)) {
            // One of each kind.
            let names = names.iter().filter_map(|names| names.last().cloned()).collect();
            return Err(Mistake::NoRow { pattern: self.only.clone().unwrap_or_default(), names });
        }
        progress.phase("measuring:");
        let count = all().count() as u64;
        let mut done = 0;
        for (group, names) in groups.iter().zip(&names) {
            progress.at(done, count);
            done += names.len() as u64;
            if !names.iter().any(|name| self.wants(name)) {
                continue;
            }
            let before = self.rows.len();
            if let Err(error) = (group.measure)(self) {
                // What is missing now is missing because of it.
                let measured = &self.rows[before..];
                let missing = names
                    .iter()
                    .filter(|name| self.wants(name) && !measured.iter().any(|row| row.name == **name));
                let row = missing.cloned().collect::<Vec<_>>().join("; ");
                self.failures.push(Failure { row, count: 1, said: error.to_string() });
            }
        }
        Ok(())
    }

    /// Whether a row is to be measured.
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.to_lowercase().contains(only))
    }

    /// The device, with nobody watching.
    fn session(&self) -> Session {
        self.place.begin(false)
    }

    /// The driver's own allocator, where it stands beside the pool: on a GPU that has it.
    fn peer(&self, session: &Session) -> aquifer_core::Result<Option<Arc<AsyncPool>>> {
        let there = matches!(self.place, Place::Cuda { .. }) && self.place.info().async_pools;
        if there { AsyncPool::open(session).map(Some) } else { Ok(None) }
    }

    /// Whether there is memory for a row, for the pool and for a peer; if not, the row says why it is not there.
    fn has_room(&mut self, name: &str, bytes: u64, peer: bool) -> bool {
        let needed = if peer { bytes * 2 } else { bytes };
        if needed > self.room {
            self.leave_out(name, format!("needs {} of {}", Bytes(needed), Bytes(self.room)));
        }
        needed <= self.room
    }

    /// Says why a row is not there.
    fn leave_out(&mut self, name: &str, why: String) {
        if self.wants(name) {
            self.left_out.push(LeftOut { row: name.to_owned(), why });
        }
    }

    /// Notes what was refused while a row was measured.
    fn note(&mut self, name: &str, failed: Failed) {
        if failed.count > 0 {
            let said = failed.first.unwrap_or_default();
            self.failures.push(Failure { row: name.to_owned(), count: failed.count, said });
        }
    }

    /// A row, if it is wanted.
    fn add(&mut self, name: &str, unit: Unit, ns: f64, peer: Option<(&str, f64)>) {
        if self.wants(name) {
            let peer = peer.map(|(name, ns)| Peer { name: name.to_owned(), ns });
            self.rows.push(Row { name: name.to_owned(), ns, unit, peer });
        }
    }

    /// The pool against its peer, if it has one: the outcomes of both. What was refused is noted.
    fn compete<'c>(
        &mut self,
        pace: Pace,
        name: &str,
        pool: Contender<'c>,
        peer: Option<Contender<'c>>,
    ) -> (Outcome, Option<Outcome>) {
        let contenders = std::iter::once(pool).chain(peer).collect();
        let mut outcomes = contest(pace, contenders).into_iter();
        let mut next = |who: &str| {
            let mut outcome = outcomes.next()?;
            self.note(&format!("{name}{who}"), std::mem::take(&mut outcome.failed));
            Some(outcome)
        };
        (next("").unwrap_or_default(), next(" (peer)"))
    }
}

/// A size as people name it: `256 B`, `4 KiB`. For whole multiples of a unit.
pub(super) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(shift, _)| bytes >= 1 << shift);
    unit.map_or_else(|| format!("{bytes} B"), |(shift, name)| format!("{} {name}", bytes >> shift))
}

#[cfg(test)]
mod tests;
