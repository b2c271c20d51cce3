//! Pinned host memory on the node it should be on.
//!
//! | module | holds |
//! |---|---|
//! | [`topology`] | which memory is near which CPU and device, and what of it the process may use |
//! | [`workers`] | threads bound to nodes that touch memory first |
//! | [`region`] | pinned pieces of memory, step by step with a fall-back for each |
//! | [`pool`] | pinned memory by the block: [`PinnedPool`], [`PinnedAllocator`], [`PinnedBuf`] |
//! | [`staging`] | moving memory that is not pinned, and files: [`Stager`] |
//! | [`clock`] | the time, cheaply |
//! | [`kernel`] | the system calls that the rest is made of, and a plan of failures for them |
//!
//! Pinned memory that is had the plain way, by `cuMemHostAlloc`, comes at 2–3.5 GB/s and lies on
//! the node of the thread that asked. Here it is mapped, placed, populated by many threads on its
//! node and registered by one, at ten times that, and the kernel is asked in the end where it lies.
//! Where a step is not to be had (no huge pages, a sandbox without memory policies, no driver at
//! all) the next best is taken, and the [`RegionReport`](region::RegionReport) says so.
//!
//! Everything runs without a GPU: memory is pageable then, and says that it is.
pub mod clock;
pub mod kernel;
pub mod pool;
pub mod region;
pub mod staging;
pub mod topology;
pub mod workers;

pub use pool::{Grow, PinnedAllocator, PinnedBuf, PinnedConfig, PinnedPool, PinnedStats};
pub use staging::{
    Begun, Failed, FileSource, HostBuffer, Permit, Progress, ReadMode, ShortWait, Sink, Source,
    StageError, StageScope, Staged, Stager, StagerConfig, Stores, Ticket,
};
