//! The page: one HTML file with its data, which needs no network.
//!
//! # Its files, in the order in which they are put together
//! [`TEMPLATE`] holds three markers. `/*STYLE*/` is replaced by [`STYLE`], `/*SCRIPT*/` by
//! [`SCRIPT`], and `<!--DATA-->`, which stands in the element for the data already, by base64 text.
//! The tests of the page read the order from here.
//!
//! | file in `script` | what it does |
//! |---|---|
//! | `payload.js` | opens the data and checks it |
//! | `words.js`, `elements.js` | figures as text; elements and tables that sort |
//! | `state.js` | what the parts share: the view, the cursor, the instant, the selected block |
//! | `groups.js` | groupings of blocks, their colours and patterns |
//! | `sample.js`, `raster.js`, `find.js` | curves for the columns of the screen; blocks as pixels; blocks at a place |
//! | `bands.js` | merged blocks: the cells of a page, their pixels, a cell at a place |
//! | `gestures.js`, `keys.js`, `glyphs.js` | the wheel and clicks; the keyboard; shapes of markers |
//! | `curves.js`, `map.js`, `block.js` | bytes over time; addresses over time; the selected block |
//! | `instant.js` | what lives at an instant |
//! | `summary.js`, `comparison.js`, `markers.js` | the head, where the memory was; two runs; failures and events |
//! | `main.js` | begins, and says what goes wrong |

use super::{
    data::{self, ReportRun},
    selection::BlockSelection,
};
use crate::error::CommandError;
use base64::{Engine, engine::general_purpose::STANDARD};
use flate2::{Compression, write::ZlibEncoder};
use std::io::{self, Write};

/// The markup, with the markers.
const TEMPLATE: &str = include_str!("page/page.html");

/// The styles.
const STYLE: &str =
    concat!(include_str!("page/vendor/uplot-1.6.32.min.css"), "\n", include_str!("page/page.css"));

/// The script: one module. The files share its scope.
const SCRIPT: &str = concat!(
    include_str!("page/vendor/uplot-1.6.32.min.js"),
    "\n",
    include_str!("page/script/payload.js"),
    include_str!("page/script/words.js"),
    include_str!("page/script/elements.js"),
    include_str!("page/script/state.js"),
    include_str!("page/script/groups.js"),
    include_str!("page/script/sample.js"),
    include_str!("page/script/raster.js"),
    include_str!("page/script/find.js"),
    include_str!("page/script/bands.js"),
    include_str!("page/script/gestures.js"),
    include_str!("page/script/glyphs.js"),
    include_str!("page/script/curves.js"),
    include_str!("page/script/map.js"),
    include_str!("page/script/block.js"),
    include_str!("page/script/instant.js"),
    include_str!("page/script/summary.js"),
    include_str!("page/script/comparison.js"),
    include_str!("page/script/markers.js"),
    include_str!("page/script/keys.js"),
    include_str!("page/script/main.js"),
);

/// Bytes of a page that a block takes at the least, after compression.
const LEAST_PER_BLOCK: usize = 12;
/// Bytes of a block before compression.
const RAW_PER_BLOCK: usize = 72;
/// The most cells of the bands of merged blocks.
const MOST_CELLS: usize = 1 << 18;
/// Bytes of a page for each cell.
const PAGE_PER_CELL: usize = 40;
/// Bytes of a cell before compression.
const RAW_PER_CELL: usize = 5;
/// The part of the room for blocks that is used, since small blocks compress worse.
const MARGIN: f64 = 0.95;

/// A page, before it is written.
#[derive(Debug)]
pub(crate) struct ReportPage {
    data: String,
    /// Blocks that are merged into bands.
    pub(crate) merged: usize,
}

impl ReportPage {
    /// Makes a page of at most `most` bytes. The smallest blocks are merged until it fits.
    ///
    /// # Errors
    /// [`CommandError::PageTooLarge`] if it does not fit without any block.
    pub(crate) fn of(runs: &[ReportRun], most: u64) -> Result<Self, CommandError> {
        let fixed = (TEMPLATE.len() + STYLE.len() + SCRIPT.len()) as u64;
        let all: usize = runs.iter().map(|run| run.history.blocks.len()).sum();
        let room = most.saturating_sub(fixed) as usize;
        let mut kept = all.min(room / LEAST_PER_BLOCK);
        let mut cells = (room / PAGE_PER_CELL / runs.len().max(1)).min(MOST_CELLS);
        // The finest level of the curves that is written.
        let mut finest = 0;
        let sets = || runs.iter().flat_map(|run| run.analysis.curve_sets());
        let levels = sets().map(|curves| curves.levels.len()).max().unwrap_or(0);
        loop {
            let page = Self::with(runs, kept, finest, cells)?;
            let bytes = fixed + page.data.len() as u64;
            if bytes <= most {
                return Ok(page);
            }
            // Curves that outweigh the blocks lose a level first.
            let curves: usize = sets().map(|curves| curves.bytes_from(finest)).sum();
            if finest + 1 < levels && curves > kept * RAW_PER_BLOCK {
                finest += 1;
                continue;
            }
            let least = fixed + Self::with(runs, 0, finest, cells)?.data.len() as u64;
            match most.checked_sub(least) {
                // Of curves and bands the larger gives way first.
                None if cells * RAW_PER_CELL > curves => cells /= 4,
                None if finest + 1 < levels => finest += 1,
                None if cells > 0 => cells /= 4,
                None => return Err(CommandError::PageTooLarge { least, most }),
                Some(room) => {
                    let for_blocks = bytes.saturating_sub(least).max(1);
                    let part = room as f64 / for_blocks as f64 * MARGIN;
                    // Fewer each time, so that this ends: a page without blocks has room.
                    kept = ((kept as f64 * part) as usize).min(kept.saturating_sub(1));
                }
            }
        }
    }

    /// Makes a page with `kept` blocks, the levels of the curves from `finest` on, and bands of at
    /// most `cells` cells for each run.
    fn with(
        runs: &[ReportRun],
        kept: usize,
        finest: usize,
        cells: usize,
    ) -> Result<Self, CommandError> {
        let all: usize = runs.iter().map(|run| run.history.blocks.len()).sum();
        let selections: Vec<_> = runs
            .iter()
            .map(|run| {
                // Each run has its part of the blocks, which is no more than it has.
                let own = run.history.blocks.len();
                let part = own as u128 * kept as u128 / all.max(1) as u128;
                BlockSelection::largest(&run.history, part as usize, cells)
            })
            .collect();
        let data =
            encode(&data::payload(runs, &selections, finest)).map_err(CommandError::Compress)?;
        let bands = selections.iter().filter_map(|selection| selection.bands.as_ref());
        Ok(Self { data, merged: bands.map(|bands| bands.count).sum() })
    }

    /// Writes the page.
    ///
    /// # Errors
    /// The error of the writer.
    pub(crate) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut parts =
            [("/*STYLE*/", STYLE), ("/*SCRIPT*/", SCRIPT), ("<!--DATA-->", self.data.as_str())];
        parts.sort_by_key(|(marker, _)| TEMPLATE.find(marker));
        let mut rest = TEMPLATE;
        for (marker, text) in parts {
            // A test holds that the template has all markers.
            let (before, after) = rest.split_once(marker).unwrap_or((rest, ""));
            out.write_all(before.as_bytes())?;
            out.write_all(text.as_bytes())?;
            rest = after;
        }
        out.write_all(rest.as_bytes())
    }
}

/// Compresses the payload and writes it as text.
fn encode(payload: &[u8]) -> io::Result<String> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(5));
    encoder.write_all(payload)?;
    Ok(STANDARD.encode(encoder.finish()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_has_each_marker_once_and_the_data_before_the_script_that_reads_it() {
        for marker in ["/*STYLE*/", "/*SCRIPT*/", "<!--DATA-->"] {
            assert_eq!(TEMPLATE.matches(marker).count(), 1, "{marker}");
        }
        let page = ReportPage { data: "QUJD".to_owned(), merged: 0 };
        let mut html = Vec::new();
        page.write_to(&mut html).unwrap();
        let html = String::from_utf8(html).unwrap();
        assert!(html.contains(STYLE) && html.contains(SCRIPT) && html.contains(">QUJD</script>"));
        assert_eq!(html.len(), TEMPLATE.len() + STYLE.len() + SCRIPT.len() + 4 - 30);
    }
}
