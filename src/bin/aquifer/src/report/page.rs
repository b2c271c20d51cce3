//! The page: one HTML file with its data, which needs no network.

mod files;

use super::{
    data::{self, ReportRun},
    selection::BlockSelection,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use files::{SCRIPT, STYLE, TEMPLATE};
use flate2::{Compression, write::ZlibEncoder};
use std::{
    fmt,
    io::{self, Write},
};

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

/// Why there is no page.
#[derive(Debug)]
pub(crate) enum PageError {
    /// Even without blocks it is larger than its limit.
    TooLarge {
        /// Its bytes without blocks.
        least: u64,
        /// The limit.
        most: u64,
    },
    /// The data cannot be compressed.
    Compress(io::Error),
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { least, most } => {
                write!(f, "the page has {least} bytes without any block; --max-page is {most}")
            }
            Self::Compress(e) => write!(f, "the data of the page cannot be compressed: {e}"),
        }
    }
}

impl ReportPage {
    /// Makes a page of at most `most` bytes. The smallest blocks are merged until it fits.
    ///
    /// # Errors
    /// [`PageError::TooLarge`] if it does not fit without any block.
    pub(crate) fn of(runs: &[ReportRun], most: u64) -> Result<Self, PageError> {
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
                None => return Err(PageError::TooLarge { least, most }),
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
    ) -> Result<Self, PageError> {
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
            encode(&data::payload(runs, &selections, finest)).map_err(PageError::Compress)?;
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
