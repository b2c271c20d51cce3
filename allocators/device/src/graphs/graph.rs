//! Graphs over the memory of a pool, captured by this library or by others.
#![expect(unsafe_code, reason = "launches and ends graphs")]

use super::{Announced, GraphPool};
use crate::{base::driver::check_stream_device, slot_memory::SlotMemory};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::{
    CaptureMode, Driver, RawGraph, RawGraphExec, RawStream, Relaxed, leftovers, site,
};
use aquifer_stream::Stream;
use std::{fmt, sync::Arc};

/// The driver's error code for an invalidated capture.
const CAPTURE_INVALIDATED: u32 = 901;

/// A graph captured over the memory of a [`GraphPool`]. It can be launched any number of times, on
/// any stream of the device.
///
/// It keeps all of the pool's memory. Dropping it does not wait (`cuGraphExecDestroy`): queued
/// launches still run. The memory is returned to the driver when the last of them is done and
/// nothing else keeps it.
pub struct Graph {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    exec: RawGraphExec,
    memory: Arc<SlotMemory>,
}

/// An open capture of this library. Dropping it ends the capture and destroys the resulting graph.
struct OpenCapture<'a> {
    driver: &'a Arc<dyn Driver>,
    stream: RawStream,
    ended: bool,
}

impl OpenCapture<'_> {
    /// Ends the capture. It stays open if the driver refused and the stream still captures.
    fn end(&mut self) -> Result<RawGraph> {
        let ended = self.driver.capture_end(self.stream);
        // An invalidated or unjoined capture has ended despite the error. A capture whose end was
        // refused has not.
        self.ended =
            ended.is_ok() || matches!(self.driver.stream_is_capturing(self.stream), Ok(false));
        ended.map_err(|refused| match refused.code {
            CAPTURE_INVALIDATED => MemoryError::CaptureInvalidated { stream: self.stream.handle() },
            _ => MemoryError::driver(self.stream.device(), refused),
        })
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        if !self.ended
            && let Ok(graph) = self.end()
        {
            destroy(self.driver, graph);
        }
    }
}

/// Destroys a graph that only the caller references, now or in a later sweep.
fn destroy(driver: &Arc<dyn Driver>, graph: RawGraph) {
    let of = driver.clone();
    leftovers::release(driver, move || {
        let _relaxed = Relaxed::enter(&*of);
        // SAFETY: 1. the caller made the graph and has its only reference, and no release of it has
        // succeeded yet.
        unsafe { of.graph_destroy(graph) }
    });
}

impl GraphPool {
    /// Captures the work that `work` queues on `stream` and on streams that join it, and
    /// instantiates a graph (`cuStreamBeginCapture`, `cuStreamEndCapture`, `cuGraphInstantiate`).
    ///
    /// Blocks allocated in `work` for those streams come from this pool's memory. The graph uses
    /// them at their addresses, whether they are still live or already freed. None of the work runs
    /// now.
    ///
    /// During the capture, this thread may not make calls that could invalidate it, except through
    /// this library; other threads may ([`CaptureMode::ThreadLocal`]). Blocks until the graph is
    /// instantiated, which takes milliseconds for thousands of nodes.
    ///
    /// # Safety
    /// 1. Memory that the captured work touches, besides blocks of this pool, stays valid, in
    ///    place, and owned by the caller until the graph has been dropped and its launches are
    ///    done. (Blocks of this pool do so by themselves.)
    /// 2. The caller orders launches with all other uses of that memory.
    ///
    /// # Errors
    /// Those of `work`; [`MemoryError::WrongDevice`], [`MemoryError::AlreadyAnnounced`];
    /// [`MemoryError::CaptureInvalidated`] if some call has invalidated the capture; the driver's.
    /// In each case no graph is made, and the stream no longer captures, unless the driver has
    /// refused twice to end the capture.
    #[track_caller]
    pub unsafe fn capture<T>(
        &self,
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<T>,
    ) -> Result<(Graph, T)> {
        let _site = site::enter();
        let announced = self.announce(stream)?;
        let (driver, device) = (stream.driver(), stream.device());
        let driver_error = |refused| MemoryError::driver(device, refused);
        let mut open = {
            let _calling = stream.timeline().calling()?;
            driver.capture_begin(stream.raw(), CaptureMode::ThreadLocal).map_err(driver_error)?;
            OpenCapture { driver, stream: stream.raw(), ended: false }
        };
        let output = work(stream)?;
        let graph = open.end()?;
        let memory = announced.end_tracked();
        // Other threads may be capturing, and either call would invalidate their captures.
        let _relaxed = Relaxed::enter(&**driver);
        let exec = driver.graph_instantiate(graph);
        destroy(driver, graph);
        let exec = exec.map_err(driver_error)?;
        Ok((Graph { driver: driver.clone(), device, exec, memory }, output))
    }
}

impl Graph {
    /// Queues the whole graph on `stream` (`cuGraphLaunch`). The launch is ordered after all queued
    /// work that touches the pool's memory on any stream, including launches of other graphs that
    /// share it. Later uses of its blocks are ordered after it. The host does not wait for work.
    ///
    /// Blocks that were allocated within the capture and kept can be read and written between
    /// launches like other blocks: a copy on another stream waits for the launch, and the next
    /// launch waits for the copy.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; [`MemoryError::Capturing`] if `stream` captures, or another
    /// stream that has used the pool's memory; [`MemoryError::Busy`] if a prepared use of a block
    /// of the pool is not finished; the driver's. In each case nothing but waits is queued.
    #[track_caller]
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _site = site::enter();
        check_stream_device(&*self.driver, self.device, stream.timeline())?;
        self.memory.launch(stream.timeline(), || {
            let _calling = stream.timeline().calling()?;
            // SAFETY: 1. the pool's memory stays mapped until the last recorded launch is done, and
            // this launch is recorded next; the caller of `capture` has promised the rest. 2. the
            // stream waits for all work that touches the blocks, and later uses wait for this
            // launch; free memory is used only by graphs of this memory, whose launches are
            // ordered; the caller of `capture` has promised the rest.
            let queued = unsafe { self.driver.graph_launch(self.exec, stream.raw()) };
            queued.map_err(|refused| MemoryError::driver(self.device, refused))
        })
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let (driver, exec) = (self.driver.clone(), self.exec);
        leftovers::release(&self.driver, move || {
            // The call would invalidate captures of other threads.
            let _relaxed = Relaxed::enter(&*driver);
            // SAFETY: 1. only this value had the handle, and no release of it has succeeded yet.
            unsafe { driver.graph_exec_destroy(exec) }
        });
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("device", &self.device)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// A graph of another library that was captured over the memory of a [`GraphPool`]. It keeps that
/// memory, and the caller reports launches to it.
///
/// Drop it when the graph is not launched any more. The memory is released only after all launches
/// recorded by then are done.
#[derive(Clone)]
pub struct Captured {
    memory: Arc<SlotMemory>,
}

impl Announced {
    /// Ends the announcement. The caller then reports when the captured graph is launched.
    ///
    /// If the announcement is dropped instead, launches of the captured graph cannot be observed:
    /// the whole device is synchronised before the memory is released.
    ///
    /// Does not wait. Call it after the end of the capture: a stream that still captures no longer
    /// allocates from the graph's memory.
    pub fn end(self) -> Captured {
        Captured { memory: self.end_tracked() }
    }
}

impl Captured {
    /// Records that the graph has just been launched on `stream`. The memory is kept until that
    /// launch is done, and later uses of its blocks are ordered after it. The caller must have
    /// ordered the launch after earlier uses of the memory by other streams, including other graphs
    /// that share it.
    ///
    /// # Errors
    /// The driver's, if the stream has to be fenced at once. The launch is recorded nevertheless.
    #[track_caller]
    pub fn launched(&self, stream: &Stream) -> Result<()> {
        let _site = site::enter();
        self.memory.launched(stream.timeline())
    }
}

impl fmt::Debug for Captured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Captured").field("memory", &self.memory).finish()
    }
}
