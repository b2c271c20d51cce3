//! Which blocks a page shows one by one: all, or the largest, if it would be too large.

use super::bands::BandGrid;
use aquifer_core::Bytes;
use aquifer_formats::history::{HistoryAction, MemoryHistory};
use std::cmp::Reverse;

/// The most points of the level of blocks that are not shown.
const MOST_POINTS: usize = 1 << 12;

/// The blocks that a page shows.
#[derive(Debug)]
pub(crate) struct BlockSelection {
    /// The shown blocks, in order of allocation.
    pub(crate) kept: Vec<u32>,
    /// The others, if there are any.
    pub(crate) bands: Option<MergedBlocks>,
}

/// The blocks that a page shows as one level over time, and as bands of the address map.
#[derive(Debug)]
pub(crate) struct MergedBlocks {
    /// All of them have fewer bytes.
    pub(crate) below: u64,
    /// Their number.
    pub(crate) count: usize,
    /// Times, and the most bytes of them that were allocated until the next one.
    pub(crate) times: Vec<f64>,
    /// See `times`.
    pub(crate) live: Vec<f64>,
    /// Where they are, if there is room for it.
    pub(crate) grid: Option<BandGrid>,
}

impl MergedBlocks {
    /// Returns the note for the reader of the page.
    pub(crate) fn note(&self) -> String {
        format!(
            "the {} smallest blocks, each below {}, are merged into bands to keep this file small: \
             --max-page shows more",
            self.count,
            Bytes(self.below)
        )
    }
}

impl BlockSelection {
    /// Selects the `most` largest blocks. Among equals the earlier are larger. The others get bands
    /// of at most `cells` cells.
    pub(crate) fn largest(history: &MemoryHistory, most: usize, cells: usize) -> Self {
        let blocks = &history.blocks;
        // The number of a block fits: a history has fewer.
        let mut kept: Vec<u32> = (0..blocks.len() as u32).collect();
        if kept.len() <= most {
            return Self { kept, bands: None };
        }
        let rank = |block: &u32| (Reverse(blocks.bytes[*block as usize]), *block);
        kept.select_nth_unstable_by_key(most, rank);
        let count = kept.len() - most;
        let below = kept[most..].iter().map(|block| blocks.bytes[*block as usize] + 1).max();
        let grid = BandGrid::of(history, &kept[most..], cells);
        kept.truncate(most);
        kept.sort_unstable();
        let mut is_kept = vec![false; blocks.len()];
        kept.iter().for_each(|block| is_kept[*block as usize] = true);
        debug_assert_eq!(kept.len() + count, blocks.len());
        let (times, live) = level(history, &is_kept);
        let below = below.unwrap_or(0);
        Self { kept, bands: Some(MergedBlocks { below, count, times, live, grid }) }
    }
}

/// Returns the allocated bytes of the blocks that are not kept over time.
fn level(history: &MemoryHistory, is_kept: &[bool]) -> (Vec<f64>, Vec<f64>) {
    let (mut times, mut levels, mut live) = (Vec::new(), Vec::new(), 0_u64);
    for step in history.steps.iter().filter(|step| step.action() != HistoryAction::Mark) {
        let block = step.index();
        if is_kept[block] {
            continue;
        }
        match step.action() {
            HistoryAction::Allocate => live += history.blocks.bytes[block],
            HistoryAction::Free | HistoryAction::Release => live -= history.blocks.bytes[block],
            HistoryAction::Complete | HistoryAction::Mark => continue,
        }
        times.push(history.time(*step));
        levels.push(live as f64);
    }
    let by = times.len().div_ceil(MOST_POINTS).max(1);
    let most = |part: &[f64]| part.iter().copied().fold(0.0, f64::max);
    (times.iter().step_by(by).copied().collect(), levels.chunks(by).map(most).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_blocks_stay_and_the_level_has_the_bytes_of_all_others() {
        let rows = "t_us,op,id,bytes,stream\n0,a,1,10,0\n1,a,2,500,0\n2,a,3,10,0\n3,a,4,30,0\n4,f,3,10,0\n4,c,3,10,0\n";
        let history = MemoryHistory::from_reader(rows.as_bytes(), None).unwrap();
        let all = BlockSelection::largest(&history, 4, 64);
        assert!(all.kept == [0, 1, 2, 3] && all.bands.is_none());
        let two = BlockSelection::largest(&history, 2, 64);
        let bands = two.bands.unwrap();
        assert_eq!((two.kept, bands.below, bands.count), (vec![1, 3], 11, 2));
        let grid = bands.grid.unwrap();
        assert_eq!((grid.rows.len(), grid.columns, grid.counts[0], grid.counts[7]), (2, 8, 1, 2));
        assert_eq!((bands.times, bands.live), (vec![0.0, 2.0, 4.0], vec![10.0, 20.0, 10.0]));
        // Of equal blocks the first stays.
        assert_eq!(BlockSelection::largest(&history, 3, 0).kept, [0, 1, 3]);
    }
}
