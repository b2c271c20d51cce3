//! Blocks for other processes: sent over a Unix socket, and mapped there.
//!
//! A header, then a message for each of the block's physical handles: its size, with its descriptor
//! (`SCM_RIGHTS`). The receiver acknowledges each [`BATCH`] of them but the last, so no more
//! descriptors of a block are open at once between the two sides.
//!
//! Neither side trusts the other with more than the bytes of the block: lengths and counts are
//! checked before they are used, a descriptor of anything else is refused by the driver, and what
//! has been opened is closed on failure.
#![expect(unsafe_code, reason = "imports memory that others work with")]

use super::{
    StableBlock,
    error::ShareError,
    wire::{ShareHeader, check_name, receive, send},
};
use crate::{
    Block, DevicePool, DeviceSlice, DeviceSliceMut, Request, backing::handle::Handle,
    block::BlockOwner,
};
use aquifer_core::{MemoryError, Result, event::BlockKind};
use aquifer_driver::{Access, DeviceRange, Driver, ExportTypes, site};
use aquifer_heap::Range as HeapRange;
use aquifer_stream::Stream;
use bytemuck::Pod;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::{
    fmt, io,
    ops::Range,
    os::{
        fd::AsFd,
        unix::net::{SocketAddr, UnixStream},
    },
    sync::Arc,
};

/// The number of handles that are sent without an answer. Far below the usual limits of open
/// descriptors, which also count those that are in flight.
const BATCH: usize = 64;

/// A block that can be sent to other processes, any number of times.
///
/// It represents the physical memory behind the block, which stays in place while the block lives:
/// neither compaction nor reclaim moves memory under a live block. So keep the block until every
/// receiver has closed its mapping. This value keeps the memory charged, but after the block's
/// free another block may use it.
///
/// A receiver maps whole physical handles (2 MiB or more), so it can also access the blocks that
/// lie beside this one. For memory that nothing else shares, send a [`StableBlock`].
///
/// ```
/// use aquifer::{DeviceBuffer, DeviceId, DevicePool, PoolConfig, device::check_peer, sim::Sim};
/// use std::os::unix::net::UnixStream;
///
/// let sim = Sim::h200(1);
/// let mut config = PoolConfig::default();
/// config.shareable = true;                        // set before memory is created
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), config)?;
/// let other = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let stream = pool.stream()?;
/// let mut ours: DeviceBuffer<u32> = pool.buffer(&stream, 1000)?;
/// stream.fill(&mut ours, 7)?;
///
/// let (here, there) = UnixStream::pair()?;        // `there` belongs to another process
/// check_peer(&here)?;
/// pool.share(ours.block(), "weights")?.send(&here)?;
///
/// // SAFETY: 1. All work is on one stream.
/// let theirs = unsafe { other.receive(&stream, &there)? };
/// assert_eq!((theirs.name(), theirs.bytes()), ("weights", 4000));
/// let mut back = vec![0_u32; 1000];
/// stream.try_scope(|c| c.download(&theirs.slice(0..1000)?, &mut back))?;
/// assert_eq!(back, [7; 1000]);
/// theirs.close()?;                                // then tell the sender, which frees its block
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SharedBlock {
    driver: Arc<dyn Driver>,
    pub(super) header: ShareHeader,
    handles: Vec<Arc<Handle>>,
}

/// A block of another process, mapped here by [`DevicePool::receive`] or
/// [`DevicePool::open_shared`]. The memory is readable, and writable unless its sender has made it
/// [read-only](SharedBlock::read_only). It is charged to the process that has created it.
///
/// When it is dropped, it is unmapped at the pool's next slow path or trim after the work of its
/// stream. [`ReceivedBlock::close`] unmaps it at once. Either way the device keeps the memory until
/// then, even if the sending process has ended.
pub struct ReceivedBlock {
    block: StableBlock,
    name: String,
    /// Where the sender's block begins within the mapping.
    offset: u64,
    bytes: u64,
    access: Access,
    generation: u64,
    /// The server that it was opened at.
    pub(super) server: Option<SocketAddr>,
}

/// Refuses a socket whose other end is a process of another user (`SO_PEERCRED`). The credentials
/// are those of the time when the other end connected or listened.
///
/// See [`SharedBlock`] for an example.
///
/// # Errors
/// [`ShareError::OtherUser`]; [`ShareError::Io`].
pub fn check_peer(socket: &UnixStream) -> Result<(), ShareError> {
    let peer = getsockopt(socket, PeerCredentials).map_err(io::Error::from)?;
    // SAFETY: 1. It reads a number of the process and cannot fail.
    let expected = unsafe { nix::libc::geteuid() };
    if peer.uid() == expected {
        Ok(())
    } else {
        Err(ShareError::OtherUser { expected, actual: peer.uid() })
    }
}

impl SharedBlock {
    /// Returns the bytes of the block.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.header.bytes
    }

    /// Returns the name for other processes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.header.name
    }

    /// Makes it read-only for its receivers: they map it so that a kernel which writes fails
    /// (`CU_MEM_ACCESS_FLAGS_PROT_READ`). It guards against mistakes only, since the driver's
    /// descriptors carry every right.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.header.access = Access::Read;
        self
    }

    /// Returns the number of physical handles behind it, which is the number of descriptors that
    /// are sent.
    #[must_use]
    pub fn handles(&self) -> usize {
        self.handles.len()
    }

    /// Sends the block to the process at the other end, which calls [`DevicePool::receive`]. Blocks
    /// while the socket does, as its timeouts allow. A block of more than 64 handles waits for the
    /// receiver.
    ///
    /// The driver opens a descriptor for each handle (`cuMemExportToShareableHandle`). They are
    /// closed when this returns.
    ///
    /// # Errors
    /// [`ShareError::Io`], [`ShareError::TimedOut`]; the driver's. The receiver then fails too.
    pub fn send(&self, socket: &UnixStream) -> Result<(), ShareError> {
        self.header.send(socket)?;
        for (number, handle) in self.handles.iter().enumerate() {
            if number > 0 && number % BATCH == 0 {
                receive(socket, &mut [0])?;
            }
            let exported = self.driver.handle_export(handle.raw());
            let file = exported.map_err(|e| MemoryError::driver(handle.raw().device(), e))?;
            send(socket, &handle.bytes().to_le_bytes(), Some(&file))?;
        }
        Ok(())
    }
}

impl DevicePool {
    /// Prepares a live block of this pool to be sent to other processes, under a name for them of
    /// at most 64 bytes. Makes no driver call.
    ///
    /// # Errors
    /// - [`MemoryError::Unsupported`] for memory that was not created for it (see
    ///   [`PoolConfig::shareable`](crate::PoolConfig::shareable)), that is not mapped from physical
    ///   handles, that was received, or that can be parked.
    /// - [`MemoryError::ForeignBlock`] for a block of another pool.
    /// - [`ShareError::BadField`] for a name that is too long.
    pub fn share(&self, block: &Block, name: &str) -> Result<SharedBlock, ShareError> {
        check_name(name)?;
        let (address, bytes) = (block.address(), block.bytes());
        if !block.owner.streams()?.is(self.streams()) {
            return Err(MemoryError::ForeignBlock { address }.into());
        }
        let found = match &block.owner {
            BlockOwner::Cache(_) => {
                self.core().memory.handles(HeapRange { start: address, len: bytes })
            }
            BlockOwner::Driver(driver_block) => driver_block.releaser().handles(address, bytes),
        };
        let feature = "virtual memory management (cuMemMap) behind the block";
        let (handles, offset) = found.ok_or(MemoryError::Unsupported { feature })?;
        let mut missing = handles.iter().map(|h| h.export().missing(ExportTypes::POSIX_FD));
        if let Some(feature) = missing.find_map(|missing| missing) {
            return Err(MemoryError::Unsupported { feature }.into());
        }
        let info = self.info();
        let header = ShareHeader {
            handles: handles.len() as u64,
            generation: 0,
            granularity: info.granularity,
            offset,
            bytes,
            access: Access::ReadWrite,
            device: info.pci_address.clone().unwrap_or_default(),
            name: name.to_owned(),
        };
        Ok(SharedBlock { driver: self.driver().clone(), header, handles })
    }

    /// Receives a block that [`SharedBlock::send`] sends, and maps it in one piece for work on
    /// `stream` from now on (`cuMemImportFromShareableHandle`, `cuMemMap`). Blocks while the socket
    /// does, as its timeouts allow. See [`SharedBlock`] for an example.
    ///
    /// # Safety
    /// 1. Work on the memory through this block is ordered with all other work on it. Uses recorded
    ///    with other blocks over the same memory are not visible to this one, nor to other
    ///    processes.
    /// 2. The sender's block lives until this one is closed, or no work uses this one any more.
    ///
    /// # Errors
    /// - [`MemoryError::Unsupported`] without virtual memory mapping; [`MemoryError::WrongDevice`]
    ///   for another device's stream; the driver's, also for a descriptor of something else.
    /// - The other [`ShareError`]s for a socket that fails, and for any message that is not what
    ///   `send` writes; [`ShareError::NotServed`] from a [server](crate::ShareServer).
    #[track_caller]
    pub unsafe fn receive(
        &self,
        stream: &Stream,
        socket: &UnixStream,
    ) -> Result<ReceivedBlock, ShareError> {
        let _site = site::enter();
        self.check_stream(stream)?;
        let dedicated = &self.core().dedicated;
        if dedicated.step() == 0 {
            return Err(MemoryError::Unsupported { feature: "virtual memory management" }.into());
        }
        let header = ShareHeader::receive(socket)?;
        if header.handles == 0 {
            return Err(ShareError::NotServed { name: header.name });
        }
        self.check_header(&header)?;
        let (mut parts, mut total) = (Vec::new(), 0);
        for handle in 0..header.handles {
            if handle > 0 && handle % BATCH as u64 == 0 {
                send(socket, &[0], None)?;
            }
            let mut size = [0; 8];
            let missing = ShareError::BadField { field: "the number of descriptors", value: 0 };
            let file = receive(socket, &mut size)?.ok_or(missing)?;
            let bytes = u64::from_le_bytes(size);
            if bytes == 0 || !bytes.is_multiple_of(header.granularity) {
                return Err(ShareError::BadField { field: "the size of a handle", value: bytes });
            }
            total = self.check_total(total, bytes)?;
            // SAFETY: 1. promised by the caller.
            let raw = unsafe { dedicated.driver.handle_import(self.device(), file.as_fd()) };
            let raw = raw.map_err(|e| dedicated.driver_error(e))?;
            parts.push((bytes, Handle::imported(&dedicated.driver, raw)));
        }
        let end = header.offset.checked_add(header.bytes);
        if header.bytes == 0 || end.is_none_or(|end| end > total) {
            return Err(ShareError::BadField {
                field: "the size of the block",
                value: header.bytes,
            });
        }
        dedicated.reap_nonblocking();
        let request = self.core().checked(Request::bytes(total))?;
        let span = dedicated
            .map_imported(BlockKind::Stable, parts, total, header.access)
            .map_err(|e| dedicated.driver_error(e))?;
        let block = self.stable(stream, span, request, true, false);
        let ShareHeader { name, offset, bytes, access, generation, .. } = header;
        Ok(ReceivedBlock { block, name, offset, bytes, access, generation, server: None })
    }

    /// Checks what can be checked before any memory has arrived.
    fn check_header(&self, header: &ShareHeader) -> Result<(), ShareError> {
        let info = self.info();
        let here = info.pci_address.as_deref().unwrap_or_default();
        if !here.is_empty() && !header.device.is_empty() && here != header.device {
            let (expected, actual) = (header.device.clone(), here.to_owned());
            return Err(ShareError::OtherDevice { expected, actual });
        }
        if header.granularity != info.granularity {
            let (field, value) = ("the granularity", header.granularity);
            return Err(ShareError::BadField { field, value });
        }
        Ok(())
    }

    /// Adds the bytes of a handle. No block has more than its device.
    fn check_total(&self, total: u64, bytes: u64) -> Result<u64, ShareError> {
        let most = self.info().memory.next_multiple_of(self.info().granularity.max(1));
        let sum = total.checked_add(bytes).filter(|sum| *sum <= most);
        sum.ok_or(ShareError::BadField { field: "the size of a handle", value: bytes })
    }
}

impl ReceivedBlock {
    /// Returns the sender's name of it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether its sender has made it [read-only](SharedBlock::read_only).
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        !self.access.writes()
    }

    /// Returns the generation with which its [server](crate::ShareServer) served it, or 0 if it was
    /// not opened by name.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the address where the sender's block begins in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address() + self.offset
    }

    /// Returns the bytes of the sender's block.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the range of the sender's block, for kernels and other libraries.
    #[must_use]
    pub fn range(&self) -> DeviceRange {
        DeviceRange { device: self.block.device(), address: self.address(), bytes: self.bytes }
    }

    /// Returns the whole mapping as a stable block, to prepare and record uses.
    #[must_use]
    pub fn mapping(&self) -> &StableBlock {
        &self.block
    }

    /// Returns a view of the elements in `range`, counted from the start of the sender's block, for
    /// reading.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice<T: Pod>(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        let (offset, len) = super::bounds::<T>(&range, self.bytes)?;
        Ok(DeviceSlice::of(self.block.block(), self.offset + offset, len))
    }

    /// Returns a view of the elements in `range`, counted from the start of the sender's block, for
    /// writing.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::Unsupported`] if it is read-only.
    pub fn slice_mut<T: Pod>(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        if self.is_read_only() {
            return Err(MemoryError::Unsupported { feature: "writing to a read-only block" });
        }
        let (offset, len) = super::bounds::<T>(&range, self.bytes)?;
        let offset = self.offset + offset;
        Ok(DeviceSliceMut::of(self.block.block_mut(), offset, len))
    }

    /// Unmaps the memory now: waits for all work queued on the device (`cuCtxSynchronize`), then
    /// unmaps. While a capture is announced, no thread may wait for the device. It is then unmapped
    /// at a later slow path or trim.
    ///
    /// Returns whether it is unmapped.
    ///
    /// # Errors
    /// The driver's. It is then unmapped at a later slow path or trim.
    pub fn close(self) -> Result<bool> {
        let (dedicated, span) = (self.block.dedicated.clone(), self.block.span.clone());
        drop(self);
        dedicated.release_now(&span)
    }
}

impl fmt::Debug for SharedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBlock")
            .field("name", &self.header.name)
            .field("bytes", &self.header.bytes)
            .field("handles", &self.handles.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ReceivedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedBlock")
            .field("name", &self.name)
            .field("bytes", &self.bytes)
            .field("access", &self.access)
            .field("mapping", &self.block)
            .finish_non_exhaustive()
    }
}
