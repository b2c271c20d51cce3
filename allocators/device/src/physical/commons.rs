//! Free memory that no stream's cache has: it belongs to all of them.
//!
//! While memory is ample streams keep what they free in caches of their own, apart from each other. When it gets short,
//! what is free in all of them is brought here, where neighbours join whoever freed them, so that a block fits that no
//! single cache has room for. Each range remembers which stream used it last and up to which epoch; where two join, what
//! either waited for is remembered of both.

use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::{collections::BTreeMap, sync::Arc};

/// What has to be over before memory is anybody's: the streams that used it, and up to which epochs.
pub(crate) type Past = Vec<(Arc<Timeline>, u64)>;

/// The ranges, by address, none touching the next.
#[derive(Default, Debug)]
pub(crate) struct Commons {
    ranges: BTreeMap<u64, (u64, Past)>,
    bytes: u64,
}

/// Whether the host has seen all of it done.
pub(crate) fn is_done(past: &Past) -> bool {
    past.iter().all(|(timeline, epoch)| timeline.is_done(*epoch))
}

/// Adds what `more` remembers to `past`. What is over need not be remembered.
fn join(past: &mut Past, more: Past) {
    past.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
    for (timeline, epoch) in more {
        if timeline.is_done(epoch) {
            continue;
        }
        match past.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &timeline)) {
            Some((_, latest)) => *latest = (*latest).max(epoch),
            None => past.push((timeline, epoch)),
        }
    }
}

impl Commons {
    /// Bytes in it.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The ranges, by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Range, &Past)> {
        self.ranges.iter().map(|(&start, (len, past))| (Range { start, len: *len }, past))
    }

    /// Whether an address is in it.
    pub(crate) fn covers(&self, address: u64) -> bool {
        let below = self.ranges.range(..=address).next_back();
        below.is_some_and(|(start, (len, _))| address < start + len)
    }

    /// Adds a range that is nobody else's.
    pub(crate) fn add(&mut self, range: Range, past: Past) {
        self.bytes += range.len;
        let Range { mut start, mut len } = range;
        let mut all = Vec::new();
        join(&mut all, past);
        if let Some((&below, &(below_len, _))) = self.ranges.range(..start).next_back()
            && below + below_len == start
            && let Some((_, past)) = self.ranges.remove(&below)
        {
            (start, len) = (below, below_len + len);
            join(&mut all, past);
        }
        if let Some((more, past)) = self.ranges.remove(&(start + len)) {
            len += more;
            join(&mut all, past);
        }
        self.ranges.insert(start, (len, all));
    }

    /// The lowest place for a block in what is `ready`.
    pub(crate) fn lowest(&self, bytes: u64, align: u64, ready: impl Fn(&Past) -> bool) -> Option<Range> {
        self.ranges.iter().find_map(|(&start, (len, past))| {
            let aligned = start.next_multiple_of(align);
            (aligned - start + bytes <= *len && ready(past)).then_some(Range { start: aligned, len: bytes })
        })
    }

    /// Takes a range out; `None` if it is not wholly here.
    pub(crate) fn take(&mut self, range: Range) -> Option<Past> {
        let (&start, &(len, _)) = self.ranges.range(..=range.start).next_back()?;
        let (end, range_end) = (start + len, range.start + range.len);
        if range_end > end {
            return None;
        }
        let (_, past) = self.ranges.remove(&start)?;
        if start < range.start {
            self.ranges.insert(start, (range.start - start, past.clone()));
        }
        if range_end < end {
            self.ranges.insert(range_end, (end - range_end, past.clone()));
        }
        self.bytes -= range.len;
        Some(past)
    }
}
