//! The results of a benchmark as a page and as JSON.

use crate::console::{json, layout::wrap};
use crate::row::Row;
use serde_json::{Value, json};

/// Columns of the page.
const WIDTH: usize = 80;
/// Columns of a row's name, of its result and its peer's, and of the ratio.
const NAME: usize = 41;
const FIGURE: usize = 14;
const RATIO: usize = WIDTH - NAME - 2 * FIGURE - 3;

/// The results of a benchmark, with the machine and the date.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchReport {
    /// The benchmark: `device`.
    pub(crate) what: &'static str,
    /// The device's name on the command line.
    pub(crate) device: String,
    /// The device's display name.
    pub(crate) device_title: String,
    /// The driver and its version.
    pub(crate) driver: String,
    /// The release of the GPU's driver, or none if no GPU is used or the kernel does not report
    /// it.
    pub(crate) driver_release: Option<String>,
    /// The host's processor, or none if the kernel does not report it.
    pub(crate) processor: Option<String>,
    /// How many threads may run at the same time.
    pub(crate) processors: u64,
    /// The date in UTC.
    pub(crate) date: String,
    /// Whether it was a quick run with rough results.
    pub(crate) quick: bool,
    /// The results.
    pub(crate) rows: Vec<Row>,
    /// Failed calls.
    pub(crate) failures: Vec<Failure>,
    /// Rows that were not measured.
    pub(crate) left_out: Vec<LeftOut>,
    /// Whether there would be more rows if this program were built with all peers.
    pub(crate) lacks_peers: bool,
}

/// Calls that failed while a row was measured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    /// The row.
    pub(crate) row: String,
    /// The number of failures.
    pub(crate) count: u64,
    /// The message of the first one. It may have several lines.
    pub(crate) said: String,
}

/// A row that could not be measured here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LeftOut {
    /// Its name.
    pub(crate) row: String,
    /// The reason.
    pub(crate) why: String,
}

impl BenchReport {
    /// Returns whether no call failed.
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty()
    }

    /// Returns the command that measures beside all peers.
    fn with_peers(&self) -> String {
        format!("cargo run --release -p aquifer-cli --features peers -- bench {}", self.what)
    }

    /// Returns the number of failed calls.
    fn failed(&self) -> u64 {
        self.failures.iter().map(|failure| failure.count).sum()
    }

    /// Returns one JSON object with the machine, the failures, and one row per line.
    pub fn to_json(&self) -> String {
        let text = |value: Value| value.to_string();
        let rows = self.rows.iter().map(Row::fields);
        let errors = self.failures.iter().map(|failure| {
            [
                ("row", json!(failure.row)),
                ("count", json!(failure.count)),
                ("says", json!(failure.said)),
            ]
        });
        let peers = self.lacks_peers.then(|| LeftOut {
            row: "more peers".to_owned(),
            why: format!("not built; they are by {}", self.with_peers()),
        });
        let left_out = self
            .left_out
            .iter()
            .chain(&peers)
            .map(|left| [("row", json!(left.row)), ("why", json!(left.why))]);
        json::object(&[
            ("bench", text(json!(self.what))),
            ("device", text(json!(self.device))),
            ("device_name", text(json!(self.device_title))),
            ("driver", text(json!(self.driver))),
            ("driver_release", text(json!(self.driver_release))),
            ("host_cpu", text(json!(self.processor))),
            ("host_cpus", text(json!(self.processors))),
            ("date", text(json!(self.date))),
            ("version", text(json!(env!("CARGO_PKG_VERSION")))),
            ("quick", text(json!(self.quick))),
            ("failures", text(json!(self.failed()))),
            ("errors", json::table(errors)),
            ("left_out", json::table(left_out)),
            ("rows", json::table(rows)),
        ])
    }

    /// Returns the page, without a newline after the last line.
    pub fn to_screen(&self) -> String {
        let mut lines = vec![format!("aquifer bench {}: {}", self.what, self.device_title)];
        let processor = self.processor.as_deref().unwrap_or("an unknown processor");
        let release = self.driver_release.as_ref();
        let host = format!(
            "{}{}, {} of {processor}, {}, aquifer {}{}",
            self.driver,
            release.map_or(String::new(), |release| format!(", release {release}")),
            self.processors,
            self.date,
            env!("CARGO_PKG_VERSION"),
            if self.quick { ", a quick look: figures are rough" } else { "" },
        );
        lines.extend(wrap(&host, WIDTH));
        lines.push(String::new());
        // There are few peers, so each is named once, above its first row.
        let mut peer = None;
        for row in &self.rows {
            let against = row.peer.as_ref().map(|peer| peer.name.as_str());
            if against != peer {
                if let Some(name) = against {
                    lines.push(format!("{:>1$}", format!("beside {name}"), WIDTH));
                }
                peer = against;
            }
            let other = match (&row.peer, row.interval) {
                (Some(peer), _) => row.unit.of(peer.ns),
                (None, Some(interval)) => {
                    let [least, most] = interval.map(|ns| row.unit.value(ns));
                    format!("{least:.1} … {most:.1}")
                }
                (None, None) => String::new(),
            };
            let ratio = row.ratio().map_or(String::new(), times);
            let figure = row.unit.of(row.ns);
            // Long names may differ only at their ends, so they are not cut. The excess is in lines
            // of its own.
            let mut names = wrap(&row.name, WIDTH);
            let name = names.pop_if(|name| name.chars().count() <= NAME).unwrap_or_default();
            lines.append(&mut names);
            let line = format!("{name:<NAME$} {figure:>FIGURE$} {other:>FIGURE$} {ratio:>RATIO$}");
            lines.push(line.trim_end().to_owned());
        }
        for left in &self.left_out {
            lines.extend(wrap(&format!("left out: {}: {}", left.row, left.why), WIDTH));
        }
        if self.lacks_peers {
            // In one line, whole, so that it can be copied.
            lines.push(format!("more peers: {}", self.with_peers()));
        }
        for failure in &self.failures {
            let said = failure.said.split_whitespace().collect::<Vec<_>>().join(" ");
            lines.extend(wrap(
                &format!("FAILED {} × {}: {said}", failure.count, failure.row),
                WIDTH,
            ));
        }
        lines.join("\n")
    }
}

/// Formats a ratio with three significant digits: `0.062×`, `4.21×`, `131×`.
pub(crate) fn times(ratio: f64) -> String {
    let digits = if ratio < 0.9995 {
        3
    } else if ratio < 9.995 {
        2
    } else if ratio < 99.95 {
        1
    } else {
        0
    };
    format!("{ratio:.digits$}×")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{Peer, Unit};

    fn report() -> BenchReport {
        let row = |name: &str, ns, peer: Option<(&str, f64)>| Row {
            name: name.into(),
            ns,
            unit: Unit::NsPerPair,
            peer: peer.map(|(name, ns)| Peer { name: name.into(), ns }),
            interval: None,
        };
        BenchReport {
            what: "device",
            device: "sim".into(),
            device_title: "a simulated device".into(),
            driver: "simulated, CUDA 13.0".into(),
            driver_release: None,
            processor: Some("a processor".into()),
            processors: 2,
            date: "2026-11-21T12:16:43Z".into(),
            quick: false,
            rows: vec![
                row("malloc pair 64 B", 8.0, None),
                row("pair 256 B", 24.123_456, Some(("malloc 64 B", 8.0))),
                row("pair 4 KiB", 2.0, Some(("malloc 64 B", 8.0))),
            ],
            failures: Vec::new(),
            left_out: Vec::new(),
            lacks_peers: false,
        }
    }

    #[test]
    fn a_row_in_json_has_its_fields_in_their_order() {
        let text = report().to_json();
        let value: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "name": "pair 256 B", "value": 24.1235, "unit": "ns/pair",
            "peer": "malloc 64 B", "peer_value": 8.0, "ratio": 3.01543,
        });
        assert_eq!(value["rows"][1], expected);
        assert_eq!(value["rows"][0]["ratio"], Value::Null);
        let line = text.lines().find(|line| line.contains("pair 256 B")).unwrap();
        let places = ["name", "value", "unit", "\"peer\"", "peer_value", "ratio"]
            .map(|name| line.find(name));
        assert!(places.is_sorted() && places[0].is_some(), "{line}");
        assert_eq!((&value["failures"], &value["left_out"]), (&json!(0), &json!([])));
    }

    #[test]
    fn what_was_refused_is_told_in_both() {
        let mut report = report();
        assert!(report.is_clean());
        let said = "out of memory:\n  asked  many bytes".to_owned();
        report.failures.push(Failure { row: "pair 256 B".into(), count: 3, said });
        report.left_out.push(LeftOut { row: "past holes".into(), why: "no room".into() });
        assert!(!report.is_clean());
        let value: Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(
            (&value["failures"], &value["errors"][0]["row"]),
            (&json!(3), &json!("pair 256 B"))
        );
        assert_eq!(value["left_out"][0]["why"], "no room");
        let screen = report.to_screen();
        assert!(
            screen.contains("FAILED 3 × pair 256 B: out of memory: asked many bytes"),
            "{screen}"
        );
        assert!(screen.contains("left out: past holes: no room"), "{screen}");
    }

    #[test]
    fn peers_that_are_not_built_are_told_by_the_command_that_builds_them() {
        let command = "cargo run --release -p aquifer-cli --features peers -- bench placement";
        let mut report = report();
        report.what = "placement";
        assert!(!report.to_screen().contains("peers") && !report.to_json().contains("peers"));
        report.lacks_peers = true;
        assert!(report.is_clean());
        let screen = report.to_screen();
        assert_eq!(screen.lines().last(), Some(&*format!("more peers: {command}")));
        let value: Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(value["left_out"][0]["row"], "more peers");
        assert!(value["left_out"][0]["why"].as_str().unwrap().ends_with(command), "{value}");
    }

    #[test]
    fn the_release_of_the_driver_stands_in_both() {
        let mut report = report();
        report.driver_release = Some("580.159.03".into());
        let value: Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(value["driver_release"], "580.159.03");
        let screen = report.to_screen();
        assert!(screen.contains("CUDA 13.0, release 580.159.03, "), "{screen}");
    }

    #[test]
    fn an_interval_stands_where_a_peer_would() {
        let mut report = report();
        report.rows[0].interval = Some([7.96, 8.14]);
        let screen = report.to_screen();
        assert!(screen.contains("8.00 ns/pair      8.0 … 8.1\n"), "{screen}");
    }

    #[test]
    fn long_names_are_told_whole_and_columns_never_touch() {
        let mut report = report();
        let long =
            "a row whose name is longer than its column and ends with the part that matters: ";
        report.rows[1].name = format!("{long}upload");
        report.rows[2].name = format!("{long}download");
        report.rows[1].ns = 123_456_789.0;
        report.rows[1].unit = Unit::CpuPerGib;
        let screen = report.to_screen();
        let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words.contains("matters: upload") && words.contains("matters: download"),
            "{screen}"
        );
        let row = screen.lines().find(|line| line.contains("CPU/GiB")).unwrap();
        assert!(
            row.split_whitespace().filter(|word| word.ends_with("CPU/GiB")).count() == 2,
            "{screen}"
        );
    }

    #[test]
    fn the_page_is_eighty_columns_wide_and_names_a_peer_once() {
        let screen = report().to_screen();
        assert!(screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
        assert_eq!(screen.matches("beside malloc 64 B").count(), 1, "{screen}");
        assert!(
            screen.contains("24.1 ns/pair")
                && screen.contains("3.02×")
                && screen.contains("0.250×"),
            "{screen}"
        );
    }
}
