//! The text for Prometheus, parsed by its own rules and compared with the processes.

use super::parts::{Part, Scratch, printed, refused, run};
use std::{collections::HashMap, fs};

/// The name of a series, its labels and its value.
type Series = (String, Vec<(String, String)>, f64);

/// A text, parsed strictly.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    pub(super) types: HashMap<String, String>,
    pub(super) series: Vec<Series>,
}

impl Exposition {
    pub(super) fn parse(text: &str) -> Self {
        let mut parsed = Self::default();
        assert!(text.ends_with('\n') && !text.contains('\r'));
        for line in text.lines() {
            if let Some(heading) = line.strip_prefix("# ") {
                let (what, rest) = heading.split_once(' ').unwrap();
                let (name, rest) = rest.split_once(' ').unwrap();
                assert!(matches!(what, "HELP" | "TYPE") && !rest.is_empty(), "{line}");
                if what == "TYPE" {
                    let again = parsed.types.insert(name.to_owned(), rest.to_owned());
                    assert_eq!(again, None, "{line}");
                }
            } else {
                parsed.add(line);
            }
        }
        let mut unique: Vec<_> = parsed.series.iter().map(|(n, l, _)| (n, l)).collect();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), parsed.series.len(), "two series are the same: {text}");
        parsed
    }

    fn add(&mut self, line: &str) {
        let end = line.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap();
        let (name, mut rest) = line.split_at(end);
        let of = self.types.get(name).unwrap_or_else(|| panic!("no type: {line}"));
        assert_eq!(of == "counter", name.ends_with("_total"), "{line}");
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            while !rest.starts_with('}') {
                let (key, value) = rest.split_once("=\"").unwrap();
                assert!(key.chars().all(|c| c.is_ascii_alphabetic()), "{line}");
                let (value, after) = unescape(value);
                labels.push((key.to_owned(), value));
                rest = after.strip_prefix(',').unwrap_or(after);
            }
            rest = &rest[1..];
        }
        let value = rest.strip_prefix(' ').unwrap().parse().unwrap();
        self.series.push((name.to_owned(), labels, value));
    }

    /// Returns the only value of a metric whose labels include these.
    pub(super) fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let mut found = self.series.iter().filter(|(found, has, _)| {
            let has = |(key, value): &(&str, &str)| has.iter().any(|(k, v)| k == key && v == value);
            found == name && labels.iter().all(has)
        });
        let one = found.next().unwrap_or_else(|| panic!("no {name} {labels:?}: {self:?}"));
        assert!(found.next().is_none(), "more than one {name} {labels:?}: {self:?}");
        one.2
    }

    pub(super) fn count(&self, name: &str) -> usize {
        self.series.iter().filter(|(found, _, _)| found == name).count()
    }
}

/// Returns a label's value up to its quote, and what follows.
fn unescape(text: &str) -> (String, &str) {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match chars.next().unwrap().1 {
                'n' => '\n',
                c @ ('\\' | '"') => c,
                other => panic!("\\{other}"),
            }),
            c => value.push(c),
        }
    }
    panic!("no end: {text}")
}

/// The metrics of the figures that a process says, in their order.
const NAMES: [&str; 20] = [
    "aquifer_memory_live_bytes",
    "aquifer_memory_requested_bytes",
    "aquifer_memory_cached_bytes",
    "aquifer_memory_pending_bytes",
    "aquifer_memory_physical_bytes",
    "aquifer_memory_graphs_bytes",
    "aquifer_memory_live_peak_bytes",
    "aquifer_memory_requested_peak_bytes",
    "aquifer_memory_physical_peak_bytes",
    "aquifer_memory_blocks",
    "aquifer_memory_allocations_total",
    "aquifer_memory_frees_total",
    "aquifer_memory_allocation_failures_total",
    "aquifer_memory_growths_total",
    "aquifer_memory_released_bytes_total",
    "aquifer_memory_moves_total",
    "aquifer_memory_adoptions_total",
    "aquifer_memory_fences_total",
    "aquifer_memory_stream_waits_total",
    "aquifer_memory_host_waits_total",
];

#[test]
fn metrics_equal_the_figures_of_each_process() {
    let folder = Scratch::new("metrics");
    let mut parts: Vec<Part> =
        (1..4).map(|scale| Part::start("device_process", &folder, scale)).collect();
    parts.push(Part::start("pinned_process", &folder, 1));
    let own: Vec<_> = parts.iter_mut().map(Part::figures).collect();
    let text = printed(&folder, &["metrics"]);
    let parsed = Exposition::parse(&text);
    for (part, own) in parts.iter().zip(&own) {
        let process = part.child.id().to_string();
        for (name, figure) in NAMES.iter().zip(own) {
            assert_eq!(parsed.value(name, &[("pid", &process)]), *figure as f64, "{name}");
        }
        let start = parsed.value("aquifer_process_start_time_seconds", &[("pid", &process)]);
        assert!(start > 1.7e9 && start < 1e11, "{start}");
    }
    let first = parts[0].child.id().to_string();
    let labels = [
        ("pid", &*first),
        ("kind", "device"),
        ("device", "0"),
        ("pool", "NVIDIA H200 (simulated)"),
    ];
    assert_eq!(parsed.value("aquifer_memory_limit_bytes", &labels), 536_870_912.0);
    // Arguments may hold secrets.
    assert!(!text.contains("nocapture"), "{text}");
    assert_eq!(parsed.value("aquifer_processes", &[("state", "alive")]), 4.0);

    parts[2].kill();
    let parsed = Exposition::parse(&printed(&folder, &["metrics"]));
    assert_eq!(parsed.value("aquifer_processes", &[("state", "dead")]), 1.0);
    assert_eq!(parsed.count("aquifer_memory_live_bytes"), 3);
    // It only reads.
    assert_eq!(folder.files(), 4);
}

#[test]
fn more_processes_and_pools_than_the_bounds_are_counted_and_the_largest_stay() {
    let folder = Scratch::new("bounds");
    let mut parts: Vec<Part> =
        (1..4).map(|scale| Part::start("device_process", &folder, 15 * scale)).collect();
    let own: Vec<_> = parts.iter_mut().map(Part::figures).collect();
    assert!(own[2][4] > own[1][4] && own[1][4] > own[0][4], "{own:?}");
    for (flag, kept) in [("--most-processes", 1), ("--most-pools", 2), ("--most-pools", 0)] {
        let text = printed(&folder, &["metrics", flag, &kept.to_string()]);
        let parsed = Exposition::parse(&text);
        assert_eq!(parsed.count("aquifer_memory_live_bytes"), kept);
        assert_eq!(parsed.value("aquifer_pools_left_out", &[]), (3 - kept) as f64);
        let processes = if flag == "--most-processes" { 2.0 } else { 0.0 };
        assert_eq!(parsed.value("aquifer_processes_left_out", &[]), processes);
        assert_eq!(parsed.value("aquifer_processes", &[("state", "alive")]), 3.0);
        if kept > 0 {
            let largest = parts[2].child.id().to_string();
            let labels = [("pid", &*largest)];
            assert_eq!(parsed.value("aquifer_memory_live_bytes", &labels), own[2][0] as f64);
        }
    }
}

#[test]
fn hostile_names_stay_within_their_labels() {
    let folder = Scratch::new("labels");
    let name = "evil\"} 1\nforged{a=\"\u{1b}[31m\\";
    let mut part = Part::start_as("hostile_process", &folder, 1, Some(name));
    assert_eq!(part.line(), "ready");
    let text = printed(&folder, &["metrics"]);
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    assert!(!text.contains("\nforged") && !text.contains("\n# TYPE forged"), "{text}");
    let parsed = Exposition::parse(&text);
    let process = part.child.id().to_string();
    let lives = parsed.series.iter().filter(|(name, _, _)| name == "aquifer_memory_live_bytes");
    let lives: Vec<_> = lives.collect();
    assert_eq!(lives.len(), 3, "{text}");
    for (_, labels, _) in &lives {
        let of = |key: &str| &labels.iter().find(|(found, _)| found == key).unwrap().1;
        assert_eq!(*of("pid"), process);
        assert!(of("process").starts_with("evil\"}"), "{labels:?}");
        assert!(of("pool").contains("<b>&\"}\\ 1\n# TYPE forged counter\nforged 7"), "{labels:?}");
    }
}

#[test]
fn a_file_is_replaced_as_a_whole_or_not_at_all() {
    let folder = Scratch::new("textfile");
    let out = Scratch::new("textfile-out");
    let path = out.0.join("aquifer.prom");
    let path = path.to_str().unwrap();
    let mut part = Part::start("device_process", &folder, 1);
    let own = part.figures();
    for _ in 0..2 {
        assert_eq!(printed(&folder, &["metrics", "-o", path]), "");
        let parsed = Exposition::parse(&fs::read_to_string(path).unwrap());
        assert_eq!(parsed.value("aquifer_memory_live_bytes", &[]), own[0] as f64);
        assert_eq!(out.files(), 1);
    }
    let before = fs::read(path).unwrap();
    // A folder that is gone, and one in the place of the file.
    refused(&run(&folder, &["metrics", "-o", "/nowhere/at/all.prom"]), "cannot be written");
    refused(&run(&folder, &["metrics", "-o", out.0.to_str().unwrap()]), "it is a directory");
    assert_eq!((fs::read(path).unwrap(), out.files()), (before, 1));
}
