//! The bands of the address map: blocks that a page does not show one by one, by address and time.
//!
//! - The axis of addresses is cut into rows of equal size. Rows without such blocks are left out.
//!   The size is the smallest power of two with which the others fit.
//! - Each row is cut into columns of equal time, from the first event to the last.
//! - A cell knows how many blocks are in it at any time, and which share of its bytes × time they
//!   occupy. So the size of the grid does not depend on the number of blocks.

use aquifer_formats::history::MemoryHistory;
use std::ops::Range;

/// The most columns.
const MOST_COLUMNS: usize = 512;
/// The smallest row, the unit of the blocks of a device pool.
const SMALLEST_ROW: u64 = 512;
/// The most rows before empty ones are left out.
const FINEST_ROWS: u64 = 1 << 20;

/// Blocks by address and time.
#[derive(Debug)]
pub(crate) struct BandGrid {
    /// The bytes of a row.
    pub(crate) row_bytes: u64,
    /// The offset at which each row begins, ascending.
    pub(crate) rows: Vec<u64>,
    /// The number of columns. Above 0.
    pub(crate) columns: usize,
    /// The blocks in each cell, row by row.
    pub(crate) counts: Vec<u32>,
    /// The occupied share of each cell: 255 for all of it.
    pub(crate) shares: Vec<u8>,
}

/// Sums over the cells of a grid, as differences along each row.
struct Sums {
    columns: usize,
    counts: Vec<i32>,
    /// Bytes of blocks that fill a column.
    full: Vec<f64>,
    /// Bytes × columns of blocks that fill a part of one. Not a difference.
    part: Vec<f64>,
}

impl Sums {
    /// Adds bytes in a row from one time to another, both in columns.
    fn add(&mut self, row: usize, bytes: f64, from: f64, to: f64) {
        let last = self.columns - 1;
        let first = (from as usize).min(last);
        let end = (to.ceil() as usize).saturating_sub(1).clamp(first, last);
        let at = row * self.columns;
        self.counts[at + first] += 1;
        if end < last {
            self.counts[at + end + 1] -= 1;
        }
        if first == end {
            self.part[at + first] += bytes * (to - from);
        } else {
            self.part[at + first] += bytes * ((first + 1) as f64 - from);
            self.part[at + end] += bytes * (to - end as f64);
            self.full[at + first + 1] += bytes;
            self.full[at + end] -= bytes;
        }
    }
}

impl BandGrid {
    /// Arranges blocks in a grid of at most this many cells. Returns `None` for fewer than 64.
    pub(crate) fn of(history: &MemoryHistory, blocks: &[u32], cells: usize) -> Option<Self> {
        let columns = cells.isqrt().min(MOST_COLUMNS);
        if columns < 8 {
            return None;
        }
        let offsets = |block: u32| {
            let block = block as usize;
            let start = history.offset(history.blocks.address[block]);
            start..start.saturating_add(history.blocks.bytes[block].max(1))
        };
        let (row_bytes, places) = rows(history.address_height, blocks, offsets, cells / columns);
        let rows: Vec<u64> =
            (0_u64..).zip(&places).filter(|(_, used)| **used).map(|(row, _)| row).collect();
        let size = rows.len() * columns;
        let (counts, full, part) = (vec![0; size], vec![0.0; size], vec![0.0; size]);
        let mut sums = Sums { columns, counts, full, part };
        let whole = if history.end > 0.0 { history.end } else { 1.0 };
        let column = |time: f64| time.min(whole) * columns as f64 / whole;
        for &block in blocks {
            let index = block as usize;
            let (from, to) = (history.blocks.birth[index], history.blocks.end[index]);
            let range = offsets(block);
            let (first, last) = (range.start / row_bytes, (range.end - 1) / row_bytes);
            let begin = rows.partition_point(|row| *row < first);
            // The rows of a block are all used, so they follow each other.
            for (place, row) in (begin..rows.len()).zip(first..=last) {
                let (low, high) = (row * row_bytes, (row + 1) * row_bytes);
                let bytes = range.end.min(high) - range.start.max(low);
                sums.add(place, bytes as f64, column(from), column(to));
            }
        }
        let (mut counts, mut shares) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for row in 0..rows.len() {
            let (mut count, mut full) = (0_i32, 0.0);
            for at in row * columns..(row + 1) * columns {
                count += sums.counts[at];
                full += sums.full[at];
                let share = (full + sums.part[at]) / row_bytes as f64;
                counts.push(count.unsigned_abs());
                // A conversion of a float saturates.
                shares.push(if count == 0 { 0 } else { (share * 255.0).round() as u8 });
            }
        }
        debug_assert!(counts.len() == size && shares.len() == size, "a cell for each place");
        let rows = rows.into_iter().map(|row| row * row_bytes).collect();
        Some(Self { row_bytes, rows, columns, counts, shares })
    }
}

/// Returns the smallest size of rows of which at most `most` have blocks, and which these are.
fn rows(
    height: u64,
    blocks: &[u32],
    offsets: impl Fn(u32) -> Range<u64>,
    most: usize,
) -> (u64, Vec<bool>) {
    let mut row_bytes = height.div_ceil(FINEST_ROWS).next_power_of_two().max(SMALLEST_ROW);
    let last = (height.max(1) - 1) / row_bytes;
    // Blocks that begin in a row, less those that have ended before it.
    let mut changes = vec![0_i32; last as usize + 2];
    for &block in blocks {
        let range = offsets(block);
        let (first, end) = (range.start / row_bytes, (range.end - 1) / row_bytes);
        changes[first.min(last) as usize] += 1;
        changes[end.min(last) as usize + 1] -= 1;
    }
    changes.pop();
    let mut inside = 0;
    let mut used: Vec<bool> = changes
        .into_iter()
        .map(|change| {
            inside += change;
            inside > 0
        })
        .collect();
    while used.iter().filter(|used| **used).count() > most {
        row_bytes *= 2;
        used = used.chunks(2).map(|pair| pair.contains(&true)).collect();
    }
    (row_bytes, used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    /// A trace of blocks at random addresses and times, some of which never end.
    fn random() -> MemoryHistory {
        let mut random = 5_u64;
        let mut below = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % most
        };
        let mut rows: Vec<(u64, String)> = Vec::new();
        for id in 1..=400 {
            let (at, life, bytes) = (below(10_000), below(3000), 1 + below(9000));
            // A slot for each block, in two ranges that are far from each other.
            let address = (1_u64 << 40) + id * 10_000 + if id % 3 == 0 { 1 << 38 } else { 0 };
            let fields = format!("{id},{bytes},0,cached,0,,{address:#x},1");
            rows.push((at, format!("a,{fields}")));
            if life % 7 > 0 {
                rows.extend(["f", "c"].map(|op| (at + life, format!("{op},{fields}"))));
            }
        }
        rows.sort_by_key(|(at, _)| *at);
        let mut text = "t_us,op,id,bytes,stream,kind,device,tag,address,thread\n".to_owned();
        rows.iter().for_each(|(at, rest)| writeln!(text, "{at},{rest}").unwrap());
        MemoryHistory::from_reader(std::io::Cursor::new(text), None).unwrap()
    }

    #[test]
    fn a_cell_has_the_number_and_the_share_of_the_blocks_in_it() {
        let history = random();
        let blocks: Vec<u32> = (0..history.blocks.len() as u32).filter(|n| n % 5 > 0).collect();
        for cells in [64, 1000, 20_000] {
            let grid = BandGrid::of(&history, &blocks, cells).unwrap();
            let BandGrid { row_bytes, columns, .. } = grid;
            assert!(grid.rows.len() * columns <= cells && grid.rows.is_sorted(), "{cells}");
            assert_eq!(
                (grid.counts.len(), grid.shares.len()),
                (grid.rows.len() * columns, grid.counts.len())
            );
            let mut found = 0;
            for (at, count) in grid.counts.iter().enumerate() {
                let low = grid.rows[at / columns];
                let at_time = |column: usize| column as f64 * history.end / columns as f64;
                let (t0, t1) = (at_time(at % columns), at_time(at % columns + 1));
                let (mut expected, mut area) = (0, 0.0);
                for &block in &blocks {
                    let index = block as usize;
                    let start = history.offset(history.blocks.address[index]);
                    let end = start + history.blocks.bytes[index];
                    let (birth, over) = (history.blocks.birth[index], history.blocks.end[index]);
                    let within = start < low + row_bytes && end > low;
                    let is_last = at % columns == columns - 1;
                    let begins = birth >= t0 && (birth < t1 || is_last);
                    if within && (begins || birth < t0 && over > t0) {
                        expected += 1;
                        let bytes = end.min(low + row_bytes) - start.max(low);
                        area += bytes as f64 * (over.min(t1) - birth.max(t0)).max(0.0);
                    }
                }
                assert_eq!(*count, expected, "cell {at} of {cells}");
                let share = area / (row_bytes as f64 * (t1 - t0)) * 255.0;
                assert!((f64::from(grid.shares[at]) - share).abs() < 1.0, "cell {at}: {share}");
                found += u32::from(expected > 0);
            }
            assert!(found > 30, "{found} cells");
        }
        assert!(BandGrid::of(&history, &blocks, 63).is_none());
    }
}
