#![doc = include_str!("../README.md")]

mod environment;
pub mod guide;
pub mod placement;
pub mod pressure;
mod runtime;
pub mod staging;

pub use placement::{
    Group, Grouping, Lease, Near, PlaceError, PlacementRequest, Placer, Placing, Policy,
};
pub use pressure::{HostWatch, Pressure};
pub use runtime::{Runtime, RuntimeBuilder};

pub use aquifer_adapters::{self as adapters, Arena, Frame, Frames, Limit, NextFrame};
pub use aquifer_core::{
    self as base, Action, Budget, Bytes, Charge, DeferReuse, DeviceId, DriverError, Event,
    EventSink, Gate, MemoryError, Opaque, OutOfBudget, OutOfMemory, PoolStats, Recorder,
    Reservation, StepMemory, Tag, error, event, impl_allocator, tagged, wake,
};
pub use aquifer_device::{
    self as device, AddressRegistration, Adopted, Adoption, Allocating, Announced, Block, Captured,
    Chunks, ChunksMut, Debugging, Declined, Dependencies, DeviceArena, DeviceBuffer, DevicePages,
    DevicePool, DeviceSlice, DeviceSliceMut, Direct, Exported, FailureCallback, Finding, Graph,
    GraphPool, Log, Offer, OnFailure, PageRun, Park, ParkReport, Parkable, PoolConfig, RangeSource,
    Reclaim, Request, Reserved, Resource, ResumeReport, Room, SourcePool, StableBlock,
    StreamOrdered, Tenant,
};
#[cfg(feature = "cuda")]
pub use aquifer_driver::cuda;
pub use aquifer_driver::{
    self as driver, Access, DeviceRange, Driver, External, Foreign, Operand, OperandMut, RawStream,
    Typed, sim,
};
pub use aquifer_global::{self as global, Global};
pub use aquifer_heap as heap;
pub use aquifer_host::{
    self as host, FileSource, PinnedAllocator, PinnedBuf, PinnedConfig, PinnedPool, Source, Stager,
    StagerConfig, Ticket,
};
pub use aquifer_stream::{
    self as stream, CopyScope, Grid, HostOwned, InFlight, Landing, Point, RefusedCopy, Stream,
    StreamLifetime, StreamPool, Use,
};

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
