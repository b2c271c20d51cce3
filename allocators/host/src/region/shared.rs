//! Regions that other processes can map too.

use super::{
    Host, PageTier, Reach, Region, RegionError, RegionReport, RegionRequest, Step, make,
    report::Cause,
};
use crate::kernel::{MapPages, Span};
use aquifer_core::{Budget, DriverError};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
};

/// A region of a memory file (`memfd_create`), for several processes: one makes it, the others are
/// given its file over a socket or by inheritance, and each registers the same pages with its own
/// driver.
///
/// The file's size is sealed, so that nobody can cut it off under a device. Its memory lives until
/// the last process has let go of mapping and file. Each process charges what it maps to a budget
/// of its own.
///
/// What surprises: others may write at any time, so that looking at it as a slice is `unsafe`.
/// Transparent huge pages come only where the system gives them to shared memory
/// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), which most do not: the report says base
/// pages. There is no fall-back to memory of the driver's own, which nobody else can map.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_host::{kernel::Kernel, region::{Host, RegionRequest, SharedRegion}, topology::Topology};
/// use std::os::fd::AsFd;
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let budget = Budget::new("pinned", 2 << 20);
/// let request = RegionRequest::bytes(1 << 20);
/// let mut ours = SharedRegion::new(&host, &budget, &request)?;
/// // SAFETY: nobody else has it yet.
/// unsafe { ours.bytes_mut()[0] = 7 };
/// // In the other process, with the descriptor that came over a socket:
/// let theirs = SharedRegion::open(&host, &budget, ours.as_fd().try_clone_to_owned()?, &request)?;
/// // SAFETY: nobody writes now.
/// assert_eq!(unsafe { theirs.bytes() }[0], 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SharedRegion {
    /// Its backing is a mapping with a file.
    region: Region,
    file: OwnedFd,
}

impl SharedRegion {
    /// Makes one. Blocks while its pages are populated and registered.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn new(host: &Host, budget: &Budget, request: &RegionRequest) -> Result<Self, RegionError> {
        Self::made(host, budget, request, make::Sharing::New)
    }

    /// Maps and registers one that another process made. How many bytes it has, and on which pages,
    /// is the file's to say; the rest is the request's. Its pages lie where its maker had them
    /// placed.
    ///
    /// # Errors
    /// `EPERM` at [`Step::Map`] for a file whose size is not sealed; as [`Region::new`].
    pub fn open(
        host: &Host,
        budget: &Budget,
        file: OwnedFd,
        request: &RegionRequest,
    ) -> Result<Self, RegionError> {
        let (bytes, pages) = host
            .kernel
            .look_at(file.as_fd())
            .map_err(|e| RegionError::new(Step::Map, Cause::System(e)))?;
        let tier = match pages {
            MapPages::Ordinary => PageTier::Base,
            MapPages::Huge2M => PageTier::HugeTlb,
            MapPages::Huge1G => PageTier::HugeTlb1G,
        };
        let request = RegionRequest { bytes, ..request.clone() };
        Self::made(host, budget, &request, make::Sharing::Given(file, tier))
    }

    fn made(
        host: &Host,
        budget: &Budget,
        request: &RegionRequest,
        sharing: make::Sharing,
    ) -> Result<Self, RegionError> {
        let region = make::region(host, budget, request, &sharing)?;
        let lost = aquifer_core::SystemError { call: "fcntl", errno: nix::libc::EMFILE };
        // Of its own, so that it can be lent whatever becomes of the mapping.
        let file = region.backing.file().and_then(|file| file.try_clone_to_owned().ok());
        let file = file.ok_or(RegionError::new(Step::Map, Cause::System(lost)))?;
        Ok(Self { region, file })
    }

    /// Its addresses in this process.
    #[must_use]
    pub fn span(&self) -> Span {
        self.region.span()
    }

    /// Its first byte in this process.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.region.start()
    }

    /// Whether devices of this process can reach it without staging.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.region.is_pinned()
    }

    /// How it was made, and what was not to be had.
    #[must_use]
    pub fn report(&self) -> &RegionReport {
        self.region.report()
    }

    /// The parts that are registered each on their own: no copy may cross from one to the next.
    #[must_use]
    pub fn registrations(&self) -> &[Span] {
        self.region.registrations()
    }

    /// As [`Region::device_address`].
    ///
    /// # Errors
    /// The driver's.
    pub fn device_address(&self, reach: &Reach) -> Result<u64, DriverError> {
        self.region.device_address(reach)
    }

    /// As [`Region::retire`].
    pub fn retire(self) {
        self.region.retire();
    }

    /// As [`Region::close`]. Other processes keep what they have.
    ///
    /// # Errors
    /// As there.
    pub fn close(self) -> Result<(), RegionError> {
        self.region.close()
    }
}

impl AsFd for SharedRegion {
    /// The file to pass on.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

mod bytes {
    //! The region as bytes.
    #![expect(unsafe_code, reason = "declares views whose callers answer for other processes")]

    use super::SharedRegion;

    impl SharedRegion {
        /// Its bytes, for reading.
        ///
        /// # Safety
        /// 1. No process, and no device, writes them while the slice lives.
        #[must_use]
        pub unsafe fn bytes(&self) -> &[u8] {
            self.region.bytes()
        }

        /// Its bytes, for writing.
        ///
        /// # Safety
        /// 1. No process, and no device, reads or writes them while the slice lives.
        #[must_use]
        pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
            self.region.bytes_mut()
        }
    }
}
