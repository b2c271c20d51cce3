//! The shared free list: free memory that is in no stream's cache.
//!
//! While memory is ample, streams keep what they free in separate caches. When memory gets short,
//! the free ranges of all caches are moved here, and neighbours are merged regardless of their last
//! stream. A block then fits that no single cache has room for. Ranges of streams that are no
//! longer leased, and memory mapped ahead of need, are always kept here.
//!
//! Each range stores its dependencies: the streams that used it last, and up to which epochs. A
//! merged range has the dependencies of both parts.

use crate::base::pending::{StreamDeps, merge_deps};
use aquifer_heap::Range;

/// The free ranges by address. None touches the next.
///
/// They are stored in short chunks with the length of their longest range. A search skips chunks
/// that are too short, and a change moves few ranges.
#[derive(Default, Debug)]
pub(crate) struct SharedFreeList {
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
    deps: Vec<StreamDeps>,
}

/// The maximum number of ranges in a chunk. A longer one is split.
const CHUNK: usize = 32;

/// The index of a chunk, and of a range in it.
type SpanIndex = (usize, usize);

impl SharedFreeList {
    /// Returns the free bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// An iterator over the ranges, by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Range, &StreamDeps)> {
        self.from(0)
    }

    /// An iterator over the ranges of at least `least` bytes, by address.
    pub(crate) fn from(&self, least: u64) -> impl Iterator<Item = (Range, &StreamDeps)> {
        let chunks = self.chunks.iter().filter(move |chunk| chunk.longest >= least);
        let ranges = chunks.flat_map(|chunk| chunk.spans.iter().copied().zip(&chunk.deps));
        ranges.filter(move |(range, _)| range.len >= least)
    }

    /// Returns the range that contains `address`.
    pub(crate) fn at(&self, address: u64) -> Option<(Range, &StreamDeps)> {
        let (chunk, at) = self.below(address).filter(|&at| self.span(at).contains(address))?;
        Some((self.chunks[chunk].spans[at], &self.chunks[chunk].deps[at]))
    }

    /// Removes dependencies that are done, and with them references to streams that are otherwise
    /// unused.
    pub(crate) fn forget_done(&mut self) {
        for deps in self.chunks.iter_mut().flat_map(|chunk| &mut chunk.deps) {
            deps.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
        }
    }

    /// Returns whether an address is in a free range.
    pub(crate) fn covers(&self, address: u64) -> bool {
        self.at(address).is_some()
    }

    /// Returns the last range that begins at `address` or below.
    fn below(&self, address: u64) -> Option<SpanIndex> {
        let chunk =
            self.chunks.partition_point(|chunk| chunk.spans[0].start <= address).checked_sub(1)?;
        let at = self.chunks[chunk].spans.partition_point(|span| span.start <= address);
        Some((chunk, at - 1))
    }

    fn remove(&mut self, (chunk, at): SpanIndex) -> (Range, StreamDeps) {
        let of = &mut self.chunks[chunk];
        let (span, deps) = (of.spans.remove(at), of.deps.remove(at));
        if of.spans.is_empty() {
            self.chunks.remove(chunk);
        } else if span.len == of.longest {
            of.update_longest();
        }
        (span, deps)
    }

    fn span(&self, (chunk, at): SpanIndex) -> Range {
        self.chunks[chunk].spans[at]
    }

    /// Returns the range that follows this one, or the first.
    fn after(&self, below: Option<SpanIndex>) -> Option<SpanIndex> {
        let (chunk, at) = Self::behind(below);
        if at < self.chunks.get(chunk)?.spans.len() {
            return Some((chunk, at));
        }
        (chunk + 1 < self.chunks.len()).then_some((chunk + 1, 0))
    }

    /// Returns the place behind this range in its chunk, or the first place.
    fn behind(below: Option<SpanIndex>) -> SpanIndex {
        below.map_or((0, 0), |(chunk, at)| (chunk, at + 1))
    }

    /// Inserts a range behind this one, or as the first.
    fn insert_after(&mut self, below: Option<SpanIndex>, span: Range, deps: StreamDeps) {
        let (chunk, at) = Self::behind(below);
        match self.chunks.get_mut(chunk) {
            None => {
                self.chunks.push(Chunk { longest: span.len, spans: vec![span], deps: vec![deps] });
            }
            Some(of) => {
                of.spans.insert(at, span);
                of.deps.insert(at, deps);
                of.longest = of.longest.max(span.len);
                if of.spans.len() > CHUNK {
                    let (spans, deps) =
                        (of.spans.split_off(CHUNK / 2), of.deps.split_off(CHUNK / 2));
                    of.update_longest();
                    let mut upper = Chunk { longest: 0, spans, deps };
                    upper.update_longest();
                    self.chunks.insert(chunk + 1, upper);
                }
            }
        }
    }

    /// Adds a range that the caller owns, and merges it with its neighbours.
    pub(crate) fn add(&mut self, range: Range, mut deps: StreamDeps) {
        debug_assert!(range.len > 0, "an empty range");
        self.bytes += range.len;
        let mut whole = range;
        let below = self.below(range.start);
        debug_assert!(
            below.is_none_or(|at| self.span(at).end() <= range.start),
            "the range below covers it"
        );
        debug_assert!(
            self.after(below).is_none_or(|at| self.span(at).start >= range.end()),
            "it covers the range above"
        );
        if let Some(above) = self.after(below)
            && self.span(above).start == range.end()
        {
            let (span, above) = self.remove(above);
            whole.len += span.len;
            merge_deps(&mut deps, above);
        }
        match below.filter(|&below| self.span(below).end() == range.start) {
            Some((chunk, at)) => {
                let of = &mut self.chunks[chunk];
                of.spans[at].len += whole.len;
                of.longest = of.longest.max(of.spans[at].len);
                merge_deps(&mut of.deps[at], deps);
            }
            None => {
                deps.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
                self.insert_after(below, whole, deps);
            }
        }
    }

    /// Checks that the ranges are in order and apart, and that the sums are right.
    ///
    /// # Panics
    /// If this is not so.
    pub(crate) fn check(&self) {
        let (mut end, mut bytes) = (None, 0);
        for chunk in &self.chunks {
            assert_eq!(chunk.spans.len(), chunk.deps.len(), "dependencies of other ranges");
            assert!((1..=CHUNK).contains(&chunk.spans.len()), "{} ranges", chunk.spans.len());
            let longest = chunk.spans.iter().map(|span| span.len).max();
            assert_eq!(Some(chunk.longest), longest, "the longest range of a chunk");
            for span in &chunk.spans {
                assert!(span.len > 0 && end.is_none_or(|end| end < span.start), "{span:?} touches");
                (end, bytes) = (Some(span.end()), bytes + span.len);
            }
        }
        assert_eq!(self.bytes, bytes, "the sum of the ranges");
    }

    /// An iterator over the ranges that are `ready` and have room for a block, by address, each
    /// with the lowest place for the block in it.
    fn places(
        &self,
        bytes: u64,
        align: u64,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> impl Iterator<Item = (Range, Range)> {
        self.from(bytes).filter_map(move |(span, deps)| {
            let place = lowest_place(span, bytes, align)?;
            ready(deps).then_some((span, place))
        })
    }

    /// Returns the lowest place for a block among the ranges that are `ready`.
    pub(crate) fn find(
        &self,
        bytes: u64,
        align: u64,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> Option<Range> {
        self.places(bytes, align, ready).next().map(|(_, place)| place)
    }

    /// Returns the lowest range that is `ready` and that a block fills wholly, or else the lowest
    /// place for the block, and whether it fills the range.
    pub(crate) fn find_filled(
        &self,
        bytes: u64,
        align: u64,
        ready: impl Fn(&StreamDeps) -> bool,
    ) -> Option<(bool, Range)> {
        let mut lowest = None;
        for (span, range) in self.places(bytes, align, ready) {
            if range == span {
                return Some((true, range));
            }
            lowest = lowest.or(Some((false, range)));
        }
        lowest
    }

    /// Removes a range; returns `None` if it is not entirely free.
    pub(crate) fn take(&mut self, range: Range) -> Option<StreamDeps> {
        debug_assert!(range.len > 0, "an empty range");
        let found = self.below(range.start)?;
        let span = self.span(found);
        if !span.covers(&range) {
            return None;
        }
        self.bytes -= range.len;
        let low = Range { start: span.start, len: range.start - span.start };
        let high = Range { start: range.end(), len: span.end() - range.end() };
        if low.len == 0 && high.len == 0 {
            return Some(self.remove(found).1);
        }
        let (chunk, at) = found;
        let of = &mut self.chunks[chunk];
        of.spans[at] = if low.len > 0 { low } else { high };
        if span.len == of.longest {
            of.update_longest();
        }
        let deps = of.deps[at].clone();
        if low.len > 0 && high.len > 0 {
            self.insert_after(Some(found), high, deps.clone());
        }
        Some(deps)
    }
}

/// Returns the lowest place for a block of `bytes` at `align` in a range, if there is room.
pub(crate) fn lowest_place(range: Range, bytes: u64, align: u64) -> Option<Range> {
    let place = Range { start: range.start.next_multiple_of(align), len: bytes };
    (place.end() <= range.end()).then_some(place)
}

impl Chunk {
    fn update_longest(&mut self) {
        self.longest = self.spans.iter().map(|span| span.len).max().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{DeviceId, sim::Sim};
    use aquifer_stream::{Stream, StreamPool};
    use smallvec::smallvec;
    use std::{collections::BTreeMap, sync::Arc};

    fn streams(count: usize) -> Vec<Stream> {
        let pool = StreamPool::new(Sim::h200(1).stepped().driver(), DeviceId(0), 8);
        (0..count).filter_map(|_| pool.lease().ok()).collect()
    }

    fn deps(stream: &Stream) -> StreamDeps {
        smallvec![(stream.timeline().clone(), stream.timeline().open())]
    }

    /// Returns for each stream whether the dependencies name it.
    fn streams_in(streams: &[Stream], deps: &StreamDeps) -> Vec<bool> {
        streams.iter().map(|s| deps.iter().any(|(t, _)| Arc::ptr_eq(t, s.timeline()))).collect()
    }

    #[test]
    fn merged_ranges_keep_the_dependencies_of_all_parts() {
        let all = streams(3);
        // In every order of insertion.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut shared_free = SharedFreeList::default();
            for at in order {
                shared_free.add(Range { start: 100 * at as u64, len: 100 }, deps(&all[at]));
            }
            let joined: Vec<_> =
                shared_free.iter().map(|(range, deps)| (range, streams_in(&all, deps))).collect();
            assert_eq!(joined, [(Range { start: 0, len: 300 }, vec![true; 3])]);
            // A part taken from the middle, and what is left, keep all dependencies.
            let taken = shared_free.take(Range { start: 150, len: 20 });
            assert_eq!(taken.map(|deps| streams_in(&all, &deps)), Some(vec![true; 3]));
            assert!(shared_free.iter().all(|(_, deps)| streams_in(&all, deps) == [true; 3]));
            assert_eq!((shared_free.bytes(), shared_free.iter().count()), (280, 2));
        }
    }

    #[test]
    fn merged_ranges_keep_the_later_epoch_of_a_stream() {
        let all = streams(1);
        let timeline = all[0].timeline();
        for epochs in [[5, 9], [9, 5]] {
            let mut shared_free = SharedFreeList::default();
            for (at, epoch) in (0..).zip(epochs) {
                shared_free
                    .add(Range { start: 10 * at, len: 10 }, smallvec![(timeline.clone(), epoch)]);
            }
            let latest: Vec<_> =
                shared_free.iter().flat_map(|(_, deps)| deps).map(|(_, epoch)| *epoch).collect();
            assert_eq!(latest, [9]);
        }
    }

    #[test]
    fn find_returns_the_lowest_range_that_is_ready_aligned_and_long_enough() {
        let all = streams(2);
        let mut shared_free = SharedFreeList::default();
        // In use, too short, too short when aligned, suitable, suitable.
        for (start, len, stream) in
            [(64, 64, 1), (192, 32, 0), (264, 66, 0), (384, 64, 0), (512, 64, 0)]
        {
            shared_free.add(Range { start, len }, deps(&all[stream]));
        }
        let ready = |deps: &StreamDeps| deps.iter().all(|(t, _)| Arc::ptr_eq(t, all[0].timeline()));
        assert_eq!(shared_free.find(64, 64, ready), Some(Range { start: 384, len: 64 }));
        assert_eq!(shared_free.find(64, 64, |_| true), Some(Range { start: 64, len: 64 }));
        assert_eq!(shared_free.find(67, 1, ready), None);
    }

    #[test]
    fn find_filled_prefers_a_range_without_a_rest_and_then_the_lowest() {
        let all = streams(1);
        let mut shared_free = SharedFreeList::default();
        for (start, len) in [(100, 200), (440, 80), (640, 80)] {
            shared_free.add(Range { start, len }, StreamDeps::new());
        }
        shared_free.add(Range { start: 8, len: 80 }, deps(&all[0]));
        let place = |bytes, align| {
            shared_free
                .find_filled(bytes, align, StreamDeps::is_empty)
                .map(|(filled, range)| (filled, range.start))
        };
        assert_eq!([place(80, 1), place(79, 1)], [Some((true, 440)), Some((false, 100))]);
        assert_eq!([place(60, 128), place(201, 1)], [Some((false, 128)), None]);
    }

    #[test]
    fn many_ranges_match_a_sorted_map() {
        // Compared with a plain map: ranges of 10 at every second place, added in one random order
        // and removed in another.
        let (mut shared_free, mut model) = (SharedFreeList::default(), BTreeMap::new());
        let check = |shared_free: &SharedFreeList, model: &BTreeMap<u64, u64>| {
            assert!(
                shared_free.iter().map(|(range, _)| (range.start, range.len)).eq(model.clone())
            );
            shared_free.check();
            assert_eq!(shared_free.bytes(), model.values().sum());
            for bytes in [1, 7, 10, 11] {
                let found = shared_free.find(bytes, 1, |_| true).map(|range| range.start);
                let lowest = model.iter().find(|&(_, len)| *len >= bytes).map(|(start, _)| *start);
                assert_eq!(found, lowest, "{bytes}");
            }
        };
        const MANY: u64 = 1009;
        for n in 0..MANY {
            let (start, len) = (n * 571 % MANY * 20, 1 + n % 10);
            shared_free.add(Range { start, len }, StreamDeps::new());
            model.insert(start, len);
            if n % 50 == 0 {
                check(&shared_free, &model);
            }
        }
        for n in 0..MANY {
            let start = n * 313 % MANY * 20;
            let len = model.remove(&start).unwrap_or(0);
            assert!(shared_free.take(Range { start, len }).is_some());
            assert!(!shared_free.covers(start));
            if n % 50 == 0 {
                check(&shared_free, &model);
            }
        }
        assert_eq!((shared_free.bytes(), shared_free.iter().count()), (0, 0));
    }

    #[test]
    fn take_of_a_partly_free_range_changes_nothing() {
        let all = streams(1);
        let mut shared_free = SharedFreeList::default();
        shared_free.add(Range { start: 100, len: 100 }, deps(&all[0]));
        for (start, len) in [(0, 50), (50, 100), (150, 51), (200, 1), (100, 101)] {
            assert!(shared_free.take(Range { start, len }).is_none(), "{start}, {len}");
        }
        assert_eq!(shared_free.bytes(), 100);
        assert_eq!(
            [99, 100, 199, 200].map(|at| shared_free.covers(at)),
            [false, true, true, false]
        );
        assert!(shared_free.take(Range { start: 100, len: 100 }).is_some());
        assert_eq!((shared_free.bytes(), shared_free.iter().count()), (0, 0));
    }
}
