//! Staging: what is not pinned goes through a [`Stager`], and what is allocated in pinned memory
//! needs none.
//!
//! [`install`] makes one pinned pool the process's staging allocator, and [`route`] sends to it
//! what a part of the program allocates:
//!
//! ```no_run
//! use aquifer::{Runtime, staging};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let rt = Runtime::builder().build()?;
//! staging::install(rt.pinned_near(0).clone())?;
//! // With `aquifer::Global` as the program's global allocator, this is a plain `std::vec::Vec<u8>` in pinned memory.
//! let bytes = staging::route(|| std::fs::read("weights.bin"))?;
//! # Ok(())
//! # }
//! ```
//!
//! A [`Stager`] moves memory that somebody else allocated, and files, at the speed of the link:
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
//! | | once a pool is installed | before |
//! |---|---|---|
//! | [`route`] | the pool serves the scope | allocations are what they always are |
//! | [`PinnedBuf::new`](crate::PinnedBuf::new) | a buffer of the pool | [`MemoryError::NotSet`](crate::MemoryError::NotSet) |
//! | [`Runtime::stager`](crate::Runtime::stager) | slots of the pool, workers on its node | [pinned memory near the device](crate::Runtime::pinned_near) |
//!
//! Nothing that was made before changes: a stager keeps the pool of its slots. A pool that has no
//! more memory refuses each as it would anybody: a buffer answers with the reason, and what a route
//! is refused the wrapped allocator serves.
//!
//! There is no way to uninstall, and installing another is an error that names the first one's
//! line: other libraries hold what the first has served. The process keeps it open, also when its
//! [`Runtime`](crate::Runtime) has gone.

mod routed;

pub use aquifer_host::staging::{
    Begun, Failed, FileSource, HostBuffer, Permit, Progress, ReadMode, Ready, ShortWait, Sink,
    Source, StageError, StageScope, Staged, Stager, StagerConfig, Stores, Ticket, install,
    installed,
};
pub use routed::{ROUTE_FROM, route};
