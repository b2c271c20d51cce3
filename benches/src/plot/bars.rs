//! Rows as bars, each beside its peer.

use super::{
    drawing::{Drawing, GRID, INK, LINE, MARGIN, OWN, PEER, Style},
    label::{lines, shown},
    scale::{Scale, tick},
};
use crate::{
    report::times,
    row::{Row, Unit},
};

/// Columns of a row's name. A longer one takes several lines.
const NAME: usize = 52;
/// Pixels of the longest bar.
const LONGEST: i32 = 420;
/// Pixels of a bar across, and between two rows.
const BAR: i32 = 12;
const GAP: i32 = 6;
const TICKS: usize = 8;

/// Rows on one axis.
pub(super) struct BarSection<'r> {
    unit: Unit,
    has_intervals: bool,
    rows: Vec<&'r Row>,
}

/// Divides rows into sections by unit, and those with an interval from others. Sections stand in
/// the order of their first rows.
pub(super) fn sections<'r>(rows: &[&'r Row]) -> Vec<BarSection<'r>> {
    let mut sections: Vec<BarSection<'r>> = Vec::new();
    for &row in rows {
        let (unit, has_intervals) = (row.unit, row.interval.is_some());
        let section = sections
            .iter_mut()
            .find(|section| (section.unit, section.has_intervals) == (unit, has_intervals));
        match section {
            Some(section) => section.rows.push(row),
            None => sections.push(BarSection { unit, has_intervals, rows: vec![row] }),
        }
    }
    sections
}

/// Returns how the axis of a section or panel is read: `, lower is better, logarithmic axis`.
pub(super) fn reading(unit: Unit, scale: &Scale) -> String {
    let better = match unit {
        Unit::GbPerSecond => ", higher is better",
        Unit::Percent => "",
        _ => ", lower is better",
    };
    format!("{better}{}", if scale.is_log() { ", logarithmic axis" } else { "" })
}

/// Returns a figure as text, also one that was not finite.
pub(super) fn figure(unit: Unit, ns: f64) -> String {
    if unit.value(ns).is_finite() { unit.of(ns) } else { "no value".to_owned() }
}

/// Draws a section and returns the place below.
pub(super) fn draw(drawing: &mut Drawing, section: &BarSection<'_>, top: i32) -> i32 {
    let (unit, rows) = (section.unit, &section.rows);
    let own = rows.iter().map(|row| row.ns);
    let peers = rows.iter().filter_map(|row| row.peer.as_ref()).map(|peer| peer.ns);
    let ends = rows.iter().filter_map(|row| row.interval).flatten();
    let scale = Scale::of(own.chain(peers).chain(ends).map(|ns| unit.on_axis(ns)));

    let names: Vec<Vec<String>> = rows.iter().map(|row| lines(&shown(&row.name), NAME)).collect();
    let widest = names.iter().flatten().map(|line| Style::Plain.width(line)).max().unwrap_or(0);
    let left = MARGIN + widest + 12;
    let across = (left, left + LONGEST);
    let mut y = legend(drawing, section, &scale, top);

    // The grid is under the bars, so the rows are measured before they are drawn.
    let height = |(row, name): (&&Row, &Vec<String>)| {
        let bars = if row.peer.is_some() { 2 } else { 1 };
        LINE * (name.len() as i32).max(bars) + GAP
    };
    let heights: Vec<i32> = rows.iter().zip(&names).map(height).collect();
    let bottom = y + heights.iter().sum::<i32>();
    grid(drawing, &scale, unit, across, (y, bottom));
    for ((row, name), height) in rows.iter().zip(&names).zip(heights) {
        for (at, line) in (0..).zip(name) {
            drawing.text(MARGIN, y + at * LINE + LINE / 2, line, Style::Plain);
        }
        bar(drawing, row, &scale, across, y);
        y += height;
    }
    bottom + 2 * LINE + GAP
}

/// Draws the title of a section, and what its bars are. Returns the place below.
fn legend(drawing: &mut Drawing, section: &BarSection<'_>, scale: &Scale, top: i32) -> i32 {
    let mut title = format!("{}{}", section.unit.name(), reading(section.unit, scale));
    if section.has_intervals {
        title.push_str(", with the interval of 95 %");
    }
    drawing.text(MARGIN, top + LINE / 2, &title, Style::Strong);
    let y = top + LINE + GAP;
    if section.rows.iter().all(|row| row.peer.is_none()) {
        return y;
    }
    let mut x = MARGIN;
    for (text, is_peer) in [
        ("the row", false),
        ("its peer in the same run; × is the row's time over the peer's", true),
    ] {
        let (from, to) = ((x, y + 2), (x + 24, y + 2 + BAR));
        if is_peer {
            drawing.hatched(from, to, PEER);
        } else {
            drawing.area(from, to, OWN);
        }
        drawing.text(x + 30, y + 2 + BAR / 2, text, Style::Plain);
        x += 30 + Style::Plain.width(text) + 18;
    }
    y + LINE + GAP
}

/// Draws the ticks of an axis and their lines.
fn grid(
    drawing: &mut Drawing,
    scale: &Scale,
    unit: Unit,
    across: (i32, i32),
    (top, bottom): (i32, i32),
) {
    let mut free = i32::MIN;
    for value in scale.ticks(TICKS) {
        let x = scale.place(value, across);
        drawing.path(&[(x, top), (x, bottom)], GRID, 1);
        let text = tick(unit, value);
        let half = Style::Plain.width(&text) / 2 + 4;
        // A label that would touch the one before is left out, and its line stays.
        if x - half >= free {
            drawing.centred(x, bottom + LINE / 2 + 2, &text);
            free = x + half;
        }
    }
    let origin = scale.origin(across);
    drawing.path(&[(origin, top), (origin, bottom)], INK, 1);
}

/// Draws the bar of a row and that of its peer.
fn bar(drawing: &mut Drawing, row: &Row, scale: &Scale, across: (i32, i32), top: i32) {
    let unit = row.unit;
    let origin = scale.origin(across);
    let span = |ns: f64| {
        let place = scale.place(unit.on_axis(ns), across);
        // Every figure has a bar of a pixel at least.
        if place < origin { (place, origin) } else { (origin, place.max(origin + 1)) }
    };
    let middle = top + LINE / 2;
    let mut text = figure(unit, row.ns);
    let mut end = origin;
    if unit.value(row.ns).is_finite() {
        let (from, to) = span(row.ns);
        drawing.area((from, middle - BAR / 2), (to, middle + BAR / 2), OWN);
        end = to;
    }
    if let Some([least, most]) = row.interval {
        let ends = [least, most].map(|ns| scale.place(unit.on_axis(ns), across));
        if least.is_finite() && most.is_finite() {
            drawing.path(&[(ends[0], middle), (ends[1], middle)], INK, 2);
            for x in ends {
                drawing.path(&[(x, middle - 4), (x, middle + 4)], INK, 2);
            }
            end = end.max(ends[0]).max(ends[1]);
        }
        text.push_str(&format!(" [{} … {}]", figure(unit, least), figure(unit, most)));
    }
    if let Some(ratio) = row.ratio().filter(|ratio| ratio.is_finite()) {
        text.push_str(&format!(" · {}", times(ratio)));
    }
    drawing.text(end + 6, middle, &text, Style::Plain);
    let Some(peer) = &row.peer else { return };
    let middle = middle + LINE;
    let mut end = origin;
    if unit.value(peer.ns).is_finite() {
        let (from, to) = span(peer.ns);
        drawing.hatched((from, middle - BAR / 2), (to, middle + BAR / 2), PEER);
        end = to;
    }
    let text = format!("{} · {}", figure(unit, peer.ns), shown(&peer.name));
    let [x, mut y] = [end + 6, middle];
    for line in lines(&text, NAME) {
        drawing.text(x, y, &line, Style::Plain);
        y += LINE;
    }
}
