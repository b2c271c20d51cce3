//! The settings of a pool, and of one allocation.

use crate::{
    region::{self, PageTier, Pinning, Verify, window::GRANULE},
    topology::NodeId,
};
use aquifer_core::{MemoryError, Recorder, Result};
use aquifer_driver::HostFlags;
use std::{sync::Arc, time::Duration};

/// Settings of a [`PinnedPool`](super::PinnedPool).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PinnedConfig {
    /// The NUMA node for the memory. `None` for no placement.
    pub node: Option<NodeId>,
    /// Whether memory on another node is an error.
    pub strict: bool,
    /// Whether the memory must be pinned.
    pub pinning: Pinning,
    /// Minimum bytes of a region. Larger requests get a region of their own size.
    pub chunk: usize,
    /// Maximum bytes of one registration when [`PinnedPool::warm`](crate::PinnedPool::warm) takes
    /// a large region.
    pub registration: usize,
    /// The largest page size to try.
    pub pages: PageTier,
    /// Flags for the registration with the driver.
    pub flags: HostFlags,
    /// How many pages of a new region are verified with the kernel.
    pub verify: Verify,
    /// Maximum time for making one region. `None` for no limit.
    pub deadline: Option<Duration>,
    /// Maximum time that an allocation which would fail waits for pending blocks, and that reclaim
    /// may wait for memory of other pools. Zero for no wait.
    pub patience: Duration,
    /// When the pool may grow.
    pub grow: Grow,
    /// Free bytes that [`PinnedPool::quiet_point`](crate::PinnedPool::quiet_point) grows to, so
    /// that allocations need not grow. Zero for none.
    pub grow_ahead: usize,
    /// Free bytes that every trim leaves in the pool.
    pub reserve: usize,
    /// Whether each thread caches free blocks. If not, every call takes the pool's lock.
    pub magazines: bool,
    /// Receives the pool's events, in addition to the file that `AQUIFER_TRACE` names. A pool
    /// whose events are recorded has no magazines.
    pub recorder: Option<Arc<Recorder>>,
}

/// When a pool registers memory with the driver. A registration stalls threads that launch kernels
/// for milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[non_exhaustive]
pub enum Grow {
    /// In any allocation that needs it.
    #[default]
    Now,
    /// Only in [`PinnedPool::warm`](crate::PinnedPool::warm) and
    /// [`PinnedPool::quiet_point`](crate::PinnedPool::quiet_point). Other allocations that do not
    /// fit are refused, and release no regions.
    AtQuietPoints,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        Self {
            node: None,
            strict: false,
            pinning: Pinning::default(),
            chunk: 64 << 20,
            registration: region::RegionRequest::REGISTRATION,
            pages: PageTier::HugeTlb,
            flags: HostFlags::default(),
            verify: Verify::default(),
            deadline: None,
            patience: Duration::from_millis(100),
            grow: Grow::Now,
            grow_ahead: 0,
            reserve: 0,
            magazines: true,
            recorder: None,
        }
    }
}

impl PinnedConfig {
    /// Returns the default settings for this node.
    #[must_use]
    pub fn on(node: NodeId) -> Self {
        Self { node: Some(node), ..Self::default() }
    }

    pub(super) fn check(&self) -> Result<()> {
        for (name, bytes) in [("chunk", self.chunk), ("registration", self.registration)] {
            if !(GRANULE..=1 << 39).contains(&bytes) {
                let expected = "2 MiB to 512 GiB";
                return Err(MemoryError::BadSetting { name, value: bytes.to_string(), expected });
            }
        }
        Ok(())
    }
}

/// What an allocation may do when no free block fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effort {
    /// The steps that the pool's settings allow.
    Configured,
    /// Nothing that grows the pool or waits.
    None,
    /// As `Configured`, then waiting until this time.
    Until(std::time::Instant),
}
