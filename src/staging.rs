//! The process's staging allocator: one pinned pool that everything which stages data uses.
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

mod routed;

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
