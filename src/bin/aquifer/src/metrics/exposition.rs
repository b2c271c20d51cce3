//! The text of one reading of all processes, in Prometheus' exposition format 0.0.4.
//!
//! - Every label has a bounded number of values, except for those that name a process or a pool,
//!   and their number is bounded. Tags and arguments of commands are no labels.
//! - No two series have the same labels. A pool like another of its process gets a number.
//! - Values of labels are escaped and cut. Any bytes that a process has published are valid.

use super::families::{MetricType, POOL_FAMILIES};
use aquifer_benches::console::foreign::is_acting;
use aquifer_status::{PoolStatus, ProcessStatus, StatusError, StatusFolder};
use std::{
    collections::HashMap,
    fmt::{Display, Write},
};

/// How many processes and pools the text has at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    pub(super) processes: usize,
    pub(super) pools: usize,
}

/// Most characters of a label's value.
const LABEL_CHARS: usize = 96;

/// The processes of one reading.
#[derive(Default)]
struct Scrape {
    alive: Vec<ProcessStatus>,
    dead: u64,
    unreadable: u64,
    /// Pools of living processes whose figures could not be read.
    torn: u64,
}

/// Reads all processes, and returns the text.
///
/// # Errors
/// [`StatusError`] if the folder cannot be read. A file that cannot be read is counted.
pub(super) fn text(folder: &StatusFolder, bounds: Bounds) -> Result<String, StatusError> {
    let mut scrape = Scrape::default();
    for process in folder.processes()? {
        match process {
            Ok(process) if process.is_alive => {
                scrape.torn += process.faults.len() as u64;
                scrape.alive.push(process);
            }
            Ok(_) => scrape.dead += 1,
            Err(_) => scrape.unreadable += 1,
        }
    }
    Ok(render(scrape, bounds))
}

fn render(mut scrape: Scrape, bounds: Bounds) -> String {
    // The largest stay, in an order that does not depend on the folder's.
    scrape.alive.sort_by_cached_key(|process| {
        (std::cmp::Reverse(process.total().physical), process.started_ns, process.process)
    });
    let processes = scrape.alive.len();
    let left_out = scrape.alive.split_off(bounds.processes.min(processes));
    let hidden: usize = left_out.iter().map(|process| process.pools.len()).sum();
    let mut pools: Vec<(&ProcessStatus, &PoolStatus)> = Vec::new();
    for process in &scrape.alive {
        pools.extend(process.pools.iter().map(|pool| (process, pool)));
    }
    let all = pools.len() + hidden;
    pools.truncate(bounds.pools);
    let labelled = labelled(&pools);

    let mut text = String::new();
    let states =
        [("alive", processes as u64), ("dead", scrape.dead), ("unreadable", scrape.unreadable)];
    heading(&mut text, "aquifer_processes", MetricType::Gauge, "Processes by state.");
    for (state, count) in states {
        line(&mut text, "aquifer_processes", &format!("state=\"{state}\""), count);
    }
    let counts = [
        (
            "aquifer_processes_left_out",
            "Living processes without series, since there are too many.",
            left_out.len() as u64,
        ),
        (
            "aquifer_pools_left_out",
            "Pools of living processes without series, since there are too many.",
            (all - pools.len()) as u64,
        ),
        (
            "aquifer_pools_unreadable",
            "Pools of living processes whose figures were never consistent.",
            scrape.torn,
        ),
    ];
    for (name, help, value) in counts {
        heading(&mut text, name, MetricType::Gauge, help);
        line(&mut text, name, "", value);
    }
    starts(&mut text, &scrape.alive);
    for family in &POOL_FAMILIES {
        let mut values = labelled
            .iter()
            .zip(&pools)
            .filter_map(|(labels, (_, pool))| (family.figure)(pool).map(|value| (labels, value)))
            .peekable();
        if values.peek().is_some() {
            heading(&mut text, family.name, family.of, family.help);
        }
        values.for_each(|(labels, value)| line(&mut text, family.name, labels, value));
    }
    text
}

/// When processes began to publish, with their versions.
fn starts(text: &mut String, processes: &[ProcessStatus]) {
    const NAME: &str = "aquifer_process_start_time_seconds";
    if !processes.is_empty() {
        heading(text, NAME, MetricType::Gauge, "When the process began to publish, since 1970.");
    }
    let mut unique = UniqueLabels::default();
    for process in processes {
        let version = escaped(&process.version);
        let name =
            |number: &str| format!("{},version=\"{version}{number}\"", process_labels(process));
        let labels = unique.add(name);
        // Milliseconds are exact; a float of nanoseconds since 1970 is not.
        let ms = process.started_ns / 1_000_000;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{NAME}{{{labels}}} {}.{:03}", ms / 1000, ms % 1000);
    }
}

/// The labels of each pool, no two of which are the same.
fn labelled(pools: &[(&ProcessStatus, &PoolStatus)]) -> Vec<String> {
    let mut unique = UniqueLabels::default();
    let labels = pools.iter().map(|(process, pool)| {
        unique.add(|number| {
            let mut labels = process_labels(process);
            // The address is the same in all processes, and an ordinal is not.
            let ordinal = || pool.device.map(|device| device.to_string());
            let device = pool.address.clone().or_else(ordinal).unwrap_or_default();
            let node = pool.node.map(|node| node.to_string()).unwrap_or_default();
            // Writing to a string cannot fail.
            let _ = write!(
                labels,
                ",device=\"{}\",node=\"{node}\",kind=\"{}\",pool=\"{}{number}\"",
                escaped(&device),
                pool.kind.name(),
                escaped(&pool.name)
            );
            labels
        })
    });
    labels.collect()
}

/// Numbers labels that would otherwise be the same.
#[derive(Default)]
pub(super) struct UniqueLabels {
    seen: HashMap<String, u32>,
}

impl UniqueLabels {
    /// Returns what `make` returns for the first suffix that makes it unique.
    pub(super) fn add(&mut self, make: impl Fn(&str) -> String) -> String {
        let plain = make("");
        let count = self.seen.entry(plain.clone()).or_insert(0);
        *count += 1;
        let mut number = *count;
        if number == 1 {
            return plain;
        }
        loop {
            let labels = make(&format!(" #{number}"));
            // A process may have named a pool like this.
            if !self.seen.contains_key(&labels) {
                self.seen.insert(labels.clone(), 1);
                // The next one of this name need not try the same numbers.
                self.seen.insert(plain, number);
                return labels;
            }
            number += 1;
        }
    }
}

fn process_labels(process: &ProcessStatus) -> String {
    labels_of(process.process, &process.command)
}

/// Returns the labels of a process.
pub(super) fn labels_of(process: u32, command: &str) -> String {
    format!("pid=\"{process}\",process=\"{}\"", escaped(program_of(command)))
}

/// Returns the name of the program. Its arguments are no labels: they are unbounded, and may hold
/// secrets.
fn program_of(command: &str) -> &str {
    let path = command.split(' ').next().unwrap_or_default();
    path.rsplit('/').next().unwrap_or_default()
}

/// Returns a label's value in the text, cut to [`LABEL_CHARS`].
///
/// The format escapes three characters. Further ones that act on a terminal are replaced.
pub(super) fn escaped(value: &str) -> String {
    let mut text = String::new();
    let cut = value.chars().count() > LABEL_CHARS;
    for c in value.chars().take(LABEL_CHARS - usize::from(cut)) {
        match c {
            '\\' => text.push_str(r"\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str(r"\n"),
            c if is_acting(c) => text.push('\u{fffd}'),
            c => text.push(c),
        }
    }
    if cut {
        text.push('…');
    }
    text
}

pub(super) fn heading(text: &mut String, name: &str, of: MetricType, help: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", of.name());
}

pub(super) fn line(text: &mut String, name: &str, labels: &str, value: impl Display) {
    // Writing to a string cannot fail.
    let _ = if labels.is_empty() {
        writeln!(text, "{name} {value}")
    } else {
        writeln!(text, "{name}{{{labels}}} {value}")
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_labels_cannot_end_their_quotes_or_line() {
        assert_eq!(escaped("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
        assert_eq!(escaped("\u{1b}[31m\r\u{9b}\0"), "\u{fffd}[31m\u{fffd}\u{fffd}\u{fffd}");
        let long = "é".repeat(1000);
        assert_eq!(escaped(&long).chars().count(), LABEL_CHARS);
        assert_eq!(escaped(&"\"".repeat(LABEL_CHARS)).len(), 2 * LABEL_CHARS);
    }

    #[test]
    fn programs_are_named_without_folders_and_arguments() {
        for (command, name) in [
            ("/usr/bin/train --token=secret", "train"),
            ("train", "train"),
            ("", ""),
            ("dir/ x", ""),
        ] {
            assert_eq!(program_of(command), name);
        }
    }

    #[test]
    fn labels_that_are_the_same_are_numbered() {
        let mut unique = UniqueLabels::default();
        let mut add = |name: &str| unique.add(|number| format!("{name}{number}"));
        let all: Vec<_> = ["a", "a #2", "a", "a", "b"].map(&mut add).into();
        assert_eq!(all, ["a", "a #2", "a #3", "a #4", "b"].map(str::to_owned));
    }
}
