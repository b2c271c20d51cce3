#![doc = include_str!("../README.md")]

mod environment;
pub mod guide;
pub mod placement;
pub mod pressure;
mod runtime;
pub mod staging;

pub use placement::{Group, Grouping, Lease, Near, Place, PlaceError, Placer, Placing, Policy};
pub use pressure::{HostWatch, Pressure};
pub use runtime::{Runtime, RuntimeBuilder};

pub use aquifer_adapters::{self as adapters, Arena, Frame, Frames, Limit};
pub use aquifer_core::{
    self as core, Action, Budget, Bytes, Charge, DeferReuse, DeviceId, DriverError, Event, Gate, MemoryError,
    Opaque, OutOfBudget, OutOfMemory, PoolStats, Recorder, Reservation, Result, Sink, StepMemory, Tag, event,
    impl_allocator, tagged,
};
pub use aquifer_device::{
    self as device, Adopted, Adoption, Announced, Block, Captured, Chunks, ChunksMut, Debugging, Declined,
    DeviceArena, DeviceBuffer, DevicePages, DevicePool, DeviceSlice, DeviceSliceMut, Direct, Exported,
    FailureCallback, Finding, Graph, GraphPool, Log, Offer, OnFailure, PageRun, Park, ParkReport, Parkable,
    PoolConfig, Reclaim, Registration, Request, Reserved, Resource, ResumeReport, Room, StableBlock,
    StreamOrdered, Tenant,
};
#[cfg(feature = "cuda")]
pub use aquifer_driver::cuda;
pub use aquifer_driver::{
    self as driver, Access, DeviceRange, Driver, External, Foreign, Operand, OperandMut, RawStream, Typed,
    sim,
};
pub use aquifer_global::{self as global, Global};
pub use aquifer_heap as heap;
pub use aquifer_host::{
    self as host, FileSource, PinnedAllocator, PinnedBuf, PinnedConfig, PinnedPool, Source, Stager,
    StagerConfig, Ticket,
};
pub use aquifer_stream::{
    self as stream, Grid, HostOwned, InFlight, Life, Point, Refused, Scope, Stream, StreamPool, Use,
};

/// Vectors over any allocator: allocator-api2's, which our allocators serve.
pub use allocator_api2::vec::{self, Vec};

/// Boxes over any allocator.
pub use allocator_api2::boxed;
