//! Regions that other processes can map.

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

/// A region of a memory file (`memfd_create`) for several processes.
///
/// One process creates it. The others receive its file over a socket or by inheritance. Each
/// process registers the same pages with its own driver, and charges them to its own budget.
///
/// - The size of the file is sealed, so that no process can truncate it while a device uses it.
/// - The memory lives until the last process has released mapping and file.
/// - Other processes may write at any time, so access as a slice is `unsafe`.
/// - Transparent huge pages require that the system enables them for shared memory
///   (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). Most systems do not, and the report
///   shows base pages.
/// - There is no fallback to memory that the driver allocates, since other processes cannot map it.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_host::{kernel::Kernel, region::{Host, RegionRequest, SharedRegion}, topology::Topology};
/// use std::os::fd::AsFd;
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let budget = Budget::new("pinned", 2 << 20);
/// let request = RegionRequest::bytes(1 << 20);
/// let mut ours = SharedRegion::new(&host, &budget, &request)?;
/// // SAFETY: no other process has the file yet.
/// unsafe { ours.bytes_mut()[0] = 7 };
/// // In the other process, with the descriptor that it received over a socket:
/// let theirs = SharedRegion::open(&host, &budget, ours.as_fd().try_clone_to_owned()?, &request)?;
/// // SAFETY: no process writes now.
/// assert_eq!(unsafe { theirs.bytes() }[0], 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SharedRegion {
    /// Its backing is a mapping of a file.
    region: Region,
    file: OwnedFd,
}

impl SharedRegion {
    /// Creates a shared region. Blocks while its pages are populated and registered.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn new(host: &Host, budget: &Budget, request: &RegionRequest) -> Result<Self, RegionError> {
        Self::create(host, budget, request, make::Sharing::New)
    }

    /// Maps and registers a region that another process created.
    ///
    /// The size and the kind of pages are those of the file. Everything else is taken from the
    /// request. The pages stay where the creator placed them.
    ///
    /// # Errors
    /// `EPERM` at [`Step::Map`] for a file whose size is not sealed, otherwise as [`Region::new`].
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
        Self::create(host, budget, &request, make::Sharing::Existing(file, tier))
    }

    fn create(
        host: &Host,
        budget: &Budget,
        request: &RegionRequest,
        sharing: make::Sharing,
    ) -> Result<Self, RegionError> {
        let region = make::region(host, budget, request, &sharing)?;
        let lost = aquifer_core::SystemError { call: "fcntl", errno: nix::libc::EMFILE };
        // A separate descriptor, so that it can be borrowed independently of the mapping.
        let file = region.backing.file().and_then(|file| file.try_clone_to_owned().ok());
        let file = file.ok_or(RegionError::new(Step::Map, Cause::System(lost)))?;
        Ok(Self { region, file })
    }

    /// Returns the address range in this process.
    #[must_use]
    pub fn span(&self) -> Span {
        self.region.span()
    }

    /// Returns the address of the first byte in this process.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.region.start()
    }

    /// Returns whether devices of this process can access the region without staging.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.region.is_pinned()
    }

    /// Returns how the region was created, with all fallbacks.
    #[must_use]
    pub fn report(&self) -> &RegionReport {
        self.region.report()
    }

    /// Returns the separately registered parts. A copy must not cross from one to the next.
    #[must_use]
    pub fn registrations(&self) -> &[Span] {
        self.region.registrations()
    }

    /// Returns the address for kernels, as [`Region::device_address`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn device_address(&self, reach: &Reach) -> Result<u64, DriverError> {
        self.region.device_address(reach)
    }

    /// Gives up the region without releasing it, as [`Region::retire`].
    pub fn retire(self) {
        self.region.retire();
    }

    /// Releases the region in this process, as [`Region::close`]. Other processes are not affected.
    ///
    /// # Errors
    /// As [`Region::close`].
    pub fn close(self) -> Result<(), RegionError> {
        self.region.close()
    }
}

impl AsFd for SharedRegion {
    /// Returns the file, to be passed to other processes.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

mod bytes {
    //! Access to the region as bytes.
    #![expect(unsafe_code, reason = "declares views whose callers answer for other processes")]

    use super::SharedRegion;

    impl SharedRegion {
        /// Returns the bytes.
        ///
        /// # Safety
        /// 1. No process, and no device, writes them while the slice is alive.
        #[must_use]
        pub unsafe fn bytes(&self) -> &[u8] {
            self.region.bytes()
        }

        /// Returns the bytes, mutably.
        ///
        /// # Safety
        /// 1. No process, and no device, reads or writes them while the slice is alive.
        #[must_use]
        pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
            self.region.bytes_mut()
        }
    }
}
