//! Physical memory that can be shared with other libraries and other processes.
#![expect(
    unsafe_code,
    reason = "declares calls that return memory which other processes write; holds no unsafe block"
)]

use crate::{DeviceId, PhysicalHandle, Result};
use std::{
    fmt::Debug,
    os::fd::{BorrowedFd, OwnedFd},
};

/// The kinds of sharing that memory is created for, besides use by its own process. It cannot be
/// changed after the memory is created.
///
/// ```
/// use aquifer::driver::ExportTypes;
/// let both = ExportTypes::POSIX_FD.and(ExportTypes::FABRIC);
/// assert!(both.covers(ExportTypes::FABRIC));
/// assert_eq!(ExportTypes::POSIX_FD.missing(both), Some("CU_MEM_HANDLE_TYPE_FABRIC"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[non_exhaustive]
pub struct ExportTypes {
    /// Other processes of this machine, by a file descriptor
    /// (`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`).
    pub posix_fd: bool,
    /// Other machines of a fabric (`NVLink` over switches), by a library that exports it itself
    /// (`CU_MEM_HANDLE_TYPE_FABRIC`).
    pub fabric: bool,
    /// Network cards, which read and write it directly (`gpuDirectRDMACapable`).
    pub rdma: bool,
}

impl ExportTypes {
    /// No sharing.
    pub const NONE: Self = Self { posix_fd: false, fabric: false, rdma: false };
    /// By a file descriptor.
    pub const POSIX_FD: Self = Self { posix_fd: true, ..Self::NONE };
    /// By a handle of the fabric.
    pub const FABRIC: Self = Self { fabric: true, ..Self::NONE };

    /// Returns the union of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            posix_fd: self.posix_fd || other.posix_fd,
            fabric: self.fabric || other.fabric,
            rdma: self.rdma || other.rdma,
        }
    }

    /// Returns the types that are in both.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self {
            posix_fd: self.posix_fd && other.posix_fd,
            fabric: self.fabric && other.fabric,
            rdma: self.rdma && other.rdma,
        }
    }

    /// Returns the same types with access for network cards.
    #[must_use]
    pub const fn with_rdma(self) -> Self {
        Self { rdma: true, ..self }
    }

    /// Returns whether all of `wanted` is included.
    #[must_use]
    pub fn covers(self, wanted: Self) -> bool {
        self.missing(wanted).is_none()
    }

    /// Returns the driver's name of the first type in `wanted` that is not included.
    #[must_use]
    pub fn missing(self, wanted: Self) -> Option<&'static str> {
        let lacks = [
            (wanted.posix_fd && !self.posix_fd, "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
            (wanted.fabric && !self.fabric, "CU_MEM_HANDLE_TYPE_FABRIC"),
            (wanted.rdma && !self.rdma, "gpuDirectRDMACapable"),
        ];
        lacks.into_iter().find_map(|(lacks, name)| lacks.then_some(name))
    }
}

/// Export and import of physical memory. None of these calls waits for the device.
///
/// ```
/// use aquifer::{DeviceId, Driver, driver::ExportTypes, sim::Sim};
/// use std::os::fd::AsFd;
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let handle = driver.handle_create(gpu, 2 << 20, ExportTypes::POSIX_FD)?;
/// let file = driver.handle_export(handle)?; // goes to another process
/// // SAFETY: 1. No work uses it.
/// let theirs = unsafe { driver.handle_import(gpu, file.as_fd()) }?;
/// # let _ = theirs;
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. A handle that is imported is a new one, of the size exported.
/// 2. A call that is refused has changed nothing.
pub unsafe trait Ipc: Debug + Send + Sync {
    /// Exports the whole memory as a file descriptor (`cuMemExportToShareableHandle`). It keeps the
    /// memory alive as a handle does.
    ///
    /// # Errors
    /// Invalid value for memory that was not created for it.
    fn handle_export(&self, handle: PhysicalHandle) -> Result<OwnedFd>;

    /// Returns whether `cuIpcGetMemHandle`, and with it every transport between processes, accepts
    /// the memory at an address of the device
    /// (`CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`). Memory of [`Memory::mem_alloc`] is
    /// accepted, and mapped memory is not.
    ///
    /// [`Memory::mem_alloc`]: crate::Memory::mem_alloc
    ///
    /// # Errors
    /// Invalid value for an address that the driver does not know.
    fn is_legacy_ipc_capable(&self, device: DeviceId, address: u64) -> Result<bool>;

    /// Exports a range as a dma-buf, which drivers of network cards and disks map
    /// (`cuMemGetHandleForAddressRange`). The range consists of whole pages of the host, and lies
    /// in one allocation or mapping.
    ///
    /// # Errors
    /// Not supported (801) if the driver, the device or the kernel cannot do it. Invalid value.
    fn dma_buf_export(&self, device: DeviceId, address: u64, bytes: u64) -> Result<OwnedFd>;

    /// Creates a handle of the memory behind a file descriptor (`cuMemImportFromShareableHandle`).
    /// It is released like a handle that was created here. The caller still owns the descriptor.
    ///
    /// # Safety
    /// 1. Work that uses the memory through this handle is ordered with the work of every other
    ///    holder of the memory.
    ///
    /// # Errors
    /// Invalid value, or an error of the driver's choice, for any other descriptor.
    unsafe fn handle_import(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<PhysicalHandle>;
}
