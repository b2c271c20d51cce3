//! The table: a line for each process and each place in it.

use super::{
    monitor::Monitor,
    sums::{DeviceSum, PoolSum, ProcessSum},
    words::{bytes, fit, rate},
};
use aquifer_benches::console::foreign::printable;
use console::measure_text_width;
use std::cmp::Reverse;

/// The columns behind the process and its command, with their titles and widths. A narrow terminal
/// cuts the last ones.
const COLUMNS: [(&str, usize, Cell); 10] = [
    ("PHYSICAL", 8, |sum| Some(bytes(sum.physical))),
    ("LIVE", 8, |sum| Some(bytes(sum.live))),
    ("CACHED", 8, |sum| Some(bytes(sum.cached))),
    ("PEAK", 8, |sum| Some(bytes(sum.peak))),
    ("LIMIT", 8, |sum| sum.limit.map(bytes)),
    ("PENDING", 8, |sum| Some(bytes(sum.pending))),
    ("LARGEST FREE", 13, |sum| {
        let percent = sum.largest_percent().map_or("    ".to_owned(), |part| format!("{part:>3}%"));
        Some(format!("{} {percent}", bytes(sum.largest_free?)))
    }),
    ("WAIT/s", 7, |sum| Some(rate(sum.rates?.waits))),
    ("GROW/s", 7, |sum| Some(rate(sum.rates?.growths))),
    ("MOVE/s", 7, |sum| Some(rate(sum.rates?.moves))),
];
/// Returns the text of a cell, or none for a figure that is not known.
type Cell = fn(&PoolSum) -> Option<String>;

const PROCESS_WIDTH: usize = 7;
/// The least width of the column of commands.
const LEAST_COMMAND: usize = 14;
/// The width of the lines on shared memory where none is given.
const PRINTED_WIDTH: usize = 120;

/// A line before its columns have widths.
struct TableLine<'m> {
    process: String,
    name: String,
    sum: &'m PoolSum,
}

impl TableLine<'_> {
    fn text(&self, command_width: usize) -> String {
        let cell = |&(_, width, cell): &(&str, usize, Cell)| {
            fit(cell(self.sum).as_deref().unwrap_or("–"), width, true)
        };
        let cells: Vec<_> = COLUMNS.iter().map(cell).collect();
        line(&self.process, &self.name, command_width, &cells)
    }
}

fn line(process: &str, name: &str, command_width: usize, cells: &[String]) -> String {
    let process = fit(process, PROCESS_WIDTH, true);
    format!("{process} {} {}", fit(name, command_width, false), cells.join(" "))
}

/// Returns the lines of all processes and their places, the largest first and dead ones last.
fn lines(monitor: &Monitor) -> Vec<TableLine<'_>> {
    let mut processes: Vec<&ProcessSum> = monitor.processes.iter().collect();
    processes.sort_by_key(|process| {
        (!process.is_alive, Reverse(process.shown().physical), process.process)
    });
    let mut lines = Vec::new();
    for process in processes {
        let dead = if process.is_alive { "" } else { "[dead] " };
        let unreadable = match process.unreadable {
            0 => String::new(),
            pools => format!("[{pools} unreadable] "),
        };
        let name = format!("{dead}{unreadable}{}", process.command);
        lines.push(TableLine { process: process.process.to_string(), name, sum: process.shown() });
        lines.extend(process.places.iter().map(|place| {
            let name = match place.sum.pools {
                1 => format!("  {}", place.label),
                pools => format!("  {} ({pools} pools)", place.label),
            };
            TableLine { process: String::new(), name, sum: &place.sum }
        }));
    }
    lines
}

/// Returns the line of a device.
pub(super) fn device_line(device: &DeviceSum) -> String {
    let unknown = || "unknown".to_owned();
    let of = device.driver_total.map(|total| format!(" of {}", bytes(total))).unwrap_or_default();
    format!(
        "{} {}: {} in {}; live {}, cached {}, pending {}; outside {}{of}",
        device.address,
        device.name,
        bytes(device.sum.physical),
        match device.processes {
            1 => "1 process".to_owned(),
            count => format!("{count} processes"),
        },
        bytes(device.sum.live),
        bytes(device.sum.cached),
        bytes(device.sum.pending),
        device.outside().map_or_else(unknown, bytes),
    )
}

/// Returns the heading: how many processes there are, and where they publish.
pub(super) fn summary(monitor: &Monitor) -> String {
    let shown_dead = monitor.processes.iter().filter(|process| !process.is_alive).count();
    let alive = monitor.processes.len() - shown_dead;
    let dead = shown_dead + monitor.hidden_dead;
    let mut text = match alive {
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    if dead > 0 {
        text.push_str(&format!(", {dead} dead"));
    }
    let errors = monitor.last.as_ref().map_or(0, |last| last.errors.len());
    if errors > 0 {
        text.push_str(&format!(", {errors} unreadable"));
    }
    format!("{text} in {}", printable(&monitor.folder().to_string_lossy()))
}

/// Returns the table. Without a width no text is cut.
pub(super) fn page(monitor: &Monitor, width: Option<usize>) -> String {
    let lines = lines(monitor);
    let longest = lines.iter().map(|line| measure_text_width(&line.name)).max().unwrap_or(0);
    let others = PROCESS_WIDTH + 1 + COLUMNS.iter().map(|(_, width, _)| width + 1).sum::<usize>();
    let room = width.map_or(longest, |width| width.saturating_sub(others));
    let command_width = longest.min(room).max(LEAST_COMMAND);
    let titles: Vec<_> = COLUMNS.iter().map(|(title, width, _)| fit(title, *width, true)).collect();
    let mut page = vec![summary(monitor)];
    page.extend(monitor.devices.iter().map(device_line));
    let shared = monitor.last.iter().map(|last| &last.shared);
    page.extend(shared.flat_map(|shared| shared.lines(width.unwrap_or(PRINTED_WIDTH))));
    page.push(line("PID", "COMMAND", command_width, &titles));
    page.extend(lines.iter().map(|line| line.text(command_width)));
    let errors = monitor.last.iter().flat_map(|last| last.errors.iter().chain(&last.shared.errors));
    let errors = errors.chain(&monitor.sweep_error);
    page.extend(errors.map(|error| format!("unreadable: {error}")));
    let page = page.iter().map(|line| match width {
        Some(width) => fit(line, width, false).trim_end().to_owned(),
        None => line.trim_end().to_owned(),
    });
    page.collect::<Vec<_>>().join("\n")
}
