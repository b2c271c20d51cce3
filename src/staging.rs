//! Staging: what is not pinned goes through a [`Stager`], and what is allocated in pinned memory needs none.
//!
//! [`install`] makes one pinned pool the process's staging allocator, and [`route`] sends to it what a part of the program
//! allocates:
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

mod routed;

pub use aquifer_host::staging::{
    Begun, Failed, FileSource, HostBuffer, Permit, Progress, ReadMode, Ready, Sink, Source, StageError,
    StageScope, Staged, Stager, StagerConfig, Stores, Ticket,
};

use aquifer_core::{MemoryError, Result};
use aquifer_host::PinnedPool;
use std::{panic::Location, sync::OnceLock};

struct Installed {
    pool: PinnedPool,
    by: &'static Location<'static>,
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// Makes `pool` the staging allocator of this process, once and for good.
///
/// # Errors
/// [`MemoryError::AlreadySet`] with the line that was first.
#[track_caller]
pub fn install(pool: PinnedPool) -> Result<()> {
    let by = Location::caller();
    let mut ours = false;
    let installed = INSTALLED.get_or_init(|| {
        ours = true;
        Installed { pool, by }
    });
    if ours {
        Ok(())
    } else {
        Err(MemoryError::AlreadySet { what: "the staging allocator", by: installed.by })
    }
}

/// The staging allocator, if one has been installed.
#[must_use]
pub fn installed() -> Option<&'static PinnedPool> {
    INSTALLED.get().map(|installed| &installed.pool)
}

pub use routed::{ROUTE_FROM, route};
