//! What the keys change: the selection, the order, what is unfolded, and the interval.

use super::table::{Column, LineKey, SortOrder, TableLayout, TableLine};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    time::Duration,
};

/// What remains to be done after a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyEffect {
    Draw,
    ReadNow,
    Quit,
}

/// The state of the view.
#[derive(Debug)]
pub(super) struct View {
    pub(super) order: SortOrder,
    pub(super) interval: Duration,
    pub(super) shows_help: bool,
    /// Where the selected line was last. It follows its process when the order changes.
    selected: usize,
    selected_key: Option<LineKey>,
    /// The first visible line.
    pub(super) first: usize,
    /// Processes that are folded otherwise than all.
    toggled: HashSet<PathBuf>,
    unfolds_all: bool,
}

const LEAST_INTERVAL: Duration = Duration::from_millis(100);
const MOST_INTERVAL: Duration = Duration::from_secs(60);

impl View {
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            order: SortOrder::default(),
            interval,
            shows_help: false,
            selected: 0,
            selected_key: None,
            first: 0,
            toggled: HashSet::new(),
            unfolds_all: false,
        }
    }

    pub(super) fn is_unfolded(&self, path: &Path) -> bool {
        self.unfolds_all != self.toggled.contains(path)
    }

    /// Returns the selected line, and scrolls so that it is within `rows`.
    pub(super) fn place(&mut self, lines: &[TableLine<'_>], rows: usize) -> usize {
        if let Some(key) = &self.selected_key {
            // A place whose process is folded leads to its process.
            let process = LineKey { path: key.path.clone(), place: None };
            let found = lines.iter().position(|line| line.key() == *key);
            let found = found.or_else(|| lines.iter().position(|line| line.key() == process));
            self.selected = found.unwrap_or(self.selected);
        }
        self.select(self.selected, lines);
        self.first = self.first.min(self.selected);
        if rows > 0 && self.selected >= self.first + rows {
            self.first = self.selected + 1 - rows;
        }
        self.first = self.first.min(lines.len().saturating_sub(rows));
        self.selected
    }

    fn select(&mut self, line: usize, lines: &[TableLine<'_>]) {
        self.selected = line.min(lines.len().saturating_sub(1));
        self.selected_key = lines.get(self.selected).map(TableLine::key);
    }

    /// Acts on a key. `layout` and `lines` are those on the screen.
    pub(super) fn key(
        &mut self,
        key: KeyEvent,
        layout: &TableLayout,
        lines: &[TableLine<'_>],
        rows: usize,
    ) -> KeyEffect {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => KeyEffect::Quit,
                _ => KeyEffect::Draw,
            };
        }
        if self.shows_help && !matches!(key.code, KeyCode::Char('q')) {
            self.shows_help = false;
            return KeyEffect::Draw;
        }
        let page = rows.max(1);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyEffect::Quit,
            KeyCode::Char('?' | 'h') => self.shows_help = true,
            KeyCode::Up | KeyCode::Char('k') => self.select(self.selected.saturating_sub(1), lines),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.selected + 1, lines),
            KeyCode::PageUp => self.select(self.selected.saturating_sub(page), lines),
            KeyCode::PageDown => self.select(self.selected + page, lines),
            KeyCode::Home => self.select(0, lines),
            KeyCode::End => self.select(usize::MAX, lines),
            KeyCode::Left | KeyCode::Char('<') => self.sort_by_neighbour(layout, false),
            KeyCode::Right | KeyCode::Char('>') => self.sort_by_neighbour(layout, true),
            KeyCode::Char('r') => self.order.is_reversed = !self.order.is_reversed,
            KeyCode::Enter | KeyCode::Char(' ') => self.toggle(),
            KeyCode::Char('a') => {
                self.unfolds_all = !self.unfolds_all;
                self.toggled.clear();
            }
            KeyCode::Char('+') => self.interval = (self.interval * 2).min(MOST_INTERVAL),
            KeyCode::Char('-') => self.interval = (self.interval / 2).max(LEAST_INTERVAL),
            KeyCode::Char('u') => return KeyEffect::ReadNow,
            _ => {}
        }
        KeyEffect::Draw
    }

    fn toggle(&mut self) {
        let Some(key) = &self.selected_key else { return };
        if !self.toggled.remove(&key.path) {
            self.toggled.insert(key.path.clone());
        }
    }

    fn sort_by_neighbour(&mut self, layout: &TableLayout, right: bool) {
        let columns: Vec<Column> = layout.0.iter().map(|(column, _)| *column).collect();
        // A column that a narrower terminal does not show any more leads to the first.
        let at = columns.iter().position(|column| *column == self.order.column);
        let next = match (at, right) {
            (None, _) => 0,
            (Some(at), true) => (at + 1) % columns.len(),
            (Some(at), false) => (at + columns.len() - 1) % columns.len(),
        };
        if let Some(&column) = columns.get(next) {
            self.order = SortOrder { column, is_reversed: false };
        }
    }
}

/// The help, line by line.
pub(super) const HELP: [&str; 27] = [
    "Up Down        select a line (also j k, PgUp PgDn, Home End)",
    "Left Right     sort by the column to the left or right; r reverses",
    "Enter, Space   unfold a process: a line for each device and node",
    "a              unfold all, or fold all",
    "+ -            double or halve the interval",
    "u              read now",
    "? h            this page; any key closes it",
    "q, Esc, Ctrl-C end",
    "",
    "PHYSICAL     held from the driver or the kernel",
    "LIVE         in live blocks, in rounded sizes",
    "CACHED       free, can be allocated again",
    "PENDING      freed, waits for queued work",
    "LIMIT        the tightest budget, if all pools have the same",
    "PEAK         maximum of PHYSICAL; of several pools, their sum",
    "LARGEST FREE largest free extent at the last slow path, of CACHED",
    "GROW/s       growths by the driver or the kernel",
    "MOVE/s       physical handles moved",
    "WAIT/s       waits of streams and of the host",
    "",
    "A process stands for its device memory, or for its host memory",
    "if it has no other. outside: what the driver counts on a GPU",
    "beyond these pools. A simulated device has no such count.",
    "shared: a memory that processes share by a ledger, with its members.",
    "other: what is in use there and claimed by none of them.",
    "A process that dies stays for 10 s. With --dead all dead ones are",
    "shown; with --sweep their files are removed.",
];
