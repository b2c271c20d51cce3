//! The settings of a pool, and of one allocation.

use crate::{
    region::{self, PageTier, Pinning, window::GRANULE},
    topology::NodeId,
};
use aquifer_core::{MemoryError, Recorder, Result};
use std::{sync::Arc, time::Duration};

/// Settings of a [`PinnedPool`](super::PinnedPool).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PinnedConfig {
    /// The NUMA node for the memory. `None` for no placement. Default: `None`.
    /// [`PinnedConfig::on`] sets it. Where the node is full, pages lie on others, which
    /// [`PinnedPool::reports`](crate::PinnedPool::reports) shows.
    pub node: Option<NodeId>,
    /// Whether memory on another node is an error. Default: `false`.
    pub strict: bool,
    /// Whether to try write-combined memory, which devices may read faster and the host reads very
    /// slowly. See [`RegionRequest`](region::RegionRequest). Default: `false`.
    pub write_combined: bool,
    /// Whether the memory must be pinned. Default: [`Pinning::Preferred`].
    pub pinning: Pinning,
    /// Minimum bytes of a region. Larger requests get a region of their own size. Default: 64 MiB.
    ///
    /// Workers populate a region in pieces of 32 MiB. So at most two workers populate a region of
    /// the default size. A region of 256 MiB or more, such as one of
    /// [`PinnedPool::warm`](crate::PinnedPool::warm), has work for eight, the most that a node has
    /// by default.
    pub chunk: usize,
    /// Maximum bytes of one registration when [`PinnedPool::warm`](crate::PinnedPool::warm) takes
    /// a large region. Default: 1 GiB. An allocation that grows the pool registers its region in
    /// one call, unless the driver or the kernel limits it.
    pub registration: usize,
    /// Whether the child of a fork has the same pages. Default: `false`, it has none.
    ///
    /// - `false`: a child that reads a block ends by `SIGSEGV` (`MADV_DONTFORK`). The memory has
    ///   transparent huge pages where the system offers them.
    /// - `true`: the child reads blocks that were live at the fork, and sees what its parent and
    ///   devices write to them later (`MAP_SHARED`). The parent sees what the child writes. Memory
    ///   that the parent releases reads as zeros in the child. The pages are base pages, unless the
    ///   pool of huge pages has some.
    ///
    /// There is no setting for a child's own copy, as it has of other private memory: the kernel
    /// copies every pinned page at the fork, which takes seconds, and as much memory again for each
    /// child. A program that the child executes has nothing of the memory in either case.
    pub share_on_fork: bool,
    /// The largest page size to try. Default: [`PageTier::HugeTlb`], huge pages of 2 MiB.
    pub pages: PageTier,
    /// Maximum time that an allocation which would fail waits for pending blocks, and that reclaim
    /// may wait for memory of other pools. The last pool also waits this long for copies in flight
    /// when it closes. Zero for no wait. Default: 100 ms.
    pub patience: Duration,
    /// When the pool may grow. Default: [`Grow::Now`].
    pub grow: Grow,
    /// Whether each thread caches free blocks. If not, every call takes the pool's lock. Default:
    /// `true`.
    pub magazines: bool,
    /// Receives the pool's events, in addition to the file that `AQUIFER_TRACE` names. A pool
    /// whose events are recorded has no magazines. Default: `None`.
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
    /// Only in [`PinnedPool::warm`](crate::PinnedPool::warm). Allocations that do not fit are
    /// refused, and release no regions.
    WhenWarmed,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        Self {
            node: None,
            strict: false,
            write_combined: false,
            pinning: Pinning::default(),
            chunk: 64 << 20,
            registration: region::RegionRequest::REGISTRATION,
            share_on_fork: false,
            pages: PageTier::HugeTlb,
            patience: Duration::from_millis(100),
            grow: Grow::Now,
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
