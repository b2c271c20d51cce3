//! Pinned host memory with NUMA placement: regions, pools and staged transfers. Part of aquifer;
//! promises no stability beyond what aquifer re-exports.
//!
//! | module | contents |
//! |---|---|
//! | [`topology`] | NUMA nodes, CPUs and devices, and which the process may use |
//! | [`workers`] | threads bound to NUMA nodes that do the first touch of memory |
//! | [`region`] | pinned memory regions, made in steps that each have a fallback |
//! | [`pool`] | pinned memory in blocks: [`PinnedPool`], [`PinnedAllocator`], [`PinnedBuf`] |
//! | [`staging`] | transfers of pageable memory and of files: [`Stager`] |
//! | [`clock`] | a cheap coarse clock |
//! | [`kernel`] | the system calls used here, and fault injection for them |
//!
//! A [`region`] is mapped, placed on its node, populated by many threads of that node, and
//! registered by one thread. Its placement is then verified with the kernel. This is about ten
//! times as fast as `cuMemHostAlloc`, which places memory on the node of the calling thread.
//! Where a step is not available (no huge pages, no memory policies in a sandbox, no driver), the
//! next best one is used, and the [`RegionReport`](region::RegionReport) records it.
//!
//! Everything also works without a GPU: memory is then pageable, and reported as such.
pub mod clock;
pub mod kernel;
pub mod pool;
pub mod region;
pub mod staging;
pub mod topology;
pub mod workers;

pub use pool::{Grow, PinnedAllocator, PinnedBuf, PinnedConfig, PinnedPool, PinnedStats};
pub use staging::{
    Begun, Failed, FileSource, HostBuffer, Permit, Progress, ReadMode, Sink, Source, StageError,
    StageScope, Staged, Stager, StagerConfig, Ticket,
};

// The state of a pool is in atomics and behind locks that ignore poison. The only code of the
// program that runs inside a pool is that of gates, sinks and reclaimers, with no lock held, and
// their panics are contained. So a panic that unwinds past a handle leaves it usable. `T` is plain
// data of the caller in a `PinnedBuf`, as in a `Vec`.
aquifer_core::__unwind_safe! { [] PinnedPool, [] PinnedAllocator, [] Stager, [T: bytemuck::Pod] PinnedBuf<T> }
