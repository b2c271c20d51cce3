//! How memory is parked, and the reports of it.

use allocator_api2::alloc::Allocator;
use aquifer_core::{MemoryError, Result, Tag};
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

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

    /// Begins the resume of parked memory. Returns whether there is any.
    ///
    /// # Errors
    /// [`MemoryError::Parked`] while another thread parks or resumes it.
    pub(crate) fn begin_resume(&mut self, tag: Tag) -> Result<bool> {
        match self {
            Self::Resident => Ok(false),
            Self::Parking | Self::Resuming => Err(MemoryError::Parked { tag }),
            Self::Parked => {
                *self = Self::Resuming;
                Ok(true)
            }
        }
    }
}

/// How to park: what happens with the contents of the blocks, and how long to wait for their last
/// use.
#[derive(Clone)]
pub struct Park {
    /// `None`: the contents are dropped.
    pub(super) host: Option<HostAllocator>,
    pub(crate) deadline: Option<Instant>,
    /// Whether to wait for all work of the device.
    pub(super) synchronizes: bool,
}

impl Park {
    /// Saves the contents in memory of this allocator. Use pinned memory to copy at the speed of
    /// the link. It is allocated in pieces of 64 MiB, or less if that is refused, and kept until
    /// the blocks are resumed or dropped.
    #[must_use]
    pub fn save_in(host: impl Allocator + Send + Sync + 'static) -> Self {
        Self { host: Some(Arc::new(host)), deadline: None, synchronizes: false }
    }

    /// Drops the contents. A resumed block then has unspecified contents.
    #[must_use]
    pub fn discard() -> Self {
        Self { host: None, deadline: None, synchronizes: false }
    }

    /// Waits for uses of the blocks at most until `deadline`, instead of the pool's
    /// [`wait`](crate::PoolConfig::wait). The deadline does not limit the copies that follow.
    #[must_use]
    pub fn by(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
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
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ParkReport {
    /// The tag.
    pub tag: Tag,
    /// The number of parked blocks.
    pub blocks: u64,
    /// Their bytes.
    pub parked: u64,
    /// Bytes of host memory that hold their contents.
    pub saved: u64,
    /// Bytes of physical memory that were returned to the driver and are no longer charged.
    pub released: u64,
    /// The memory that stayed on the device.
    pub kept: Elsewhere,
    /// The time of the copies, including the allocation of host memory.
    pub copying: Duration,
    /// The total time, including the wait for the last use.
    pub took: Duration,
}

/// The memory of a parked tag that stays on the device.
///
/// [`Parkable`](crate::Parkable) has an example.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Elsewhere {
    /// Bytes in blocks that are not parkable: those in the streams' caches, where other tags share
    /// the handles, and stable and reserved memory, whose addresses may be stored elsewhere.
    pub shared: u64,
    /// Bytes of handles that the driver did not unmap. They stay charged, and unmapping is
    /// retried.
    pub refused: u64,
    /// The driver's error.
    pub refusal: Option<MemoryError>,
}

/// The result of resuming a tag.
///
/// [`Parkable`](crate::Parkable) has an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ResumeReport {
    /// The tag.
    pub tag: Tag,
    /// The number of blocks that can be used again.
    pub blocks: u64,
    /// Bytes of physical memory that were mapped for them.
    pub taken: u64,
    /// Bytes of contents that were copied back.
    pub restored: u64,
    /// The time of the copies.
    pub copying: Duration,
    /// The total time.
    pub took: Duration,
}

impl ParkReport {
    pub(crate) fn of(tag: Tag) -> Self {
        let (kept, zero) = (Elsewhere::default(), Duration::ZERO);
        Self { tag, blocks: 0, parked: 0, saved: 0, released: 0, kept, copying: zero, took: zero }
    }
}

impl ResumeReport {
    pub(crate) fn of(tag: Tag) -> Self {
        let zero = Duration::ZERO;
        Self { tag, blocks: 0, taken: 0, restored: 0, copying: zero, took: zero }
    }
}

impl fmt::Debug for Park {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Park")
            .field("saves", &self.host.is_some())
            .field("deadline", &self.deadline)
            .finish()
    }
}
