//! Pinned regions: whole pieces of memory on a node that devices can reach.
//!
//! A [`Region`] is made step by step, and each step has a fall-back:
//!
//! ```text
//!   charge ─ address ─ map ─ protect ─ pages ─ policy ─ populate ─┬─ register ─ verify
//!                                                                 └─ the next chunk meanwhile
//!   charge     the budget first: populating past a control group's limit is a kill, not an error
//!   address    from the process's window, see [`window`]
//!   map        huge pages of 1 GiB or 2 MiB from the pool if there are enough, else ordinary ones
//!   protect    not for child processes (or no region at all), not for core dumps
//!   pages      transparent huge pages, if they are offered, and until making them stalls
//!   policy     prefer the node; a sandbox that forbids it leaves first touch
//!   populate   in pieces, by workers on the node
//!   register   with the driver, one thread, chunk after chunk; or `cuMemHostAlloc`; or not at all, by [`Pinning`]
//!   verify     ask the kernel where the pages are, after registering; of a strict region before as well
//! ```
//!
//! What was had instead of what was wanted, and why, is in the [`RegionReport`]. A region remembers
//! how it was made and ends that way, in reverse. A step that fails is rolled back; what cannot be
//! given back (a driver that will not end a registration) stays charged and mapped, and is tried
//! again by [`retry_stranded`].
//!
//! # Quiet points
//! Ending a registration makes the driver wait for the whole device, and making one slows other
//! threads' launches from 3 to 4,400 µs while it runs. So nothing here registers or unregisters
//! unless it is asked to: [`Region::new`] and [`Region::close`] do, [`Region::retire`] leaves the
//! end for [`end_retired`], and what is dropped while a copy is known to be on its way is retired
//! too.
//!
//! # Kinds
//! | | whose memory | who else has it |
//! |---|---|---|
//! | [`Region`] | ours, made for the purpose | nobody |
//! | [`SharedRegion`] | ours, of a memory file | every process that is given the file |
//! | [`InPlace`] | yours, in a `Vec` or mapping that is handed over | nobody while it lasts |
//! | [`scope`], [`scope_mut`] | yours, lent for a closure | nobody while it lasts |
//!
//! # Limits
//! One registration pins less than 512 GiB (the driver), and less than 2 GiB on Linux 6.11 to 6.13:
//! regions are registered in chunks within that. A copy that crosses from one registration into the
//! next fails, so that [`Region::registrations`] says where they are; memory that is registered in
//! place is one, or refused.

mod backing;
mod claims;
mod file_map;
mod flight;
mod in_place;
mod make;
mod mapping;
mod report;
mod retired;
mod shared;
mod stall;
pub mod window;

pub use backing::{retry_stranded, stranded_bytes};
pub use file_map::FileMap;
pub use in_place::{InPlace, Pinnable, PinnableMut, Refused, scope, scope_mut};
pub use report::{
    Cause, PageTier, PinnedBy, PlacedBy, Placement, RegionError, RegionReport, Shortfall, Step,
    Unfit,
};
pub use retired::{end_retired, retired_bytes};
pub use shared::SharedRegion;

use crate::{
    kernel::{Kernel, Span, pointer},
    topology::{NodeId, Topology},
    workers::Workers,
};
use aquifer_core::{Budget, DriverError};
use aquifer_driver::{DeviceId, Driver, HostFlags};
use backing::Backing;
use std::{fmt, num::NonZeroUsize, ptr::NonNull, sync::Arc, time::Instant};

/// More bytes than any machine could pin.
const LARGEST: usize = 1 << 41;

/// Whether a region must be pinned.
///
/// Its example is that of [`RegionRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Pinning {
    /// Pinned, or an error.
    Required,
    /// Pinned where that can be had, else pageable memory that says so.
    #[default]
    Preferred,
    /// Never pinned.
    Off,
}

/// How many pages the kernel is asked about.
///
/// Asking about each base page takes about as long as populating them did, so that only strict
/// regions always do. Of huge pages from the pool each is asked about, and counts as the base pages
/// it holds.
///
/// Its example is that of [`RegionRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verify {
    /// Each base page.
    Every,
    /// So many, evenly spread.
    Sample(NonZeroUsize),
    /// None: the report knows nothing of where they are.
    Skip,
}

impl Default for Verify {
    /// 4096 pages, evenly spread: all of a region of 16 MiB.
    fn default() -> Self {
        const SPREAD: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
        Self::Sample(SPREAD)
    }
}

/// A device and the driver that reaches it.
///
/// Its example is that of [`Host`].
#[derive(Clone)]
pub struct Reach {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The device whose context registers memory. Its primary context is made by the first region.
    pub device: DeviceId,
}

impl Reach {
    /// Makes a call that pins host memory, or ends that, for the device, or for another one that
    /// lives if this one is lost: pinned memory belongs to the process, and any context can
    /// register it and end that (seen on two H200). A loss that takes all contexts along, as an
    /// illegal address does there, is answered for all of them.
    ///
    /// # Errors
    /// The device's own, if no other device's call goes through.
    fn call<T>(
        &self,
        call: impl Fn(&dyn Driver, DeviceId) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let driver = &*self.driver;
        call(driver, self.device).or_else(|refused| {
            if !refused.is_device_lost() {
                return Err(refused);
            }
            let devices = (0..driver.device_count().unwrap_or(0)).map(DeviceId);
            let mut others =
                devices.filter(|&other| other != self.device && !driver.is_lost(other));
            others.find_map(|other| call(driver, other).ok()).ok_or(refused)
        })
    }
}

impl fmt::Debug for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reach")
            .field("driver", &self.driver.name())
            .field("device", &self.device)
            .finish()
    }
}

/// What regions are made with: kernel, topology, workers and, if there is one, a driver. Cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct Host {
    /// The system calls.
    pub kernel: Kernel,
    /// The machine.
    pub topology: Arc<Topology>,
    /// The threads that touch memory first.
    pub workers: Arc<Workers>,
    /// The driver; `None` leaves all memory pageable.
    pub reach: Option<Reach>,
}

impl Host {
    /// A machine without a driver.
    #[must_use]
    pub fn new(topology: Topology, kernel: Kernel) -> Self {
        let workers = Arc::new(Workers::new(&topology, kernel.clone()));
        Self { kernel, topology: Arc::new(topology), workers, reach: None }
    }

    /// The same with a driver, and the device whose context registers.
    #[must_use]
    pub fn with_driver(mut self, driver: Arc<dyn Driver>, device: DeviceId) -> Self {
        self.reach = Some(Reach { driver, device });
        self
    }
}

/// What a region should be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegionRequest {
    /// Bytes; rounded up to base pages.
    pub bytes: usize,
    /// The node it should lie on; `None` for wherever its pages fall.
    pub node: Option<NodeId>,
    /// An error instead of a region with a page elsewhere, or one whose place cannot be known.
    /// Without it the node is preferred, and without a node placement is off. The kernel's own
    /// strict policy is never used: over a full node it ends in a kill.
    pub strict: bool,
    /// Whether it must be pinned.
    pub pinning: Pinning,
    /// The best pages to try for.
    pub pages: PageTier,
    /// How the driver is to pin it, and what each flag costs: see [`HostFlags`]. Write-combined
    /// memory comes from the driver itself; a flag that is not to be had is left out, and the
    /// report says so.
    pub flags: HostFlags,
    /// Bytes of one registration at most. No copy may cross from one to the next.
    pub registration: usize,
    /// Bytes of one piece for a worker.
    pub piece: usize,
    /// How many pages the kernel is asked about in the end.
    pub verify: Verify,
    /// When to give up. Pieces that a worker is at then are finished, and the memory is given back
    /// after them.
    pub deadline: Option<Instant>,
}

impl RegionRequest {
    /// Bytes of one registration at most, unless told otherwise: the driver holds locks while it
    /// registers.
    pub const REGISTRATION: usize = 1 << 30;
    /// Bytes of one piece for a worker, unless told otherwise.
    pub const PIECE: usize = 32 << 20;

    /// A region of so many bytes, the rest by default: anywhere, pinned if that can be had, the
    /// best pages.
    #[must_use]
    pub fn bytes(bytes: usize) -> Self {
        Self {
            bytes,
            node: None,
            strict: false,
            pinning: Pinning::default(),
            pages: PageTier::HugeTlb,
            flags: HostFlags::default(),
            registration: Self::REGISTRATION,
            piece: Self::PIECE,
            verify: Verify::default(),
            deadline: None,
        }
    }

    /// On this node.
    #[must_use]
    pub fn on(mut self, node: NodeId) -> Self {
        self.node = Some(node);
        self
    }
}

/// A piece of memory that is there in whole, charged, and as near and as pinned as its
/// [`RegionReport`] says.
///
/// Its bytes are zero at first. Dropping it ends its registrations and gives the memory back, which
/// blocks while the device is busy; only if a copy in safe code is known to be on its way is that
/// left for [`end_retired`]. What else is queued may touch it no more.
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
    /// Makes one. Blocks while its pages are populated and registered.
    ///
    /// # Errors
    /// [`RegionError`] with the step that failed and everything that was tried; nothing stays
    /// behind, but for what the error calls stranded.
    pub fn new(host: &Host, budget: &Budget, request: &RegionRequest) -> Result<Self, RegionError> {
        make::region(host, budget, request, &make::Sharing::Own)
    }

    /// Its addresses.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    /// Its first byte.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        // A region begins where something was mapped, and nothing is mapped at zero.
        pointer(self.span.start).unwrap_or(NonNull::dangling())
    }

    /// Whether devices can reach it without staging.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.report.pinned_by != PinnedBy::Nobody
    }

    /// How it was made, and what was not to be had.
    #[must_use]
    pub fn report(&self) -> &RegionReport {
        &self.report
    }

    /// The parts that are registered each on their own: no copy may cross from one to the next.
    /// Memory that the driver allocated is one; pageable memory has none.
    #[must_use]
    pub fn registrations(&self) -> &[Span] {
        self.backing.registrations()
    }

    /// Where kernels of the device that registered it find it, if it is pinned and
    /// [`HostFlags::mapped`] (`cuMemHostGetDevicePointer`).
    ///
    /// # Errors
    /// The driver's.
    pub fn device_address(&self, reach: &Reach) -> Result<u64, DriverError> {
        reach.driver.host_device_address(reach.device, self.start())
    }

    /// Gives it up without ending it: that is left for [`end_retired`], and blocks nobody here. It
    /// stays charged.
    pub fn retire(mut self) {
        retired::retire(self.backing.take());
    }

    /// Ends it and says how that went. Blocks until copies that are on their way, and the device,
    /// are done.
    ///
    /// # Errors
    /// [`RegionError`] if the driver or the kernel would not take it back: it is stranded then, and
    /// stays charged.
    pub fn close(self) -> Result<(), RegionError> {
        self.backing.close()
    }
}

mod bytes {
    //! The region as bytes.
    #![expect(unsafe_code, reason = "views the region's memory")]

    use super::Region;
    use std::slice;

    impl Region {
        /// Its bytes, for reading.
        #[must_use]
        pub fn bytes(&self) -> &[u8] {
            // SAFETY: 1. the span is mapped for reading and writing while the region lives, and
            // holds bytes that the kernel or the driver has written. 2. it is this region's alone;
            // writing takes it mutably.
            unsafe { slice::from_raw_parts(self.start().as_ptr(), self.span.len) }
        }

        /// Its bytes, for writing.
        #[must_use]
        pub fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: 1. and 2. as above.
            unsafe { slice::from_raw_parts_mut(self.start().as_ptr(), self.span.len) }
        }
    }
}
