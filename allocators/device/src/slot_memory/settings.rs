//! How memory is parked, and the reports of it.

use allocator_api2::alloc::Allocator;
use aquifer_core::MemoryError;
use std::{fmt, sync::Arc, time::Duration};

/// An allocator of host memory that any thread may use.
pub(super) type HostAllocator = Arc<dyn Allocator + Send + Sync>;

/// The interval at which a thread checks whether other threads have finished taking memory, or
/// parking or resuming it.
pub(crate) const QUIESCE_POLL: Duration = Duration::from_micros(50);

/// The state of a tag's memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Phase {
    /// Resident: uses are allowed.
    #[default]
    Resident,
    /// Being parked: no uses. The memory is still there.
    Parking,
    /// Parked: no uses, and no memory.
    Parked,
    /// Being resumed: no uses yet.
    Resuming,
}

impl Phase {
    /// Returns whether live blocks have memory that is accounted as theirs.
    pub(crate) fn has_memory(self) -> bool {
        matches!(self, Self::Resident | Self::Parking)
    }
}

/// How to park: what happens with the contents of the blocks, and which work to wait for.
#[derive(Clone)]
pub struct Park {
    /// `None`: the contents are dropped.
    pub(super) host: Option<HostAllocator>,
    /// Whether to wait for all work of the device.
    pub(super) synchronizes: bool,
}

impl Park {
    /// Saves the contents in memory of this allocator. Use pinned memory to copy at the speed of
    /// the link. For each block, it is allocated in pieces of at most 64 MiB, or less if that is
    /// refused, and kept until the block is resumed or dropped.
    #[must_use]
    pub fn save_in(host: impl Allocator + Send + Sync + 'static) -> Self {
        Self { host: Some(Arc::new(host)), synchronizes: false }
    }

    /// Drops the contents. A resumed block then has unspecified contents.
    #[must_use]
    pub fn discard() -> Self {
        Self { host: None, synchronizes: false }
    }

    /// Also waits for work of the device that was not recorded with the blocks
    /// (`cuCtxSynchronize`). This wait has no deadline. While captures are
    /// [announced](crate::GraphPool::announce), the park fails with [`MemoryError::Capturing`] for
    /// stream 0, since such a wait would invalidate them.
    #[must_use]
    pub fn after_all_work(mut self) -> Self {
        self.synchronizes = true;
        self
    }
}

/// The result of parking a tag.
///
/// [`Parkable`](crate::Parkable) has an example.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ParkReport {
    /// The number of parked blocks.
    pub blocks: u64,
    /// Their bytes.
    pub parked: u64,
    /// Bytes of host memory that hold their contents.
    pub saved: u64,
    /// Bytes of physical memory that were returned to the driver and are no longer charged.
    pub released: u64,
    /// Bytes of handles that the driver did not unmap. They stay charged, and unmapping is
    /// retried.
    pub refused: u64,
    /// The driver's error.
    pub refusal: Option<MemoryError>,
}

/// The result of resuming a tag.
///
/// [`Parkable`](crate::Parkable) has an example.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ResumeReport {
    /// The number of blocks that can be used again.
    pub blocks: u64,
    /// Bytes of physical memory that were mapped for them.
    pub taken: u64,
    /// Bytes of contents that were copied back.
    pub restored: u64,
}

impl fmt::Debug for Park {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Park").field("saves", &self.host.is_some()).finish()
    }
}
