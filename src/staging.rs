//! Staging: memory that is not pinned is copied by a [`Stager`](crate::Stager), and memory allocated in pinned
//! memory needs no copy.
//!
//! [`install`] makes one pinned pool the staging allocator of the process. [`route`] directs the
//! allocations of a part of the program to it:
//!
//! ```no_run
//! use aquifer::{Runtime, staging};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let rt = Runtime::builder().build()?;
//! staging::install(rt.pinned_near(0).clone())?;
//! // With `aquifer::Global` as the program's global allocator, this is a plain
//! // `std::vec::Vec<u8>` in pinned memory.
//! let bytes = staging::route(|| std::fs::read("weights.bin"))?;
//! # Ok(())
//! # }
//! ```
//!
//! A [`Stager`](crate::Stager) transfers pageable memory and files at the speed of the link:
//!
//! ```
//! use aquifer::{DeviceBuffer, Runtime, StagerConfig};
//! let rt = Runtime::builder().or_sim().build()?;
//! let pool = rt.device(0)?;
//! let s = pool.stream()?;
//! let stager = rt.stager(0, StagerConfig::default())?;
//! let rows = vec![0.5f32; 1 << 16]; // an ordinary vector
//! let mut x: DeviceBuffer<f32> = pool.buffer(&s, rows.len())?;
//! stager.scope(|stage| stage.upload(&rows, &mut x).map(drop))??;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The process's staging allocator
//! - [`route`]: once a pool is installed, it serves the scope. Before, allocations are unchanged.
//! - [`PinnedBuf::new`](crate::PinnedBuf::new): returns a buffer of the pool. Before, it fails with
//!   [`MemoryError::NotSet`](crate::MemoryError::NotSet).
//! - [`Runtime::stager`](crate::Runtime::stager): uses slots of the pool and workers on its node.
//!   Before, it uses [pinned memory near the device](crate::Runtime::pinned_near).
//!
//! `install` does not change what exists already: a stager keeps the pool of its slots. When the
//! pool has no more memory, a buffer returns the reason, and an allocation in a routed scope is
//! served by the wrapped allocator.
//!
//! There is no uninstall. Installing another pool is an error that names the source line of the
//! first `install`, since other libraries hold memory of the first pool. The process keeps the pool
//! open, even after its [`Runtime`](crate::Runtime) has been dropped.

mod pool_route;

pub use aquifer_host::staging::{
    Failed, HostBuffer, Permit, Progress, ReadMode, Sink, Source, StageError, StageScope, Staged,
    Ticket, install, installed,
};
pub use pool_route::{ROUTE_FROM, route};
