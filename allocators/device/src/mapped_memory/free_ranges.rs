//! Candidates for reuse: free ranges of caches and of the shared free list in one list, by address,
//! and the handles that lie wholly in them. The lists belong to a pass and are partly built under
//! the locks of caches: see `aquifer_core::scratch`.

use super::{MappedMemory, intersection};
use crate::{
    backing::{
        shared_free::{SharedFreeList, lowest_place},
        slots::Mapping,
    },
    base::pending::{StreamDeps, is_done, is_done_except},
    stream_cache::{CacheState, StreamCache},
};
use aquifer_core::scratch::{Bump, List, list};
use aquifer_heap::{Extent, Heap, Range};
use aquifer_stream::Timeline;
use smallvec::smallvec;
use std::{
    cmp::Reverse,
    ops::ControlFlow::{Break, Continue},
    sync::{Arc, Mutex, PoisonError},
};

/// A free range.
pub(super) struct FreeRange {
    pub(super) range: Range,
    /// The index in [`FreeRanges::caches`]; `None` for the shared free list.
    owner: Option<usize>,
    done: bool,
}

/// Which free ranges a search looks at: long ones, and what touches them. Those shorter than a slot,
/// which hold no whole handle, are as many as the blocks of a program, so they are looked at only
/// where one is needed.
#[derive(Clone, Copy, Default)]
pub(super) struct Reach<'a> {
    /// Ranges of at least this many bytes.
    pub(super) least: u64,
    /// Of each list, also the lowest range with room for each of these blocks: size and alignment.
    pub(super) blocks: &'a [(u64, u64)],
    /// Also what touches unclaimed slots.
    pub(super) beside_bare: bool,
}

/// Free ranges, by address. They are only read, not taken: another thread may take one first.
pub(super) struct FreeRanges<'s> {
    /// The cache that searches. What only its own stream still uses is ready for it.
    cache: Option<&'static StreamCache>,
    may_wait: bool,
    caches: List<'s, (&'static StreamCache, Arc<Timeline>)>,
    pub(super) all: List<'s, FreeRange>,
    /// Bytes of live blocks of these caches.
    pub(super) live: u64,
    /// The number of these blocks, with those that are freed and pending.
    blocks: u64,
}

/// A range taken from its list.
pub(super) struct RangePiece {
    pub(super) range: Range,
    /// `None` for the shared free list.
    pub(super) from: Option<&'static StreamCache>,
    pub(super) deps: StreamDeps,
}

/// A handle under memory that is wholly free.
pub(super) struct MappingCandidate {
    pub(super) first: u64,
    pub(super) count: u64,
    /// Bytes of the free stretch around it.
    pub(super) stretch: u64,
    /// Whether some of its work is not known to be done.
    pub(super) busy: bool,
}

/// A mapping removed from the table, with the memory over it, which is in no list.
///
/// Owning this value is the proof that no list, no block and no other thread can reach the range.
/// It is no proof that the work on the range is done: [`TakenMapping::is_done`] must be checked
/// before the value is passed to [`MappedMemory::unmap_done`]. While it is not done, the handle may only
/// be mapped a second time, or the value restored.
pub(super) struct TakenMapping<'s> {
    pub(super) mapping: Mapping,
    pub(super) pieces: List<'s, RangePiece>,
}

impl RangePiece {
    pub(super) fn is_from(&self, cache: &'static StreamCache) -> bool {
        self.from.is_some_and(|from| std::ptr::eq(from, cache))
    }

    /// Returns whether the host has seen all work on it done, except for that of `own`.
    pub(super) fn is_done_except(&self, own: Option<&Arc<Timeline>>) -> bool {
        is_done_except(&self.deps, own)
    }
}

impl TakenMapping<'_> {
    /// Returns whether the host has seen all work on the range done, so that it may be unmapped.
    pub(super) fn is_done(&self) -> bool {
        self.pieces.iter().all(|piece| is_done(&piece.deps))
    }
}

/// Returns whether a block of `bytes` at `align` fits in a range.
fn has_room(range: Range, bytes: u64, align: u64) -> bool {
    lowest_place(range, bytes, align).is_some()
}

impl<'s> FreeRanges<'s> {
    fn new(bump: &'s Bump, cache: Option<&'static StreamCache>, may_wait: bool) -> Self {
        let (caches, all) = (List::new_in(bump), List::new_in(bump));
        Self { cache, may_wait, caches, all, live: 0, blocks: 0 }
    }

    fn is_for(&self, cache: &'static StreamCache) -> bool {
        self.cache.is_some_and(|searching| std::ptr::eq(searching, cache))
    }

    /// Adds what `pick` passes on of a cache's free ranges, as far as it is ready: it is told which
    /// are.
    fn read_cache(
        &mut self,
        donor: &'static StreamCache,
        pick: impl FnOnce(&Heap, &mut dyn FnMut(Extent) -> bool),
    ) {
        let waits = self.may_wait || self.is_for(donor);
        donor.with(|s| {
            let Some(timeline) = s.timeline().cloned() else { return };
            let known = self.caches.iter().position(|(other, _)| std::ptr::eq(*other, donor));
            let at = known.unwrap_or_else(|| {
                self.live += s.footprint().live;
                self.blocks += s.heap.live_blocks();
                self.caches.push((donor, timeline.clone()));
                self.caches.len() - 1
            });
            let owner = Some(at);
            pick(&s.heap, &mut |Extent { range, stamp }| {
                let done = timeline.is_done(stamp);
                if done || waits {
                    self.all.push(FreeRange { range, owner, done });
                }
                done || waits
            });
        });
    }

    /// As [`FreeRanges::read_cache`], of the shared free list. What may still be waited for is
    /// passed on as ready.
    fn read_shared(
        &mut self,
        shared: &Mutex<SharedFreeList>,
        pick: impl FnOnce(&SharedFreeList, &mut dyn FnMut(Range, &StreamDeps) -> bool),
    ) {
        let bump = self.bump();
        let (own, waits) = (self.cache.map(StreamCache::timeline), self.may_wait);
        // With the dependencies that are still to be judged.
        let mut picked = List::new_in(bump);
        pick(&shared.lock().unwrap_or_else(PoisonError::into_inner), &mut |range, deps| {
            let done = is_done(deps);
            let free_range = FreeRange { range, owner: None, done };
            let ready = done || is_done_except(deps, own.as_ref());
            if ready {
                picked.push((free_range, StreamDeps::new()));
            } else if waits {
                picked.push((free_range, deps.clone()));
            }
            ready || waits
        });
        // This queries the driver, so it runs without the lock, and once for each stream. Work of
        // an isolated stream is never waited for.
        let mut answers: List<'_, (Arc<Timeline>, bool)> = List::new_in(bump);
        let mut is_waited_for = |timeline: &Arc<Timeline>, epoch: u64| {
            let known = answers.iter().find(|(other, _)| Arc::ptr_eq(other, timeline));
            match known {
                Some(&(_, answer)) => answer,
                None => {
                    let answer = timeline.is_waited_for_unasked(epoch);
                    // The answer for a stream that is fenced at once is about this epoch only.
                    if !timeline.fences_at_once() {
                        answers.push((timeline.clone(), answer));
                    }
                    answer
                }
            }
        };
        let ready = picked.into_iter().filter_map(|(free_range, deps)| {
            deps.iter().all(|(t, e)| t.is_done(*e) || is_waited_for(t, *e)).then_some(free_range)
        });
        self.all.extend(ready);
    }

    /// Puts the ranges in order, each once. Due after the lists have been read.
    fn sort(&mut self) {
        self.all.sort_unstable_by_key(|free_range| free_range.range.start);
        self.all.dedup_by_key(|free_range| free_range.range.start);
    }

    /// Returns the allocator of its lists.
    pub(super) fn bump(&self) -> &'s Bump {
        self.all.allocator()
    }

    /// Returns the smaller of the size of a new block and the mean of the live ones, it included.
    pub(super) fn typical_block(&self, bytes: u64) -> u64 {
        bytes.min(self.live.saturating_add(bytes) / (self.blocks + 1))
    }

    /// Returns the ranges that overlap `range`.
    pub(super) fn touching(&self, range: Range) -> &[FreeRange] {
        let from = self.all.partition_point(|o| o.range.start + o.range.len <= range.start);
        let to = self.all.partition_point(|o| o.range.start < range.start + range.len);
        &self.all[from..to.max(from)]
    }

    /// An iterator over the stretches without a gap, as slices of ranges.
    fn stretches(&self) -> impl Iterator<Item = &[FreeRange]> {
        self.all.chunk_by(|a, b| a.range.start + a.range.len == b.range.start)
    }
}

impl MappedMemory {
    /// Returns the free ranges of `donors` and of the shared free list within `reach`: those that
    /// are done, those that only `cache` itself still uses, and if the search `may_wait` all of them.
    pub(super) fn free_ranges<'s>(
        &self,
        bump: &'s Bump,
        donors: &[&'static StreamCache],
        cache: Option<&'static StreamCache>,
        may_wait: bool,
        reach: Reach<'_>,
    ) -> FreeRanges<'s> {
        let least = reach.least;
        let mut found = FreeRanges::new(bump, cache, may_wait);
        for &donor in donors {
            found.read_cache(donor, |heap, add| {
                let _ = heap.visit_free(least, |extent| {
                    add(extent);
                    Continue(())
                });
                for &(bytes, align) in reach.blocks {
                    let mut lowest = u64::MAX;
                    let _ = heap.visit_free(bytes, |extent| {
                        let Range { start, len } = extent.range;
                        if len >= least {
                            // It and all that follow have been added above.
                            return Break(());
                        }
                        let lower = start < lowest && has_room(extent.range, bytes, align);
                        if lower && add(extent) {
                            lowest = start;
                        }
                        Continue(())
                    });
                }
            });
        }
        found.read_shared(&self.shared_free, |shared, add| {
            shared.from(least).for_each(|(range, deps)| _ = add(range, deps));
            for &(bytes, align) in reach.blocks {
                let ends = |&(range, deps): &(Range, &StreamDeps)| {
                    range.len >= least || has_room(range, bytes, align) && add(range, deps)
                };
                let _ = shared.from(bytes).find(ends);
            }
        });
        found.sort();
        if least > 1 {
            self.add_touching(&mut found, donors, reach);
        }
        found
    }

    /// Adds the free ranges that touch those that were found.
    fn add_touching(
        &self,
        found: &mut FreeRanges<'_>,
        donors: &[&'static StreamCache],
        reach: Reach<'_>,
    ) {
        let mut beside = List::new_in(found.bump());
        let mut add = |range: Range| beside.extend([range.start.saturating_sub(1), range.end()]);
        found.all.iter().for_each(|free_range| add(free_range.range));
        if reach.beside_bare {
            self.slots().free_runs().for_each(|(first, count)| add(self.range(first, count)));
        }
        beside.sort_unstable();
        beside.dedup();
        beside.retain(|at| found.touching(Range { start: *at, len: 1 }).is_empty());
        for &donor in donors {
            found.read_cache(donor, |heap, add| {
                let touching = beside.iter().filter_map(|&at| heap.free_extent_at(at));
                touching.for_each(|extent| _ = add(extent));
            });
        }
        found.read_shared(&self.shared_free, |shared, add| {
            let touching = beside.iter().filter_map(|&at| shared.at(at));
            touching.for_each(|(range, deps)| _ = add(range, deps));
        });
        found.sort();
    }

    /// Moves free ranges of at least `least` bytes from the caches of `donors` to the shared free
    /// list. The cost grows with the number of ranges moved. No handle is moved.
    pub(crate) fn share_free(&self, donors: &[&'static StreamCache], least: u64) {
        let _transfer = self.begin_transfer();
        let pass = self.scratch.begin();
        let mut taken = List::new_in(&*pass);
        for &donor in donors {
            let timeline = donor.with(|s| {
                s.heap.drain(least, |extent| taken.push(extent));
                s.timeline().filter(|_| !taken.is_empty()).cloned()
            });
            let Some(timeline) = timeline else { continue };
            let mut shared_free = self.shared_free();
            for extent in taken.drain(..) {
                shared_free.add(extent.range, smallvec![(timeline.clone(), extent.stamp)]);
            }
        }
    }

    /// Moves free ranges whose work is known to be done from the caches of `donors` to the shared
    /// free list, as far as a cache holds more than `cap` free bytes. Takes the high ends of the
    /// longest ranges. Returns the number of transfers begun, one for each cache above `cap`. No
    /// handle is moved.
    pub(crate) fn cap_caches(&self, donors: &[&'static StreamCache], cap: u64) -> u64 {
        let mut own_transfers = 0;
        for &donor in donors {
            let over = |s: &CacheState| s.heap.free_bytes().saturating_sub(cap);
            if donor.with(|s| over(s)) == 0 {
                continue;
            }
            let _transfer = self.begin_transfer();
            let pass = self.scratch.begin();
            own_transfers += 1;
            let (taken, timeline) = donor.with(|s| {
                let timeline = s.timeline().cloned();
                let done =
                    |stamp| timeline.as_ref().is_some_and(|timeline| timeline.is_done(stamp));
                let mut free =
                    list(&pass, s.heap.free_extents().filter(|extent| done(extent.stamp)));
                free.sort_unstable_by_key(|extent| Reverse(extent.range.len));
                let mut taken = List::new_in(&*pass);
                for Range { start, len } in free.into_iter().map(|extent| extent.range) {
                    let over = over(s);
                    if over == 0 {
                        break;
                    }
                    // Cut at a slot border: small blocks of other streams take whole slots first.
                    let from = start + len.saturating_sub(over);
                    let from = (from - (from - self.base) % self.slot).max(start);
                    let range = Range { start: from, len: start + len - from };
                    taken.extend(s.heap.remove(range).ok().map(|stamp| (range, stamp)));
                }
                (taken, timeline)
            });
            let Some(timeline) = timeline else { continue };
            let mut shared_free = self.shared_free();
            for (range, stamp) in taken {
                shared_free.add(range, smallvec![(timeline.clone(), stamp)]);
            }
        }
        own_transfers
    }

    /// Takes `range` out of a free range. Returns `None` if another thread has taken it.
    pub(super) fn take_piece(
        &self,
        free_ranges: &FreeRanges<'_>,
        free_range: &FreeRange,
        range: Range,
    ) -> Option<RangePiece> {
        let (from, deps) = match free_range.owner {
            Some(at) => {
                let (cache, timeline) = &free_ranges.caches[at];
                let stamp = cache.with(|s| s.heap.remove(range)).ok()?;
                (Some(*cache), smallvec![(timeline.clone(), stamp)])
            }
            None => (None, self.shared_free().take(range)?),
        };
        Some(RangePiece { range, from, deps })
    }

    /// Returns the handles that lie wholly in the offered ranges.
    pub(super) fn candidates<'s>(
        &self,
        free_ranges: &FreeRanges<'s>,
    ) -> List<'s, MappingCandidate> {
        let mut found = List::new_in(free_ranges.bump());
        let slots = self.slots();
        for stretch in free_ranges.stretches() {
            let (Some(lowest), Some(highest)) = (stretch.first(), stretch.last()) else { continue };
            let start = lowest.range.start;
            let whole = Range { start, len: highest.range.start + highest.range.len - start };
            let (first, count) = self.whole_slots(whole);
            for mapping in slots.inside(first, count) {
                let range = self.range(mapping.first, mapping.count);
                let busy = free_ranges.touching(range).iter().any(|free_range| !free_range.done);
                let (first, count) = (mapping.first, mapping.count);
                found.push(MappingCandidate { first, count, stretch: whole.len, busy });
            }
        }
        found
    }

    /// Takes a candidate: the memory over it from its lists, and the mapping out of the table.
    /// Returns `None` if another thread was faster.
    pub(super) fn take_mapping<'s>(
        &self,
        candidate: &MappingCandidate,
        free_ranges: &FreeRanges<'s>,
        may_wait: bool,
    ) -> Option<TakenMapping<'s>> {
        let whole = self.range(candidate.first, candidate.count);
        let mut pieces = List::new_in(free_ranges.bump());
        for free_range in free_ranges.touching(whole) {
            let Some(range) = intersection(free_range.range, whole) else { continue };
            let Some(piece) = self.take_piece(free_ranges, free_range, range) else { break };
            pieces.push(piece);
        }
        let all = pieces.iter().map(|piece| piece.range.len).sum::<u64>() == whole.len;
        // With all of the memory taken, no other thread can unmap the handle. But another handle
        // may have been mapped here before.
        let mapping =
            if all { self.slots().unmap_exactly(candidate.first, candidate.count) } else { None };
        let Some(mapping) = mapping else {
            self.return_pieces(pieces);
            return None;
        };
        let taken = TakenMapping { mapping, pieces };
        if !may_wait && !taken.is_done() {
            self.restore_mappings([taken]);
            return None;
        }
        Some(taken)
    }

    /// Returns taken mappings to where they were.
    pub(super) fn restore_mappings<'s>(&self, taken: impl IntoIterator<Item = TakenMapping<'s>>) {
        for TakenMapping { mapping, pieces } in taken {
            self.slots().map(mapping);
            self.return_pieces(pieces);
        }
    }

    pub(super) fn return_pieces(&self, pieces: impl IntoIterator<Item = RangePiece>) {
        for RangePiece { range, from, deps } in pieces {
            match from {
                Some(cache) => {
                    let stamp = deps.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0);
                    cache.with(|s| s.add(range, stamp));
                }
                None => self.shared_free().add(range, deps),
            }
        }
    }
}
