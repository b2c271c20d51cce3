// The README's pictures by their data, and the pages that it links to by their modules: its own
// links lead from the root of the repository, and of two definitions Markdown takes the first.
#![cfg_attr(doc, doc = include_str!("guide/pictures/definitions.txt"))]
//! [C and Python]: guide::c_and_python
//! [any program]: guide::any_program
//! [choosing]: guide::choosing
//! [cookbook]: guide::cookbook
//! [figures]: guide::figures
//! [frameworks]: guide::frameworks
//! [guide]: mod@guide
//! [inside]: guide::inside
//! [planning]: guide::planning
//! [ranks]: guide::torchrun
//! [yardsticks]: guide::yardsticks
//! [Ray]: guide::ray
//! [safety]: guide::safety
//! [sharing]: guide::sharing
//!
#![doc = include_str!("../README.md")]

mod environment;
pub mod event;
pub mod guide;
pub mod placement;
pub mod pressure;
mod runtime;
pub mod staging;

pub use placement::{Group, Lease, Near, PlaceError, PlacementRequest, Placer, Placing, Policy};
pub use runtime::{Runtime, RuntimeBuilder};

pub use aquifer_adapters::{Arena, Frames, Limit};
pub use aquifer_core::{
    Budget, Bytes, DeferReuse, DeviceId, Gate, MemoryError, Opaque, OutOfBudget, OutOfMemory,
    PoolStats, Request, Tag, impl_allocator, tagged,
};
pub use aquifer_device::{
    Adopted, Block, Debugging, Dependencies, DeviceArena, DeviceBuffer, DevicePages, DevicePool,
    DeviceSlice, DeviceSliceMut, Direct, FailureCallback, Graph, GraphPool, Log, Park, Parkable,
    PoolConfig, RangeSource, RegisteredDevicePool, Reserved, Resource, SourcePool, StableBlock,
    StreamOrdered, Tenant,
};
pub use aquifer_driver::{Access, DeviceRange, Driver, Operand, OperandMut, RawStream, Typed};
pub use aquifer_global::Global;
pub use aquifer_host::{
    FileSource, PinnedAllocator, PinnedBuf, PinnedConfig, PinnedPool, Stager, StagerConfig,
};
pub use aquifer_stream::{Stream, StreamPool};

/// Adapters that wrap any allocator, and the settings of arenas and frames: [`aquifer_adapters`].
pub mod adapters {
    pub use aquifer_adapters::{
        ArenaMark, ArenaSettings, ArenaStats, CountingAllocator, Fallback, OnReset, Owns,
        Segregate, Tagged,
    };
    pub use aquifer_core::StepMemory;
}

/// What a [`Budget`] hands out, reports and calls: [`aquifer_core::budget`].
pub mod budget {
    pub use aquifer_core::{
        Charge, Reservation,
        budget::{BudgetLease, HookRegistration, Leased, Offer, Reclaim, Room},
    };
}

/// Randomised tests of the contract of allocators: [`aquifer_adapters::conformance`].
pub mod conformance {
    pub use aquifer_adapters::conformance::{ContractFault, ContractViolation, Suite, check};
}

/// The driver of NVIDIA GPUs, and memory that cudarc and this crate lend each other:
/// [`aquifer_driver::cuda`].
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use aquifer_driver::cuda::{CudaDriver, Lend, keep_alive, raw_stream};
}

/// Settings, reports and errors of device memory, and its less common kinds: [`aquifer_device`].
pub mod device {
    pub use aquifer_core::OpaqueBlock;
    pub use aquifer_device::{
        AddressRegistration, Adoption, Announced, BrokenPromise, CANARY, Captured, Declined, Fault,
        Finding, ForeignPages, GUARD_BYTES, MAX_ALIGN, OnFailure, POISON_ALLOCATED, POISON_FREED,
        PageRun, ReceivedBlock, Registrar, ShareError, ShareServer, SharedBlock, check_peer,
        conformance,
    };
}

/// What a [`Driver`] reports, and memory that other libraries own: [`aquifer_driver`].
pub mod driver {
    pub use aquifer_driver::{
        Call, CaptureMode, DeviceInfo, ExportTypes, External, Foreign, KeepAlive, RawGraph,
    };
}

/// The errors of drivers and systems, and the advice of an [`OutOfMemory`].
pub mod error {
    pub use aquifer_core::{DriverError, NoGpu, Result, SystemError, error::Remedy};
}

/// Accounts, limits and reports of the [`Global`] allocator: [`aquifer_global`].
pub mod global {
    pub use aquifer_global::{
        Allocated, Counted, Held, Stats, Tracked, Uncounted, allocated_under, cap, held_under,
        is_installed, publish_status,
        report::{Report, ReportTo, report, report_at_exit},
        reset_peak, set_cap, stats, top,
    };
}

/// The host's topology, and the settings and reports of pinned memory: [`aquifer_host`].
pub mod host {
    pub use aquifer_host::{
        Grow, PinnedStats,
        region::{Host, PageTier, PinnedBy, Pinning, RegionReport},
        topology::{Found, NodeId, Topology},
    };
}

/// A GPU in software, whose oracle reports accesses that race: [`aquifer_driver::sim`].
pub mod sim {
    pub use aquifer_driver::sim::{
        DeviceConfig, KernelMemory, Mode, OnViolation, Schedule, Sim, SimConfig, SimKernel,
        Violation, ViolationKind,
    };
}

/// Whether other processes can read the memory figures of this one: [`aquifer_status`], which also
/// has their reader.
pub mod status {
    pub use aquifer_status::{disable, is_published};
}

/// Copies and launches in stream order: [`aquifer_stream`].
pub mod stream {
    pub use aquifer_stream::{
        CopyScope, Grid, HostOwned, InFlight, Launch, Point, RefusedCopy, StreamLifetime,
        TrackUses, Use,
    };
}

/// Wake-ups for your own futures: [`aquifer_core::wake`].
pub mod wake {
    pub use aquifer_core::wake::{Alarm, LONGEST_PAUSE};
}

/// Vectors over any allocator of this crate, from allocator-api2. [`vec::Vec`] is not re-exported
/// at the root, so that `use aquifer::*` does not shadow the standard library's `Vec`, `vec!`,
/// `Result` and `core`.
pub mod vec {
    pub use allocator_api2::vec::*;
}

/// Types that can be copied to a device and back as bytes: plain data for which every bit
/// pattern is valid. Derive it with bytemuck's `derive` feature, see [custom
/// structs](guide::custom_structs).
pub use bytemuck::Pod;

/// Boxes over any allocator, from allocator-api2.
pub use allocator_api2::boxed;
