//! The vertical axis of a history: recorded addresses as spans without the gaps between them, or
//! offsets by first fit.

use super::{AddressSource, AddressSpan, BlockColumns, ExtentTree, HistoryAction, HistoryStep};
use std::ops::Range;

/// The maximum number of spans.
const MAX_SPANS: usize = 256;
/// The smallest unit of a span, and the usual one: the size of physical handles.
const UNITS: [u64; 2] = [4096, 2 << 20];
/// The limit of the axis: below it, `f64` counts exactly.
const MAX_HEIGHT: u64 = 1 << 53;

/// The axis of a history.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) source: AddressSource,
    pub(super) spans: Vec<AddressSpan>,
    pub(super) height: u64,
}

/// Returns the axis of the recorded addresses, or `None` if they are too far apart for one.
pub(super) fn recorded(
    blocks: &BlockColumns,
    mapped: impl Iterator<Item = Range<u64>>,
) -> Option<Layout> {
    let mut ranges: Vec<Range<u64>> = (0..blocks.len()).map(|block| blocks.range(block)).collect();
    ranges.extend(mapped);
    ranges.sort_unstable_by_key(|range| range.start);
    let mut union: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match union.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => union.push(range),
        }
    }
    let bytes = union.iter().fold(0_u64, |sum, range| sum.saturating_add(range.end - range.start));
    let mut unit = UNITS[usize::from(bytes >= UNITS[1] * 16)];
    loop {
        let mut spans: Vec<Range<u64>> = Vec::new();
        for range in &union {
            let start = range.start / unit * unit;
            let end = range.end.checked_next_multiple_of(unit)?;
            match spans.last_mut() {
                Some(last) if start <= last.end => last.end = last.end.max(end),
                _ => spans.push(start..end),
            }
        }
        if spans.len() <= MAX_SPANS {
            let mut height = 0_u64;
            let mut placed = Vec::with_capacity(spans.len());
            for Range { start, end } in spans {
                placed.push(AddressSpan { start, bytes: end - start, at: height });
                height = height.checked_add(end - start).filter(|height| *height < MAX_HEIGHT)?;
            }
            debug_assert!(placed.len() <= MAX_SPANS && height < MAX_HEIGHT);
            return Some(Layout { source: AddressSource::Recorded, spans: placed, height });
        }
        unit = unit.checked_mul(2)?;
    }
}

/// Gives each block the lowest offset that has room for it while it lives.
pub(super) fn packed(blocks: &mut BlockColumns, steps: &[HistoryStep]) -> Layout {
    let mut free = ExtentTree::default();
    free.insert(0..1 << 63);
    let mut height = 0;
    for step in steps {
        let block = step.index();
        match step.action() {
            HistoryAction::Allocate => {
                let bytes = blocks.bytes[block];
                // Live bytes are bounded by the checks of the reader, so there is always room for
                // them: free ranges end far beyond.
                let offset = free.take_first(bytes).unwrap_or(0);
                debug_assert!(offset + bytes < 1 << 63, "there is room for all live blocks");
                blocks.address[block] = offset;
                height = height.max(offset + bytes);
            }
            HistoryAction::Complete | HistoryAction::Release => free.insert(blocks.range(block)),
            HistoryAction::Free | HistoryAction::Mark => {}
        }
    }
    let spans = vec![AddressSpan { start: 0, bytes: height, at: 0 }];
    Layout { source: AddressSource::Packed, spans, height }
}
