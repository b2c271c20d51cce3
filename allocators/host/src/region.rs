//! Pinned regions: host memory on a chosen NUMA node that devices can access directly.
//!
//! A [`Region`] is created in steps, and each step has a fallback:
//!
//! ```text
//!   charge ─ address ─ map ─ protect ─ pages ─ policy ─ populate ─┬─ register ─ verify
//!                                                                 └─ the next chunk meanwhile
//!   charge     the budget first: populating past a control group's limit is a kill, not an error
//!   address    from the process's window, see [`window`]
//!   map        huge pages of 1 GiB or 2 MiB from the pool if there are enough, else ordinary ones
//!   protect    not for child processes (or no region at all) unless shared; not for core dumps
//!   pages      transparent huge pages, if they are offered, and until making them stalls
//!   policy     prefer the node; a sandbox that forbids it leaves first touch
//!   populate   in pieces, by workers on the node
//!   register   with the driver, one thread, chunk after chunk; or `cuMemHostAlloc`; or not at all, by [`Pinning`]
//!   verify     ask the kernel where the pages are, after registering, since pinning may move them
//! ```
//!
//! The [`RegionReport`] lists each fallback and its reason. A region is released in the reverse
//! order of its creation. A step that fails is rolled back. Memory that cannot be released, because
//! the driver refuses to end a registration, stays charged and mapped. [`retry_stranded`] tries
//! again.
//!
//! # Quiet points
//! Ending a registration makes the driver wait for the whole device. Creating one slows down kernel
//! launches of other threads for its duration, by up to three orders of magnitude. So registrations
//! are created and ended only on request:
//!
//! - [`Region::new`] registers, and [`Region::close`] unregisters.
//! - [`Region::retire`] leaves the unregistration to [`end_retired`].
//!
//! # Limits
//! One registration pins less than 512 GiB (a limit of the driver), and less than 2 GiB on Linux
//! 6.11 to 6.13. Regions are registered in chunks within that limit. A copy that crosses the
//! boundary of two registrations fails, so [`Region::registrations`] lists them.

mod backing;
mod host;
mod make;
mod mapping;
mod report;
mod stall_detector;
pub mod window;

pub use backing::{end_retired, retired_bytes};
pub use host::{Host, Reach};
pub use mapping::{retry_stranded, stranded_bytes};
pub use report::{Cause, PageTier, PinnedBy, Placement, RegionError, RegionReport};

use crate::{
    kernel::{Span, pointer},
    topology::NodeId,
};
use backing::{Backing, retire};
use std::ptr::NonNull;

/// Whether a region must be pinned.
///
/// See [`RegionRequest`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Pinning {
    /// Pinned memory, or an error.
    Required,
    /// Pinned memory if available, otherwise pageable memory, which the report shows.
    #[default]
    Preferred,
    /// Never pinned.
    Off,
}

/// The requested properties of a region.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegionRequest {
    /// Size in bytes, rounded up to base pages.
    pub bytes: usize,
    /// The preferred NUMA node. With `None` the pages may lie anywhere.
    pub node: Option<NodeId>,
    /// Requires every page to lie on `node`: a page on another or an unknown node is an error.
    /// Otherwise the report has the pages on other nodes. Has no effect without a node. The strict
    /// memory policy of the kernel is never used, because on a full node it kills the process.
    pub strict: bool,
    /// Tries memory that the driver maps as write-combined (`CU_MEMHOSTALLOC_WRITECOMBINED`):
    /// devices may read it faster, and the host reads it very slowly. Where the driver has none,
    /// cached memory is used, and the report says so.
    pub write_combined: bool,
    /// Whether the region must be pinned.
    pub pinning: Pinning,
    /// Whether the child of a fork has the same pages (`MAP_SHARED`), or none
    /// (`MADV_DONTFORK`). Shared memory has no transparent huge pages. Memory that the driver
    /// allocates is shared as the driver does it.
    pub share_on_fork: bool,
    /// The best kind of pages to try.
    pub pages: PageTier,
    /// Maximum bytes of one registration. A copy must not cross from one registration to the next.
    pub registration: usize,
    /// Bytes of the piece that a worker populates at once.
    pub piece: usize,
}

impl RegionRequest {
    /// Default maximum bytes of one registration. The driver holds locks while it registers.
    pub const REGISTRATION: usize = 1 << 30;
    /// Default bytes of a worker's piece.
    pub const PIECE: usize = 32 << 20;

    /// Creates a request for `bytes` bytes with default settings: on any node, pinned if possible,
    /// with the best pages.
    #[must_use]
    pub fn bytes(bytes: usize) -> Self {
        Self {
            bytes,
            node: None,
            strict: false,
            write_combined: false,
            pinning: Pinning::default(),
            share_on_fork: false,
            pages: PageTier::HugeTlb,
            registration: Self::REGISTRATION,
            piece: Self::PIECE,
        }
    }

    /// Sets the preferred node.
    #[must_use]
    pub fn on(mut self, node: NodeId) -> Self {
        self.node = Some(node);
        self
    }
}

/// Populated and charged host memory. Its [`RegionReport`] shows its placement and whether it is
/// pinned.
///
/// The bytes are initially zero. Dropping the region ends its registrations and releases the
/// memory, which blocks while the device is busy. No queued work may still access the memory.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_host::{kernel::Kernel, region::{Host, Region, RegionRequest}, topology::Topology};
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let budget = Budget::new("pinned", 1 << 20);
/// let mut region = Region::new(&host, &budget, &RegionRequest::bytes(1 << 20))?;
/// region.bytes_mut()[0] = 7;
/// assert!(!region.is_pinned(), "there is no driver");
/// assert_eq!(budget.remaining(), 0);
/// drop(region);
/// assert_eq!(budget.used(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Region {
    backing: Backing,
    span: Span,
    report: RegionReport,
}

impl Region {
    /// Returns the address range.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        // A region starts at a mapped address, and address zero is never mapped.
        pointer(self.span.start).unwrap_or(NonNull::dangling())
    }

    /// Returns whether devices can access the region without staging.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.report.pinned_by != PinnedBy::Nobody
    }

    /// Returns how the region was created, with all fallbacks.
    #[must_use]
    pub fn report(&self) -> &RegionReport {
        &self.report
    }

    /// Returns the separately registered parts. A copy must not cross from one to the next.
    ///
    /// Memory that the driver allocated is one part. Pageable memory has none.
    #[must_use]
    pub fn registrations(&self) -> &[Span] {
        self.backing.registrations()
    }

    /// Gives up the region without releasing it. Does not block. [`end_retired`] releases it, and
    /// until then it stays charged.
    pub fn retire(mut self) {
        retire(self.backing.take());
    }

    /// Releases the region. Blocks until copies in flight are done and the device is idle.
    ///
    /// # Errors
    /// [`RegionError`] if the driver or the kernel refuses the release. The region is then stranded
    /// and stays charged.
    pub fn close(self) -> Result<(), RegionError> {
        self.backing.close()
    }
}

mod bytes {
    //! Access to the region as bytes.
    #![expect(unsafe_code, reason = "views the region's memory")]

    use super::Region;
    use std::slice;

    impl Region {
        /// Returns the bytes.
        #[must_use]
        pub fn bytes(&self) -> &[u8] {
            // SAFETY: 1. the span is mapped for reading and writing while the region is alive, and
            // the kernel or the driver has initialised its bytes. 2. the region has exclusive
            // access, and writing requires `&mut self`.
            unsafe { slice::from_raw_parts(self.start().as_ptr(), self.span.len) }
        }

        /// Returns the bytes, mutably.
        #[must_use]
        pub fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: 1. and 2. as above.
            unsafe { slice::from_raw_parts_mut(self.start().as_ptr(), self.span.len) }
        }
    }
}
