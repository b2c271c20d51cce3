//! The families of driver calls that need few types of their own: streams, events, graphs, memory,
//! physical memory and its mappings, and pinned memory.
#![expect(unsafe_code, reason = "declares calls with safety conditions; holds no unsafe block")]

use crate::{
    DeviceId, ExportTypes, PhysicalHandle, PoolHandle, RawEvent, RawGraph, RawGraphExec, RawStream,
    Result,
};
use std::{fmt::Debug, ptr::NonNull};

/// Which calls of a thread are refused because they could disturb an open capture
/// (`CUstreamCaptureMode`).
///
/// See [`Streams`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureMode {
    /// Unsafe calls fail while any thread captures in this mode, and invalidate that capture.
    Global,
    /// Unsafe calls fail while this thread captures.
    ThreadLocal,
    /// No call is refused.
    Relaxed,
}

/// Driver calls for streams.
///
/// ```
/// use aquifer::{DeviceId, Driver, driver::CaptureMode, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let urgent = driver.stream_create(gpu, -1)?;
/// assert!(driver.stream_query(urgent)? && !driver.stream_is_capturing(urgent)?);
/// let before = driver.exchange_capture_mode(CaptureMode::Relaxed)?;
/// driver.exchange_capture_mode(before)?;
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`Streams::stream_create`] returns a new stream that is valid until it is destroyed.
/// 2. Work that is queued on a stream runs in order, and after the work that
///    [`Streams::stream_wait_event`] made the stream wait for.
/// 3. `Ok` of [`Streams::stream_synchronize`] and `Ok(true)` of [`Streams::stream_query`] mean that
///    all work queued on the stream before the call is done.
/// 4. [`Streams::stream_id`] never returns the same number for two streams, and
///    [`Streams::stream_is_capturing`] never returns `Ok(false)` for a stream whose work becomes
///    part of a graph.
/// 5. A call that is refused has changed nothing.
pub unsafe trait Streams: Debug + Send + Sync {
    /// Creates a stream that does not wait for the legacy default stream
    /// (`cuStreamCreateWithPriority`, non-blocking). A lower number is a higher priority, 0 the
    /// lowest. The driver clamps it to what the device has.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_create(&self, device: DeviceId, priority: i32) -> Result<RawStream>;

    /// Destroys a stream (`cuStreamDestroy`). Work queued on it still runs. Does not block.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()>;

    /// Returns a number that no other stream of the process ever has (`cuStreamGetId`). The handle,
    /// in contrast, can be reused.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_id(&self, stream: RawStream) -> Result<u64>;

    /// Returns whether all queued work is done (`cuStreamQuery`). Never blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn stream_query(&self, stream: RawStream) -> Result<bool>;

    /// Waits until all queued work is done (`cuStreamSynchronize`). Blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn stream_synchronize(&self, stream: RawStream) -> Result<()>;

    /// Makes work queued on `stream` from now on wait for the last record of the event
    /// (`cuStreamWaitEvent`). The host does not wait.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Returns whether work queued on `stream` now becomes part of a graph instead of running
    /// (`cuStreamIsCapturing`, 14 ns). Also returns `true` after the capture has been invalidated,
    /// until it is ended, and for the legacy default stream while a stream that is ordered with it
    /// captures: nothing can be queued there then. Breaks no capture, and never blocks.
    ///
    /// # Errors
    /// Errors of the driver.
    fn stream_is_capturing(&self, stream: RawStream) -> Result<bool>;

    /// Sets this thread's capture mode and returns the previous one
    /// (`cuThreadExchangeStreamCaptureMode`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;
}

/// Driver calls for events.
///
/// ```
/// use aquifer::{DeviceId, Driver, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let (a, b) = (driver.stream_create(gpu, 0)?, driver.stream_create(gpu, 0)?);
/// let event = driver.event_create(gpu)?;
/// driver.event_record(event, a)?;          // after the work queued on `a`
/// driver.stream_wait_event(b, event)?;     // work queued on `b` from now on waits for it
/// driver.event_synchronize(event)?;        // and so does the host
/// assert!(driver.event_query(event)?);
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`Events::event_create`] returns a new event that is valid until it is destroyed.
/// 2. `Ok(true)` of [`Events::event_query`] and `Ok` of [`Events::event_synchronize`] mean that all
///    work queued on the stream before the last record is done.
/// 3. A call that is refused has changed nothing.
pub unsafe trait Events: Debug + Send + Sync {
    /// Creates an event without timing in the primary context of `device` (`cuEventCreate`, about
    /// 0.1 µs).
    ///
    /// # Errors
    /// Errors of the driver.
    fn event_create(&self, device: DeviceId) -> Result<RawEvent>;

    /// Destroys an event (`cuEventDestroy`). Streams that already wait for it still do.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()>;

    /// Records the event after all work queued on `stream` (`cuEventRecord`, about 0.17 µs).
    /// Replaces an earlier record.
    ///
    /// # Errors
    /// Errors of the driver.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Returns whether the last record has been reached (`cuEventQuery`). Returns `true` for an
    /// event that was never recorded. Never blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn event_query(&self, event: RawEvent) -> Result<bool>;

    /// Waits until the last record has been reached (`cuEventSynchronize`). Blocks.
    ///
    /// # Errors
    /// Errors of work queued before.
    fn event_synchronize(&self, event: RawEvent) -> Result<()>;
}

/// The capture that a stream takes part in (`CUstreamCaptureStatus`, and the capture's id).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// No capture: queued work runs.
    None,
    /// An open capture: queued work becomes part of its graph. The stream began the capture, or has
    /// waited for an event of a stream that takes part.
    Active {
        /// A number that no other capture of the process ever has. It is the same for all streams
        /// that take part.
        id: u64,
    },
    /// A capture that a call has invalidated and that has not been ended yet. Until then nothing
    /// can be queued on the stream.
    Invalidated,
}

/// Captures, and the graphs that they create.
///
/// Between [`capture_begin`](Graphs::capture_begin) and [`capture_end`](Graphs::capture_end), work
/// that is queued on a stream does not run but becomes part of a graph. An event that is recorded
/// there belongs to the capture. Another stream that waits for the event takes part from then on,
/// and must be joined back in the same way before the end. The graph is a template:
/// [`graph_instantiate`](Graphs::graph_instantiate) copies it into an executable that can be
/// launched any number of times, on any stream.
///
/// A graph contains *addresses*. The owner of the memory is not notified of launches. The memory
/// must stay in place while executables of the graph exist.
///
/// ```
/// use aquifer_driver::{CaptureMode, CaptureStatus, DeviceId, DeviceRange, Pattern, sim::Sim};
/// # #[expect(unsafe_code, reason = "an example")]
/// # fn main() -> aquifer_driver::Result<()> {
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let stream = driver.stream_create(DeviceId(0), 0)?;
/// let address = driver.mem_alloc(DeviceId(0), 64)?;
/// driver.capture_begin(stream, CaptureMode::Global)?;
/// assert!(matches!(driver.capture_status(stream)?, CaptureStatus::Active { .. }));
/// // SAFETY: 1. The range is mapped until the end. 2. It has no other user.
/// unsafe { driver.fill_with(stream, address, Pattern::Byte(7), 64)? };
/// let graph = driver.capture_end(stream)?;
/// let exec = driver.graph_instantiate(graph)?;
/// // SAFETY: 1. and 2. as for the fill. 3. The handles are not used afterwards.
/// unsafe {
///     driver.graph_launch(exec, stream)?;
///     driver.graph_exec_destroy(exec)?;
///     driver.graph_destroy(graph)?;
/// }
/// assert_eq!(sim.read_back(DeviceRange { device: DeviceId(0), address, bytes: 64 }), Some(vec![7; 64]));
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// 1. Graphs and executables are new ones, valid until they are destroyed.
/// 2. Captured work does not run before its graph is launched, and then in the order of the stream
///    it is launched on.
/// 3. [`Graphs::capture_status`] never reports two captures by the same number, and never reports a
///    capturing stream as not capturing.
pub unsafe trait Graphs: Debug + Send + Sync {
    /// Begins a capture on a stream (`cuStreamBeginCapture`). `mode` selects the calls that are
    /// refused, and invalidate it, until it is ended. Does not block.
    ///
    /// # Errors
    /// Unsupported (900) on the legacy default stream. Illegal state (401) for a stream that
    /// already takes part in a capture.
    fn capture_begin(&self, stream: RawStream, mode: CaptureMode) -> Result<()>;

    /// Ends the capture that was begun on this stream (`cuStreamEndCapture`). Must be called on the
    /// thread that began it, unless its mode is [`CaptureMode::Relaxed`]. Every stream that took
    /// part is released from the capture, even if this call fails because the capture was
    /// invalidated. Does not block.
    ///
    /// # Errors
    /// Invalidated (901) if a call has broken it. Unjoined (904) if a stream that took part holds
    /// work which this stream does not wait for. Unmatched (903) for a stream that took part but
    /// did not begin it. Wrong thread (908). Illegal state (401) for a stream that takes part in no
    /// capture.
    fn capture_end(&self, stream: RawStream) -> Result<RawGraph>;

    /// Returns the capture that a stream takes part in (`cuStreamGetCaptureInfo`). Breaks no
    /// capture, and never blocks.
    ///
    /// # Errors
    /// Implicit (906) for the legacy default stream while a stream that is ordered with it
    /// captures.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// Copies a graph into an executable (`cuGraphInstantiateWithFlags`). Afterwards the two are
    /// independent. May take milliseconds for some thousands of nodes.
    ///
    /// # Errors
    /// Invalid value (1) if an address of a fill is not mapped now. The driver checks those
    /// addresses, but neither those of copies nor the arguments of kernels. Errors of the driver.
    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawGraphExec>;

    /// Queues a whole graph on a stream (`cuGraphLaunch`). It runs after the work queued there, and
    /// after earlier launches of the same executable on any stream. Work queued on the stream
    /// afterwards waits for all of it. Does not block, unless the driver's queues are full.
    ///
    /// # Safety
    /// 1. Every address that the graph accesses is mapped until the launch is done. Host memory
    ///    that it reads is readable, and host memory that it writes is writable.
    /// 2. There is no other conflicting access to those bytes from here until the launch is done.
    ///    In particular, they still belong to the owner that they were captured for.
    ///
    /// # Errors
    /// Unsupported (900) on a stream that captures. Errors of the driver.
    unsafe fn graph_launch(&self, exec: RawGraphExec, stream: RawStream) -> Result<()>;

    /// Destroys a graph but not its executables (`cuGraphDestroy`). Does not block.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn graph_destroy(&self, graph: RawGraph) -> Result<()>;

    /// Destroys an executable (`cuGraphExecDestroy`). Launches that have been queued still run.
    /// Does not block. Breaks an open capture as `cuMemFree` would, unless the thread's mode is
    /// [`Relaxed`](crate::Relaxed).
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn graph_exec_destroy(&self, exec: RawGraphExec) -> Result<()>;
}

/// The bytes that a pool of the driver holds.
///
/// Returned by [`Memory::pool_usage`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolUsage {
    /// Allocated from the device.
    pub reserved: u64,
    /// Allocated by users of the pool.
    pub used: u64,
    /// The maximum of `reserved` so far.
    pub reserved_high: u64,
}

/// Device memory from the driver's own allocators.
///
/// # Safety
/// 1. A range that an allocation returns is mapped and aligned as documented, overlaps no other
///    range that has not been freed, and is owned by the caller until it is freed.
/// 2. A call that is refused has changed nothing: memory whose free is refused stays allocated.
pub unsafe trait Memory: Debug + Send + Sync {
    /// Allocates device memory (`cuMemAlloc`, 50–400 µs). It is aligned to at least 256 bytes.
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<u64>;

    /// Frees an allocation (`cuMemFree`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` was returned by [`Memory::mem_alloc`] and has not been freed.
    /// 2. No queued work accesses it, in an order that the driver knows.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays allocated.
    unsafe fn mem_free(&self, device: DeviceId, address: u64) -> Result<()>;

    /// Creates a stream-ordered pool (`cuMemPoolCreate`) that keeps freed memory.
    ///
    /// # Errors
    /// Errors of the driver.
    fn pool_create(&self, device: DeviceId) -> Result<PoolHandle>;

    /// Destroys a pool (`cuMemPoolDestroy`). Blocks that are still allocated stay valid.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver.
    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()>;

    /// Allocates memory that work queued on `stream` from now on may use
    /// (`cuMemAllocFromPoolAsync`).
    ///
    /// # Errors
    /// Out of memory (code 2).
    fn pool_alloc(&self, pool: PoolHandle, stream: RawStream, bytes: u64) -> Result<u64>;

    /// Frees memory after all work queued on `stream` (`cuMemFreeAsync`). The host does not wait.
    ///
    /// # Safety
    /// 1. `address` was returned by [`Memory::pool_alloc`] and has not been freed.
    /// 2. All work that accesses it is queued on `stream`, or `stream` waits for it.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays allocated.
    unsafe fn pool_free(&self, stream: RawStream, address: u64) -> Result<()>;

    /// Releases free memory of the pool to the device, down to `keep` reserved bytes
    /// (`cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn pool_trim(&self, pool: PoolHandle, keep: u64) -> Result<()>;

    /// Returns what the pool holds (`cuMemPoolGetAttribute`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn pool_usage(&self, pool: PoolHandle) -> Result<PoolUsage>;
}

/// Virtual memory management. Sizes and addresses are multiples of the device's granularity
/// (usually 2 MiB).
///
/// None of these calls waits for the device, and none is ordered with streams: mapping and
/// unmapping take effect during the call, even if work is queued. The driver runs them one at a
/// time. Moving a handle takes about 40 µs.
///
/// ```
/// use aquifer::{DeviceId, Driver, driver::ExportTypes, sim::Sim};
/// let (sim, gpu, unit) = (Sim::h200(1), DeviceId(0), 2 << 20);
/// let driver = sim.driver();
/// let address = driver.address_reserve(gpu, 4 * unit, 0)?;
/// let handle = driver.handle_create(gpu, unit, ExportTypes::NONE)?;
/// // SAFETY: 1. Nothing is mapped there, and no work is queued.
/// unsafe { driver.map(address, unit, handle) }?;
/// driver.set_access(address, unit, &[gpu])?;
/// // SAFETY: 1. No queued work accesses it.
/// unsafe { driver.unmap(gpu, address, unit) }?;
/// // SAFETY: 1. The handle and the range are not used afterwards.
/// unsafe {
///     driver.handle_release(handle)?;
///     driver.address_free(gpu, address, 4 * unit)?;
/// }
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. A range that [`Physical::address_reserve`] returns overlaps no other range that has not been
///    freed. A handle is a new one, of the requested size.
/// 2. After `Ok` of [`Physical::map`] and [`Physical::set_access`], the range refers to the
///    handle's memory on the named devices until it is unmapped.
/// 3. A call that is refused has changed nothing.
pub unsafe trait Physical: Debug + Send + Sync {
    /// Reserves a range of addresses without memory (`cuMemAddressReserve`). With `align` 0 the
    /// driver chooses the alignment.
    ///
    /// # Errors
    /// Out of memory if the address space of the process is exhausted. Not supported on devices
    /// without virtual memory management.
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<u64>;

    /// Frees a whole reserved range (`cuMemAddressFree`).
    ///
    /// # Safety
    /// 1. The range was returned by [`Physical::address_reserve`], nothing is mapped in it, and its
    ///    addresses are not in use.
    ///
    /// # Errors
    /// Errors of the driver. The range stays reserved.
    unsafe fn address_free(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()>;

    /// Allocates physical memory that can be exported in the ways of `types` (`cuMemCreate`).
    ///
    /// # Errors
    /// Out of memory (code 2). Not supported or not permitted (800, 801) if the device or the
    /// system cannot export it so.
    fn handle_create(
        &self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<PhysicalHandle>;

    /// Releases a physical handle (`cuMemRelease`). The memory returns to the device when its last
    /// mapping is gone as well.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// Errors of the driver. The handle stays valid.
    unsafe fn handle_release(&self, handle: PhysicalHandle) -> Result<()>;

    /// Maps a whole handle at an address inside a reserved range (`cuMemMap`). The memory can be
    /// accessed after [`Physical::set_access`]. One handle may be mapped at several addresses at
    /// once.
    ///
    /// # Safety
    /// 1. Nothing is mapped there, and no queued work accesses the range.
    ///
    /// # Errors
    /// Errors of the driver. Nothing is mapped.
    unsafe fn map(&self, address: u64, bytes: u64, handle: PhysicalHandle) -> Result<()>;

    /// Unmaps whole mappings immediately (`cuMemUnmap`).
    ///
    /// # Safety
    /// 1. The host has established that no queued work accesses the range through these addresses,
    ///    by an event that it has seen complete or a stream that it has synchronised. A wait
    ///    between streams is not enough.
    ///
    /// # Errors
    /// Errors of the driver. The mappings stay.
    unsafe fn unmap(&self, device: DeviceId, address: u64, bytes: u64) -> Result<()>;

    /// Makes a fully mapped range readable and writable for `devices` (`cuMemSetAccess`).
    ///
    /// # Errors
    /// Errors of the driver. Access is unchanged.
    fn set_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()>;

    /// Makes a fully mapped range readable, but not writable, for `devices`
    /// (`cuMemSetAccess` with `CU_MEM_ACCESS_FLAGS_PROT_READ`).
    ///
    /// # Errors
    /// Errors of the driver. Access is unchanged.
    fn set_read_access(&self, address: u64, bytes: u64, devices: &[DeviceId]) -> Result<()>;
}

/// Host memory that devices can reach.
///
/// ```
/// use aquifer::{DeviceId, Driver, sim::Sim};
/// let (driver, gpu) = (Sim::h200(1).driver(), DeviceId(0));
/// let pinned = driver.host_alloc(gpu, 4096, false)?;
/// // SAFETY: 1. `host_alloc` returned it. 2. It is not in use.
/// unsafe { driver.host_free(gpu, pinned) }?;
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
///
/// # Safety
/// 1. [`HostMemory::host_alloc`] returns memory that is mapped, readable and writable for `bytes`
///    bytes, aligned to a page, and owned by the caller until it is freed.
/// 2. After `Ok` of [`HostMemory::host_unregister`] and [`HostMemory::host_free`] no device
///    accesses the memory.
/// 3. A call that is refused has changed nothing.
pub unsafe trait HostMemory: Debug + Send + Sync {
    /// Allocates memory that is pinned for every context of the process (`cuMemHostAlloc`). Its
    /// pages are placed on the NUMA node of the calling thread, at 2–3.5 GB/s. `device` selects the
    /// context that is used. `write_combined` asks for memory without the host's caches
    /// (`CU_MEMHOSTALLOC_WRITECOMBINED`), which the host reads very slowly.
    ///
    /// # Errors
    /// Out of memory.
    fn host_alloc(
        &self,
        device: DeviceId,
        bytes: usize,
        write_combined: bool,
    ) -> Result<NonNull<u8>>;

    /// Frees pinned memory (`cuMemFreeHost`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` was returned by [`HostMemory::host_alloc`] and has not been freed.
    /// 2. It is no longer in use: no queued copy and no slice refers to it.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays allocated.
    unsafe fn host_free(&self, device: DeviceId, address: NonNull<u8>) -> Result<()>;

    /// Pins existing memory for every context of the process (`cuMemHostRegister`). Holds
    /// driver-wide locks while it runs. The driver refuses a single registration of 512 GiB or
    /// more.
    ///
    /// # Safety
    /// 1. The range is mapped, and stays mapped to the same pages until it is unregistered.
    ///
    /// # Errors
    /// Errors of the driver. Nothing is pinned. Already registered (code 712) if any part of it is.
    unsafe fn host_register(
        &self,
        device: DeviceId,
        address: NonNull<u8>,
        bytes: usize,
    ) -> Result<()>;

    /// Ends a registration (`cuMemHostUnregister`). Blocks until the whole device is idle.
    ///
    /// # Safety
    /// 1. `address` is the start of a registration.
    /// 2. No queued copy accesses it.
    ///
    /// # Errors
    /// Errors of the driver. The memory stays registered.
    unsafe fn host_unregister(&self, device: DeviceId, address: NonNull<u8>) -> Result<()>;
}
