//! Reports of how a region was created, and its errors.

use crate::{kernel::MapPages, topology::NodeId, workers::WorkerError};
use aquifer_core::{DriverError, MemoryError, OutOfBudget, SystemError};
use std::{error, fmt};

/// More bytes than any machine can pin.
pub(super) const LARGEST: usize = 1 << 41;

/// The kind of pages of a region, in ascending order of quality.
///
/// See [`RegionReport`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PageTier {
    /// Chosen by the driver.
    DriverChosen,
    /// Base pages.
    Base,
    /// Transparent huge pages, as far as the kernel had any.
    Transparent,
    /// Huge pages of 2 MiB from the reserved pool.
    HugeTlb,
}

impl PageTier {
    /// Returns the guaranteed page size in bytes. Transparent huge pages are not guaranteed.
    #[must_use]
    pub(super) fn page(self) -> Option<usize> {
        match self {
            Self::HugeTlb => Some(2 << 20),
            Self::DriverChosen | Self::Base | Self::Transparent => None,
        }
    }

    /// Returns the corresponding option for the kernel.
    pub(super) fn map_pages(self) -> MapPages {
        match self {
            Self::HugeTlb => MapPages::Huge2M,
            Self::DriverChosen | Self::Base | Self::Transparent => MapPages::Ordinary,
        }
    }
}

/// How a region was made accessible to devices.
///
/// See [`RegionReport`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PinnedBy {
    /// By this many calls of `cuMemHostRegister`.
    Registration(usize),
    /// By `cuMemHostAlloc`: the driver allocated it.
    Driver,
    /// Not at all: the region is pageable.
    Nobody,
}

/// The location of the pages, as reported by the kernel.
///
/// See [`RegionReport`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Placement {
    /// The requested node.
    pub wanted: Option<NodeId>,
    /// Number of queried pages on each node, in order of nodes.
    pub pages: Vec<(NodeId, u64)>,
    /// Number of pages whose node the kernel did not report.
    pub unknown: u64,
}

impl Placement {
    /// Returns the number of pages on the requested node.
    #[must_use]
    pub fn on_node(&self) -> u64 {
        self.pages.iter().filter(|(node, _)| Some(*node) == self.wanted).map(|(_, n)| n).sum()
    }

    /// Returns the number of pages on other nodes.
    #[must_use]
    pub fn elsewhere(&self) -> u64 {
        self.pages.iter().filter(|(node, _)| Some(*node) != self.wanted).map(|(_, n)| n).sum()
    }
}

/// The reason why a step failed or was skipped.
///
/// See [`RegionReport`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// A size of zero, or too large to map.
    Size {
        /// Requested bytes.
        bytes: usize,
        /// The maximum.
        max: usize,
    },
    /// The budget refused the charge.
    Budget(OutOfBudget),
    /// A system call failed.
    System(SystemError),
    /// A driver call failed.
    Driver(DriverError),
    /// The workers did not accept the task, or have lost it.
    Workers(WorkerError),
    /// There is no driver.
    NoDriver,
    /// The machine has no such node.
    UnknownNode(NodeId),
    /// `AQUIFER_NUMA=off`: the node was ignored.
    NumaOff,
    /// This process may not use the CPUs of the node. CPUs of the nearest node touched the pages.
    NoCpus(NodeId),
    /// The pool of huge pages has too few pages.
    HugePages {
        /// Required pages.
        needed: u64,
        /// Free pages, `None` if unknown.
        free: Option<u64>,
    },
    /// The size is not a multiple of the huge page size.
    NotHuge,
    /// The system does not offer transparent huge pages.
    NotOffered,
    /// The kernel is too old to populate memory. Each page was written instead.
    Touched,
    /// The kernel took so long to create huge pages, because it had to compact memory, that base
    /// pages were faster. Base pages were used for the rest.
    Stalled {
        /// Bytes in base pages.
        bytes: u64,
    },
    /// The driver has no write-combined memory. The memory is cached.
    Cached,
    /// The request was strict, and pages are on other nodes or their node is unknown.
    Misplaced {
        /// Pages on other nodes.
        elsewhere: u64,
        /// Pages whose node is unknown.
        unknown: u64,
    },
    /// The pool was closed while the region was created, or its table of records is full.
    NotKept,
}

/// How a region was created.
///
/// ```
/// use aquifer::{PinnedBuf, Runtime};
/// let rt = Runtime::builder().or_sim_quietly().build()?;
/// let _weights = PinnedBuf::<f32>::new_in(rt.pinned_near(0), 1 << 20)?;
/// for report in rt.pinned_near(0).reports() {
///     println!("{report:?}");             // pages, placement and fallbacks
/// }
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RegionReport {
    /// Bytes that are charged and mapped.
    pub bytes: u64,
    /// The kind of pages.
    pub pages: PageTier,
    /// How the region was pinned.
    pub pinned_by: PinnedBy,
    /// The location of the pages.
    pub placement: Placement,
    /// Why requested properties were not available, in the order of the steps.
    pub shortfalls: Vec<Cause>,
}

/// A region that could not be created or released.
///
/// See [`RegionReport`] for an example.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionError {
    /// The reason.
    pub cause: Cause,
    /// Earlier failures that had a fallback.
    pub before: Vec<Cause>,
}

impl RegionError {
    pub(super) fn new(cause: Cause) -> Self {
        Self { cause, before: Vec::new() }
    }

    /// Creates the error for a request whose size computation overflows.
    pub(crate) fn too_large(bytes: usize) -> Self {
        Self::new(Cause::Size { bytes, max: LARGEST })
    }

    /// Creates the error for a region that was created but could not be kept.
    pub(crate) fn not_kept() -> Self {
        Self::new(Cause::NotKept)
    }
}

impl fmt::Display for PageTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DriverChosen => "the driver's pages",
            Self::Base => "base pages",
            Self::Transparent => "transparent huge pages",
            Self::HugeTlb => "huge pages from the pool",
        })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { bytes, max } => write!(f, "{bytes} bytes asked, 1 to {max} can be had"),
            Self::Budget(e) => e.fmt(f),
            Self::System(e) => e.fmt(f),
            Self::Driver(e) => e.fmt(f),
            Self::Workers(e) => e.fmt(f),
            Self::NoDriver => f.write_str("there is no driver"),
            Self::UnknownNode(node) => write!(f, "there is no {node} here"),
            Self::NumaOff => f.write_str("AQUIFER_NUMA=off: nodes are not looked at"),
            Self::NoCpus(node) => write!(f, "the process may run on no CPU of {node}"),
            Self::HugePages { needed, free: Some(free) } => {
                write!(f, "{needed} huge pages needed, {free} free")
            }
            Self::HugePages { needed, free: None } => {
                write!(f, "{needed} huge pages needed, no pool of them")
            }
            Self::NotHuge => f.write_str("no whole number of huge pages"),
            Self::NotOffered => f.write_str("the system offers no transparent huge pages"),
            Self::Touched => f.write_str("the kernel cannot populate; each page was written"),
            Self::Stalled { bytes } => {
                write!(f, "huge pages took longer than base pages, which {bytes} bytes are in now")
            }
            Self::Cached => f.write_str("the driver has no write-combined memory; this is cached"),
            Self::Misplaced { elsewhere, unknown } => {
                write!(f, "{elsewhere} pages on other nodes, {unknown} of unknown place")
            }
            Self::NotKept => {
                f.write_str("the pool was closed in the meantime, or its tables are full")
            }
        }
    }
}

aquifer_core::__debug_as_display!(RegionError);

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)?;
        for before in &self.before {
            write!(f, "; before that, {before}")?;
        }
        Ok(())
    }
}

impl error::Error for RegionError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &self.cause {
            Cause::Budget(e) => Some(e),
            Cause::System(e) => Some(e),
            Cause::Driver(e) => Some(e),
            Cause::Workers(e) => Some(e),
            _ => None,
        }
    }
}

impl From<RegionError> for MemoryError {
    fn from(e: RegionError) -> Self {
        match e.cause {
            Cause::Size { bytes: 0, .. } => Self::ZeroSize,
            Cause::Size { bytes, max } => {
                Self::TooLarge { requested: bytes as u64, limit: max as u64 }
            }
            Cause::Budget(e) => Self::OutOfBudget(e),
            Cause::System(e) => Self::System(e),
            Cause::Driver(e) => Self::Driver(e),
            Cause::NotKept => Self::Closed,
            Cause::Workers(WorkerError::Bind { error, .. } | WorkerError::Spawn { error }) => {
                Self::System(error)
            }
            Cause::Workers(WorkerError::Lost)
            | Cause::HugePages { .. }
            | Cause::NotHuge
            | Cause::NotOffered
            | Cause::Touched
            | Cause::Cached
            | Cause::Stalled { .. } => Self::Unsupported { feature: "populating pinned memory" },
            Cause::NoDriver => Self::Unsupported { feature: "pinned memory without a driver" },
            Cause::UnknownNode(_) | Cause::NumaOff | Cause::NoCpus(_) | Cause::Workers(_) => {
                Self::Unsupported { feature: "memory on that NUMA node" }
            }
            Cause::Misplaced { .. } => {
                Self::Unsupported { feature: "every page on the wanted NUMA node" }
            }
        }
    }
}
