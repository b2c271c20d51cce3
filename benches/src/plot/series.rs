//! Which rows form curves.
//!
//! Rows form a curve if their names differ by one quantity only (`4 threads`, `10,000 holes`,
//! `64 KiB`, `×16`), if they have the same unit, and if there are at least three of them. Curves
//! over the same quantity in the same part of the name stand in one panel. A row with a confidence
//! interval stays a bar.

use crate::row::{Row, Unit};

/// The fewest points of a curve.
const POINTS: usize = 3;
/// The most curves of a panel: as many as there are marks.
const CURVES: usize = 8;

/// What can be counted in a name, one and many, in the order in which curves are looked for.
const COUNTED: [(&str, &str); 8] = [
    ("thread", "threads"),
    ("hole", "holes"),
    ("worker", "workers"),
    ("device", "devices"),
    ("level", "levels"),
    ("stream", "streams"),
    ("peer", "peers"),
    ("shard", "shards"),
];
const BYTES: [(&str, f64); 5] = [
    ("B", 1.0),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
];
/// What `×16` counts in the rows of `bench global`, and what sizes are called.
const TIMES: &str = "threads";
const SIZE: &str = "bytes";

/// A quantity in a name.
#[derive(Clone, PartialEq, Debug)]
struct Quantity {
    /// What is counted, in the plural.
    what: &'static str,
    value: f64,
    /// As it stands in the name: `64 KiB`, and `4` of `4 threads`.
    text: String,
    /// The name with an ellipsis in its place.
    template: String,
}

/// One row as the point of a curve.
#[derive(Clone, Debug)]
pub(super) struct CurvePoint<'r> {
    pub(super) x: f64,
    /// The quantity as text.
    pub(super) text: String,
    pub(super) row: &'r Row,
}

/// The rows that differ by one quantity.
#[derive(Clone, Debug)]
pub(super) struct Curve<'r> {
    pub(super) name: String,
    /// By rising quantity.
    pub(super) points: Vec<CurvePoint<'r>>,
}

/// Curves over the same quantity with one unit.
#[derive(Clone, Debug)]
pub(super) struct CurvePanel<'r> {
    pub(super) unit: Unit,
    /// What stands along the axis: `threads`.
    pub(super) what: &'static str,
    /// The part of the names with the quantity.
    pub(super) part: String,
    pub(super) curves: Vec<Curve<'r>>,
}

/// Splits rows into those for bars, and panels of curves. Both keep the order of the rows.
pub(super) fn split(rows: &[Row]) -> (Vec<&Row>, Vec<CurvePanel<'_>>) {
    let mut rest: Vec<&Row> = rows.iter().collect();
    let mut found: Vec<(Quantity, Curve<'_>)> = Vec::new();
    let mut kinds: Vec<&'static str> = Vec::new();
    for quantity in rows.iter().flat_map(|row| quantities(&row.name)) {
        if !kinds.contains(&quantity.what) {
            kinds.push(quantity.what);
        }
    }
    kinds.sort_by_key(|&what| rank(what));
    for what in kinds {
        // Groups by name and unit, in the order of their first rows.
        let mut groups: Vec<(Quantity, Curve<'_>)> = Vec::new();
        for &row in rest.iter().filter(|row| row.interval.is_none() && row.value().is_finite()) {
            for quantity in quantities(&row.name).into_iter().filter(|q| q.what == what) {
                let point = CurvePoint { x: quantity.value, text: quantity.text.clone(), row };
                let group = groups.iter_mut().find(|(of, curve)| {
                    of.template == quantity.template
                        && curve.points.first().is_some_and(|first| first.row.unit == row.unit)
                });
                match group {
                    Some((_, curve)) => curve.points.push(point),
                    None => {
                        let name = without_part(&quantity.template).1;
                        groups.push((quantity, Curve { name, points: vec![point] }));
                    }
                }
            }
        }
        for (quantity, mut curve) in groups {
            curve.points.sort_by(|a, b| a.x.total_cmp(&b.x));
            let is_curve = curve.points.len() >= POINTS
                && curve.points.windows(2).all(|pair| pair[0].x < pair[1].x)
                // A row may be in two groups, and belongs to the first that is a curve.
                && curve.points.iter().all(|point| rest.iter().any(|row| is_same(row, point.row)));
            if is_curve {
                rest.retain(|row| !curve.points.iter().any(|point| is_same(row, point.row)));
                found.push((quantity, curve));
            }
        }
    }
    (rest, panels(found))
}

/// Returns whether both are the same row, and not only equal.
fn is_same(a: &Row, b: &Row) -> bool {
    std::ptr::eq(a, b)
}

fn panels(found: Vec<(Quantity, Curve<'_>)>) -> Vec<CurvePanel<'_>> {
    let mut panels: Vec<CurvePanel<'_>> = Vec::new();
    for (Quantity { what, template, .. }, curve) in found {
        let Some(unit) = curve.points.first().map(|point| point.row.unit) else { continue };
        let part = without_part(&template).0;
        let panel = panels
            .iter_mut()
            .find(|panel| (panel.unit, panel.what, &panel.part) == (unit, what, &part));
        match panel {
            Some(panel) => panel.curves.push(curve),
            None => panels.push(CurvePanel { unit, what, part, curves: vec![curve] }),
        }
    }
    panels.into_iter().flat_map(divided).collect()
}

/// Divides a panel with too many curves into as few as possible, of about the same number.
fn divided<'r>(panel: CurvePanel<'r>) -> Vec<CurvePanel<'r>> {
    let count = panel.curves.len().div_ceil(CURVES).max(1);
    let each = panel.curves.len().div_ceil(count).max(1);
    let part = |curves: &[Curve<'r>]| CurvePanel { curves: curves.to_vec(), ..panel.clone() };
    panel.curves.chunks(each).map(part).collect()
}

/// Returns the part of a template with the ellipsis, and the parts around it. A template of one
/// part is its own name.
fn without_part(template: &str) -> (String, String) {
    let (with, without): (Vec<&str>, Vec<&str>) =
        template.split(", ").partition(|part| part.contains('…'));
    let name = if without.is_empty() { template.to_owned() } else { without.join(", ") };
    (with.join(", "), name)
}

/// Returns the place of what is counted in the order in which curves are looked for.
fn rank(what: &str) -> usize {
    COUNTED.iter().position(|(_, many)| *many == what).unwrap_or(COUNTED.len())
}

/// Returns the quantities in a name, from the left.
fn quantities(name: &str) -> Vec<Quantity> {
    let mut found = Vec::new();
    let mut end = 0;
    for (at, c) in name.char_indices() {
        // The end of the number before, and a digit in the middle of a word.
        let is_first = at >= end
            && c.is_ascii_digit()
            && !name[..at].ends_with(|before: char| before.is_alphanumeric() || before == '.');
        if !is_first {
            continue;
        }
        let digits = name[at..].find(|c: char| !c.is_ascii_digit() && c != ',');
        let number =
            name[at..digits.map_or(name.len(), |digits| at + digits)].trim_end_matches(',');
        end = at + number.len();
        let Some(value) =
            number.replace(',', "").parse::<f64>().ok().filter(|value| (1.0..1e15).contains(value))
        else {
            continue;
        };
        let word = name[end..].strip_prefix(' ').unwrap_or("");
        let word = &word[..word.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(word.len())];
        let quantity = |what, value, from: usize, to: usize, text: &str| Quantity {
            what,
            value,
            text: text.to_owned(),
            template: format!("{}…{}", &name[..from], &name[to..]),
        };
        let after = end + 1 + word.len();
        if let Some((_, unit)) = BYTES.iter().find(|(unit, _)| *unit == word) {
            found.push(quantity(SIZE, value * unit, at, after, &name[at..after]));
        } else if let Some(what) = plural(word) {
            // In the template the noun is in the plural, for one as for many.
            let template = format!("{}… {what}{}", &name[..at], &name[after..]);
            let text = number.to_owned();
            found.push(Quantity { what, value, text, template });
        } else if name[..at].ends_with('×') {
            found.push(quantity(TIMES, value, at, end, number));
        }
    }
    found
}

/// Returns the plural of a noun that is counted, from its singular or plural.
fn plural(word: &str) -> Option<&'static str> {
    COUNTED.iter().find(|(one, many)| [*one, *many].contains(&word)).map(|(_, many)| *many)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(names: &[&str]) -> Vec<Row> {
        let row = |name: &&str| Row {
            name: (*name).to_owned(),
            ns: 5.0,
            unit: Unit::NsPerPair,
            peer: None,
            interval: None,
        };
        names.iter().map(row).collect()
    }

    #[test]
    fn quantities_are_found_with_their_templates() {
        let table = [
            (
                "1 thread, 4 KiB, each",
                vec![
                    ("threads", 1.0, "… threads, 4 KiB, each"),
                    ("bytes", 4096.0, "1 thread, …, each"),
                ],
            ),
            ("past 1,000 holes", vec![("holes", 1000.0, "past … holes")]),
            (
                "system, 64 B ×16, on",
                vec![
                    ("bytes", 64.0, "system, … ×16, on"),
                    ("threads", 16.0, "system, 64 B ×…, on"),
                ],
            ),
            ("batch of 64, 1 MiB", vec![("bytes", 1_048_576.0, "batch of 64, …")]),
            ("sha256 and x4 KiBs", vec![]),
            ("0 B", vec![]),
            ("", vec![]),
        ];
        for (name, expected) in table {
            let found: Vec<_> = quantities(name)
                .into_iter()
                .map(|found| (found.what, found.value, found.template))
                .collect();
            let expected: Vec<_> =
                expected.into_iter().map(|(what, n, name)| (what, n, name.to_owned())).collect();
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn rows_over_threads_form_curves_and_others_stay() {
        let rows = rows(&[
            "pair 64 B",
            "2 threads, 4 KiB, each",
            "1 thread, 4 KiB, each",
            "4 threads, 4 KiB, each",
            "1 thread, 1 MiB, each",
            "2 threads, 1 MiB, each",
            "4 threads, 1 MiB, each",
            "16 threads, over one",
        ]);
        let (plain, panels) = split(&rows);
        assert_eq!(
            plain.iter().map(|row| &*row.name).collect::<Vec<_>>(),
            ["pair 64 B", "16 threads, over one"]
        );
        assert_eq!(panels.len(), 1);
        let curves = &panels[0].curves;
        assert_eq!((panels[0].what, &*panels[0].part), ("threads", "… threads"));
        assert_eq!(
            curves.iter().map(|curve| &*curve.name).collect::<Vec<_>>(),
            ["4 KiB, each", "1 MiB, each"]
        );
        assert_eq!(
            curves[0].points.iter().map(|point| point.x).collect::<Vec<_>>(),
            [1.0, 2.0, 4.0]
        );
    }

    #[test]
    fn rows_with_the_same_quantity_twice_or_an_interval_form_none() {
        let twice = rows(&["pair 1 B", "pair 2 B", "pair 2 B", "pair 4 B"]);
        assert_eq!(split(&twice).1.len(), 0);
        assert_eq!(split(&twice).0.len(), 4);
        let mut adds = rows(&["1 B, adds", "2 B, adds", "4 B, adds"]);
        assert_eq!(split(&adds).1.len(), 1);
        adds[1].interval = Some([1.0, 2.0]);
        assert_eq!(split(&adds).0.len(), 3);
    }

    #[test]
    fn each_row_is_drawn_once() {
        let names: Vec<String> = [1, 2, 4]
            .into_iter()
            .flat_map(|threads| {
                ["64 B", "1 KiB", "4 KiB", "1 MiB"].map(|size| format!("{threads} threads, {size}"))
            })
            .collect();
        let rows = rows(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let (plain, panels) = split(&rows);
        let points = panels.iter().flat_map(|panel| &panel.curves).flat_map(|curve| &curve.points);
        assert_eq!((plain.len(), points.count()), (0, 12));
    }

    #[test]
    fn no_panel_has_more_curves_than_there_are_marks() {
        let names: Vec<String> = (0..20)
            .flat_map(|curve| [1, 2, 4].map(|threads| format!("{threads} threads, no. {curve}")))
            .collect();
        let rows = rows(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let counts: Vec<_> = split(&rows).1.iter().map(|panel| panel.curves.len()).collect();
        assert_eq!(counts, [7, 7, 6]);
    }
}
