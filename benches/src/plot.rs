//! Pictures of runs, as SVG: bars beside the peers, and curves for rows that form a series.
//!
//! A picture is drawn from the JSON of a run alone ([`BenchRun`]), so a run that was kept gives the
//! same picture as the command that measured it, byte for byte.
//!
//! | module | contents |
//! |---|---|
//! | `run` | a run, read from its JSON |
//! | `series` | which rows form curves, by their names |
//! | `scale` | axes |
//! | `label` | text: what is not shown as it is, its width, its lines |
//! | `drawing` | shapes, and the SVG |
//! | `bars`, `curves` | the two kinds of sections |
//! | `file` | the file of a picture |
//!
//! - Every row's value is written as text. A row of bars also has its whole name. The name of a row
//!   of a curve is the curve's name and the column of its value in the table below.
//! - Nothing is told by colour alone: peers are hatched or dashed, and each curve has its own mark
//!   and its name at its end.
//! - The picture has a background of its own, and is as large as its text needs.

mod bars;
mod curves;
mod drawing;
mod file;
mod label;
mod run;
mod scale;
mod series;
#[cfg(test)]
mod tests;

pub use file::PictureFile;
pub use run::{BenchRun, PlotError};

use drawing::{Drawing, LINE, MARGIN, Style};
use label::{lines, shown};

/// Columns of a paragraph.
const PARAGRAPH: usize = 100;

/// Draws runs, one below the other, and returns the SVG.
///
/// ```
/// use aquifer_benches::{BenchRun, picture};
///
/// let run = BenchRun::parse(r#"{"bench": "budget", "device_name": "none", "rows": [
///     {"name": "charge + release", "value": 5.0, "unit": "ns/pair", "peer": "malloc", "peer_value": 8.7}
/// ]}"#)?;
/// let svg = picture(&[run])?;
/// assert!(svg.contains("charge + release") && svg.contains("5.00 ns/pair"));
/// # Ok::<(), aquifer_benches::PlotError>(())
/// ```
///
/// # Errors
/// [`PlotError::NoRow`] if no run has a row.
pub fn picture(runs: &[BenchRun]) -> Result<String, PlotError> {
    if runs.iter().all(|run| run.rows.is_empty()) {
        return Err(PlotError::NoRow);
    }
    let mut drawing = Drawing::default();
    let mut top = MARGIN;
    for run in runs {
        top = head(&mut drawing, run, top);
        let (plain, panels) = series::split(&run.rows);
        for section in bars::sections(&plain) {
            top = bars::draw(&mut drawing, &section, top);
        }
        for panel in &panels {
            top = curves::draw(&mut drawing, panel, top);
        }
    }
    Ok(drawing.to_svg())
}

/// Draws what was measured, where and when. Returns the place below.
fn head(drawing: &mut Drawing, run: &BenchRun, mut top: i32) -> i32 {
    for line in lines(&shown(&run.title()), PARAGRAPH) {
        drawing.text(MARGIN, top + LINE / 2, &line, Style::Title);
        top += LINE + 4;
    }
    for text in [Some(run.machine()), run.note.clone()].into_iter().flatten() {
        for line in lines(&shown(&text), PARAGRAPH) {
            drawing.text(MARGIN, top + LINE / 2, &line, Style::Plain);
            top += LINE;
        }
    }
    top + LINE / 2
}
