//! Columns and lines: of the live view, and of the printed table.

use super::{
    monitor::Monitor,
    sums::{DeviceSum, PlaceSum, PoolSum, ProcessSum},
    words::{UNKNOWN, bytes, fit, rate},
};
use aquifer_benches::console::foreign::printable;
use std::{
    cmp::Ordering,
    path::{Path, PathBuf},
};

/// A column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Column {
    Process,
    Command,
    Physical,
    Live,
    Cached,
    Pending,
    Limit,
    Peak,
    Largest,
    Growths,
    Moves,
    Waits,
}

/// The columns from left to right, with their titles and widths, and how early a narrow terminal
/// gives them up. Those at 0 stay.
const COLUMNS: [(Column, &str, usize, u32); 12] = [
    (Column::Process, "PID", 7, 0),
    (Column::Command, "COMMAND", LEAST_COMMAND, 0),
    // With room for the mark of the column that is sorted by.
    (Column::Physical, "PHYSICAL", 9, 1),
    (Column::Live, "LIVE", 8, 2),
    (Column::Cached, "CACHED", 8, 3),
    (Column::Pending, "PENDING", 8, 6),
    (Column::Limit, "LIMIT", 8, 5),
    (Column::Peak, "PEAK", 8, 4),
    (Column::Largest, "LARGEST FREE", 13, 7),
    (Column::Growths, "GROW/s", 7, 9),
    (Column::Moves, "MOVE/s", 7, 10),
    (Column::Waits, "WAIT/s", 7, 8),
];

/// The least width of the column of commands, and what it has before less important columns come.
const LEAST_COMMAND: usize = 14;

/// The width of the lines on shared memory where none is given.
const PRINTED_WIDTH: usize = 120;

impl Column {
    fn title(self) -> &'static str {
        COLUMNS[self as usize].1
    }

    fn is_right(self) -> bool {
        self != Self::Command
    }
}

/// The columns that fit, with their widths. The column of commands has what is left.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct TableLayout(pub(super) Vec<(Column, usize)>);

impl TableLayout {
    pub(super) fn for_width(width: usize) -> Self {
        let mut kept: Vec<_> = COLUMNS.iter().filter(|(.., rank)| *rank == 0).collect();
        let mut used: usize = kept.iter().map(|(_, _, width, _)| width + 1).sum();
        for rank in 1..COLUMNS.len() as u32 {
            let Some(next) = COLUMNS.iter().find(|(.., found)| *found == rank) else { break };
            if used + next.2 > width {
                break;
            }
            used += next.2 + 1;
            kept.push(next);
        }
        kept.sort_by_key(|(column, ..)| *column as usize);
        let left = (width + 1).saturating_sub(used);
        let widths = kept.into_iter().map(|&(column, _, width, _)| match column {
            Column::Command => (column, width + left),
            _ => (column, width),
        });
        Self(widths.collect())
    }

    /// Returns the titles, with a mark at the column that is sorted by.
    pub(super) fn titles(&self, order: SortOrder) -> String {
        let mark = if order.is_rising() { '▲' } else { '▼' };
        self.join(|column| {
            let mut title = column.title().to_owned();
            if column == order.column {
                title.push(mark);
            }
            title
        })
    }

    /// Returns one line of cells.
    pub(super) fn join(&self, mut cell: impl FnMut(Column) -> String) -> String {
        let cells = self.0.iter().map(|&(column, width)| {
            let mut text = cell(column);
            if column == Column::Command && width < 2 {
                text.clear();
            }
            fit(&text, width, column.is_right())
        });
        cells.collect::<Vec<_>>().join(" ")
    }
}

/// By which column processes are sorted. Dead ones are last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SortOrder {
    pub(super) column: Column,
    pub(super) is_reversed: bool,
}

impl SortOrder {
    /// Texts and numbers of processes rise, and amounts fall, unless they are reversed.
    pub(super) fn is_rising(self) -> bool {
        matches!(self.column, Column::Process | Column::Command) != self.is_reversed
    }

    fn compare(self, a: &ProcessSum, b: &ProcessSum) -> Ordering {
        let (x, y) = (a.shown(), b.shown());
        let rates = |pick: fn(super::reading::Rates) -> f64| {
            let value = |sum: &PoolSum| sum.rates.map_or(-1.0, pick);
            value(x).total_cmp(&value(y))
        };
        let by = match self.column {
            Column::Process => a.process.cmp(&b.process),
            Column::Command => a.command.cmp(&b.command),
            Column::Physical => x.physical.cmp(&y.physical),
            Column::Live => x.live.cmp(&y.live),
            Column::Cached => x.cached.cmp(&y.cached),
            Column::Pending => x.pending.cmp(&y.pending),
            Column::Limit => x.limit.cmp(&y.limit),
            Column::Peak => x.peak.cmp(&y.peak),
            Column::Largest => x.largest_free.cmp(&y.largest_free),
            Column::Growths => rates(|rates| rates.growths),
            Column::Moves => rates(|rates| rates.moves),
            Column::Waits => rates(|rates| rates.waits),
        };
        let by = if self.is_rising() { by } else { by.reverse() };
        b.is_alive.cmp(&a.is_alive).then(by).then(a.process.cmp(&b.process))
    }
}

impl Default for SortOrder {
    fn default() -> Self {
        Self { column: Column::Physical, is_reversed: false }
    }
}

/// Which line this is, in any reading: a process by its file, or one of its places.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LineKey {
    pub(super) path: PathBuf,
    pub(super) place: Option<String>,
}

/// A line of the table.
#[derive(Debug)]
pub(super) struct TableLine<'m> {
    process: &'m ProcessSum,
    place: Option<&'m PlaceSum>,
    is_unfolded: bool,
}

impl TableLine<'_> {
    pub(super) fn key(&self) -> LineKey {
        let place = self.place.map(|place| place.label.clone());
        LineKey { path: self.process.path.clone(), place }
    }

    pub(super) fn is_process(&self) -> bool {
        self.place.is_none()
    }

    pub(super) fn is_alive(&self) -> bool {
        self.process.is_alive
    }

    /// Returns the text of the line.
    pub(super) fn text(&self, layout: &TableLayout) -> String {
        layout.join(|column| self.cell(column))
    }

    fn cell(&self, column: Column) -> String {
        let sum = self.place.map_or_else(|| self.process.shown(), |place| &place.sum);
        let unknown = || UNKNOWN.to_owned();
        let in_a_second = |pick: fn(super::reading::Rates) -> f64| {
            sum.rates.map_or_else(unknown, |rates| rate(pick(rates)))
        };
        match column {
            Column::Process if self.place.is_none() => self.process.process.to_string(),
            Column::Process => String::new(),
            Column::Command => self.name(),
            Column::Physical => bytes(sum.physical),
            Column::Live => bytes(sum.live),
            Column::Cached => bytes(sum.cached),
            Column::Pending => bytes(sum.pending),
            Column::Limit => sum.limit.map_or_else(unknown, bytes),
            Column::Peak => bytes(sum.peak),
            Column::Largest => match (sum.largest_free, sum.largest_percent()) {
                (Some(largest), Some(percent)) => format!("{} {percent:>3}%", bytes(largest)),
                (Some(largest), None) => format!("{}     ", bytes(largest)),
                (None, _) => unknown(),
            },
            Column::Growths => in_a_second(|rates| rates.growths),
            Column::Moves => in_a_second(|rates| rates.moves),
            Column::Waits => in_a_second(|rates| rates.waits),
        }
    }

    fn name(&self) -> String {
        if let Some(place) = self.place {
            return match place.sum.pools {
                1 => format!("    {}", place.label),
                pools => format!("    {} ({pools} pools)", place.label),
            };
        }
        let fold = match (self.process.places.is_empty(), self.is_unfolded) {
            (true, _) => ' ',
            (_, true) => '-',
            (_, false) => '+',
        };
        let mut name = format!("{fold} ");
        if !self.process.is_alive {
            name.push_str("[dead] ");
        }
        if self.process.unreadable > 0 {
            name.push_str(&format!("[{} unreadable] ", self.process.unreadable));
        }
        name.push_str(&self.process.command);
        name
    }
}

/// Returns the lines of all processes, sorted, with the places of those that are unfolded.
pub(super) fn lines(
    monitor: &Monitor,
    order: SortOrder,
    is_unfolded: impl Fn(&Path) -> bool,
) -> Vec<TableLine<'_>> {
    let mut processes: Vec<&ProcessSum> = monitor.processes.iter().collect();
    processes.sort_by(|a, b| order.compare(a, b));
    let mut lines = Vec::new();
    for process in processes {
        let is_unfolded = is_unfolded(&process.path);
        lines.push(TableLine { process, place: None, is_unfolded });
        if is_unfolded {
            let places = process.places.iter();
            lines.extend(places.map(|place| TableLine {
                process,
                place: Some(place),
                is_unfolded,
            }));
        }
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

/// Returns the errors of the last reading, of its ledgers too, and of the last sweep.
pub(super) fn errors(monitor: &Monitor) -> impl Iterator<Item = &String> {
    let readings = monitor.last.iter();
    let of_readings = readings.flat_map(|last| last.errors.iter().chain(&last.shared.errors));
    of_readings.chain(&monitor.sweep_error)
}

/// Returns the lines on memories that processes share.
pub(super) fn shared_lines(monitor: &Monitor, width: usize, rows: usize) -> Vec<String> {
    monitor.last.as_ref().map_or_else(Vec::new, |last| last.shared.lines(width, rows))
}

/// Returns the table to be printed. Without a width every column is there, and no text is cut.
pub(super) fn page(monitor: &Monitor, width: Option<usize>) -> String {
    let order = SortOrder::default();
    let lines = lines(monitor, order, |_| true);
    let mut layout = TableLayout::for_width(width.unwrap_or(usize::MAX / 2));
    if width.is_none() {
        let longest = lines.iter().map(|line| super::words::width(&line.name())).max();
        for (column, width) in &mut layout.0 {
            if *column == Column::Command {
                *width = longest.unwrap_or(0).max(LEAST_COMMAND);
            }
        }
    }
    let mut page = vec![summary(monitor)];
    page.extend(monitor.devices.iter().map(device_line));
    page.extend(shared_lines(monitor, width.unwrap_or(PRINTED_WIDTH), usize::MAX));
    page.push(layout.titles(order));
    page.extend(lines.iter().map(|line| line.text(&layout)));
    page.extend(errors(monitor).map(|error| format!("unreadable: {error}")));
    let page = page.iter().map(|line| match width {
        Some(width) => fit(line, width, false).trim_end().to_owned(),
        None => line.trim_end().to_owned(),
    });
    page.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fill_every_width_and_the_important_ones_stay() {
        for width in 24..300 {
            let layout = TableLayout::for_width(width);
            let used: usize = layout.0.iter().map(|(_, width)| width + 1).sum();
            assert_eq!(used - 1, width, "{layout:?}");
            let line = layout.titles(SortOrder::default());
            assert_eq!(super::super::words::width(&line), width);
        }
        let has = |width: usize, column: Column| {
            TableLayout::for_width(width).0.iter().any(|(found, _)| *found == column)
        };
        for column in [Column::Physical, Column::Live, Column::Cached, Column::Peak] {
            assert!(has(60, column), "{column:?}");
        }
        assert!(!has(60, Column::Moves) && has(160, Column::Moves));
    }
}
