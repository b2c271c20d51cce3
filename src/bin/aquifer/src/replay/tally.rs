//! The cost of a round besides memory and time: driver calls, fences, waits, moves, and
//! concurrency.
//!
//! # Concurrency
//! Waits that order one stream behind another reduce concurrency, and a host clock does not show
//! it. On the simulator, therefore, each read and write counts as one unit of time, the device runs
//! all streams in parallel, and three lengths are compared:
//!
//! - `longest_stream`: the reads and writes of the stream that has the most. No order can be
//!   faster.
//! - `needed_path`: the longest chain of reads and writes in the order of each stream and of the
//!   trace itself, where another stream uses a block after its owner's work.
//! - `taken_path`: the longest chain as queued, with each wait that the allocator inserted, on the
//!   device or on the host.
//!
//! The *concurrency cost* is `taken_path / needed_path`, at least 1. It is the factor by which the
//! allocator's waits lengthen the streams' work. N streams of equal work that are fully serialised
//! cost N, even if the reason is that memory never holds more than one of them. A wait for work
//! that had already run when the wait was queued counts in neither path. A host that polls instead
//! of blocking, as it does under a deadline, is not visible in `taken_path` but counts as host
//! waits.
//!
//! A GPU reports no such lengths. There only the counts are available.

use super::work::{Paths, Work};
use aquifer_core::PoolStats;
use aquifer_driver::{Call, CallCounts};
use std::ops::Sub;

/// Counts of a round, or since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Tally {
    /// Allocations and frees.
    pub(crate) operations: u64,
    /// Driver calls of all kinds.
    pub(crate) driver_calls: u64,
    /// Driver calls that allocate, map, unmap or free memory or addresses.
    pub(crate) memory_calls: u64,
    /// Driver calls that create, record, query, wait for or destroy events.
    pub(crate) event_calls: u64,
    /// Events recorded to fence a stream.
    pub(crate) fences: u64,
    /// Waits of one stream for another.
    pub(crate) stream_waits: u64,
    /// Waits of the host.
    pub(crate) host_waits: u64,
    /// Physical handles that moved.
    pub(crate) moves: u64,
    /// The peak of bytes held from the driver since the beginning. A difference keeps the later
    /// value.
    pub(crate) peak_physical: u64,
    /// The lengths of the work, or none if they are unknown.
    pub(crate) paths: Option<Paths>,
}

impl Tally {
    /// Returns all counts since the beginning. Calls that `work` itself made are excluded.
    pub(crate) fn now<W: Work>(
        operations: u64,
        calls: &CallCounts,
        stats: &PoolStats,
        work: &W,
    ) -> Self {
        let own = work.driver_calls();
        let mut tally = Self {
            operations,
            fences: stats.fences,
            stream_waits: stats.stream_waits,
            host_waits: stats.host_waits,
            moves: stats.moves,
            peak_physical: stats.peak_physical,
            paths: work.paths(),
            ..Self::default()
        };
        for (call, count) in calls.made() {
            let own: u64 =
                own.iter().filter(|(other, _)| *other == call).map(|(_, count)| count).sum();
            let count = count.saturating_sub(own);
            tally.driver_calls += count;
            tally.memory_calls += if is_memory(call) { count } else { 0 };
            tally.event_calls += if is_event(call) { count } else { 0 };
        }
        tally
    }

    /// Returns `count` per allocation or free.
    pub(crate) fn per_operation(&self, count: u64) -> f64 {
        count as f64 / self.operations.max(1) as f64
    }
}

/// The counts between two points in time. Counts only grow.
impl Sub for Tally {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let paths = self.paths.zip(earlier.paths).map(|(now, then)| Paths {
            longest_stream: now.longest_stream - then.longest_stream,
            needed: now.needed - then.needed,
            taken: now.taken - then.taken,
        });
        debug_assert!(self.memory_calls + self.event_calls <= self.driver_calls);
        Self {
            operations: self.operations - earlier.operations,
            driver_calls: self.driver_calls - earlier.driver_calls,
            memory_calls: self.memory_calls - earlier.memory_calls,
            event_calls: self.event_calls - earlier.event_calls,
            fences: self.fences - earlier.fences,
            stream_waits: self.stream_waits - earlier.stream_waits,
            host_waits: self.host_waits - earlier.host_waits,
            moves: self.moves - earlier.moves,
            peak_physical: self.peak_physical,
            paths,
        }
    }
}

fn is_memory(call: Call) -> bool {
    use Call::{
        AddressFree, AddressReserve, HandleCreate, HandleRelease, Map, MemAlloc, MemFree,
        PoolAlloc, PoolCreate, PoolDestroy, PoolFree, PoolTrim, SetAccess, Unmap,
    };
    matches!(
        call,
        MemAlloc
            | MemFree
            | PoolCreate
            | PoolDestroy
            | PoolAlloc
            | PoolFree
            | PoolTrim
            | AddressReserve
            | AddressFree
            | HandleCreate
            | HandleRelease
            | Map
            | Unmap
            | SetAccess
    )
}

fn is_event(call: Call) -> bool {
    use Call::{
        EventCreate, EventDestroy, EventQuery, EventRecord, EventSynchronize, StreamWaitEvent,
    };
    matches!(
        call,
        EventCreate | EventDestroy | EventRecord | EventQuery | EventSynchronize | StreamWaitEvent
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::work::Idle;

    #[test]
    fn calls_are_sorted_by_what_they_touch() {
        let calls = CallCounts::new();
        for call in Call::ALL {
            calls.add(*call);
        }
        let mut stats = PoolStats::default();
        stats.fences = 3;
        let tally = Tally::now(2, &calls, &stats, &Idle);
        assert_eq!((tally.memory_calls, tally.event_calls), (14, 6));
        assert_eq!(tally.driver_calls, Call::ALL.len() as u64);
        assert_eq!((tally.fences, tally.per_operation(tally.fences), tally.paths), (3, 1.5, None));
        assert_eq!(tally - tally, Tally::default());
    }

    #[test]
    fn the_cost_is_that_of_the_waits_alone() {
        let paths = Paths { longest_stream: 50, needed: 100, taken: 125 };
        assert_eq!(paths.cost(), 1.25);
        assert_eq!(Paths::default().cost(), 1.0, "nothing was done");
        assert_eq!(Paths { needed: 7, taken: 6, ..paths }.cost(), 1.0);
    }
}
