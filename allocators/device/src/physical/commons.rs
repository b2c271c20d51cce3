//! Free memory that no stream's cache has: it belongs to all of them.
//!
//! While memory is ample streams keep what they free in caches of their own, apart from each other. When it gets short,
//! what is free in all of them is brought here, where neighbours join whoever freed them, so that a block fits that no
//! single cache has room for. What streams leave that nobody leases any more comes here at all times, and so does what is mapped
//! ahead of the need. Each range remembers which stream used it last and up to which epoch; where two join, what
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
    is_done_but_for(past, None)
}

/// Whether the host has seen all of it done but for the work of `own`, which is in order with itself.
pub(crate) fn is_done_but_for(past: &Past, own: Option<&Arc<Timeline>>) -> bool {
    let is_own = |timeline| own.is_some_and(|own| Arc::ptr_eq(own, timeline));
    past.iter().all(|(timeline, epoch)| is_own(timeline) || timeline.is_done(*epoch))
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

    /// Lets go of what is known to be done of all pasts, and so of streams that nobody else knows any more.
    pub(crate) fn forget_done(&mut self) {
        for (_, past) in self.ranges.values_mut() {
            past.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{DeviceId, sim::Sim};
    use aquifer_stream::{Stream, StreamPool};

    fn streams(count: usize) -> Vec<Stream> {
        let pool = StreamPool::new(Sim::h200(1).stepped().driver(), DeviceId(0), 8);
        (0..count).filter_map(|_| pool.lease().ok()).collect()
    }

    fn past(stream: &Stream) -> Past {
        vec![(stream.timeline().clone(), stream.timeline().open())]
    }

    /// Whether the past of a range names a stream, for each.
    fn named(streams: &[Stream], past: &Past) -> Vec<bool> {
        streams.iter().map(|s| past.iter().any(|(t, _)| Arc::ptr_eq(t, s.timeline()))).collect()
    }

    #[test]
    fn where_ranges_join_the_pasts_of_all_of_them_are_remembered() {
        let all = streams(3);
        // In whatever order they come.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut commons = Commons::default();
            for at in order {
                commons.add(Range { start: 100 * at as u64, len: 100 }, past(&all[at]));
            }
            let joined: Vec<_> = commons.iter().map(|(range, past)| (range, named(&all, past))).collect();
            assert_eq!(joined, [(Range { start: 0, len: 300 }, vec![true; 3])]);
            // What is taken out of the middle, and what is left of it, remembers as much.
            let taken = commons.take(Range { start: 150, len: 20 });
            assert_eq!(taken.map(|past| named(&all, &past)), Some(vec![true; 3]));
            assert!(commons.iter().all(|(_, past)| named(&all, past) == [true; 3]));
            assert_eq!((commons.bytes(), commons.iter().count()), (280, 2));
        }
    }

    #[test]
    fn the_later_of_two_epochs_of_one_stream_is_remembered() {
        let all = streams(1);
        let timeline = all[0].timeline();
        for epochs in [[5, 9], [9, 5]] {
            let mut commons = Commons::default();
            for (at, epoch) in (0..).zip(epochs) {
                commons.add(Range { start: 10 * at, len: 10 }, vec![(timeline.clone(), epoch)]);
            }
            let latest: Vec<_> = commons.iter().flat_map(|(_, past)| past).map(|(_, epoch)| *epoch).collect();
            assert_eq!(latest, [9]);
        }
    }

    #[test]
    fn the_lowest_place_is_the_first_that_is_ready_aligned_and_long_enough() {
        let all = streams(2);
        let mut commons = Commons::default();
        // In use, too short, too short when aligned, right, right.
        for (start, len, stream) in [(64, 64, 1), (192, 32, 0), (264, 66, 0), (384, 64, 0), (512, 64, 0)] {
            commons.add(Range { start, len }, past(&all[stream]));
        }
        let ready = |past: &Past| past.iter().all(|(t, _)| Arc::ptr_eq(t, all[0].timeline()));
        assert_eq!(commons.lowest(64, 64, ready), Some(Range { start: 384, len: 64 }));
        assert_eq!(commons.lowest(64, 64, |_| true), Some(Range { start: 64, len: 64 }));
        assert_eq!(commons.lowest(67, 1, ready), None);
    }

    #[test]
    fn what_is_not_wholly_there_is_not_taken_and_stays_as_it_is() {
        let all = streams(1);
        let mut commons = Commons::default();
        commons.add(Range { start: 100, len: 100 }, past(&all[0]));
        for (start, len) in [(0, 50), (50, 100), (150, 51), (200, 1), (100, 101)] {
            assert!(commons.take(Range { start, len }).is_none(), "{start}, {len}");
        }
        assert_eq!(commons.bytes(), 100);
        assert_eq!([99, 100, 199, 200].map(|at| commons.covers(at)), [false, true, true, false]);
        assert!(commons.take(Range { start: 100, len: 100 }).is_some());
        assert_eq!((commons.bytes(), commons.iter().count()), (0, 0));
    }
}
