//! Rows of a result on the screen: a label, a figure and a remark, in 80 columns.

use aquifer_console::layout::wrap;

/// Columns of the screen.
pub(crate) const WIDTH: usize = 80;
/// Columns before the remark of a row.
pub(crate) const REMARK: usize = 32;

/// Adds a row with a label, a figure and a remark. The remark may continue in the next line. It is
/// not broken at a no-break space.
pub(crate) fn row(lines: &mut Vec<String>, label: &str, figure: &str, remark: &str) {
    let mut remarks =
        wrap(remark, WIDTH - REMARK).into_iter().map(|line| line.replace('\u{a0}', " "));
    let first = remarks.next().unwrap_or_default();
    lines.push(format!("  {label:<15} {figure:>12}  {first}").trim_end().to_owned());
    lines.extend(remarks.map(|more| format!("{:REMARK$}{more}", "")));
}
