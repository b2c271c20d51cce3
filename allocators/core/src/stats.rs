//! The statistics of a pool.

use std::ops::Add;

/// The statistics of a pool at one moment. Fields are in bytes unless noted.
///
/// `live + cached + pending` is what the pool's blocks and caches span. `physical` is what the pool
/// holds from the driver or the kernel, and what its budget is charged for. Of device memory,
/// `physical` also contains bytes that are in none of the three:
///
/// - free memory of graphs, which is a part of `graphs`;
/// - a physical handle that is mapped only where it is not used any more: queued work may still
///   access that mapping, or the driver has refused to remove it;
/// - memory that a thread is moving, backing or releasing at this moment.
///
/// The crate documentation of aquifer-device has a table of all kinds of memory and their fields.
///
/// See the example of any pool, such as `DevicePool` of aquifer-device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes in live blocks, in rounded sizes. Of device memory this includes stable blocks,
    /// committed elements of reserved memory, parkable blocks that are not parked, and blocks of
    /// graphs, but no memory that another process has exported to this one. Where debugging puts
    /// guards around blocks, they count too.
    pub live: u64,
    /// Bytes in live blocks, in requested sizes. Guards count as for `live`.
    pub requested: u64,
    /// Free bytes that are backed by memory and can be allocated again. Includes memory that
    /// queued work of its own stream may still use, physical handles that are mapped nowhere, and
    /// free memory between parkable blocks. Excludes free memory that belongs to graphs.
    pub cached: u64,
    /// Freed bytes that cannot be allocated again yet:
    ///
    /// - blocks that other streams may still use, and host blocks whose gates are shut;
    /// - stable blocks, reserved elements and memory of ended graphs until they are released: they
    ///   wait for the work of all streams that used them, also their own, and for all
    ///   registrations of their address;
    /// - blocks that debugging holds back;
    /// - memory whose release the driver has refused.
    pub pending: u64,
    /// Bytes held from the driver or the kernel.
    pub physical: u64,
    /// Bytes held for graphs, live or free. A part of `physical` that other requests cannot use
    /// while a graph may be launched. Its live blocks count in `live` too, and its freed blocks
    /// that other streams may still use in `pending` too.
    pub graphs: u64,
    /// The maximum of `requested`, of all streams together. A device pool with several streams
    /// reports up to 1 MiB more for each of them that has live blocks, and never less. Blocks that
    /// debugging holds back count.
    pub peak_requested: u64,
    /// The maximum of `live`, counted like `peak_requested`.
    pub peak_live: u64,
    /// The maximum of `physical`.
    pub peak_physical: u64,
    /// Live blocks (a count). Includes parked blocks. Excludes reserved memory.
    pub blocks: u64,
    /// Allocations that succeeded (a count).
    pub allocations: u64,
    /// Blocks freed (a count).
    pub frees: u64,
    /// Allocations that failed (a count).
    pub failures: u64,
    /// How often the pool took memory from the driver or the kernel (a count).
    pub growths: u64,
    /// Bytes released to the driver or the kernel so far.
    pub reaped: u64,
    /// Physical handles taken from under free memory for a block elsewhere (a count): mapped at
    /// another address, or released and created in another size. They count when they are taken,
    /// also if the search then fails for lack of room, but not if it ends with a driver's error.
    /// Memory that passes from one list or cache to another with its mapping does not count here.
    pub moves: u64,
    /// Searches that gave a request memory of another stream's cache or of the shared free list (a
    /// count).
    pub adoptions: u64,
    /// Events recorded to fence a stream (a count).
    pub fences: u64,
    /// GPU-side waits of one stream for another (a count).
    pub stream_waits: u64,
    /// How often the host waited for queued work (a count).
    pub host_waits: u64,
    /// Allocations that the pool's plan has served (a count).
    pub plan_hits: u64,
    /// Allocations that it has not served while it was in use (a count).
    pub plan_strays: u64,
    /// Those of `plan_strays` whose place was still held, or not ordered (a count).
    pub plan_overlaps: u64,
    /// How often the position in the plan was lost and found again (a count).
    pub plan_resynchronisations: u64,
}

impl Add for PoolStats {
    type Output = Self;

    /// Adds two statistics. The sum of the peaks is an upper bound of the common peak.
    fn add(self, other: Self) -> Self {
        Self {
            live: self.live + other.live,
            requested: self.requested + other.requested,
            cached: self.cached + other.cached,
            pending: self.pending + other.pending,
            physical: self.physical + other.physical,
            graphs: self.graphs + other.graphs,
            peak_requested: self.peak_requested + other.peak_requested,
            peak_live: self.peak_live + other.peak_live,
            peak_physical: self.peak_physical + other.peak_physical,
            blocks: self.blocks + other.blocks,
            allocations: self.allocations + other.allocations,
            frees: self.frees + other.frees,
            failures: self.failures + other.failures,
            growths: self.growths + other.growths,
            reaped: self.reaped + other.reaped,
            moves: self.moves + other.moves,
            adoptions: self.adoptions + other.adoptions,
            fences: self.fences + other.fences,
            stream_waits: self.stream_waits + other.stream_waits,
            host_waits: self.host_waits + other.host_waits,
            plan_hits: self.plan_hits + other.plan_hits,
            plan_strays: self.plan_strays + other.plan_strays,
            plan_overlaps: self.plan_overlaps + other.plan_overlaps,
            plan_resynchronisations: self.plan_resynchronisations + other.plan_resynchronisations,
        }
    }
}
