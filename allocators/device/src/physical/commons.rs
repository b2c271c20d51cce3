//! The shared free list: free memory that is in no stream's cache.
//!
//! While memory is ample, streams keep what they free in separate caches. When memory gets short,
//! the free ranges of all caches are moved here, and neighbours are merged regardless of their last
//! stream. A block then fits that no single cache has room for. Ranges of streams that are no
//! longer leased, and memory mapped ahead of need, are always kept here.
//!
//! Each range stores its dependencies: the streams that used it last, and up to which epochs. A
//! merged range has the dependencies of both parts.

use super::window::Grid;
use crate::leasing::Fit;
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use smallvec::SmallVec;
use std::sync::Arc;

/// The dependencies of a range: the streams that used it, and the epochs that must be done before
/// it is reused.
pub(crate) type Past = SmallVec<[(Arc<Timeline>, u64); 2]>;

/// The free ranges by address. None touches the next.
///
/// They are stored in short chunks with the length of their longest range. A search skips chunks
/// that are too short, and a change moves few ranges.
#[derive(Default, Debug)]
pub(crate) struct Commons {
    /// No chunk is empty.
    chunks: Vec<Chunk>,
    bytes: u64,
}

/// Consecutive ranges.
#[derive(Debug)]
struct Chunk {
    longest: u64,
    spans: Vec<Range>,
    /// The dependencies of the spans, in the same order. Stored separately, since a search reads
    /// only the spans.
    pasts: Vec<Past>,
}

/// The maximum number of ranges in a chunk. A longer one is split.
const CHUNK: usize = 128;

/// The index of a chunk, and of a range in it.
type At = (usize, usize);

/// Returns whether the host has seen all dependencies done.
pub(crate) fn is_done(past: &Past) -> bool {
    is_done_but_for(past, None)
}

/// Returns whether the host has seen all dependencies done, except for those on `own`, which is in
/// order with itself.
pub(crate) fn is_done_but_for(past: &Past, own: Option<&Arc<Timeline>>) -> bool {
    let is_own = |timeline| own.is_some_and(|own| Arc::ptr_eq(own, timeline));
    past.iter().all(|(timeline, epoch)| is_own(timeline) || timeline.is_done(*epoch))
}

/// Merges the dependencies `more` into `past`, without those that are done.
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
    /// Returns the free bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// An iterator over the ranges, by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Range, &Past)> {
        self.chunks.iter().flat_map(|chunk| chunk.spans.iter().copied().zip(&chunk.pasts))
    }

    /// Removes dependencies that are done, and with them references to streams that are otherwise
    /// unused.
    pub(crate) fn forget_done(&mut self) {
        for past in self.chunks.iter_mut().flat_map(|chunk| &mut chunk.pasts) {
            past.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
        }
    }

    /// Returns whether an address is in a free range.
    pub(crate) fn covers(&self, address: u64) -> bool {
        self.below(address)
            .is_some_and(|(chunk, at)| self.chunks[chunk].spans[at].contains(address))
    }

    /// Returns the last range that begins at `address` or below.
    fn below(&self, address: u64) -> Option<At> {
        let chunk =
            self.chunks.partition_point(|chunk| chunk.spans[0].start <= address).checked_sub(1)?;
        let at = self.chunks[chunk].spans.partition_point(|span| span.start <= address);
        Some((chunk, at - 1))
    }

    fn remove(&mut self, (chunk, at): At) -> (Range, Past) {
        let of = &mut self.chunks[chunk];
        let (span, past) = (of.spans.remove(at), of.pasts.remove(at));
        if of.spans.is_empty() {
            self.chunks.remove(chunk);
        } else if span.len == of.longest {
            of.measure();
        }
        (span, past)
    }

    fn insert(&mut self, span: Range, past: Past) {
        let below = self.below(span.start);
        let (chunk, at) = below.map_or((0, 0), |(chunk, at)| (chunk, at + 1));
        match self.chunks.get_mut(chunk) {
            None => {
                self.chunks.push(Chunk { longest: span.len, spans: vec![span], pasts: vec![past] });
            }
            Some(of) => {
                of.spans.insert(at, span);
                of.pasts.insert(at, past);
                of.longest = of.longest.max(span.len);
                if of.spans.len() > CHUNK {
                    let (spans, pasts) =
                        (of.spans.split_off(CHUNK / 2), of.pasts.split_off(CHUNK / 2));
                    of.measure();
                    let mut upper = Chunk { longest: 0, spans, pasts };
                    upper.measure();
                    self.chunks.insert(chunk + 1, upper);
                }
            }
        }
    }

    /// Adds a range that the caller owns, and merges it with its neighbours.
    pub(crate) fn add(&mut self, range: Range, past: Past) {
        self.bytes += range.len;
        let mut whole = range;
        let mut all = Past::new();
        join(&mut all, past);
        if let Some(below) = self.below(range.start)
            && self.chunks[below.0].spans[below.1].end() == range.start
        {
            let (span, past) = self.remove(below);
            whole = Range { start: span.start, len: span.len + whole.len };
            join(&mut all, past);
        }
        if let Some(above) = self.below(range.end())
            && self.chunks[above.0].spans[above.1].start == range.end()
        {
            let (span, past) = self.remove(above);
            whole.len += span.len;
            join(&mut all, past);
        }
        self.insert(whole, all);
    }

    /// Returns the best place for a block among the ranges that are `ready`, by `fit`.
    pub(crate) fn place(
        &self,
        bytes: u64,
        align: u64,
        fit: Fit,
        grid: Grid,
        ready: impl Fn(&Past) -> bool,
    ) -> Option<Range> {
        let mut best: Option<(u64, Range)> = None;
        for chunk in self.chunks.iter().filter(|chunk| chunk.longest >= bytes) {
            for (span, past) in chunk.spans.iter().zip(&chunk.pasts) {
                let range = Range { start: span.start.next_multiple_of(align), len: bytes };
                if range.end() > span.end() || !ready(past) {
                    continue;
                }
                if fit == Fit::Lowest {
                    return Some(range);
                }
                let pinned = grid.pins(*span, range);
                if best.is_none_or(|(least, _)| pinned < least) {
                    best = Some((pinned, range));
                }
            }
        }
        best.map(|(_, range)| range)
    }

    /// Removes a range; returns `None` if it is not entirely free.
    pub(crate) fn take(&mut self, range: Range) -> Option<Past> {
        let at = self.below(range.start)?;
        if !self.chunks[at.0].spans[at.1].covers(&range) {
            return None;
        }
        let (span, past) = self.remove(at);
        if span.start < range.start {
            self.insert(Range { start: span.start, len: range.start - span.start }, past.clone());
        }
        if range.end() < span.end() {
            self.insert(Range { start: range.end(), len: span.end() - range.end() }, past.clone());
        }
        self.bytes -= range.len;
        Some(past)
    }
}

impl Chunk {
    fn measure(&mut self) {
        self.longest = self.spans.iter().map(|span| span.len).max().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{DeviceId, sim::Sim};
    use aquifer_stream::{Stream, StreamPool};
    use smallvec::smallvec;
    use std::collections::BTreeMap;

    const GRID: Grid = Grid { base: 0, slot: 100 };

    fn streams(count: usize) -> Vec<Stream> {
        let pool = StreamPool::new(Sim::h200(1).stepped().driver(), DeviceId(0), 8);
        (0..count).filter_map(|_| pool.lease().ok()).collect()
    }

    fn past(stream: &Stream) -> Past {
        smallvec![(stream.timeline().clone(), stream.timeline().open())]
    }

    /// Returns for each stream whether the dependencies name it.
    fn named(streams: &[Stream], past: &Past) -> Vec<bool> {
        streams.iter().map(|s| past.iter().any(|(t, _)| Arc::ptr_eq(t, s.timeline()))).collect()
    }

    #[test]
    fn where_ranges_join_the_pasts_of_all_of_them_are_remembered() {
        let all = streams(3);
        // In every order of insertion.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut commons = Commons::default();
            for at in order {
                commons.add(Range { start: 100 * at as u64, len: 100 }, past(&all[at]));
            }
            let joined: Vec<_> =
                commons.iter().map(|(range, past)| (range, named(&all, past))).collect();
            assert_eq!(joined, [(Range { start: 0, len: 300 }, vec![true; 3])]);
            // A part taken from the middle, and what is left, keep all dependencies.
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
                commons
                    .add(Range { start: 10 * at, len: 10 }, smallvec![(timeline.clone(), epoch)]);
            }
            let latest: Vec<_> =
                commons.iter().flat_map(|(_, past)| past).map(|(_, epoch)| *epoch).collect();
            assert_eq!(latest, [9]);
        }
    }

    #[test]
    fn the_lowest_place_is_the_first_that_is_ready_aligned_and_long_enough() {
        let all = streams(2);
        let mut commons = Commons::default();
        // In use, too short, too short when aligned, suitable, suitable.
        for (start, len, stream) in
            [(64, 64, 1), (192, 32, 0), (264, 66, 0), (384, 64, 0), (512, 64, 0)]
        {
            commons.add(Range { start, len }, past(&all[stream]));
        }
        let ready = |past: &Past| past.iter().all(|(t, _)| Arc::ptr_eq(t, all[0].timeline()));
        assert_eq!(
            commons.place(64, 64, Fit::Lowest, GRID, ready),
            Some(Range { start: 384, len: 64 })
        );
        assert_eq!(
            commons.place(64, 64, Fit::Lowest, GRID, |_| true),
            Some(Range { start: 64, len: 64 })
        );
        assert_eq!(commons.place(67, 1, Fit::Lowest, GRID, ready), None);
    }

    #[test]
    fn where_memory_is_tight_a_block_goes_where_it_pins_the_fewest_free_handles() {
        let mut commons = Commons::default();
        // Two whole slots, one of which a block of 60 would pin; the end of one and the start of
        // another; the same again.
        for (start, len) in [(100, 200), (440, 80), (640, 80)] {
            commons.add(Range { start, len }, Past::new());
        }
        let place =
            |bytes, fit| commons.place(bytes, 1, fit, GRID, |_| true).map(|range| range.start);
        assert_eq!((place(60, Fit::Lowest), place(60, Fit::FewestPinned)), (Some(100), Some(440)));
        // A block that fits in no part of a slot pins what it must.
        assert_eq!(place(90, Fit::FewestPinned), Some(100));
    }

    #[test]
    fn many_ranges_are_kept_and_found_as_few_are() {
        // Compared with a plain map: ranges of 10 at every second place, added in one random order
        // and removed in another.
        let (mut commons, mut model) = (Commons::default(), BTreeMap::new());
        let check = |commons: &Commons, model: &BTreeMap<u64, u64>| {
            assert!(commons.iter().map(|(range, _)| (range.start, range.len)).eq(model.clone()));
            assert_eq!(commons.bytes(), model.values().sum());
            for bytes in [1, 7, 10, 11] {
                let found =
                    commons.place(bytes, 1, Fit::Lowest, GRID, |_| true).map(|range| range.start);
                let lowest = model.iter().find(|&(_, len)| *len >= bytes).map(|(start, _)| *start);
                assert_eq!(found, lowest, "{bytes}");
            }
        };
        const MANY: u64 = 1009;
        for n in 0..MANY {
            let (start, len) = (n * 571 % MANY * 20, 1 + n % 10);
            commons.add(Range { start, len }, Past::new());
            model.insert(start, len);
            if n % 50 == 0 {
                check(&commons, &model);
            }
        }
        for n in 0..MANY {
            let start = n * 313 % MANY * 20;
            let len = model.remove(&start).unwrap_or(0);
            assert!(commons.take(Range { start, len }).is_some());
            assert!(!commons.covers(start));
            if n % 50 == 0 {
                check(&commons, &model);
            }
        }
        assert_eq!((commons.bytes(), commons.iter().count()), (0, 0));
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
