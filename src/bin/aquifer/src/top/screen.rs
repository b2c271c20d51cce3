//! Drawing. Everything that a colour says is also said by a word or a mark.

use super::{
    monitor::Monitor,
    table::{self, TableLayout, TableLine},
    view::{HELP, View},
    words::fit,
};
use ratatui::{
    Frame,
    layout::Rect,
    style::{Color, Modifier, Style},
    text::Line,
};
use std::env;

/// How the kinds of lines look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Palette {
    heading: Style,
    titles: Style,
    selected: Style,
    place: Style,
    dead: Style,
    error: Style,
}

impl Palette {
    /// With colours, unless `NO_COLOR` is set.
    pub(super) fn from_environment() -> Self {
        Self::new(env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
    }

    pub(super) fn new(has_colors: bool) -> Self {
        let color = |color: Color| if has_colors { Style::new().fg(color) } else { Style::new() };
        Self {
            heading: Style::new().add_modifier(Modifier::BOLD),
            titles: Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
            selected: Style::new().add_modifier(Modifier::REVERSED),
            place: color(Color::Cyan),
            dead: color(Color::Red).add_modifier(Modifier::DIM),
            error: color(Color::Yellow),
        }
    }
}

/// How many rows the lines of the table have on a screen of this height.
pub(super) fn rows(monitor: &Monitor, height: usize) -> usize {
    let shared = shared_shown(monitor, 0, height).len();
    let above = devices_shown(monitor, height) + shared + errors_shown(monitor, height);
    // The heading, the titles, and the keys.
    height.saturating_sub(3 + above)
}

/// At most a third of the screen for devices.
fn devices_shown(monitor: &Monitor, height: usize) -> usize {
    monitor.devices.len().min(height / 3)
}

/// At most half of the screen for devices and shared memory.
fn shared_shown(monitor: &Monitor, width: usize, height: usize) -> Vec<String> {
    table::shared_lines(monitor, width, height / 2 - devices_shown(monitor, height))
}

fn errors_shown(monitor: &Monitor, height: usize) -> usize {
    table::errors(monitor).count().min(height / 6)
}

/// Draws everything. `problem` is why the last reading failed.
pub(super) fn draw(
    frame: &mut Frame<'_>,
    monitor: &Monitor,
    view: &mut View,
    palette: &Palette,
    lines: &[TableLine<'_>],
    problem: Option<&str>,
) {
    let area = frame.area();
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let mut page: Vec<(String, Style)> = Vec::with_capacity(height);
    let seconds = view.interval.as_secs_f64();
    let heading = format!("aquifer top: {}, every {seconds} s", table::summary(monitor));
    page.push((heading, palette.heading));
    if view.shows_help {
        page.extend(HELP.iter().map(|line| ((*line).to_owned(), Style::new())));
    } else {
        table_page(&mut page, monitor, view, palette, lines, (width, height));
    }
    page.truncate(height.saturating_sub(1));
    page.resize(height.saturating_sub(1), (String::new(), Style::new()));
    page.push(match problem {
        Some(problem) => (format!("cannot read: {problem}"), palette.error),
        None => {
            let keys = "q end  ? help  ↑↓ select  ←→ sort  r reverse  Enter unfold  a all  +- time";
            (keys.to_owned(), palette.heading)
        }
    });
    for (row, (text, style)) in page.iter().take(height).enumerate() {
        let line = Line::styled(fit(text, width, false), *style);
        let row = row as u16;
        frame.render_widget(line, Rect::new(area.x, area.y + row, area.width, 1));
    }
}

fn table_page(
    page: &mut Vec<(String, Style)>,
    monitor: &Monitor,
    view: &mut View,
    palette: &Palette,
    lines: &[TableLine<'_>],
    (width, height): (usize, usize),
) {
    let devices = monitor.devices.iter().take(devices_shown(monitor, height));
    page.extend(devices.map(|device| (table::device_line(device), Style::new())));
    let shared = shared_shown(monitor, width, height);
    page.extend(shared.into_iter().map(|line| (line, Style::new())));
    let errors = table::errors(monitor).take(errors_shown(monitor, height));
    page.extend(errors.map(|error| (format!("unreadable: {error}"), palette.error)));
    let layout = TableLayout::for_width(width);
    page.push((layout.titles(view.order), palette.titles));
    let rows = rows(monitor, height);
    let selected = view.place(lines, rows);
    if lines.is_empty() {
        page.push(("No process publishes its memory here.".to_owned(), Style::new()));
    }
    for (number, line) in lines.iter().enumerate().skip(view.first).take(rows) {
        let style = match (line.is_alive(), line.is_process()) {
            (false, _) => palette.dead,
            (_, true) => Style::new(),
            (_, false) => palette.place,
        };
        let style = if number == selected { style.patch(palette.selected) } else { style };
        page.push((line.text(&layout), style));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::table::SortOrder;
    use aquifer_status::StatusFolder;
    use ratatui::{Terminal, backend::TestBackend, crossterm::event::KeyCode};
    use std::time::Duration;

    #[test]
    fn every_size_of_a_terminal_can_be_drawn() {
        let folder = StatusFolder::at("/nowhere/at/all").unwrap();
        let mut monitor = Monitor::new(folder, false, false);
        monitor.read().unwrap();
        let mut view = View::new(Duration::from_secs(1));
        let palette = Palette::new(true);
        for help in [false, true] {
            view.shows_help = help;
            for (width, height) in [(1, 1), (5, 2), (20, 3), (60, 24), (80, 1), (500, 200)] {
                let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
                let lines = table::lines(&monitor, SortOrder::default(), |_| true);
                terminal
                    .draw(|frame| draw(frame, &monitor, &mut view, &palette, &lines, None))
                    .unwrap();
                let shown = terminal.backend().to_string();
                let is_whole = height > 2 && width >= 60;
                assert_eq!(shown.contains("No process publishes"), is_whole && !help, "{shown}");
            }
        }
    }

    #[test]
    fn without_colors_no_style_has_any() {
        let palette = Palette::new(false);
        let Palette { heading, titles, selected, place, dead, error } = palette;
        for style in [heading, titles, selected, place, dead, error] {
            assert_eq!((style.fg, style.bg), (None, None));
        }
        assert!(Palette::new(true).dead.fg.is_some());
    }

    #[test]
    fn keys_lead_through_the_columns_and_back() {
        let layout = TableLayout::for_width(60);
        let mut view = View::new(Duration::from_secs(1));
        let first = view.order;
        let mut seen = Vec::new();
        while seen.is_empty() || view.order != first {
            seen.push(view.order.column);
            view.key(KeyCode::Right.into(), &layout, &[], 5);
        }
        assert_eq!(seen.len(), layout.0.len());
        for code in [KeyCode::Up, KeyCode::Down, KeyCode::End, KeyCode::PageUp, KeyCode::Enter] {
            view.key(code.into(), &layout, &[], 0);
            assert_eq!(view.place(&[], 0), 0);
        }
        view.key(KeyCode::Char('r').into(), &layout, &[], 5);
        assert!(view.order.is_rising());
    }
}
