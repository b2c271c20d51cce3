//! Why a request failed: what was free at that moment, in which pieces, and what would have had to
//! be free.

use super::holders::{HolderGroup, group};
use aquifer_core::Bytes;
use aquifer_formats::history::{AddressSource, ExtentTree, HistoryMark, MarkKind, MemoryHistory};
use serde_json::{Value, json};
use std::{cmp::Reverse, collections::HashMap, ops::Range};

/// Holders that a line names.
const NAMED: usize = 3;

/// The state of memory when a request failed.
#[derive(Debug)]
pub(crate) struct FailureState<'a> {
    /// The failure.
    pub(crate) mark: HistoryMark,
    /// Requested bytes of allocated blocks.
    pub(crate) live: u64,
    /// Bytes of freed blocks whose last use is not over.
    pub(crate) pending: u64,
    /// Physical bytes, if known.
    pub(crate) physical: Option<u64>,
    /// The limit, if the input tells one.
    pub(crate) limit: Option<u64>,
    /// What the device had in use outside of the pool, if the input tells.
    pub(crate) outside: Option<u64>,
    /// Physical bytes that no block occupies, if known.
    pub(crate) cached: Option<u64>,
    /// Free ranges, if addresses are known.
    pub(crate) free: Option<&'a ExtentTree>,
    /// Mapped ranges, if known.
    pub(crate) mapped: Option<&'a ExtentTree>,
    /// The allocated blocks, in order of allocation.
    pub(crate) held: &'a [u32],
    /// The freed blocks whose last use is not over.
    pub(crate) lingering: &'a [u32],
}

impl FailureState<'_> {
    /// Returns the line on pending bytes that would have been enough with the `free` ones.
    fn pending_line(&self, free: u64) -> Option<String> {
        let wanted = self.mark.bytes;
        (free < wanted && self.pending.saturating_add(free) >= wanted).then(|| {
            "what was pending would have been enough: freed, but a stream still used it".to_owned()
        })
    }
}

/// The failed requests for one tag that one budget refused, or none.
#[derive(Debug)]
pub(crate) struct FailureGroup<'a> {
    /// The tag. Empty for none.
    pub(crate) tag: &'a str,
    /// The budget that refused. Empty if the input does not tell.
    pub(crate) refused_by: &'a str,
    /// Their number.
    pub(crate) count: u64,
    /// The smallest and the largest request.
    bytes: [u64; 2],
    /// The times of the first and the last.
    times: [f64; 2],
}

impl FailureGroup<'_> {
    /// Returns the JSON form.
    pub(crate) fn to_json(&self) -> Value {
        let Self { tag, refused_by, count, bytes: [least, most], times: [first, last] } = self;
        json!({
            "tag": tag, "refused_by": refused_by, "count": count, "least": least, "most": most,
            "first": first, "last": last,
        })
    }
}

/// Groups all failed requests by tag and by the budget that refused, the largest group first.
pub(crate) fn groups(history: &MemoryHistory) -> Vec<FailureGroup<'_>> {
    let mut groups: HashMap<[u32; 2], FailureGroup<'_>> = HashMap::new();
    for mark in history.marks.iter().filter(|mark| mark.kind == MarkKind::Fail) {
        let (bytes, times) = ([mark.bytes; 2], [mark.time; 2]);
        let key @ [tag, refused_by] = [mark.text, mark.refused_by];
        let [tag, refused_by] = [tag, refused_by].map(|name| history.names.get(name));
        let group = FailureGroup { tag, refused_by, count: 0, bytes, times };
        let group = groups.entry(key).or_insert(group);
        group.count += 1;
        group.bytes = [group.bytes[0].min(mark.bytes), group.bytes[1].max(mark.bytes)];
        group.times[1] = mark.time;
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| (Reverse(group.count), group.tag, group.refused_by));
    groups
}

/// A failed request and its explanation.
#[derive(Debug)]
pub(crate) struct FailureNote {
    mark: HistoryMark,
    /// The budget that refused. Empty if the input does not tell.
    refused_by: String,
    /// The explanation in lines.
    pub(crate) text: Vec<String>,
}

impl FailureNote {
    /// Explains a failure.
    pub(crate) fn of(history: &MemoryHistory, state: &FailureState<'_>) -> Self {
        let mark = state.mark;
        let tag = history.names.get(mark.text);
        let whose = if tag.is_empty() { String::new() } else { format!(" for {tag}") };
        let unit = history.unit();
        let mut text = vec![format!("{} wanted{whose} in {unit} {}", Bytes(mark.bytes), mark.row)];
        let refused_by = history.names.get(mark.refused_by).to_owned();
        if !refused_by.is_empty() {
            text.push(format!("refused by the budget {refused_by}"));
        }
        let blocks = state.held.len();
        let mut have = format!("live {} in {blocks} blocks", Bytes(state.live));
        if state.pending > 0 {
            have += &format!(", pending {}", Bytes(state.pending));
        }
        if let (Some(cached), Some(physical)) = (state.cached, state.physical) {
            have += &format!(", cached {} of {} physical", Bytes(cached), Bytes(physical));
        }
        if let Some(limit) = state.limit {
            have += &format!(", limit {}", Bytes(limit));
        }
        if let Some(outside) = state.outside {
            have += &format!(", outside {}", Bytes(outside));
        }
        text.push(have);
        if let Some(free) = mark.device_free {
            text.push(format!("{} free on the device beside that", Bytes(free)));
        }
        if let Some(free) = state.free {
            let (total, largest) = (free.total(), free.largest());
            text.push(format!(
                "{} free between blocks, {} of it in one piece",
                Bytes(total),
                Bytes(largest)
            ));
            text.push(if largest >= mark.bytes {
                "one free piece was large enough: a limit, a rule or work of another stream stood \
                 in the way, not the space"
                    .to_owned()
            } else if total >= mark.bytes {
                format!(
                    "fragmented: enough was free, but the largest piece was {} too small",
                    Bytes(mark.bytes - largest)
                )
            } else {
                let more = mark.device_free.unwrap_or(0);
                let short = mark.bytes.saturating_sub(total.saturating_add(more));
                match short {
                    0 => "what was free between blocks and on the device was enough together"
                        .to_owned(),
                    short => format!("{} more would have had to be free", Bytes(short)),
                }
            });
            text.extend(state.pending_line(total));
            if largest < mark.bytes {
                text.push(cheapest(history, state));
            }
        } else if let Some(cached) = state.cached
            && cached < mark.bytes
        {
            let short = mark.bytes - cached;
            text.push(format!("{} more would have had to be free or mapped", Bytes(short)));
            text.extend(state.pending_line(cached));
        }
        text.extend(held_by(history, "most was held by", state.held));
        if state.pending > 0 {
            text.extend(held_by(history, "freed but still in use", state.lingering));
        }
        Self { mark, refused_by, text }
    }

    /// Returns the JSON form.
    pub(crate) fn to_json(&self) -> Value {
        let HistoryMark { time, row, bytes, .. } = self.mark;
        let Self { refused_by, text, .. } = self;
        json!({
            "t": time, "event": row, "bytes": bytes, "refused_by": refused_by, "text": text,
        })
    }
}

/// Names the largest holders among blocks, by the grouping that says the most.
fn held_by(history: &MemoryHistory, what: &str, blocks: &[u32]) -> Option<String> {
    for by in [HolderGroup::Tag, HolderGroup::Stack, HolderGroup::Size] {
        let holders = group(history, blocks, by);
        if by == HolderGroup::Size || holders.iter().any(|holder| !holder.name.is_empty()) {
            let phrases: Vec<_> =
                holders.iter().take(NAMED).map(|holder| holder.phrase()).collect();
            return (!phrases.is_empty()).then(|| format!("{what}: {}", phrases.join(", ")));
        }
    }
    None
}

/// Returns the line on the window of addresses that would have cost the least to free.
fn cheapest(history: &MemoryHistory, state: &FailureState<'_>) -> String {
    let wanted = state.mark.bytes;
    let spans: Vec<Range<u64>> = match state.mapped {
        Some(mapped) => mapped.iter().collect(),
        None => history.spans.iter().map(|span| span.start..span.start + span.bytes).collect(),
    };
    let mut blocks: Vec<u32> = state.held.iter().chain(state.lingering).copied().collect();
    let start = |block: &u32| history.blocks.address[*block as usize];
    blocks.sort_unstable_by_key(start);
    match window(&spans, &blocks, wanted, |block| history.blocks.range(block as usize)) {
        None => format!("no range of addresses in use has room for {}", Bytes(wanted)),
        Some(range) => {
            let named = held_by(history, "", &blocks[range.clone()]).unwrap_or_default();
            let bytes = blocks[range.clone()]
                .iter()
                .fold(0, |sum, block| sum + history.blocks.requested[*block as usize]);
            format!(
                "the cheapest place for it held {} in {} blocks{named}",
                Bytes(bytes),
                range.len()
            )
        }
    }
}

/// Returns the blocks, sorted by address, that overlap the window of `wanted` bytes within one span
/// whose blocks have the fewest bytes. A window that begins at the end of a block or at the start
/// of a span is always among the best: further left it would overlap no fewer.
fn window(
    spans: &[Range<u64>],
    blocks: &[u32],
    wanted: u64,
    range: impl Fn(u32) -> Range<u64>,
) -> Option<Range<usize>> {
    let mut best: Option<(u64, Range<usize>)> = None;
    for span in spans.iter().filter(|span| span.end - span.start >= wanted) {
        let first = blocks.partition_point(|block| range(*block).end <= span.start);
        let behind = blocks.partition_point(|block| range(*block).start < span.end);
        let (mut left, mut right, mut bytes, mut from) = (first, first, 0, span.start);
        while from.saturating_add(wanted) <= span.end {
            while right < behind && range(blocks[right]).start < from + wanted {
                let own = range(blocks[right]);
                bytes += own.end - own.start;
                right += 1;
            }
            if best.as_ref().is_none_or(|(least, _)| bytes < *least) {
                best = Some((bytes, left..right));
            }
            if left == right {
                break;
            }
            let own = range(blocks[left]);
            from = from.max(own.end);
            bytes -= own.end - own.start;
            left += 1;
        }
    }
    best.map(|(_, range)| range)
}

/// Returns whether the addresses of a history allow statements on free extents.
pub(crate) fn tells_extents(history: &MemoryHistory) -> bool {
    history.addresses == AddressSource::Recorded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheapest_window_is_that_of_a_search_over_every_address() {
        let mut random = 11_u64;
        let mut below = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % most
        };
        for _ in 0..500 {
            let (mut ranges, mut at) = (Vec::new(), 0);
            while at < 60 {
                let start = at + below(8);
                let end = start + 1 + below(8);
                ranges.push(start..end);
                at = end;
            }
            let spans = [0..30, 40..80];
            let wanted = 1 + below(25);
            let blocks: Vec<u32> = (0..ranges.len() as u32).collect();
            let found = window(&spans, &blocks, wanted, |block| ranges[block as usize].clone());
            let cost = |from: u64| -> u64 {
                let within = ranges.iter().filter(|r| r.start < from + wanted && r.end > from);
                within.map(|range| range.end - range.start).sum()
            };
            let all = spans
                .iter()
                .flat_map(|span| span.start..=span.end.saturating_sub(wanted).max(span.start));
            let fits = |from: &u64| {
                spans.iter().any(|span| span.contains(from) && from + wanted <= span.end)
            };
            let least = all.filter(fits).map(cost).min();
            let own =
                found.map(|found| ranges[found].iter().map(|range| range.end - range.start).sum());
            assert_eq!(own, least, "{ranges:?} {wanted}");
        }
    }
}
