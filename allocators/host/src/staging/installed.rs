//! The staging allocator of the process: the pinned pool that is used when a caller names none.

use crate::{PinnedBuf, PinnedPool};
use aquifer_core::{MemoryError, Result};
use bytemuck::Pod;
use std::{panic::Location, sync::OnceLock};

/// Its name in errors.
const WHAT: &str = "the staging allocator";

struct InstalledPool {
    pool: PinnedPool,
    by: &'static Location<'static>,
}

static INSTALLED: OnceLock<InstalledPool> = OnceLock::new();

/// Makes `pool` the staging allocator of this process. This can be done only once.
///
/// The pool cannot be removed or replaced, since other libraries may hold its memory. The process
/// keeps a clone of the pool, so the pool is never closed, and its memory stays registered until
/// the process ends.
///
/// # Errors
/// [`MemoryError::AlreadySet`] with the location of the first call, whose pool stays installed.
#[track_caller]
pub fn install(pool: PinnedPool) -> Result<()> {
    let by = Location::caller();
    let mut first = false;
    let installed = INSTALLED.get_or_init(|| {
        first = true;
        InstalledPool { pool, by }
    });
    if first { Ok(()) } else { Err(MemoryError::AlreadySet { what: WHAT, by: installed.by }) }
}

/// Returns the staging allocator, if one has been installed. Never blocks.
#[must_use]
pub fn installed() -> Option<&'static PinnedPool> {
    INSTALLED.get().map(|installed| &installed.pool)
}

impl<T: Pod> PinnedBuf<T> {
    /// Allocates `len` zeroed elements from the process's staging allocator. Blocks if the pool has
    /// to grow.
    ///
    /// ```
    /// use aquifer::{MemoryError, PinnedBuf, Runtime, staging};
    /// assert!(matches!(PinnedBuf::<f32>::new(1024), Err(MemoryError::NotSet { .. })), "nobody has installed one");
    ///
    /// let rt = Runtime::builder().or_sim_quietly().build()?;
    /// staging::install(rt.pinned_near(0).clone())?;
    /// let weights = PinnedBuf::<f32>::new(1024)?;
    /// assert_eq!(weights.iter().sum::<f32>(), 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::NotSet`] before [`install`], and those of [`PinnedPool::allocate`].
    #[track_caller]
    pub fn new(len: usize) -> Result<Self> {
        let pool = installed().ok_or(MemoryError::NotSet { what: WHAT, by: "staging::install" })?;
        Self::new_in(pool, len)
    }
}
