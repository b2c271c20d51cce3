//! The driver boundary: one trait per family of driver calls, implemented by CUDA and by a
//! simulated GPU. Part of aquifer; promises no stability beyond what aquifer re-exports.
//!
//! | family | calls |
//! |---|---|
//! | [`Devices`] | the devices and their capabilities |
//! | [`Streams`] | streams, and the thread's capture mode |
//! | [`Events`] | points in a stream that streams and the host can wait for |
//! | [`Graphs`] | work that is captured once and launched many times |
//! | [`Memory`] | whole allocations, and the driver's own stream-ordered pools |
//! | [`Physical`] | address ranges, physical handles, and mappings |
//! | [`Ipc`] | physical memory shared with other processes |
//! | [`HostMemory`] | pinned memory |
//! | [`Copies`] | copies and fills in stream order |
//!
//! A [`Driver`] implements all of them and is used as `Arc<dyn Driver>`, on slow paths only. A call
//! that fails returns a [`DriverError`] and has changed nothing, unless its documentation says
//! otherwise.
//!
//! # Handles
//! Streams, events, physical handles and pools are plain numbers to the driver, which crashes on an
//! invalid one. Here they are created only by `unsafe fn from_raw`, so each handle was valid at
//! some time. Calls that destroy a handle are `unsafe` too, since copies of it may exist.
//!
//! The results of a driver are trusted: memory that it reports as free is allocated again, and work
//! that it reports as done is not waited for. Its traits are therefore `unsafe` to implement.
//!
//! # Access to memory
//! Calls that give addresses to the device, or take them away, are `unsafe`: the caller is
//! responsible for what queued work still does with them. The simulated GPU checks exactly that. It
//! reports violations with the source lines of both sides. See [`sim`].

mod calls;
mod codes;
mod copies;
mod devices;
mod driver;
mod families;
mod foreign;
pub mod forks;
mod handles;
mod ipc;
pub mod leftovers;
mod observe;
mod operand;
pub mod site;

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sim;

pub use aquifer_core::{DeviceId, DriverError};
pub use calls::{Call, CallCounts};
pub use copies::{Copies, Pattern, Rows};
pub use devices::{DeviceInfo, Devices, MemoryInfo, losses};
pub use driver::{Driver, Relaxed, same_machine};
pub use families::{
    CaptureMode, CaptureStatus, Events, Graphs, HostMemory, Memory, Physical, PoolUsage, Streams,
};
pub use foreign::{External, Foreign};
pub use handles::{PhysicalHandle, PoolHandle, RawEvent, RawGraph, RawGraphExec, RawStream};
pub use ipc::{ExportTypes, Ipc};
pub use observe::{BlockNote, HostAccess, Observer, Ownership};
pub use operand::{Access, DeviceRange, KeepAlive, Operand, OperandMut, Typed};

/// The result of a driver call.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;
