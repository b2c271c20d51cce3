//! Memory pressure of the machine and of the process's control groups: stalls and events.

use super::{
    Found, GroupEvents, Headroom, Topology, TopologyError,
    files::{file, wrong_number},
    groups::{self, Version},
};
use std::{path::Path, time::Duration};

/// The file with the machine's stalls.
const MACHINE: &str = "/proc/pressure/memory";

/// How long memory stalled threads (PSI).
///
/// See [`Topology::strain`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Stalls {
    /// Share of the last ten seconds in which some thread was stalled, in hundredths of a per
    /// cent.
    pub some: u32,
    /// Share of the last ten seconds in which all runnable threads were stalled, in the same unit.
    pub full: u32,
    /// Total time in which some thread was stalled.
    pub some_total: Duration,
}

/// The memory pressure that the process is under.
///
/// See [`Topology::strain`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Strain {
    /// How much memory it may still allocate.
    pub headroom: Headroom,
    /// Stalls of its own group if the kernel counts them, else of the machine. Unknown on a kernel
    /// without PSI.
    pub stalls: Found<Stalls>,
    /// The sum of throttling events of its group and of the groups above. Unknown without groups
    /// of version 2. The counts of a group include those of the groups below it, so only their
    /// growth is meaningful.
    pub events: Found<GroupEvents>,
}

impl Topology {
    /// Reads the memory pressure that the process is under.
    ///
    /// ```
    /// use aquifer::host::Topology;
    /// let strain = Topology::read()?.strain()?;
    /// if let Some(stalls) = strain.stalls.value {
    ///     println!("{} hundredths of a per cent of the time ({})", stalls.some, strain.stalls.source);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed. Values of missing files are unknown.
    pub fn strain(&self) -> Result<Strain, TopologyError> {
        Ok(Strain { headroom: self.headroom()?, stalls: self.stalls()?, events: self.events()? })
    }

    fn stalls(&self) -> Result<Found<Stalls>, TopologyError> {
        let groups = groups::all(&self.files)?;
        // The root group has no such file.
        let own = groups.iter().find(|group| group.version == Version::Two);
        let own = own.map(|group| group.folder.join("memory.pressure"));
        for path in own.into_iter().chain([MACHINE.into()]) {
            if let Some(text) = self.files.text(&path)? {
                return Ok(Found::known(parse(&path, &text)?, file(path)));
            }
        }
        Ok(Found::unknown(file(MACHINE)))
    }

    fn events(&self) -> Result<Found<GroupEvents>, TopologyError> {
        let mut all = Found::unknown(file(groups::MEMBERSHIP));
        for group in groups::all(&self.files)? {
            let Some(more) = group.events(&self.files)? else { continue };
            let GroupEvents { high, max, oom, oom_kill } = all.value.unwrap_or_default();
            let sum = GroupEvents {
                high: high.saturating_add(more.high),
                max: max.saturating_add(more.max),
                oom: oom.saturating_add(more.oom),
                oom_kill: oom_kill.saturating_add(more.oom_kill),
            };
            all = match all.value {
                None => Found::known(sum, file(group.folder.join("memory.events"))),
                Some(_) => Found { value: Some(sum), ..all },
            };
        }
        Ok(all)
    }
}

/// Parses the two lines `some avg10=1.77 avg60=0.37 avg300=0.08 total=18128159` and `full …`, in
/// per cent and microseconds.
fn parse(path: &Path, text: &str) -> Result<Stalls, TopologyError> {
    let mut stalls = Stalls::default();
    for line in text.lines() {
        let wrong = || wrong_number(path, line);
        let of = |name: &str| {
            line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let average = || of("avg10").and_then(hundredths).ok_or_else(wrong);
        if line.starts_with("some ") {
            stalls.some = average()?;
            let total = of("total").and_then(|total| total.parse().ok()).ok_or_else(wrong)?;
            stalls.some_total = Duration::from_micros(total);
        } else if line.starts_with("full ") {
            stalls.full = average()?;
        }
    }
    Ok(stalls)
}

/// Parses a decimal number with two digits: `1.77` is 177.
fn hundredths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.')?;
    let part: u32 = (part.len() == 2).then(|| part.parse().ok())??;
    whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(part)
}
