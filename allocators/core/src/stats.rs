//! What a pool holds.

use std::ops::Add;

/// A pool's account at one moment. All fields are bytes unless their name says otherwise.
///
/// `live + cached + pending` is what the pool's blocks and caches span; `physical` is what it holds
/// from the driver or the kernel, and what its budget is charged for.
///
/// Its example is that of any pool, such as `DevicePool` of aquifer-device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// In blocks that are allocated now, as their sizes were rounded.
    pub live: u64,
    /// As `live`, in the sizes that were asked for.
    pub requested: u64,
    /// Free and backed by memory: can be given out again. Without what is free and belongs to
    /// graphs.
    pub cached: u64,
    /// Freed, but held back until a use on another stream is done, or until the driver takes back
    /// what it has refused to.
    pub pending: u64,
    /// Held from the driver or the kernel.
    pub physical: u64,
    /// Held for graphs, live or free: a part of `physical` that nobody else is given while a graph
    /// may be launched.
    pub graphs: u64,
    /// The most that `requested` has been. Where each stream counts for itself, the sum of their
    /// peaks, which is no less.
    pub peak_requested: u64,
    /// The most that `live` has been, counted as `peak_requested` is.
    pub peak_live: u64,
    /// The most that `physical` has been.
    pub peak_physical: u64,
    /// Blocks allocated now (a count).
    pub blocks: u64,
    /// Allocations that succeeded (a count).
    pub allocations: u64,
    /// Blocks freed (a count).
    pub frees: u64,
    /// Allocations that failed (a count).
    pub failures: u64,
    /// Times the pool took memory from the driver or the kernel (a count).
    pub growths: u64,
    /// Given back to the driver or the kernel so far.
    pub reaped: u64,
    /// Physical handles moved from one address to another (a count).
    pub moves: u64,
    /// Ranges that one stream took over from another (a count).
    pub adoptions: u64,
    /// Events recorded to fence a stream (a count).
    pub fences: u64,
    /// GPU-side waits that one stream was made to do for another (a count).
    pub stream_waits: u64,
    /// Times the host had to wait for queued work (a count).
    pub host_waits: u64,
}

impl Add for PoolStats {
    type Output = Self;

    /// Both accounts in one. Peaks add up to no less than the peak of both together.
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
        }
    }
}
