//! Graphs: work that is captured once and launched many times.
#![expect(
    unsafe_code,
    reason = "declares calls that destroy handles, or run work by address; holds no unsafe block"
)]

use crate::{CaptureMode, RawGraph, RawGraphExec, RawStream, Result};
use std::fmt::Debug;

/// A function to call when a graph is no longer in use. See [`Graphs::graph_on_release`].
pub type OnRelease = Box<dyn FnOnce() + Send>;

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
/// 4. A function registered with [`Graphs::graph_on_release`] is called only when the graph, every
///    executable of it and every launch of one are gone.
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

    /// Registers a function to call once when the graph, every executable created from it from now
    /// on, and every launch of those have ended (`cuUserObjectCreate` and
    /// `cuGraphRetainUserObject`). Does not block.
    ///
    /// `call` runs some time afterwards, on a thread of the driver or inside the call that released
    /// the last reference. It must not call the driver, must not panic, and must not wait for a
    /// lock that is held during driver calls. It should only set a flag that another thread acts
    /// on.
    ///
    /// # Errors
    /// Errors of the driver. `call` is then dropped and never called.
    fn graph_on_release(&self, graph: RawGraph, call: OnRelease) -> Result<()>;
}
