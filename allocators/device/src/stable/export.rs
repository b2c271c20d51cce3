//! Export of stable blocks to other processes, and import of theirs.
#![expect(unsafe_code, reason = "imports memory that others work with")]

use crate::{DevicePool, Request, StableBlock, backing::handle::Handle};
use aquifer_core::{DeviceId, MemoryError, Result, event::BlockKind};
use aquifer_driver::{ExportTypes, FabricHandle, site};
use aquifer_stream::Stream;
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// An exported block: a file descriptor to send over a Unix socket, or a fabric handle to send
/// anywhere.
///
/// It covers the block's whole handle, which contains no other memory. While it lives, the memory
/// stays allocated on the device, and charged, even if the block is freed. A descriptor that has
/// been taken out of it, or sent, keeps the memory too, beyond what the budget can count.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, driver::ExportTypes, sim::Sim};
/// let sim = Sim::h200(1);
/// let mut config = PoolConfig::default();
/// config.export = ExportTypes::POSIX_FD;          // set before memory is created
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let mut ours = pool.alloc_stable(&stream, Request::bytes(1 << 20))?;
/// stream.fill(&mut ours.slice_mut::<u8>(0..1 << 20)?, 7)?;
/// let exported = ours.export()?;
/// // SAFETY: 1. all work is on one stream.
/// let theirs = unsafe { pool.import(&stream, &exported)? };
/// let mut back = vec![0_u8; 1 << 20];
/// stream.try_scope(|c| c.download(&theirs.slice(0..1 << 20)?, &mut back))?;
/// assert!(back.iter().all(|&byte| byte == 7) && theirs.address() != ours.address());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Debug)]
pub struct Exported {
    kind: ExportKind,
    /// Bytes of the whole handle.
    bytes: u64,
    /// The device of the memory, if this process has exported it.
    device: Option<DeviceId>,
    #[expect(dead_code, reason = "keeps the memory charged while it can be imported")]
    handle: Option<Arc<Handle>>,
}

#[derive(Debug)]
enum ExportKind {
    Fd(OwnedFd),
    Fabric(FabricHandle),
}

impl Exported {
    /// Wraps a descriptor that another process has sent, of memory of `bytes` as returned by its
    /// [`Exported::bytes`].
    #[must_use]
    pub fn from_fd(fd: OwnedFd, bytes: u64) -> Self {
        Self { kind: ExportKind::Fd(fd), bytes, device: None, handle: None }
    }

    /// Wraps a fabric handle that another machine has sent, of memory of `bytes`.
    #[must_use]
    pub fn from_fabric(name: FabricHandle, bytes: u64) -> Self {
        Self { kind: ExportKind::Fabric(name), bytes, device: None, handle: None }
    }

    /// Returns the bytes of the whole handle. The importer needs this number.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the file descriptor, if it has one.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.kind {
            ExportKind::Fd(fd) => Some(fd.as_fd()),
            ExportKind::Fabric(_) => None,
        }
    }

    /// Returns the fabric handle, if it has one.
    #[must_use]
    pub fn fabric(&self) -> Option<&FabricHandle> {
        match &self.kind {
            ExportKind::Fd(_) => None,
            ExportKind::Fabric(name) => Some(name),
        }
    }

    /// Returns the file descriptor alone. It keeps the memory allocated, but uncharged once the
    /// block is freed.
    #[must_use]
    pub fn into_fd(self) -> Option<OwnedFd> {
        match self.kind {
            ExportKind::Fd(fd) => Some(fd),
            ExportKind::Fabric(_) => None,
        }
    }
}

impl StableBlock {
    /// Exports its memory as a file descriptor (`cuMemExportToShareableHandle`). Does not block.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] for memory that was not created for it, see
    /// [`PoolConfig::export`](crate::PoolConfig::export), and for imported memory, which only its
    /// creator can export. The driver's.
    #[track_caller]
    pub fn export(&self) -> Result<Exported> {
        let _site = site::enter();
        let handle = self.exportable(ExportTypes::POSIX_FD)?;
        let fd = self
            .dedicated
            .driver
            .handle_export(handle.raw())
            .map_err(|e| self.dedicated.driver_error(e))?;
        Ok(self.exported(ExportKind::Fd(fd), handle))
    }

    /// Exports its memory as a fabric handle (`cuMemExportToShareableHandle`). Does not block.
    ///
    /// # Errors
    /// As [`StableBlock::export`].
    #[track_caller]
    pub fn export_fabric(&self) -> Result<Exported> {
        let _site = site::enter();
        let handle = self.exportable(ExportTypes::FABRIC)?;
        let name = self
            .dedicated
            .driver
            .handle_export_fabric(handle.raw())
            .map_err(|e| self.dedicated.driver_error(e))?;
        Ok(self.exported(ExportKind::Fabric(name), handle))
    }

    fn exportable(&self, types: ExportTypes) -> Result<Arc<Handle>> {
        if self.imported {
            return Err(MemoryError::Unsupported { feature: "export of imported memory" });
        }
        let handle = self.span.handle();
        let handle =
            handle.ok_or(MemoryError::Unsupported { feature: "virtual memory management" })?;
        match handle.export().missing(types) {
            Some(feature) => Err(MemoryError::Unsupported { feature }),
            None => Ok(handle),
        }
    }

    fn exported(&self, kind: ExportKind, handle: Arc<Handle>) -> Exported {
        Exported { kind, bytes: self.span.bytes, device: Some(self.device()), handle: Some(handle) }
    }
}

impl DevicePool {
    /// Maps memory that another pool or process has exported, for work on `stream` from now on
    /// (`cuMemImportFromShareableHandle`). The result is a stable block of whole handles, of as
    /// many bytes as were exported. It is charged to its creator, not here. Does not block.
    ///
    /// # Safety
    /// 1. Work on the memory through this block is ordered with all other work on it. Uses recorded
    ///    with other blocks over the same memory are not visible to this one, nor to other
    ///    processes.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] without virtual memory mapping; [`MemoryError::WrongDevice`]
    /// for another device's memory or stream; [`MemoryError::ZeroSize`], [`MemoryError::TooLarge`];
    /// the driver's, also for a descriptor of something else or a wrong number of bytes.
    #[track_caller]
    pub unsafe fn import(&self, stream: &Stream, exported: &Exported) -> Result<StableBlock> {
        let _site = site::enter();
        self.check_stream(stream)?;
        let (expected, actual) = (self.device(), exported.device.unwrap_or(self.device()));
        if expected != actual {
            return Err(MemoryError::WrongDevice { expected, actual });
        }
        let request = self.core().checked(Request::bytes(exported.bytes))?;
        let dedicated = &self.core().dedicated;
        if dedicated.step() == 0 {
            return Err(MemoryError::Unsupported { feature: "virtual memory management" });
        }
        dedicated.reap_nonblocking();
        let raw = match &exported.kind {
            // SAFETY: 1. promised by the caller.
            ExportKind::Fd(fd) => unsafe {
                dedicated.driver.handle_import(dedicated.device, fd.as_fd())
            },
            // SAFETY: 1. promised by the caller.
            ExportKind::Fabric(name) => unsafe {
                dedicated.driver.handle_import_fabric(dedicated.device, name)
            },
        };
        let handle =
            Handle::imported(&dedicated.driver, raw.map_err(|e| dedicated.driver_error(e))?);
        let span = dedicated
            .map_span(BlockKind::Stable, handle, exported.bytes, request.alignment())
            .map_err(|e| dedicated.driver_error(e))?;
        Ok(self.stable(stream, span, request, true))
    }
}
