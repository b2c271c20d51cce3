//! How a region was made, and what was not to be had.

use crate::{
    kernel::{MapPages, Span},
    topology::NodeId,
    workers::{RunError, WorkerError},
};
use aquifer_core::{DriverError, MemoryError, OutOfBudget, SystemError};
use std::{error, fmt};

/// The pages behind a region, best last.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PageTier {
    /// Whatever the driver took for it.
    DriverChosen,
    /// Base pages.
    Base,
    /// Transparent huge pages, as far as the kernel had any.
    Transparent,
    /// Huge pages of 2 MiB from the reserved pool.
    HugeTlb,
    /// Huge pages of 1 GiB from the reserved pool. Regions are whole multiples of that then, or get
    /// less.
    HugeTlb1G,
}

impl PageTier {
    /// Bytes of a page that is promised; transparent huge pages are not.
    #[must_use]
    pub(super) fn page(self) -> Option<usize> {
        match self {
            Self::HugeTlb => Some(2 << 20),
            Self::HugeTlb1G => Some(1 << 30),
            Self::DriverChosen | Self::Base | Self::Transparent => None,
        }
    }

    /// How the kernel is asked for them.
    pub(super) fn map_pages(self) -> MapPages {
        match self {
            Self::HugeTlb => MapPages::Huge2M,
            Self::HugeTlb1G => MapPages::Huge1G,
            Self::DriverChosen | Self::Base | Self::Transparent => MapPages::Ordinary,
        }
    }
}

/// Who made a region reachable for devices.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PinnedBy {
    /// `cuMemHostRegister`, so many times.
    Registration(usize),
    /// `cuMemHostAlloc`: the driver allocated it.
    Driver,
    /// Nobody: it is pageable.
    Nobody,
}

/// What made the pages lie where they should.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PlacedBy {
    /// The mapping's memory policy.
    Policy,
    /// Threads on the node that touched them first.
    FirstTouch,
    /// Nothing.
    Nobody,
}

/// Where the pages are, by the kernel's own answer.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Placement {
    /// Where they should be.
    pub wanted: Option<NodeId>,
    /// What put them there.
    pub by: PlacedBy,
    /// Pages on each node, as far as the kernel was asked; in order of nodes.
    pub pages: Vec<(NodeId, u64)>,
    /// Pages whose node the kernel would not tell.
    pub unknown: u64,
}

impl Placement {
    /// Pages on the wanted node.
    #[must_use]
    pub fn on_node(&self) -> u64 {
        self.pages.iter().filter(|(node, _)| Some(*node) == self.wanted).map(|(_, n)| n).sum()
    }

    /// Pages on other nodes than the wanted one.
    #[must_use]
    pub fn elsewhere(&self) -> u64 {
        self.pages.iter().filter(|(node, _)| Some(*node) != self.wanted).map(|(_, n)| n).sum()
    }
}

/// A step of making or ending a region.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Looking at the request.
    Request,
    /// Charging the budget.
    Charge,
    /// Taking addresses.
    Address,
    /// Mapping memory, or giving it back.
    Map,
    /// Keeping it from child processes and core dumps.
    Protect,
    /// Choosing pages.
    Pages,
    /// Setting the memory policy.
    Policy,
    /// Populating.
    Populate,
    /// Registering with the driver, or ending a registration.
    Register,
    /// Allocating from the driver.
    DriverAlloc,
    /// Asking where the pages are.
    Verify,
}

/// Why a step failed, or was left out.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// No bytes, or more than could be mapped.
    Size {
        /// Bytes asked for.
        bytes: usize,
        /// The most that are taken.
        max: usize,
    },
    /// The budget refused.
    Budget(OutOfBudget),
    /// The kernel refused.
    System(SystemError),
    /// The driver refused.
    Driver(DriverError),
    /// The workers did not take the job.
    Workers(WorkerError),
    /// The workers did not do the job.
    Job(RunError),
    /// There is no driver.
    NoDriver,
    /// A node that this machine does not have.
    UnknownNode(NodeId),
    /// `AQUIFER_NUMA=off`: the node was not looked at.
    NumaOff,
    /// The node has no CPUs for us: its neighbour's touched the pages.
    NoCpus(NodeId),
    /// The pool of huge pages has too few.
    HugePages {
        /// Pages needed.
        needed: u64,
        /// Pages there are; `None` where nobody can tell.
        free: Option<u64>,
    },
    /// Bytes that are no whole number of huge pages.
    NotHuge,
    /// The system offers no transparent huge pages.
    NotOffered,
    /// The kernel is too old to populate: each page was written instead.
    Touched,
    /// The kernel took so long over making huge pages (it moves others' memory together for them)
    /// that base pages were faster, and the rest was taken in those.
    Stalled {
        /// Bytes in base pages.
        bytes: u64,
    },
    /// The driver or the kernel pins less at once than one registration was to have.
    Chunks {
        /// Bytes of one registration that were asked for.
        asked: usize,
        /// Bytes that one was given.
        taken: usize,
    },
    /// The device could not be told that it only reads; it may write.
    Writable,
    /// Write-combined memory was not to be had, or not of this kind; it is cached.
    Cached,
    /// Queued work may still touch it.
    InUse,
    /// Memory that cannot be registered where it lies, so that a stager has to move it.
    NotInPlace(Unfit),
    /// Some of it is pinned already: by another registration in place, maybe of another part of the
    /// same page, or as a region.
    AlreadyPinned(Span),
    /// Pages are elsewhere, or the kernel would not tell, and the request was strict.
    Misplaced {
        /// Pages on other nodes.
        elsewhere: u64,
        /// Pages whose node is unknown.
        unknown: u64,
    },
    /// The driver's memory begins inside a page, or there are too many such regions.
    Untellable,
    /// The pool was closed while the region was made, or keeps as many records as it can.
    NotKept,
    /// The deadline passed.
    TimedOut,
}

/// Why memory cannot be registered where it lies.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Unfit {
    /// A file that is mapped to be written, shared or private: the driver refuses the one, and
    /// copies each page of the other first.
    WritableFile,
    /// A file that is mapped privately to be read. A driver that is asked to register that does not
    /// return.
    PrivateFile,
    /// Memory without a file that may not be written.
    Protected,
    /// Several kinds of memory, or a gap.
    Mixed,
    /// More than one registration can pin here.
    TooLarge {
        /// The most bytes.
        limit: usize,
    },
}

/// Something that was wanted and not to be had.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shortfall {
    /// At which step.
    pub step: Step,
    /// Why.
    pub cause: Cause,
}

/// How a region was made.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_host::{kernel::Kernel, region::{Host, Region, RegionRequest}, topology::Topology};
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let region = Region::new(&host, &Budget::new("pinned", 1 << 20), &RegionRequest::bytes(1 << 20))?;
/// println!("{:?}", region.report());      // pages, placement, and what was not to be had
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RegionReport {
    /// Bytes, charged and mapped.
    pub bytes: u64,
    /// Its pages.
    pub pages: PageTier,
    /// Who pinned it.
    pub pinned_by: PinnedBy,
    /// Where its pages are.
    pub placement: Placement,
    /// What was wanted and not to be had, in the order of the steps. Empty where everything was.
    pub shortfalls: Vec<Shortfall>,
}

/// A region that could not be made, or not be ended.
///
/// Its example is that of [`RegionReport`].
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionError {
    /// The step that failed.
    pub step: Step,
    /// Why.
    pub cause: Cause,
    /// What had failed before and had a fall-back.
    pub before: Vec<Shortfall>,
}

impl RegionError {
    pub(super) fn new(step: Step, cause: Cause) -> Self {
        Self { step, cause, before: Vec::new() }
    }

    /// For a request whose arithmetic overflows.
    pub(crate) fn too_large(bytes: usize) -> Self {
        Self::new(Step::Request, Cause::Size { bytes, max: super::LARGEST })
    }

    /// For a region that was made and not kept.
    pub(crate) fn not_kept() -> Self {
        Self::new(Step::Request, Cause::NotKept)
    }
}

impl fmt::Display for PageTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DriverChosen => "the driver's pages",
            Self::Base => "base pages",
            Self::Transparent => "transparent huge pages",
            Self::HugeTlb => "huge pages from the pool",
            Self::HugeTlb1G => "huge pages of 1 GiB from the pool",
        })
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Request => "request",
            Self::Charge => "charge",
            Self::Address => "address",
            Self::Map => "map",
            Self::Protect => "protect",
            Self::Pages => "pages",
            Self::Policy => "policy",
            Self::Populate => "populate",
            Self::Register => "register",
            Self::DriverAlloc => "driver allocation",
            Self::Verify => "verify",
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
            Self::Job(e) => e.fmt(f),
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
            Self::Chunks { asked, taken } => {
                write!(f, "one registration cannot pin {asked} bytes here: {taken} at once")
            }
            Self::Cached => f.write_str("there is no write-combined memory of that kind"),
            Self::InUse => f.write_str("queued work may still touch it"),
            Self::Writable => f.write_str("the device could not be kept from writing"),
            Self::NotInPlace(unfit) => write!(f, "{unfit}; use a stager"),
            Self::AlreadyPinned(span) => {
                write!(
                    f,
                    "some of the pages from {:#x} to {:#x} are pinned already",
                    span.start,
                    span.end()
                )
            }
            Self::Misplaced { elsewhere, unknown } => {
                write!(f, "{elsewhere} pages on other nodes, {unknown} of unknown place")
            }
            Self::Untellable => {
                f.write_str("the driver's memory could not be told from foreign memory")
            }
            Self::NotKept => f.write_str("the pool was closed meanwhile, or its books are full"),
            Self::TimedOut => f.write_str("the deadline passed"),
        }
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WritableFile => "a file that is mapped to be written is not pinned in place",
            Self::PrivateFile => "a file that is mapped privately is not pinned in place",
            Self::Protected => {
                "memory that may not be written is not pinned in place, unless it is a file's"
            }
            Self::Mixed => "one piece of memory of one kind can be pinned in place, this is more",
            Self::TooLarge { limit } => {
                return write!(f, "at most {limit} bytes can be pinned at once");
            }
        })
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.cause)
    }
}

aquifer_core::__debug_as_display!(RegionError);

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.cause)?;
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
            Cause::Job(e) => Some(e),
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
            Cause::TimedOut => Self::TimedOut,
            Cause::Workers(WorkerError::Bind { error, .. } | WorkerError::Spawn { error }) => {
                Self::System(error)
            }
            Cause::NoDriver => Self::Unsupported { feature: "pinned memory without a driver" },
            Cause::UnknownNode(_) | Cause::NumaOff | Cause::NoCpus(_) | Cause::Workers(_) => {
                Self::Unsupported { feature: "memory on that NUMA node" }
            }
            Cause::Misplaced { .. } => {
                Self::Unsupported { feature: "every page on the wanted NUMA node" }
            }
            Cause::NotInPlace(_) => Self::Unsupported { feature: "pinning this memory in place" },
            Cause::AlreadyPinned(_) => Self::Unsupported { feature: "pinning memory twice" },
            Cause::Job(_)
            | Cause::HugePages { .. }
            | Cause::NotHuge
            | Cause::NotOffered
            | Cause::Touched
            | Cause::Stalled { .. }
            | Cause::Chunks { .. }
            | Cause::Writable
            | Cause::Cached
            | Cause::InUse
            | Cause::Untellable => Self::Unsupported { feature: "populating pinned memory" },
        }
    }
}
