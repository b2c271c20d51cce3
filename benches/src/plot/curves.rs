//! Rows that form series, as curves over a quantity, with a table of their values.

use super::{
    bars::{figure, reading},
    drawing::{Drawing, GRID, INK, LINE, MARGIN, MARKS, PEER, Style},
    label::{columns, lines, shown},
    scale::{Scale, tick},
    series::{Curve, CurvePanel},
};
use crate::{report::times, row::Row};
use plotters::style::RGBColor;

/// Pixels of a panel's axes, without labels.
const WIDTH: i32 = 520;
const HEIGHT: i32 = 240;
const TICKS: usize = 6;
/// Columns of a curve's name. A longer one takes several lines.
const NAME: usize = 40;
/// Columns of the values in one row of the table. More values take another table below.
const VALUES: usize = 100;
/// Colours of the curves, dark enough on white. Marks tell them apart too.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 90, 160),
    RGBColor(196, 78, 0),
    RGBColor(0, 121, 84),
    RGBColor(150, 50, 125),
    RGBColor(26, 26, 26),
    RGBColor(0, 116, 150),
    RGBColor(140, 95, 0),
    RGBColor(110, 60, 170),
];

/// What stands at the end of a curve.
struct End {
    /// Where the curve ends.
    from: (i32, i32),
    /// The middle of the first line.
    y: i32,
    lines: Vec<String>,
}

/// Draws a panel and returns the place below.
pub(super) fn draw(drawing: &mut Drawing, panel: &CurvePanel<'_>, top: i32) -> i32 {
    let unit = panel.unit;
    let rows = || panel.curves.iter().flat_map(|curve| &curve.points);
    let peers = rows().filter_map(|point| point.row.peer.as_ref()).map(|peer| peer.ns);
    let figures = rows().map(|point| point.row.ns).chain(peers).map(|ns| unit.on_axis(ns));
    let up = Scale::of(figures);
    let least = rows().map(|point| point.x).fold(f64::INFINITY, f64::min);
    let most = rows().map(|point| point.x).fold(f64::NEG_INFINITY, f64::max);
    let along = Scale::of_quantities(least, most);

    let mut y = top;
    // A part that is the quantity alone says no more than the axis.
    let is_bare = panel.part == "…" || panel.part == format!("… {}", panel.what);
    let part = if is_bare { String::new() } else { format!("{}: ", shown(&panel.part)) };
    let title = format!("{part}{} over {}{}", unit.name(), panel.what, reading(unit, &up));
    for line in lines(&title, VALUES) {
        drawing.text(MARGIN, y + LINE / 2, &line, Style::Strong);
        y += LINE;
    }
    y += LINE / 2;

    let labels: Vec<(f64, String)> =
        up.ticks(TICKS).into_iter().map(|value| (value, tick(unit, value))).collect();
    let widest = labels.iter().map(|(_, text)| Style::Plain.width(text)).max().unwrap_or(0);
    let left = MARGIN + widest + 10;
    let across = (left, left + WIDTH);
    let mut ends = Vec::new();
    let height = HEIGHT.max(LINE * end_lines(panel) + LINE);
    let upward = (y + height, y);
    for (value, text) in labels {
        let place = up.place(value, upward);
        drawing.path(&[(left, place), (across.1, place)], GRID, 1);
        drawing.text(left - 8 - Style::Plain.width(&text), place, &text, Style::Plain);
    }
    ticks_along(drawing, panel, &along, across, upward);
    drawing.path(&[(left, upward.1), (left, upward.0), (across.1, upward.0)], INK, 1);

    // Peers are under the curves. Those of one name have one label, at the first of them.
    let mut named: Vec<&str> = Vec::new();
    for curve in &panel.curves {
        for name in peer_names(curve) {
            let path = path_of(curve, &along, &up, across, upward, |row| {
                row.peer.as_ref().filter(|peer| peer.name == name).map(|peer| peer.ns)
            });
            drawing.dashed(&path, PEER);
            for &(x, y) in &path {
                drawing.area((x - 1, y - 1), (x + 2, y + 2), PEER);
            }
            if let Some(&from) = path.last().filter(|_| !named.contains(&name)) {
                named.push(name);
                let lines = lines(&shown(&format!("beside {name}, dashed")), NAME);
                ends.push(End { from, y: from.1, lines });
            }
        }
    }
    for (at, curve) in panel.curves.iter().enumerate() {
        let (colour, mark) = (COLOURS[at % COLOURS.len()], MARKS[at % MARKS.len()]);
        let path = path_of(curve, &along, &up, across, upward, |row| Some(row.ns));
        drawing.path(&path, colour, 2);
        path.iter().for_each(|&point| drawing.mark(point, mark, colour));
        if let Some(&from) = path.last() {
            ends.push(End { from, y: from.1, lines: lines(&shown(&curve.name), NAME) });
        }
    }
    name_ends(drawing, ends, across.1, (upward.1, upward.0));
    table(drawing, panel, upward.0 + 2 * LINE + LINE / 2)
}

/// Returns how many lines the names at the ends of all curves take.
fn end_lines(panel: &CurvePanel<'_>) -> i32 {
    let mut named: Vec<String> = panel.curves.iter().map(|curve| shown(&curve.name)).collect();
    for name in panel.curves.iter().flat_map(|curve| peer_names(curve)) {
        let text = shown(&format!("beside {name}, dashed"));
        if !named.contains(&text) {
            named.push(text);
        }
    }
    named.iter().map(|name| lines(name, NAME).len() as i32).sum()
}

/// Returns the names of a curve's peers, each once.
fn peer_names<'r>(curve: &Curve<'r>) -> Vec<&'r str> {
    let mut names = Vec::new();
    for peer in curve.points.iter().filter_map(|point| point.row.peer.as_ref()) {
        if !names.contains(&&*peer.name) {
            names.push(&*peer.name);
        }
    }
    names
}

/// Returns the places of a curve's figures.
fn path_of(
    curve: &Curve<'_>,
    along: &Scale,
    up: &Scale,
    across: (i32, i32),
    upward: (i32, i32),
    figure: impl Fn(&Row) -> Option<f64>,
) -> Vec<(i32, i32)> {
    let place = |point: &super::series::CurvePoint<'_>| {
        let value = point.row.unit.on_axis(figure(point.row)?);
        value.is_finite().then(|| (along.place(point.x, across), up.place(value, upward)))
    };
    curve.points.iter().filter_map(place).collect()
}

/// Draws a tick for each quantity. A label that would touch the one before is left out: all
/// quantities stand in the table.
fn ticks_along(
    drawing: &mut Drawing,
    panel: &CurvePanel<'_>,
    along: &Scale,
    across: (i32, i32),
    (bottom, top): (i32, i32),
) {
    let mut free = i32::MIN;
    for (value, text) in quantities(panel) {
        let x = along.place(value, across);
        drawing.path(&[(x, top), (x, bottom + 4)], GRID, 1);
        let half = Style::Plain.width(&text) / 2 + 4;
        if x - half >= free {
            drawing.centred(x, bottom + LINE, &text);
            free = x + half;
        }
    }
}

/// Returns all quantities of a panel, rising.
fn quantities(panel: &CurvePanel<'_>) -> Vec<(f64, String)> {
    let points = panel.curves.iter().flat_map(|curve| &curve.points);
    let mut all: Vec<_> = points.map(|point| (point.x, point.text.clone())).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.dedup_by(|a, b| a.0 == b.0);
    all
}

/// Writes the names at the ends of curves, one below the other, near the ends.
fn name_ends(drawing: &mut Drawing, mut ends: Vec<End>, right: i32, (top, bottom): (i32, i32)) {
    // The sort is stable, so curves that end together keep their order.
    ends.sort_by_key(|end| end.y);
    let tall = |end: &End| LINE * end.lines.len() as i32;
    let mut free = top;
    for end in &mut ends {
        end.y = end.y.max(free + LINE / 2);
        free = end.y - LINE / 2 + tall(end);
    }
    // Those that were pushed out go back, and push others up.
    let mut limit = bottom.max(top + ends.iter().map(tall).sum::<i32>());
    for end in ends.iter_mut().rev() {
        end.y = end.y.min(limit - tall(end) + LINE / 2);
        limit = end.y - LINE / 2;
    }
    for end in &ends {
        drawing.path(&[(end.from.0 + 6, end.from.1), (right + 22, end.y)], GRID, 1);
        for (at, line) in (0..).zip(&end.lines) {
            drawing.text(right + 26, end.y + at * LINE, line, Style::Plain);
        }
    }
}

/// Writes the values of all curves and their peers. Returns the place below.
fn table(drawing: &mut Drawing, panel: &CurvePanel<'_>, mut top: i32) -> i32 {
    let quantities = quantities(panel);
    let mut records: Vec<(Option<usize>, String, Vec<String>)> = Vec::new();
    for (at, curve) in panel.curves.iter().enumerate() {
        let row_at = |x: f64| curve.points.iter().find(|point| point.x == x).map(|point| point.row);
        let own = |row: &Row| {
            let ratio = row.ratio().filter(|ratio| ratio.is_finite());
            let ratio = ratio.map_or(String::new(), |ratio| format!(" · {}", times(ratio)));
            format!("{}{ratio}", figure(row.unit, row.ns))
        };
        let cells = |text: &dyn Fn(&Row) -> Option<String>| {
            quantities.iter().map(|(x, _)| row_at(*x).and_then(text).unwrap_or_default()).collect()
        };
        records.push((Some(at), shown(&curve.name), cells(&|row| Some(own(row)))));
        for name in peer_names(curve) {
            let peer = |row: &Row| {
                let peer = row.peer.as_ref().filter(|peer| peer.name == name)?;
                Some(figure(row.unit, peer.ns))
            };
            // Curves beside the same figures share the line.
            let record = (None, shown(&format!("beside {name}")), cells(&peer));
            if !records.contains(&record) {
                records.push(record);
            }
        }
    }
    let names: Vec<Vec<String>> = records.iter().map(|(_, name, _)| lines(name, NAME)).collect();
    let widest = names.iter().flatten().map(|line| Style::Plain.width(line)).max().unwrap_or(0);
    let left = MARGIN + 20 + widest + 16;
    let all = records.iter().flat_map(|(_, _, cells)| cells);
    let wide = all.chain(quantities.iter().map(|(_, text)| text)).map(|text| columns(text));
    let wide = wide.max().unwrap_or(0) + 2;
    let pixels = Style::Plain.width(&" ".repeat(wide));
    let per_table = (VALUES / wide).max(1);
    for from in (0..quantities.len()).step_by(per_table) {
        let shown_here = from..(from + per_table).min(quantities.len());
        drawing.text(MARGIN + 20, top + LINE / 2, panel.what, Style::Strong);
        for (at, column) in (0..).zip(shown_here.clone()) {
            let x = left + at * pixels;
            drawing.text(x, top + LINE / 2, &quantities[column].1, Style::Strong);
        }
        top += LINE + 2;
        for ((mark, _, cells), name) in records.iter().zip(&names) {
            if let Some(at) = *mark {
                let (colour, mark) = (COLOURS[at % COLOURS.len()], MARKS[at % MARKS.len()]);
                drawing.mark((MARGIN + 6, top + LINE / 2), mark, colour);
            }
            for (at, line) in (0..).zip(name) {
                drawing.text(MARGIN + 20, top + at * LINE + LINE / 2, line, Style::Plain);
            }
            for (at, cell) in (0..).zip(&cells[shown_here.clone()]) {
                if !cell.is_empty() {
                    drawing.text(left + at * pixels, top + LINE / 2, cell, Style::Plain);
                }
            }
            top += LINE * name.len() as i32 + 2;
        }
        top += LINE / 2;
    }
    top + LINE / 2
}
