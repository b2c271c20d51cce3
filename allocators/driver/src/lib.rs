//! The boundary to the GPU: one trait per family of driver calls, behind which stands CUDA or a
//! simulated GPU.
//!
//! | family | calls |
//! |---|---|
//! | [`Devices`] | what there is and what it can do |
//! | [`Streams`] | queues of work, and the thread's capture mode |
//! | [`Events`] | points in a queue that others can wait for |
//! | [`Graphs`] | work that is captured once and launched many times |
//! | [`Memory`] | whole allocations, and the driver's own stream-ordered pools |
//! | [`Physical`] | address ranges, physical handles, and which is mapped where |
//! | [`Ipc`] | physical memory that other processes can be given |
//! | [`HostMemory`] | pinned memory |
//! | [`Copies`] | moving and filling bytes, in stream order |
//!
//! A [`Driver`] is all of them and is used as `Arc<dyn Driver>`: it stands on slow paths only. A
//! call that fails answers with a [`DriverError`] and has changed nothing, unless its own text says
//! otherwise.
//!
//! # Handles
//! Streams, events, physical handles and pools are plain numbers to the driver, which crashes on a
//! wrong one. Here they can only be made by `unsafe fn from_raw`, so whoever holds one may believe
//! that it was valid once; calls that end its life are `unsafe` too, since copies of it may be
//! about.
//!
//! What a driver answers is trusted: memory that it says is free is handed out, work that it says
//! is done is not waited for. So its traits are `unsafe` to implement.
//!
//! # What may touch what
//! Calls that give addresses to the device, or take them away, are `unsafe`: the caller answers for
//! what queued work still does with them. The simulated GPU checks exactly that and reports it,
//! with the source lines of both parties; see [`sim`].

mod calls;
mod copies;
mod devices;
mod events;
mod foreign;
pub mod forks;
mod graphs;
mod handles;
mod host_memory;
mod ipc;
pub mod leftovers;
mod memory;
mod observe;
mod operand;
mod physical;
pub mod site;
mod streams;

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sim;

pub use aquifer_core::{DeviceId, DriverError};
pub use calls::{Call, CallCounts};
pub use copies::{Copies, Pattern, Pitched, Rows};
pub use devices::{DeviceInfo, Devices, MemoryInfo, losses};
pub use events::Events;
pub use foreign::{External, Foreign};
pub use graphs::{CaptureStatus, Graphs, OnRelease};
pub use handles::{PhysicalHandle, PoolHandle, RawEvent, RawGraph, RawGraphExec, RawStream};
pub use host_memory::{HostFlags, HostMemory};
pub use ipc::{ExportTypes, FabricHandle, Ipc};
pub use memory::{Memory, PoolUsage};
pub use observe::{BlockNote, HostAccess, Observer, Ownership};
pub use operand::{Access, DeviceRange, KeepAlive, Operand, OperandMut, Typed};
pub use physical::Physical;
pub use streams::{CaptureMode, Relaxed, Streams};

/// Refuses what belongs to another machine.
///
/// # Errors
/// [`MemoryError::OtherMachine`](aquifer_core::MemoryError::OtherMachine).
pub fn same_machine(expected: &dyn Driver, actual: &dyn Driver) -> aquifer_core::Result<()> {
    let (expected, actual) = (expected.machine(), actual.machine());
    if expected == actual {
        Ok(())
    } else {
        Err(aquifer_core::MemoryError::OtherMachine { expected, actual })
    }
}

/// The answer of a driver call.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A GPU driver: every family, and what it tells about itself.
///
/// # Safety
/// 1. All families are of one driver: a device, a handle or an address that one of them has given
///    out means the same to the others.
#[expect(unsafe_code, reason = "declares a trait whose answers are trusted; holds no unsafe block")]
pub unsafe trait Driver:
    Devices + Streams + Events + Graphs + Memory + Physical + Ipc + HostMemory + Copies
{
    /// `cuda`, `sim`.
    fn name(&self) -> &'static str;

    /// How often each call has been made since the driver was opened.
    fn calls(&self) -> &CallCounts;

    /// Whoever wants to know which block belongs to whom. The simulated GPU does; a real one does
    /// not.
    fn observer(&self) -> Option<&dyn Observer> {
        None
    }

    /// Returns the number of the machine whose devices these are: 0 for the GPUs of this host,
    /// another for each simulated machine. Streams and memory of two machines have nothing to do
    /// with each other, whatever their numbers.
    fn machine(&self) -> u64 {
        0
    }

    /// Returns the simulated machine that this is the driver of; `None` for any other driver.
    fn simulator(self: std::sync::Arc<Self>) -> Option<sim::Sim> {
        None
    }
}
