//! Work that is captured once and launched many times.
#![expect(
    unsafe_code,
    reason = "declares calls that end a handle's life, or run work by address; holds no unsafe block"
)]

use crate::{CaptureMode, RawGraph, RawGraphExec, RawStream, Result};
use std::fmt::Debug;

/// What is to be called when a graph is no longer in use: see [`Graphs::graph_on_release`].
pub type OnRelease = Box<dyn FnOnce() + Send>;

/// Which capture a stream takes part in (`CUstreamCaptureStatus`, and the capture's id).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// None: what is queued on it runs.
    None,
    /// This one: what is queued on it becomes part of the capture's graph. The stream began it, or
    /// has waited for an event of one that takes part.
    Active {
        /// The number that no other capture of the process ever has. All streams that take part
        /// answer with the same.
        id: u64,
    },
    /// One that some call has broken, and that has not been ended yet. Nothing can be queued on the
    /// stream until then.
    Invalidated,
}

/// Captures, and the graphs that they make.
///
/// Between [`capture_begin`](Graphs::capture_begin) and [`capture_end`](Graphs::capture_end) the
/// work that is queued on a stream does not run but becomes part of a graph. An event that is
/// recorded there belongs to the capture; another stream that waits for it takes part from then on,
/// and must be joined back, the same way, before the end. The graph is a
/// template; [`graph_instantiate`](Graphs::graph_instantiate) copies it into something that can be
/// launched, as often as one likes, on any stream.
///
/// A graph keeps *addresses*. Whoever owns the memory learns of no launch; it must stay what it was
/// for as long as there are executables of the graph.
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
/// // SAFETY: 1. The range is mapped until the end. 2. Nobody else has it.
/// unsafe { driver.fill_with(stream, address, Pattern::Byte(7), 64)? };
/// let graph = driver.capture_end(stream)?;
/// let exec = driver.graph_instantiate(graph)?;
/// // SAFETY: 1. and 2. as for the fill. 3. The handles are used no more.
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
/// 2. Work that is captured does not run before its graph is launched, and then in the order of the
///    stream it is launched on.
/// 3. [`Graphs::capture_status`] tells two captures by different numbers, and never a stream that
///    captures as one that does not.
/// 4. What is registered with [`Graphs::graph_on_release`] is called only when neither the graph,
///    nor an executable of it, nor a launch of one is left.
pub unsafe trait Graphs: Debug + Send + Sync {
    /// Opens a capture on a stream (`cuStreamBeginCapture`). `mode` says which calls are refused,
    /// and break it, until it is ended. Does not block.
    ///
    /// # Errors
    /// Unsupported (900) on the legacy default stream; illegal state (401) for a stream that takes
    /// part in a capture already.
    fn capture_begin(&self, stream: RawStream, mode: CaptureMode) -> Result<()>;

    /// Ends the capture that was begun on this stream (`cuStreamEndCapture`), on the thread that
    /// began it unless that was in [`CaptureMode::Relaxed`]. Every stream that took part is free
    /// again, also where this fails because the capture is broken. Does not block.
    ///
    /// # Errors
    /// Invalidated (901) if some call has broken it, unjoined (904) if a stream that took part
    /// holds work which the stream has not been made to wait for; unmatched (903) for a stream that
    /// took part and did not begin it, wrong thread (908); illegal state (401) for one that takes
    /// part in none.
    fn capture_end(&self, stream: RawStream) -> Result<RawGraph>;

    /// Which capture a stream takes part in (`cuStreamGetCaptureInfo`). Breaks no capture, and
    /// never blocks.
    ///
    /// # Errors
    /// Implicit (906) for the legacy default stream while a stream that is ordered with it
    /// captures.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// Copies a graph into something that can be launched (`cuGraphInstantiateWithFlags`). Later
    /// the two know nothing of each other. May take long: milliseconds for some thousands of nodes.
    ///
    /// # Errors
    /// Invalid value (1) where a copy or a fill has an address with nothing mapped behind it now:
    /// the driver looks at those, and not at what kernels are given. The driver's own.
    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawGraphExec>;

    /// Queues all of a graph on a stream (`cuGraphLaunch`): behind what is queued there, and behind
    /// the launches of the same executable before, on whatever stream. What is queued on the stream
    /// afterwards waits for all of it. Does not block, unless the driver's queues are full.
    ///
    /// # Safety
    /// 1. Every address that the graph touches is mapped, and what it reads of the host readable,
    ///    what it writes writable, until the launch is done.
    /// 2. Nobody else touches those bytes in a way that conflicts, from here until the launch is
    ///    done; in particular they still belong to whom they were captured for.
    ///
    /// # Errors
    /// Unsupported (900) on a stream that captures; the driver's.
    unsafe fn graph_launch(&self, exec: RawGraphExec, stream: RawStream) -> Result<()>;

    /// Ends a graph, and not its executables (`cuGraphDestroy`). Does not block.
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn graph_destroy(&self, graph: RawGraph) -> Result<()>;

    /// Ends an executable; launches that have been queued still run (`cuGraphExecDestroy`). Does
    /// not block. Breaks a capture that is open as `cuMemFree` would, unless the thread is
    /// [`Relaxed`](crate::Relaxed).
    ///
    /// # Safety
    /// 1. No copy of the handle is used afterwards.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn graph_exec_destroy(&self, exec: RawGraphExec) -> Result<()>;

    /// Has `call` made once when the graph, every executable that is made of it from now on, and
    /// every launch of those are done with (`cuUserObjectCreate` and `cuGraphRetainUserObject`).
    /// Does not block.
    ///
    /// `call` runs some time afterwards, on a thread of the driver's or inside the call that was
    /// the last to let go. It may call nothing of the driver's, must not panic, and must not wait
    /// for a lock that somebody holds while he calls the driver: it leaves word, and somebody else
    /// acts on it.
    ///
    /// # Errors
    /// The driver's; `call` is dropped then, and never made.
    fn graph_on_release(&self, graph: RawGraph, call: OnRelease) -> Result<()>;
}
