//! The cost of a round besides memory and time: driver calls, fences, waits and moves.

use super::work::Work;
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
}

/// The counts between two points in time. Counts only grow.
impl Sub for Tally {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
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
        assert_eq!(tally.fences, 3);
        assert_eq!(tally - tally, Tally::default());
    }
}
